"""Calibration from the command line: read a stream, report the entropies, write a calibrated model."""

import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import Progress
from rich.table import Table
from transformers.utils import logging

from chiar.config import ChiarConfig
from chiar.data.shards import Corpus
from chiar.data.tokens import batches, encode, read_text_file, read_token_file
from chiar.errors import InputError
from chiar.files import check_new, new_folder, write_new
from chiar.model.load import check_tokenizer, load_model, resolve_model
from chiar.routing.calibration import PERCENTILES, Calibration, LayerReport, calibrate
from chiar.routing.calibration_file import check_comparable, to_json

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", "special_tokens_map.json")


def run_calibration(
    name: str,
    text_file: Path | None,
    token_file: Path | None,
    data: Path | None,
    split: str,
    tokenizer: Path | None,
    rule: str,
    fraction: float | None,
    rows: int,
    length: int,
    batch_size: int,
    apply_to: Path | None,
    out: Path | None,
    json: Path | None = None,
) -> list[Table | str]:
    if [text_file, token_file, data].count(None) != 2:
        raise InputError("give the stream to calibrate on as exactly one of --text-file, --token-file and --data.")
    if apply_to is not None and out is None:
        raise InputError("--apply-to needs --out: the calibrated model goes to a new folder.")
    printed = str(json) == "-"
    for new in (out, None if printed else json):
        if new is not None:
            check_new(new)
    model, folder = load_model(resolve_model(name)[0])
    if data is not None:
        ids = read_corpus(data, split, str(folder or name), model.config, rows * length)
    elif token_file is not None:
        ids = read_token_file(token_file)
    else:
        assert text_file is not None
        ids = np.array(encode(read_text_file(text_file), model.config, folder, tokenizer)[0], dtype=np.int64)
    stream = batches(ids, rows, length, batch_size)
    if apply_to is None:
        target, target_folder = model, folder
    else:
        target, target_folder = load_model(resolve_model(str(apply_to))[0])
        if rule != "embeddings":
            raise InputError(
                "--apply-to goes with --rule embeddings: per-layer thresholds belong to the model measured."
            )
        check_comparable(model.config.to_dict(), target.config)
    if out is not None and not target.config.routed_layers:
        raise InputError("the model to write has no routed layers: name one that has with --apply-to.")
    found = with_progress(model, stream, rule, fraction, target)
    if out is not None:
        write(target, target_folder, tokenizer, found, out)
    if printed:
        return [to_json(found, model.config)]
    if json is not None:
        write_new(json, to_json(found, model.config))
    notes = [] if found.converged else ["warning: the splits were still moving in the last pass: read more rows."]
    notes += [f"wrote {new}" for new in (out, json) if new is not None]
    return [*tables(found, name), *notes]


def read_corpus(data: Path, split: str, folder: str, config: ChiarConfig, tokens: int) -> np.ndarray:
    """The first tokens of a prepared split, which must be those the model was trained for."""
    corpus = Corpus.open(data)
    check_tokenizer(folder, config, corpus)
    opened = corpus.split(split)
    return opened.read(0, min(tokens, opened.tokens))


def with_progress(model: Any, stream: list, rule: str, fraction: float | None, target: Any) -> Calibration:
    with Progress(transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("reading tokens", total=None)
        return calibrate(model, stream, rule, fraction, target, progress=lambda n: bar.advance(task, n))


def write(target: Any, folder: Path | None, tokenizer: Path | None, found: Calibration, out: Path) -> None:
    target.model.set_thresholds(found.thresholds(len(target.config.routed_layers)))
    logging.disable_progress_bar()
    with new_folder(out) as aside:
        target.save_pretrained(aside)
        (aside / "calibration.json").write_text(to_json(found, target.config), encoding="utf-8")
        for name in TOKENIZER_FILES:
            for source in (tokenizer, folder):
                if source is not None and (source / name).is_file() and not (aside / name).exists():
                    shutil.copy(source / name, aside / name)


def tables(found: Calibration, name: str) -> list[Table]:
    table = Table(
        "layer",
        "tokens",
        *(f"p{p}" for p in PERCENTILES),
        "τ",
        "split (light … dark)",
        "KS from noise",
        "shift (σ of noise)",
        title=f"{name}: spectral entropy by rule '{found.rule}', read {found.passes} time(s); "
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
