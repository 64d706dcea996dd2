"""`chiar train`, also as `torchrun -m chiar.train`. Heavy imports happen inside."""

import json
import os
import sys
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Annotated, Any

import typer

from chiar.errors import InputError, unknown_name
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


def train(
    model: Annotated[str, typer.Argument(metavar="PRESET", help="A preset, or a folder whose configuration is taken.")],
    data: Data,
    out: Out,
    resume: Resume = False,
    setting: Set = None,
    thresholds: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Route by the thresholds of chiar calibrate --json.")
    ] = None,
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
    """Train a model on prepared corpora; killed at any moment, --resume continues exactly where it was saved."""
    from chiar.training.settings import TrainSettings

    given: dict[str, Any] = {"steps": steps, "batch": batch, "micro_batch": micro_batch, "length": length}
    given |= {"learning_rate": learning_rate, "seed": seed, "compile": compile, "deterministic": deterministic or None}
    chosen, changes = sort_settings(given, setting)
    settings = TrainSettings.from_dict({"precision": "auto", **chosen, "data": list(data)})
    check_types(settings)
    config = configuration(model, changes, Path(data[0]))
    if thresholds is not None:
        from chiar.routing.calibration import read_thresholds

        if "thresholds" in changes:
            raise InputError("--thresholds and --set thresholds say the same thing twice: give one of them.")
        config = configuration(model, {**changes, "thresholds": read_thresholds(thresholds, config)}, Path(data[0]))
    run(config, settings, out, resume, device)


def run(config: Any, settings: Any, out: Path, resume: bool, device: str) -> None:
    from chiar.training.interruption import Interrupted
    from chiar.training.loop import TrainingStopped
    from chiar.training.loop import train as run_training

    try:
        run_training(config, settings, out, resume=resume, device=device)
    except TrainingStopped as stopped:
        if os.environ.get("RANK", "0") == "0":
            typer.echo(f"stopped: {stopped}", err=True)
        sys.exit(1)
    except Interrupted as interrupted:
        if int(os.environ.get("RANK", "0")) == 0:
            typer.echo(f"interrupted: {interrupted}", err=True)
        sys.exit(130)


def sort_settings(given: dict[str, Any], setting: list[str] | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Options that were given and what --set adds: training settings, and configuration fields."""
    from chiar.training.settings import TrainSettings

    chosen = {name: value for name, value in given.items() if value is not None}
    names = {field.name for field in fields(TrainSettings)}
    changes: dict[str, Any] = {}
    for item in setting or []:
        name, value = parse(item)
        (chosen if name in names else changes)[name] = value
    return chosen, changes


def parse(item: str) -> tuple[str, Any]:
    name, equals, value = item.partition("=")
    if not equals:
        raise InputError(f"--set takes NAME=VALUE, got {item!r}.")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def check_types(settings: Any) -> None:
    """A setting must have the type of its default."""
    for field in fields(settings):
        value, default = getattr(settings, field.name), field.default
        if default is MISSING or default is None:
            continue
        number = isinstance(default, float) and isinstance(value, int) and not isinstance(value, bool)
        if type(value) is not type(default) and not number:
            raise InputError(f"{field.name} must be {type(default).__name__}, got {value!r}.")


def configuration(model: str, changes: dict[str, Any], corpus: Path) -> Any:
    """The model's configuration; a preset takes vocabulary and end of text from the corpus."""
    from chiar import presets
    from chiar.config import ChiarConfig
    from chiar.data import Corpus
    from chiar.model.load import load_config
    from chiar.training.settings import TrainSettings

    for name in changes:
        if name not in ChiarConfig.__annotations__:
            known = [*(field.name for field in fields(TrainSettings)), *ChiarConfig.__annotations__]
            raise unknown_name("training setting or configuration field", name, known)
    if model in presets.NAMES:
        opened = Corpus.open(corpus)
        end = opened.end_of_text
        taken = {"vocab_size": opened.vocab_size, "bos_token_id": end, "eos_token_id": end}
        return presets.get(model, **{**taken, **changes})
    fields_of = load_config(model).to_dict()
    return ChiarConfig(**{**fields_of, **changes})
