"""The `chiar` command: thin verbs over typed functions. Heavy imports happen inside the verbs."""

import io
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from chiar.analysis.theorem_cli import theorem
from chiar.data.cli import data_app
from chiar.errors import InputError
from chiar.evaluation.cli import compare, evaluate
from chiar.explore.cli import explore
from chiar.figures.cli import curves, figures_app
from chiar.generation.cli import generate
from chiar.nulltest.cli import nulltest
from chiar.registry import add_plugins, load_plugins
from chiar.reproduce.cli import reproduce
from chiar.serving.cli import serve
from chiar.studies.cli import study_app
from chiar.training.cli import train
from chiar.training.finetune_cli import finetune

app = typer.Typer(
    no_args_is_help=True,
    context_settings={"max_content_width": 120},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="CHIAR-Former: language models that send each token to a spectral filter (light) or to attention (dark).",
)

app.add_typer(data_app, name="data")
app.command("train")(train)
app.command("finetune")(finetune)
app.command("eval")(evaluate)
app.command("compare")(compare)
app.command("reproduce")(reproduce)
app.add_typer(study_app, name="study")
app.command("generate")(generate)
app.command("serve")(serve)
app.command("nulltest")(nulltest)
app.command("theorem")(theorem)
app.add_typer(figures_app, name="figures")
app.command("curves")(curves)
app.command("explore")(explore)

ModelName = Annotated[str, typer.Argument(metavar="MODEL", help="A model folder, or a preset (random weights).")]
Keys = Annotated[
    str | None, typer.Option(metavar="all|routed", help="Which tokens are keys; the model's own choice by default.")
]
Json = Annotated[Path | None, typer.Option(metavar="FILE", help="Write the numbers as JSON to a new file, - to print.")]


def show(renderable: Any) -> None:
    """Print in full: a table wider than the terminal runs over rather than losing digits."""
    from rich.console import Console
    from rich.measure import Measurement
    from rich.table import Table

    console = Console()
    if isinstance(renderable, Table) and renderable.title:  # rich would fold a title to the width of its table
        console.print(renderable.title, soft_wrap=True, highlight=False)
        renderable.title = None
    needed = Measurement.get(console, console.options.update(width=400), renderable).maximum
    Console(width=max(console.width, needed)).print(renderable)


def version(wanted: bool) -> None:
    if wanted:
        from chiar import __version__

        typer.echo(f"chiar {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=version, is_eager=True, help="Show the version and exit.")
    ] = False,
    plugin: Annotated[
        list[str] | None,
        typer.Option(metavar="FILE.py|MODULE", help="Import your own routers and operators first (docs/extending.md)."),
    ] = None,
) -> None:
    add_plugins(plugin or [])


def write_json(out: Path, text: str) -> None:
    from chiar.files import write_new

    if str(out) == "-":
        typer.echo(text)
    else:
        write_new(out, text)
        typer.echo(f"wrote {out}")


@app.command("presets")
def presets_command() -> None:
    """List the presets with their exact trainable parameter counts."""
    from rich.table import Table

    from chiar import presets
    from chiar.config_checks import LAYER_TYPES
    from chiar.model.load import count_parameters

    table = Table("preset", "parameters", "D", "heads", "layers", "positions", "operators", "router", "gate", box=None)
    for name in presets.NAMES:
        config = presets.get(name)
        kinds = config.layer_types or []
        routed = "routed" in kinds
        table.add_row(
            name,
            f"{count_parameters(config):,}",
            str(config.hidden_size),
            str(config.num_attention_heads),
            " ".join(f"{kinds.count(k)} {k}" for k in LAYER_TYPES if k in kinds),
            config.positions,
            "+".join(config.operators or []) if routed else "attention",
            f"{config.router}/{config.routing}" if routed else "–",
            config.gate_pool if config.meta_router else "–",
        )
    show(table)


@app.command()
def flops(
    model: Annotated[str, typer.Argument(metavar="PRESET", help="A preset or a model folder.")],
    length: Annotated[str, typer.Option(help="Sequence length T; several separated by commas sweep.")] = "256",
    fraction: Annotated[float | None, typer.Option(help="f: share sent to attention; the model's own, or ½.")] = None,
    keys: Keys = None,
    light_ffn: Annotated[bool | None, typer.Option(help="Whether light tokens run the FFN of routed layers.")] = None,
    json: Json = None,
) -> None:
    """Count forward FLOPs per token for CHIAR and its dense baseline, beside the paper's claims."""
    from chiar.analysis.flop_tables import flop_json, flop_tables
    from chiar.model.load import load_config

    try:
        lengths = [int(part) for part in length.split(",")]
    except ValueError:
        raise InputError(f"--length takes whole numbers separated by commas, got {length!r}.") from None
    config = load_config(model)
    if json is not None:
        write_json(json, flop_json(config, lengths, fraction, keys, light_ffn))
        return
    for table in flop_tables(model, config, lengths, fraction, keys, light_ffn):
        show(table)


