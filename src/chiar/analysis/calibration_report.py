"""Calibration from the command line: read a stream, report the entropies, write a calibrated model."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import Progress
from rich.table import Table

from chiar.errors import InputError
from chiar.folders import new_folder
from chiar.load import load_model
from chiar.routing.calibration import PERCENTILES, Calibration, LayerReport, calibrate
from chiar.tokens import batches, encode, read_text_file, read_token_file


def run_calibration(
    name: str,
    text: Path | None,
    tokens: Path | None,
    tokenizer: Path | None,
    rule: str,
    fraction: float | None,
    rows: int,
    length: int,
    batch_size: int,
    apply_to: Path | None,
    out: Path | None,
) -> list[Table]:
    if (text is None) == (tokens is None):
        raise InputError("give the stream to calibrate on as exactly one of --text FILE and --tokens FILE.")
    if apply_to is not None and out is None:
        raise InputError("--apply-to needs --out: the calibrated model goes to a new folder.")
    model, folder = load_model(name)
    if tokens is not None:
        ids = read_token_file(tokens)
    else:
        assert text is not None
        ids = np.array(encode(read_text_file(text), model.config, folder, tokenizer)[0], dtype=np.int64)
    stream = batches(ids, rows, length, batch_size)
    if apply_to is None:
        target, target_folder = model, folder
    else:
        target, target_folder = load_model(str(apply_to))
        if rule != "embeddings":
            raise InputError(
                "--apply-to goes with --rule embeddings: per-layer thresholds belong to the model measured."
            )
        if target.config.hidden_size != model.config.hidden_size:
            raise InputError(
                f"thresholds of width {model.config.hidden_size} route everything one way at width "
                f"{target.config.hidden_size}: calibrate a model of the same width."
            )
    if out is not None and not target.config.routed_layers:
        raise InputError("the model to write has no routed layers: name one that has with --apply-to.")
    found = with_progress(model, stream, rule, fraction, len(target.config.operators))
    if out is not None:
        write(target, target_folder, found, out)
    return tables(found, name)


def with_progress(model: Any, stream: list, rule: str, fraction: float | None, operators: int) -> Calibration:
    with Progress(transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("reading tokens", total=None)
        return calibrate(model, stream, rule, fraction, operators, progress=lambda n: bar.advance(task, n))


def write(target: Any, folder: Path | None, found: Calibration, out: Path) -> None:
    target.model.set_thresholds(found.thresholds(len(target.config.routed_layers)))
    with new_folder(out) as aside:
        target.save_pretrained(aside)
        (aside / "calibration.json").write_text(json.dumps(found.to_dict(), indent=2))
        if folder is not None and (folder / "tokenizer.json").is_file():
            from transformers import AutoTokenizer

            AutoTokenizer.from_pretrained(folder).save_pretrained(aside)


def tables(found: Calibration, name: str) -> list[Table]:
    table = Table(
        "layer",
        "tokens",
        *(f"p{p}" for p in PERCENTILES),
        "τ",
        "split (light … dark)",
        "KS from noise",
        "shift (σ of noise)",
        title=f"{name}: spectral entropy by rule '{found.rule}', {found.rounds} pass(es); "
        f"white noise of this width {found.noise_mean:.4f} ± {found.noise_deviation:.4f}",
        title_justify="left",
        box=None,
    )
    for row in found.layers:
        table.add_row(*cells(row))
    return [table]


def cells(row: LayerReport) -> list[str]:
    return [
        "embedding" if row.layer is None else str(row.layer + 1),
        f"{row.tokens:,}",
        *(f"{row.percentiles[p]:.4f}" for p in PERCENTILES),
        ", ".join(f"{t:.4f}" for t in row.thresholds),
        " / ".join(f"{share:.1%}" for share in row.split),
        f"{row.distance_from_noise:.3f}",
        f"{row.shift_from_noise:+.2f}",
    ]
