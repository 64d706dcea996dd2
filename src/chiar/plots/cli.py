"""`chiar plot`."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from chiar.errors import InputError, unknown_name
from chiar.plots.curves import OVER, draw_curves
from chiar.plots.figure import check_figure_path, save
from chiar.plots.model import draw_model
from chiar.plots.routes import draw_routes
from chiar.plots.study import draw_study

if TYPE_CHECKING:
    from matplotlib.figure import Figure


# By kind of figure: what it is drawn from and shows, the function that draws it, and the options this accepts.
KINDS: "dict[str, tuple[str, Callable[..., Figure], tuple[str, ...]]]" = {
    "curves": (
        "training runs: losses, learning rate, operators by layer, the gate g and its histogram",
        draw_curves,
        ("data", "over"),
    ),
    "pareto": ("a study's folder or results.json: loss against FLOPs and step time", draw_study, ()),
    "model": ("a preset, model folder or run: its architecture", draw_model, ()),
    "routing": (
        "a preset, model folder or run: the route of each token of a text",
        draw_routes,
        ("prompt", "tokenizer", "seed"),
    ),
}


def plot(
    kind: Annotated[str, typer.Argument(metavar="KIND", help="|".join(KINDS))],
    out: Annotated[Path, typer.Option(metavar="FILE", help="New .svg, .png or .pdf file.")],
    sources: Annotated[list[str] | None, typer.Argument(metavar="[SOURCE...]", help="What to draw.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file if it exists.")] = False,
    data: Annotated[Path | None, typer.Option(metavar="CORPUS", help="curves: mark its unigram entropy.")] = None,
    over: Annotated[str | None, typer.Option(metavar="|".join(OVER), help="curves: x-axis. [default: steps]")] = None,
    prompt: Annotated[str | None, typer.Option(metavar="TEXT", help="routing: text to route.")] = None,
    tokenizer: Annotated[Path | None, typer.Option(help="routing: tokenizer folder, if the model has none.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, max=2**63 - 1, help="routing: preset's seed. [default: 0]")] = None,
) -> None:
    options = {"data": data, "over": over, "prompt": prompt, "tokenizer": tokenizer, "seed": seed}
    given = {name: value for name, value in options.items() if value is not None}
    if kind not in KINDS:
        raise unknown_name("kind of figure", kind, KINDS)
    what, draw, accepted = KINDS[kind]
    for name in given.keys() - set(accepted):
        raise InputError(f"--{name.replace('_', '-')} does not apply to {kind}: leave it out.")
    if not sources or (kind != "curves" and len(sources) > 1):
        problem = f"{kind} takes one source, got {len(sources)}" if sources else "name a source"
        raise InputError(f"{problem}. {kind} is drawn from {what}.")
    check_figure_path(out, overwrite)
    save(draw(sources, **given), out, overwrite)
    typer.echo(f"wrote {out}")


plot.__doc__ = "\n\n".join(
    ["Draw recorded runs, studies and models.", *(f"{name}, from {what}." for name, (what, *_) in KINDS.items())]
)
