"""`chiar figures`. Heavy imports happen inside the verbs; the first line of a verb's help is what `list` shows."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

figures_app = typer.Typer(
    no_args_is_help=True,
    context_settings={"max_content_width": 120},
    help="Draw pictures (SVG) of recorded runs, reports, studies and models. docs/figures.md explains each.",
)

PROMPT = "The overwhelming consensus of many scientists is that the burning of carbon warms the oceans."
"""Ours, with the words the paper names for its heat map: the, of, many; overwhelming, consensus, carbon."""

Runs = Annotated[
    list[Path], typer.Argument(metavar="RUN...", help="Training runs; run.json and metrics.jsonl are enough.")
]
Report = Annotated[Path, typer.Argument(metavar="REPORT", help="nulltest.json, or the folder of chiar nulltest --out.")]
Out = Annotated[Path, typer.Option(metavar="FILE", help="New .svg file.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the file if it exists.")]


def save(out: Path, overwrite: bool, draw: Callable[[], str]) -> None:
    """The name is checked before the work is done."""
    from chiar.cli import check_svg
    from chiar.files import check_new, write_new

    check_svg(out)
    if not overwrite:
        check_new(out)
    write_new(out, draw(), overwrite)
    typer.echo(f"wrote {out}")


@figures_app.command("list")
def list_figures() -> None:
    """List the figures and what each is drawn from."""
    from rich.table import Table

    from chiar.cli import show

    table = Table("figure", "drawn from", "what it shows", box=None)
    for command in figures_app.registered_commands:
        name = command.name or getattr(command.callback, "__name__", "")
        if name != "list":
            source, _, shown = ((command.callback and command.callback.__doc__) or "").split("\n")[0].partition(": ")
            table.add_row(name, source.removeprefix("From "), shown)
    show(table)
    typer.echo(
        "Also: chiar diagram draws architectures, chiar theorem --picture Theorem 1, chiar nulltest --out its own."
    )


@figures_app.command()
def curves(
    runs: Runs,
    out: Out,
    data: Annotated[
        Path | None, typer.Option(metavar="CORPUS", help="Mark the unigram entropy of this corpus's validation split.")
    ] = None,
    over: Annotated[str, typer.Option(metavar="steps|tokens|time", help="What lies across.")] = "steps",
    overwrite: Overwrite = False,
) -> None:
    """From training runs: losses, learning rate, f by layer and g over steps, tokens or time.

    Time is that of the steps as they ran, without the first (which compiles) and without evaluations. Over tokens or
    time it says when each of several runs first had the least validation loss of the first one.
    """
    from chiar.analysis.curves import draw_curves, reaching

    save(out, overwrite, lambda: draw_curves(runs, data, over))
    for sentence in reaching(runs, over) if over != "steps" else []:
        typer.echo(sentence)


@figures_app.command()
def scaling(
    reports: Annotated[
        list[str],
        typer.Argument(metavar="[LINE=]REPORT...", help="Evaluation reports, or run folders with an evaluation.json."),
    ],
    out: Out,
    against: Annotated[str, typer.Option(metavar="parameters|flops", help="Measure of size.")] = "parameters",
    overwrite: Overwrite = False,
) -> None:
    """From evaluation reports: loss against parameters or FLOPs, and the gap to the dense model of the same shape.

    Reports are lines by the name before the =, else dense and CHIAR; several of one size (seeds) are dots, and
    the line goes through their mean. All must be of the same text, evaluated alike.
    """
    from chiar.figures.scaling import draw_scaling

    save(out, overwrite, lambda: draw_scaling(reports, against))


@figures_app.command()
def savings(
    out: Out,
    models: Annotated[
        list[str] | None, typer.Argument(metavar="[PRESET...]", help="Presets or model folders; v3 in all sizes.")
    ] = None,
    length: Annotated[int, typer.Option(min=1, help="Sequence length T.")] = 256,
    fraction: Annotated[float | None, typer.Option(help="f: share sent to attention; the model's own, or ½.")] = None,
    keys: Annotated[str | None, typer.Option(metavar="all|routed", help="Which tokens are keys; as the model.")] = None,
    light_ffn: Annotated[bool | None, typer.Option(help="Whether light tokens run the FFN of routed layers.")] = None,
    overwrite: Overwrite = False,
) -> None:
    """From presets: counted FLOPs saved against model size, of everything, of the layers and of attention."""
    from chiar.figures.savings import DEFAULT, draw_savings

    save(out, overwrite, lambda: draw_savings(list(models or DEFAULT), length, fraction, keys, light_ffn))


@figures_app.command()
def routing(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A training run or a model folder.")],
    out: Out,
    text: Annotated[str, typer.Option(help="Text to route; one with the words the paper names by default.")] = PROMPT,
    tokenizer: Annotated[Path | None, typer.Option(help="Tokenizer folder, if the model folder has none.")] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of a preset's random weights.")] = 0,
    overwrite: Overwrite = False,
) -> None:
    """From a model: which operator each token of a text takes in each layer, as a heat map."""
    from chiar.analysis.trace_picture import draw_routing
    from chiar.routing.tables import route_text

    save(out, overwrite, lambda: draw_routing(route_text(model, text, tokenizer, seed)))


@figures_app.command()
def gate(
    runs: Runs,
    out: Out,
    data: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="CORPUS", help="Also measure g of the best model on its validation text; several allowed."
        ),
    ] = None,
    rows: Annotated[int, typer.Option(min=1, help="Rows or documents of each corpus to measure on.")] = 64,
    overwrite: Overwrite = False,
) -> None:
    """From training runs: the MetaRouter's g over steps, its histogram, and by corpus at the end."""
    from chiar.figures.gate import draw_gate

    save(out, overwrite, lambda: draw_gate(runs, data or [], rows))