@app.command()
def calibrate(
    model: ModelName,
    text_file: Annotated[Path | None, typer.Option(metavar="FILE", help="UTF-8 text to calibrate on.")] = None,
    token_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Token ids instead: .npy, or raw little-endian uint16.")
    ] = None,
    data: Annotated[Path | None, typer.Option(metavar="CORPUS", help="A prepared corpus instead.")] = None,
    split: Annotated[str, typer.Option(help="Split of the corpus.")] = "valid",
    tokenizer: Annotated[Path | None, typer.Option(help="Tokenizer folder, if the model folder has none.")] = None,
    rule: Annotated[
        str, typer.Option(metavar="embeddings|layers", help="One τ, as the paper, or one a layer.")
    ] = "layers",
    fraction: Annotated[
        float | None, typer.Option(help="Fraction for attention, instead of the midpoint rule.")
    ] = None,
    rows: Annotated[int, typer.Option(min=1, help="Rows of text to read.")] = 200,
    length: Annotated[int, typer.Option(min=1, help="Tokens a row.")] = 256,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows at a time.")] = 8,
    apply_to: Annotated[
        Path | None, typer.Option(help="Model folder that gets the thresholds; MODEL itself by default.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="New folder for the model with its thresholds.")] = None,
    json: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the calibration to a new file, for train --thresholds; - to print."),
    ] = None,
) -> None:
    """Measure the entropies a model produces and set the routing thresholds from them."""
    from chiar.analysis.calibration_report import run_calibration

    for table in run_calibration(
        model, text_file, token_file, data, split, tokenizer, rule, fraction, rows, length, batch_size, apply_to, out,
        json,
    ):  # fmt: skip
        typer.echo(table) if isinstance(table, str) else show(table)


@app.command("import-checkpoint")
def import_checkpoint_command(
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE", help="A .pt file of the author's code. It is never executed."),
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="New model folder.")],
    tau: Annotated[float | None, typer.Option(help="Threshold; the file has none (0.8954 at width 1024).")] = None,
    routing: Annotated[str | None, typer.Option(help="soft or hard, where the file does not say.")] = None,
    pool: Annotated[str, typer.Option(help="last or mean: how a classifier file pools tokens.")] = "last",
) -> None:
    """Convert a checkpoint of the author's code into a folder that from_pretrained opens."""
    from transformers.utils import logging

    from chiar.model.author_checkpoint import import_checkpoint

    logging.disable_progress_bar()
    imported = import_checkpoint(file, out, tau=tau, routing=routing, classifier_pool=pool)
    for note in imported.notes:
        typer.echo(f"note: {note}")
    config = imported.config
    typer.echo(
        f"wrote {out}: {config.num_hidden_layers} layers, width {config.hidden_size}, {config.vocab_size} tokens"
    )


@app.command()
def convert(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A model folder or a training run.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="New model folder.")],
    coordinates: Annotated[
        str, typer.Option(metavar="spectral|features", help="Coordinates of the residual stream.")
    ] = "spectral",
) -> None:
    """Fold the basis into the weights (pre-norm RMSNorm models): the same outputs without any transform, or back."""
    from transformers.utils import logging

    from chiar.model.coordinates import convert_folder

    logging.disable_progress_bar()
    converted = convert_folder(model, out, coordinates)
    tied = "tied to the embedding" if converted.config.tie_word_embeddings else "a matrix of its own"
    typer.echo(f"wrote {out}: basis {converted.config.basis}, output projection {tied}")


@app.command()
def trace(
    model: ModelName,
    text: Annotated[str, typer.Option(help="Text to route.")],
    tokenizer: Annotated[Path | None, typer.Option(help="Tokenizer folder, if the model folder has none.")] = None,
    json: Json = None,
    csv: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a line a token and layer to a new file, - to print.")
    ] = None,
    picture: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the routes to a new .svg file.")] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of a preset's random weights.")] = 0,
) -> None:
    """Route a text and show which operator each token took in each layer."""
    from chiar.analysis.trace_csv import routing_csv
    from chiar.analysis.trace_picture import draw_routing
    from chiar.analysis.trace_view import route_text, views
    from chiar.files import check_new, write_new

    printed = [name for name, out in (("--json", json), ("--csv", csv)) if str(out) == "-"]
    if len(printed) == 2:
        raise InputError("--json - and --csv - would both print: give one of them a file.")
    for out in (json, csv, picture):
        if out is not None and str(out) != "-":
            check_new(out)
    if picture is not None:
        check_svg(picture)
    routed = route_text(model, text, tokenizer, seed)
    if picture is not None:
        write_new(picture, draw_routing(routed))
        typer.echo(f"wrote {picture}", err=bool(printed))
    if json is not None:
        write_json(json, routed.trace.to_json())
    if csv is not None:
        write_json(csv, routing_csv(routed).rstrip("\n"))
    if not printed:
        for view in views(routed):
            show(view)


@app.command()
def diagram(
    model: Annotated[str, typer.Argument(metavar="PRESET", help="A preset or a model folder.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="New .svg file.")],
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file if it exists.")] = False,
) -> None:
    """Draw the architecture of a configuration as SVG."""
    from chiar.analysis.diagram import draw
    from chiar.files import write_new
    from chiar.model.load import load_config

    check_svg(out)
    write_new(out, draw(load_config(model), title=Path(model).name), overwrite)
    typer.echo(f"wrote {out}")


def check_svg(out: Path) -> None:
    if out.suffix != ".svg":
        raise InputError(f"pictures are SVG: name the file {out.with_suffix('.svg').name}.")


def main() -> None:
    guarded(app)


def guarded(command: Callable[[], Any]) -> None:
    """Run a command; what the user can mend becomes one sentence and exit code 2."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without Unicode shows ? instead of failing
    try:
        load_plugins()
        command()
    except InputError as error:
        if os.environ.get("RANK", "0") == "0":  # of several processes one speaks
            typer.echo(f"error: {error}", err=True)
        sys.exit(2)
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        typer.echo(f"error: {error.strerror or error}{where}", err=True)
        sys.exit(2)
