"""`chiar plot`. Heavy imports happen inside the verb."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# What can be drawn, from what, and with which options.
KINDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "curves": ("training runs: losses, learning rate, f by layer, g", ("data", "over")),
    "gate": ("training runs: the MetaRouter's g over steps, and its histogram", ()),
    "operators": ("training runs: the share of tokens each operator got in each routed layer", ("over",)),
    "scaling": ("[LINE=]evaluation reports, or run folders with one: loss against size", ("against",)),
    "savings": ("presets: counted FLOPs saved against size", ("length", "fraction", "keys", "light_ffn")),
    "pareto": ("a study's folder or results.json: loss against counted FLOPs and step time", ()),
    "model": ("a preset or model folder: its architecture", ()),
    "routing": ("a model: the operator each token of a text takes in each layer", ("prompt", "tokenizer", "seed")),
}
HELP = "\n\n".join(f"{kind}: from {what}." for kind, (what, _) in KINDS.items())


def plot(
    kind: Annotated[str, typer.Argument(metavar="KIND", help="|".join(KINDS))],
    out: Annotated[Path, typer.Option(metavar="FILE", help="New .svg, .png or .pdf file.")],
    sources: Annotated[list[str] | None, typer.Argument(metavar="[SOURCE...]", help="What is drawn.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file if it exists.")] = False,
    data: Annotated[
        Path | None, typer.Option(metavar="CORPUS", help="curves: mark its validation split's unigram entropy.")
    ] = None,
    over: Annotated[
        str, typer.Option(metavar="steps|tokens|time", help="curves, operators: what is across.")
    ] = "steps",
    against: Annotated[str, typer.Option(metavar="parameters|flops", help="scaling: the size.")] = "parameters",
    length: Annotated[int, typer.Option(min=1, help="savings: sequence length T.")] = 256,
    fraction: Annotated[float | None, typer.Option(help="savings: f; the model's own, or ½.")] = None,
    keys: Annotated[str | None, typer.Option(metavar="all|routed", help="savings: keys; as the model.")] = None,
    light_ffn: Annotated[bool | None, typer.Option(help="savings: whether light tokens run the FFN.")] = None,
    prompt: Annotated[str | None, typer.Option(help="routing: the text.")] = None,
    tokenizer: Annotated[Path | None, typer.Option(help="routing: tokenizer folder, if the model has none.")] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="routing: of a preset's random weights.")] = 0,
) -> None:
    from chiar.errors import InputError, unknown_name
    from chiar.plots import check_picture, reaching, save

    options = {"data": data, "over": over, "against": against, "length": length, "fraction": fraction, "keys": keys}
    options |= {"light_ffn": light_ffn, "prompt": prompt, "tokenizer": tokenizer, "seed": seed}
    if kind not in KINDS:
        raise unknown_name("kind of picture", kind, KINDS)
    untaken = {"over": "steps", "against": "parameters", "length": 256, "seed": 0}
    for name, value in options.items():
        if value != untaken.get(name) and name not in KINDS[kind][1]:
            raise InputError(f"--{name.replace('_', '-')} says nothing about {kind}: leave it out.")
    if not sources and kind != "savings":
        raise InputError(f"name what to draw: {kind} is drawn from {KINDS[kind][0]}.")
    if kind in ("pareto", "model", "routing") and len(sources or []) > 1:
        raise InputError(f"{kind} draws one thing, got {len(sources or [])}.")
    check_picture(out, overwrite)
    save(draw(kind, sources or [], options), out, overwrite)
    typer.echo(f"wrote {out}")
    for sentence in reaching([Path(source) for source in sources or []], over) if over != "steps" else []:
        typer.echo(sentence)


plot.__doc__ = f"Draw a picture of recorded runs, reports, studies and models.\n\n{HELP}"


def draw(kind: str, sources: list[str], options: dict[str, Any]) -> "Figure":
    from chiar import plots, plots_diagrams
    from chiar.errors import InputError

    paths, taken = [Path(source) for source in sources], {name: options[name] for name in KINDS[kind][1]}
    if kind == "curves":
        return plots.draw_curves(paths, taken["data"], taken["over"])
    if kind == "savings":
        return plots.draw_savings(sources or ["v3-16m", "v3-400m", "v3-1b"], **taken)
    if kind == "pareto":
        from chiar.studies.results import read_results

        results = read_results(paths[0])
        device = (results["times"] or results["runs"][0])["device"]
        return plots.draw_pareto(results["variants"], results["title"], device)
    if kind == "model":
        from chiar.model.load import load_config

        return plots_diagrams.draw_model(load_config(sources[0]), paths[0].name)
    if kind == "routing":
        from chiar.routing.tables import route_text

        if taken["prompt"] is None:
            raise InputError("routing shows the routes of a text: give it with --prompt.")
        routed = route_text(sources[0], taken["prompt"], taken["tokenizer"], taken["seed"])
        return plots_diagrams.draw_routing(routed.trace, routed.pieces, routed.heading)
    if kind == "scaling":
        return plots.draw_scaling(sources, taken["against"])
    return plots.draw_gate(paths) if kind == "gate" else plots.draw_operators(paths, taken["over"])