@figures_app.command()
def operators(
    runs: Runs,
    out: Out,
    data: Annotated[
        Path | None, typer.Option(metavar="CORPUS", help="The corpus the runs read: draw over its epochs, not steps.")
    ] = None,
    overwrite: Overwrite = False,
) -> None:
    """From training runs: the share of tokens each operator got in each routed layer, over steps or epochs."""
    from chiar.figures.operators import draw_operators

    save(out, overwrite, lambda: draw_operators(runs, data))


@figures_app.command()
def pareto(
    study: Annotated[Path, typer.Argument(metavar="STUDY", help="The folder of a study, or its results.json.")],
    out: Out,
    overwrite: Overwrite = False,
) -> None:
    """From a study: loss against counted FLOPs and against step time, with the frontier."""
    from chiar.studies.results import draw_picture, read_results

    save(out, overwrite, lambda: draw_picture(read_results(study)))


@figures_app.command()
def entropy(report: Report, out: Out, overwrite: Overwrite = False) -> None:
    """From a null test: H of every layer's input beside white noise, in three bases."""
    from chiar.figures.boxes import draw_boxes

    save_report(report, out, overwrite, draw_boxes)


@figures_app.command()
def compaction(report: Report, out: Out, overwrite: Overwrite = False) -> None:
    """From a null test: energy in few coefficients by quartile of H: DCT, identity, random, KLT, white noise."""
    from chiar.nulltest.pictures import draw_compaction

    save_report(report, out, overwrite, draw_compaction)


@figures_app.command()
def information(report: Report, out: Out, overwrite: Overwrite = False) -> None:
    """From a null test: what token, word class and position say about the route, by layer."""
    from chiar.nulltest.pictures import draw_information

    save_report(report, out, overwrite, draw_information)


@figures_app.command()
def classes(report: Report, out: Out, overwrite: Overwrite = False) -> None:
    """From a null test: H by word class and layer."""
    from chiar.nulltest.class_picture import draw_classes
    from chiar.nulltest.pictures import called

    save_report(report, out, overwrite, lambda read: draw_classes(read, called(read, "H by word class")))


@figures_app.command()
def flips(report: Report, out: Out, overwrite: Overwrite = False) -> None:
    """From a null test: what attention adds to a token, by its H."""
    from chiar.errors import InputError
    from chiar.nulltest.pictures import draw_flips

    def draw(read: Any) -> str:
        if read.worth is None:
            raise InputError(f"no routes were flipped in {report}: chiar nulltest --flips 64 flips some.")
        return draw_flips(read)

    save_report(report, out, overwrite, draw)


def save_report(report: Path, out: Path, overwrite: bool, draw: Callable[[Any], str]) -> None:
    from chiar.nulltest.reading import read_report

    save(out, overwrite, lambda: draw(read_report(report)))
