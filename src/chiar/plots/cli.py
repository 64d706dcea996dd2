"""The command `plot`."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from chiar.errors import InputError, unknown_name
from chiar.plots.curves import OVER, draw_curves
from chiar.plots.figure import check_picture, save
from chiar.plots.model import draw_model
from chiar.plots.routes import draw_routes
from chiar.plots.study import draw_study

if TYPE_CHECKING:
    from matplotlib.figure import Figure


# What is drawn from what, by which function, and the options it takes.
KINDS: "dict[str, tuple[str, Callable[..., Figure], tuple[str, ...]]]" = {
    "curves": (
        "training runs: losses, learning rate, operators by layer, g and its histogram",
        draw_curves,
        ("data", "over"),
    ),
    "pareto": ("a study's folder or results.json: loss against FLOPs and step time", draw_study, ()),
    "model": ("a preset, model folder or run: its architecture", draw_model, ()),
    "routing": ("a model: the route of each token of a text", draw_routes, ("prompt", "tokenizer", "seed")),
}


def plot(
    kind: Annotated[str, typer.Argument(metavar="KIND", help="|".join(KINDS))],
    out: Annotated[Path, typer.Option(metavar="FILE", help="New .svg, .png or .pdf file.")],
    sources: Annotated[list[str] | None, typer.Argument(metavar="[SOURCE...]", help="What is drawn.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file if it exists.")] = False,
    data: Annotated[Path | None, typer.Option(metavar="CORPUS", help="curves: mark its unigram entropy.")] = None,
    over: Annotated[str | None, typer.Option(metavar="|".join(OVER), help="curves: across. [default: steps]")] = None,
    prompt: Annotated[str | None, typer.Option(metavar="TEXT", help="routing: the text.")] = None,
    tokenizer: Annotated[Path | None, typer.Option(help="routing: tokenizer folder, if the model has none.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, max=2**63 - 1, help="routing: weights'. [default: 0]")] = None,
) -> None:
    options = {"data": data, "over": over, "prompt": prompt, "tokenizer": tokenizer, "seed": seed}
    given = {name: value for name, value in options.items() if value is not None}
    if kind not in KINDS:
        raise unknown_name("kind of picture", kind, KINDS)
    what, draw, taken = KINDS[kind]
    for name in given.keys() - set(taken):
        raise InputError(f"--{name.replace('_', '-')} says nothing about {kind}: leave it out.")
    if not sources or (kind != "curves" and len(sources) > 1):
        wrong = f"{kind} draws one thing, got {len(sources)}" if sources else "name what to draw"
        raise InputError(f"{wrong}: it is drawn from {what}.")
    check_picture(out, overwrite)
    save(draw(sources, **given), out, overwrite)
    typer.echo(f"wrote {out}")


plot.__doc__ = "\n\n".join(
    ["Draw recorded runs, studies and models.", *(f"{name}: {what}." for name, (what, *_) in KINDS.items())]
)
