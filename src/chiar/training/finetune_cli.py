"""`chiar finetune`: training as `chiar train` does it, with the settings classification wants. Heavy imports inside."""

from pathlib import Path
from typing import Annotated, Any

import typer

from chiar.errors import InputError
from chiar.training.cli import check_types, configuration, run, sort_settings
from chiar.training.options import (
    Compile,
    Data,
    Deterministic,
    Device,
    Length,
    MicroRows,
    Out,
    Rate,
    Resume,
    Rows,
    Seed,
    Set,
    Steps,
)


def finetune(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="A model folder, a training run (its best), or a preset: from scratch."),
    ],
    data: Data,
    out: Out,
    epochs: Annotated[float, typer.Option(help="How often all documents are read.")] = 3.0,
    resume: Resume = False,
    setting: Set = None,
    steps: Steps = None,
    batch: Rows = None,
    micro_batch: MicroRows = None,
    length: Length = None,
    learning_rate: Rate = None,
    seed: Seed = None,
    compile: Compile = None,
    deterministic: Deterministic = False,
    device: Device = "auto",
) -> None:
    """Train a classifier on labelled corpora, from a model's weights or from scratch; --resume as in chiar train."""
    from chiar import presets
    from chiar.data import Corpus
    from chiar.model.load import resolve_model
    from chiar.training.finetune import classification_settings

    given: dict[str, Any] = {"steps": steps, "batch": batch, "micro_batch": micro_batch, "length": length}
    given |= {"learning_rate": learning_rate, "seed": seed, "compile": compile, "deterministic": deterministic or None}
    chosen, changes = sort_settings(given, setting)
    if "initial" in chosen:
        raise InputError("the weights to start from are MODEL's: leave --set initial out.")
    folder = model if model in presets.NAMES else resolve_model(model)[0]
    config = configuration(folder, changes, Path(data[0]))
    chosen |= {"data": list(data), "initial": "" if model in presets.NAMES else folder}
    config, settings = classification_settings(config, [Corpus.open(path) for path in data], chosen, epochs)
    check_types(settings)
    run(config, settings, out, resume, device)
