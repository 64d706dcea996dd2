"""`chiar train`, also as `torchrun -m chiar.train`. Heavy imports happen inside."""

import json
import sys
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Annotated, Any

import typer

from chiar.errors import InputError, unknown_name


def train(
    model: Annotated[str, typer.Argument(metavar="PRESET", help="A preset, or a folder whose configuration is taken.")],
    data: Annotated[list[str], typer.Option(metavar="CORPUS", help="Prepared corpus; several mix.")],
    out: Annotated[Path, typer.Option(metavar="RUN", help="Run folder.")],
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in RUN.")] = False,
    setting: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="Any training setting or configuration field."),
    ] = None,
    thresholds: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Route by the thresholds of chiar calibrate --json.")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Optimiser steps.")] = None,
    batch: Annotated[int | None, typer.Option(help="Rows a step.")] = None,
    micro_batch: Annotated[int | None, typer.Option(help="Rows of one forward pass.")] = None,
    length: Annotated[int | None, typer.Option(help="Tokens a row.")] = None,
    learning_rate: Annotated[float | None, typer.Option(help="Highest learning rate.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of weights, order and dropout.")] = None,
    compile: Annotated[bool | None, typer.Option("--compile/--no-compile", help="torch.compile the model.")] = None,
    deterministic: Annotated[bool, typer.Option("--deterministic", help="Bit-exact resume on a GPU too.")] = False,
    device: Annotated[str, typer.Option(metavar="auto|cpu|cuda", help="Where to train.")] = "auto",
) -> None:
    """Train a model on prepared corpora; killed at any moment, --resume continues exactly where it was saved."""
    from chiar.training.loop import TrainingStopped
    from chiar.training.loop import train as run_training
    from chiar.training.settings import TrainSettings

    chosen: dict[str, Any] = {"steps": steps, "batch": batch, "micro_batch": micro_batch, "length": length}
    chosen |= {"learning_rate": learning_rate, "seed": seed, "compile": compile}
    chosen = {name: value for name, value in chosen.items() if value is not None}
    if deterministic:
        chosen["deterministic"] = True
    names = {field.name for field in fields(TrainSettings)}
    changes: dict[str, Any] = {}
    for item in setting or []:
        name, value = parse(item)
        (chosen if name in names else changes)[name] = value
    settings = TrainSettings.from_dict({**chosen, "data": list(data)})
    check_types(settings)
    config = configuration(model, changes, Path(data[0]))
    if thresholds is not None:
        from chiar.routing.calibration_file import read_thresholds

        if "thresholds" in changes:
            raise InputError("--thresholds and --set thresholds say the same thing twice: give one of them.")
        config = configuration(model, {**changes, "thresholds": read_thresholds(thresholds, config)}, Path(data[0]))
    try:
        run_training(config, settings, out, resume=resume, device=device)
    except TrainingStopped as stopped:
        typer.echo(f"stopped: {stopped}", err=True)
        sys.exit(1)


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
    from chiar.load import load_config

    if model in presets.NAMES:
        opened = Corpus.open(corpus)
        end = opened.end_of_text
        taken = {"vocab_size": opened.vocab_size, "bos_token_id": end, "eos_token_id": end}
        return presets.get(model, **{**taken, **changes})
    fields_of = load_config(model).to_dict()
    for name in changes:
        if name not in ChiarConfig.__annotations__:
            raise unknown_name("training setting or configuration field", name, ChiarConfig.__annotations__)
    return ChiarConfig(**{**fields_of, **changes})
