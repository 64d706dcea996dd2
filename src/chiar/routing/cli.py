"""The commands `flops`, `calibrate` and `trace`. Slow imports are inside the functions."""

import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from chiar.console import Json, ModelName, Overwrite, SplitName, has_colour, show, write_json
from chiar.errors import InputError, require
from chiar.files import check_new, new_folder

Tokenizer = Annotated[Path | None, typer.Option(metavar="FOLDER", help="Tokenizer, if the model folder has none.")]


def flops(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A preset, a model folder or a run.")],
    length: Annotated[str, typer.Option(help="Sequence length T, or several, separated by commas.")] = "256",
    fraction: Annotated[float | None, typer.Option(help="f, the dark share. [default: the model's, or ½]")] = None,
    keys: Annotated[
        str | None, typer.Option(metavar="all|routed", help="Tokens that are keys. [default: the model's]")
    ] = None,
    light_ffn: Annotated[bool | None, typer.Option(help="Light tokens run the FFN too. [default: the model's]")] = None,
    json: Json = None,
    overwrite: Overwrite = False,
) -> None:
    """Count FLOPs per token of a model and its dense baseline. Forward passes, next to the paper's claims."""
    from json import dumps

    from chiar.config_checks import check
    from chiar.model.load import load_config
    from chiar.routing.tables import flop_records, flop_tables

    try:
        lengths = [int(part) for part in length.split(",")]
    except ValueError:
        raise InputError(f"--length takes whole numbers separated by commas, got {length!r}.") from None
    config = load_config(model)
    own = keys is None and light_ffn is None
    require(own or not config.stacks, "light tokens do not enter a dark stack: leave --keys and --light-ffn out.")
    config.keys, config.light_ffn = keys or config.keys, config.light_ffn if light_ffn is None else light_ffn
    check(config)
    records = flop_records(config, lengths, fraction)
    if json is not None:
        write_json(json, dumps(records, indent=2), overwrite)
        return
    for table in flop_tables(model, config, records):
        show(table)


def calibrate(
    model: ModelName,
    text_file: Annotated[Path | None, typer.Option(metavar="FILE", help="UTF-8 text to calibrate on.")] = None,
    data: Annotated[Path | None, typer.Option(metavar="CORPUS", help="Prepared corpus to calibrate on.")] = None,
    split: SplitName = "valid",
    tokenizer: Tokenizer = None,
    rule: Annotated[str, typer.Option(metavar="embeddings|layers", help="One τ (paper), or one per layer.")] = "layers",
    fraction: Annotated[
        float | None, typer.Option(help="Share of dark tokens. [default: by the midpoint rule, or a stack's own]")
    ] = None,
    rows: Annotated[int, typer.Option(min=1, help="Rows to read.")] = 200,
    length: Annotated[int | None, typer.Option(min=1, help="Tokens per row. [default: the trained length]")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Rows per batch.")] = 8,
    out: Annotated[Path | None, typer.Option(metavar="FOLDER", help="New folder for the calibrated model.")] = None,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="File for train --thresholds; - to print.")] = None,
    overwrite: Overwrite = False,
) -> None:
    """Calibrate the thresholds of a model on a text. They follow the scores of its routed layers or its dark stack.
    With --fraction another share of the tokens may be dark than in training."""
    import numpy as np
    from rich.progress import Progress
    from transformers.utils import logging

    from chiar.data.shards import Corpus
    from chiar.data.tokenizers import check_tokenizer
    from chiar.data.tokens import TextCodec, batches, read_text_file
    from chiar.model.load import MODEL_FILE, copy_tokenizer, load_model
    from chiar.routing.calibration import calibrate, to_json
    from chiar.routing.tables import calibration_table

    if (text_file is None) == (data is None):
        raise InputError("give exactly one of --text-file and --data to calibrate on.")
    if json is not None and str(json) != "-":
        check_new(json, overwrite)
    if out is not None:
        check_new(out, overwrite, MODEL_FILE)
    loaded, folder = load_model(model)
    length = length or loaded.config.max_position_embeddings
    if out is not None and not loaded.config.routed_layers:
        raise InputError("the model has no routed layers to write thresholds for: use --json, then train --thresholds.")
    if data is not None:
        corpus = Corpus.open(data)
        check_tokenizer(str(folder or model), loaded.config, corpus)
        stream = corpus.split(split)
        ids = stream.read(0, min(rows * length, stream.tokens))
    else:
        assert text_file is not None
        codec = TextCodec.open(loaded.config, folder, tokenizer)
        ids = np.array(codec.encode(read_text_file(text_file)), dtype=np.int64)
    with Progress(transient=True, disable=not sys.stderr.isatty()) as bar:
        advance = partial(bar.advance, bar.add_task("reading tokens", total=None))
        # A dark stack can meet its quantile exactly; routed layers keep shifting each other's scores.
        tolerance = 0.001 if loaded.config.stacks else 0.01
        rows_read = batches(ids, rows, length, batch)
        calibration = calibrate(loaded, rows_read, rule, fraction, tolerance=tolerance, progress=advance)
    if str(json) != "-":
        show(calibration_table(calibration, model, loaded.config))
        if folder is None:
            typer.echo(f"note: {model} has random weights: these thresholds are for training from scratch.")
        if not calibration.converged:
            typer.echo("warning: the splits still moved in the last pass: read more --rows.")
        if loaded.config.stacks and fraction is not None:
            typer.echo("note: at another share than in training the loss may rise, even if more tokens pass the stack.")
    if out is not None:
        loaded.model.set_thresholds(calibration.thresholds(len(loaded.config.routed_layers)))
        if loaded.config.stacks and fraction is not None:
            loaded.config.target_fraction = fraction
        logging.disable_progress_bar()
        with new_folder(out, overwrite, MODEL_FILE) as aside:
            loaded.save_pretrained(aside)
            (aside / "calibration.json").write_text(to_json(calibration, loaded.config), encoding="utf-8")
            for source in (tokenizer, folder):
                copy_tokenizer(source, aside)
        typer.echo(f"wrote {out}", err=str(json) == "-")
    if json is not None:
        write_json(json, to_json(calibration, loaded.config), overwrite)
    if out is None and json is None:
        typer.echo("nothing was written: --out FOLDER saves the calibrated model, --json FILE its thresholds alone.")


def trace(
    model: ModelName,
    prompt: Annotated[str, typer.Option(metavar="TEXT", help="Text to route.")],
    tokenizer: Tokenizer = None,
    json: Json = None,
    csv: Annotated[Path | None, typer.Option(metavar="FILE", help="A line per token and layer; - to print.")] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of a preset's random weights.")] = 0,
    overwrite: Overwrite = False,
) -> None:
    """Show which operator each token of a text took in each layer."""
    from chiar.routing.tables import route_text, routing_csv, routing_views

    require(not str(json) == str(csv) == "-", "--json - and --csv - would both print: give one of them a file.")
    for out in (json, csv):
        if out is not None and str(out) != "-":
            check_new(out, overwrite)
    routed = route_text(model, prompt, tokenizer, seed)
    if json is not None:
        write_json(json, routed.trace.to_json(), overwrite)
    if csv is not None:
        write_json(csv, routing_csv(routed).rstrip("\n"), overwrite)
    if "-" not in (str(json), str(csv)):
        for view in routing_views(routed, has_colour()):
            show(view)
