"""The `chiar` command: thin verbs over typed functions. Heavy imports happen inside the verbs."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from chiar.errors import InputError

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="CHIAR-Former: language models that send each token to a spectral filter (light) or to attention (dark).",
)

ModelName = Annotated[str, typer.Argument(metavar="MODEL", help="A model folder, or a preset (random weights).")]
Keys = Annotated[str | None, typer.Option(help="all or routed: which tokens are keys (the model's own by default).")]


def show(renderable: Any) -> None:
    from rich.console import Console

    # Away from a terminal rich would squeeze tables into 80 columns.
    Console(width=None if sys.stdout.isatty() else 140).print(renderable)


@app.command("presets")
def presets_command() -> None:
    """List the presets with their exact trainable parameter counts."""
    from rich.table import Table

    from chiar import presets
    from chiar.load import count_parameters

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
            " ".join(f"{kinds.count(k)} {k}" for k in ("spectral", "routed", "attention") if k in kinds),
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
    fraction: Annotated[float, typer.Option(help="f: fraction of tokens routed layers send to attention.")] = 0.5,
    keys: Keys = None,
    light_ffn: Annotated[bool | None, typer.Option(help="Whether light tokens run the FFN of routed layers.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the counts as JSON.")] = False,
) -> None:
    """Count forward FLOPs per token for CHIAR and its dense baseline, beside the paper's claims."""
    from chiar.analysis.flop_tables import flop_json, flop_tables
    from chiar.load import load_config

    try:
        lengths = [int(part) for part in length.split(",")]
    except ValueError:
        raise InputError(f"--length takes whole numbers separated by commas, got {length!r}.") from None
    config = load_config(model)
    if json:
        typer.echo(flop_json(config, lengths, fraction, keys, light_ffn))
        return
    for table in flop_tables(model, config, lengths, fraction, keys, light_ffn):
        show(table)


@app.command()
def calibrate(
    model: ModelName,
    text: Annotated[Path | None, typer.Option(help="UTF-8 text to calibrate on.")] = None,
    tokens: Annotated[Path | None, typer.Option(help="Token ids: .npy, or raw little-endian uint16.")] = None,
    tokenizer: Annotated[Path | None, typer.Option(help="Tokenizer folder, if the model folder has none.")] = None,
    rule: Annotated[str, typer.Option(help="embeddings (the paper: one τ) or layers (a τ each).")] = "layers",
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
) -> None:
    """Measure the entropies a model produces and set the routing thresholds from them."""
    from chiar.analysis.calibration_report import run_calibration

    for table in run_calibration(
        model, text, tokens, tokenizer, rule, fraction, rows, length, batch_size, apply_to, out
    ):
        show(table)


@app.command("import-checkpoint")
def import_checkpoint_command(
    file: Annotated[Path, typer.Argument(help="A .pt file of the author's released code. Nothing in it is executed.")],
    out: Annotated[Path, typer.Argument(help="New model folder.")],
    tau: Annotated[float | None, typer.Option(help="Threshold; the file has none (0.8954 at width 1024).")] = None,
    routing: Annotated[str | None, typer.Option(help="soft or hard, where the file does not say.")] = None,
    pool: Annotated[str, typer.Option(help="last or mean: how a classifier file pools tokens.")] = "last",
) -> None:
    """Convert a checkpoint of the author's code into a folder that from_pretrained opens."""
    from transformers.utils import logging

    from chiar.author_checkpoint import import_checkpoint

    logging.disable_progress_bar()
    imported = import_checkpoint(file, out, tau=tau, routing=routing, classifier_pool=pool)
    for note in imported.notes:
        typer.echo(f"note: {note}")
    config = imported.config
    typer.echo(
        f"wrote {out}: {config.num_hidden_layers} layers, width {config.hidden_size}, {config.vocab_size} tokens"
    )


@app.command()
def trace(
    model: ModelName,
    text: Annotated[str, typer.Option(help="Text to route.")],
    tokenizer: Annotated[Path | None, typer.Option(help="Tokenizer folder, if the model folder has none.")] = None,
    json: Annotated[Path | None, typer.Option(help="Also write the trace as JSON to this new file.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of a preset's random weights.")] = 0,
) -> None:
    """Route a text and show which operator each token took in each layer."""
    from chiar.analysis.trace_view import run_trace

    for view in run_trace(model, text, tokenizer, json, seed):
        show(view)


@app.command()
def diagram(
    model: Annotated[str, typer.Argument(metavar="PRESET", help="A preset or a model folder.")],
    out: Annotated[Path, typer.Argument(help="SVG file to write.")],
) -> None:
    """Draw the architecture of a configuration as SVG."""
    from chiar.analysis.diagram import draw
    from chiar.load import load_config

    picture = draw(load_config(model), title=Path(model).name)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(picture)
    typer.echo(f"wrote {out}")


def main() -> None:
    try:
        app()
    except InputError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(2)
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        typer.echo(f"error: {error.strerror or error}{where}", err=True)
        sys.exit(2)
