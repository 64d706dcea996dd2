"""`chiar train`, also as `torchrun -m chiar.train`, and `chiar finetune`. Heavy imports happen inside.

Both have the options of `Launch` and of the training settings named in OPTIONS, with the help that stands under each
field; `--set` reaches every other setting and the configuration.
"""

import ast
import inspect
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import MISSING, Field, dataclass, fields
from inspect import Parameter
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from chiar.errors import InputError, unknown_name
from chiar.training.settings import TrainSettings, finetune_settings

if TYPE_CHECKING:
    from chiar.config import ChiarConfig

OPTIONS = ("data", "steps", "batch", "micro_batch", "length", "learning_rate", "seed", "compile", "deterministic")
METAVARS = {"data": "CORPUS", "out": "RUN", "set": "NAME=VALUE", "device": "auto|cpu|cuda"}


@dataclass
class Launch:
    """Where a run is kept and computed."""

    out: Path
    """Run folder."""
    resume: bool = False
    """Continue the run in RUN."""
    set: list[str] | None = None
    """Any training setting or configuration field."""
    device: str = "auto"
    """Where to train."""


def field_docstrings(kind: type) -> dict[str, str]:
    """The docstring under each field of a dataclass."""
    (tree,) = ast.parse(inspect.getsource(kind)).body
    assert isinstance(tree, ast.ClassDef)
    found = {}
    for statement, below in pairwise(tree.body):
        match statement, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                found[name] = " ".join(text.split())
    return found


def parameters_of(kind: type, names: tuple[str, ...]) -> Iterator[Parameter]:
    """Fields of a dataclass as options. A setting that is not given is None: what it is then, the command decides."""
    described = field_docstrings(kind)
    known: dict[str, Field] = {field.name: field for field in fields(kind)}
    for name in names:
        field, flag = known[name], f"--{name.replace('_', '-')}"
        if field.type is bool and field.default:
            flag += f"/--no-{name.replace('_', '-')}"
        option = typer.Option(flag, metavar=METAVARS.get(name), help=described[name])
        required = field.default is MISSING
        default = Parameter.empty if required else field.default if kind is Launch else None
        wanted = field.type if required or default is not None else field.type | None  # type: ignore[operator]
        yield Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[wanted, option])


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """The command with the shared options in place of its **given."""
    signature = inspect.signature(command)
    model, *own, _ = signature.parameters.values()
    launch = parameters_of(Launch, tuple(field.name for field in fields(Launch)))
    shared = [*parameters_of(TrainSettings, OPTIONS), *launch]
    command.__signature__ = signature.replace(parameters=[model, *shared, *own])  # type: ignore[attr-defined]
    return command


@with_options
def train(
    model: Annotated[str, typer.Argument(metavar="PRESET", help="A preset, or a folder whose configuration is taken.")],
    *,
    thresholds: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Route by the thresholds of chiar calibrate --json.")
    ] = None,
    **given: Any,
) -> None:
    """Train a model on prepared corpora; killed at any moment, --resume continues exactly where it was saved."""
    launch, chosen, changes = sort_options(given)
    settings = TrainSettings.from_dict({"precision": "auto", **chosen})
    corpus = Path(settings.data[0])
    config = configuration(model, changes, corpus)
    if thresholds is not None:
        from chiar.routing.calibration import read_thresholds

        if "thresholds" in changes:
            raise InputError("--thresholds and --set thresholds say the same thing twice: give one of them.")
        config = configuration(model, {**changes, "thresholds": read_thresholds(thresholds, config)}, corpus)
    run(config, settings, launch)


@with_options
def finetune(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="A model folder, a training run (its best), or a preset: from scratch."),
    ],
    *,
    epochs: Annotated[float, typer.Option(help="How often all documents are read.")] = 3.0,
    **given: Any,
) -> None:
    """Train a classifier on labelled corpora, from a model's weights or from scratch; --resume as in chiar train."""
    from chiar import presets
    from chiar.data import Corpus
    from chiar.model.load import resolve_model

    launch, chosen, changes = sort_options(given)
    if "initial" in chosen:
        raise InputError("the weights to start from are MODEL's: leave --set initial out.")
    folder = model if model in presets.NAMES else resolve_model(model)[0]
    config = configuration(folder, changes, Path(chosen["data"][0]))
    chosen["initial"] = "" if model in presets.NAMES else folder
    corpora = [Corpus.open(path) for path in chosen["data"]]
    for corpus in corpora:
        if corpus.kind != "classification":
            raise InputError(f"{corpus.folder} is a {corpus.kind} corpus without labels: train on it with chiar train.")
    documents = sum(corpus.split("train").documents for corpus in corpora)
    run(config, finetune_settings(chosen, config.max_position_embeddings, documents, epochs), launch)


def sort_options(given: dict[str, Any]) -> tuple[Launch, dict[str, Any], dict[str, Any]]:
    """The launch, the training settings asked for by options or --set, and the configuration fields of --set."""
    launch = Launch(**{field.name: given.pop(field.name) for field in fields(Launch)})
    chosen = {name: value for name, value in given.items() if value is not None}
    changes: dict[str, Any] = {}
    settings = {field.name for field in fields(TrainSettings)}
    for item in launch.set or []:
        name, value = parse(item)
        (chosen if name in settings else changes)[name] = value
    return launch, chosen, changes


def parse(item: str) -> tuple[str, Any]:
    name, equals, value = item.partition("=")
    if not equals:
        raise InputError(f"--set takes NAME=VALUE, got {item!r}.")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def configuration(model: str, changes: dict[str, Any], corpus: Path) -> "ChiarConfig":
    """The model's configuration; a preset takes vocabulary and end of text from the corpus."""
    from chiar import presets
    from chiar.config import ChiarConfig
    from chiar.data import Corpus
    from chiar.model.load import load_config

    for name in changes:
        if name not in ChiarConfig.__annotations__:
            known = [*(field.name for field in fields(TrainSettings)), *ChiarConfig.__annotations__]
            raise unknown_name("training setting or configuration field", name, known)
    if model in presets.NAMES:
        opened = Corpus.open(corpus)
        end = opened.end_of_text
        taken = {"vocab_size": opened.vocab_size, "bos_token_id": end, "eos_token_id": end}
        return presets.get(model, **{**taken, **changes})
    return ChiarConfig(**{**load_config(model).to_dict(), **changes})


def run(config: "ChiarConfig", settings: TrainSettings, launch: Launch) -> None:
    from chiar.training import loop

    try:
        loop.train(config, settings, launch.out, resume=launch.resume, device=launch.device)
    except (loop.TrainingStopped, loop.Interrupted) as ended:
        what, code = ("interrupted", 130) if isinstance(ended, loop.Interrupted) else ("stopped", 1)
        if os.environ.get("RANK", "0") == "0":  # of several processes one speaks
            typer.echo(f"{what}: {ended}", err=True)
        sys.exit(code)
