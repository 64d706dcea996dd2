"""`chiar train`, also as `torchrun -m chiar.train`, and `chiar finetune`. Heavy imports happen inside."""

import ast
import inspect
import json
import os
import sys
import textwrap
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, replace
from inspect import Parameter
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from chiar.config_checks import ALL_SETTINGS
from chiar.errors import require, unknown_name
from chiar.training.settings import MANY, RANGES, TINY, TrainSettings, finetune_settings, micro_batch_of

if TYPE_CHECKING:
    from chiar.config import ChiarConfig

# What has an option of its own, besides the fields of Launch; --set reaches all else.
OPTIONS = ("data", "steps", "batch", "micro_batch", "length", "learning_rate", "seed", "compile", "deterministic")
METAVARS = {"data": "CORPUS", "out": "RUN", "set": "NAME=VALUE", "device": "auto|cpu|cuda"}
SETTINGS = {field.name: field for field in fields(TrainSettings)}
# What help says of defaults that are not simply those of the settings.
ANEW = {"data": "required", "out": "required", "set": "default: none"}
ANEW["micro_batch"] = "default: the most up to 32 that divides the batch"
FINETUNED = {"batch": "default: 32", "length": "default: the model's", "steps": "default: what --epochs makes"}
FINETUNED |= {"compile": "default: off", "learning_rate": "default: 1e-4; 5e-4 from scratch"}


@dataclass
class Launch:
    out: Annotated[Path | None, "Run folder, a new one."] = None
    resume: Annotated[bool, "Go on with a run: --resume RUN needs nothing else."] = False
    extend: Annotated[bool, "With --resume: --steps may change the run's length, and so its learning rate."] = False
    set: Annotated[list[str] | None, "Any training setting or configuration field."] = None
    device: Annotated[str, "Where to train."] = "auto"


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """The command with the shared options in place of its **given. A setting that is not given is None."""
    signature, shared = inspect.signature(command), []
    known = ANEW | (FINETUNED if command.__name__ == "finetune" else {})
    for field in (*(SETTINGS[name] for name in OPTIONS), *fields(Launch)):
        (kind,), (text,) = field.type.__args__, field.type.__metadata__  # type: ignore[union-attr]
        flag, own = f"--{field.name.replace('_', '-')}", field.name not in SETTINGS
        if kind is bool and field.default:
            flag += f"/--no-{flag[2:]}"
        default, named = field.default if own else None, known.get(field.name) or f"default: {shown(field.default)}"
        if field.name in TINY and field.name not in known:
            named += f"; tiny presets on a CPU: {shown(TINY[field.name])}"
        option = typer.Option(flag, metavar=METAVARS.get(field.name), help=f"{text} [{named}]", show_default=False)
        wanted: Any = Annotated[kind | None if default is None else kind, option]
        shared.append(Parameter(field.name, Parameter.KEYWORD_ONLY, default=default, annotation=wanted))
    listed = typer.Option("--settings", callback=list_settings, is_eager=True, help="List all that --set takes.")
    shared.append(Parameter("settings", Parameter.KEYWORD_ONLY, default=False, annotation=Annotated[bool, listed]))
    model, *more, _ = signature.parameters.values()
    command.__signature__ = signature.replace(parameters=[model, *shared, *more])  # type: ignore[attr-defined]
    return command


def shown(default: Any) -> str:
    return ("on" if default else "off") if isinstance(default, bool) else f"{default}"


def list_settings(wanted: bool) -> None:
    """Print every name that --set takes with its type, its default, a line on it and what it may be."""
    if not wanted:
        return
    from chiar.config import ChiarConfig

    tiny = ", ".join(f"{name}={json.dumps(value)}" for name, value in TINY.items())
    typer.echo(f"training settings (tiny presets on a CPU: {tiny})")
    for field in SETTINGS.values():
        (kind,), (text,) = field.type.__args__, field.type.__metadata__  # type: ignore[union-attr]
        least, most = RANGES.get(field.name, (0, MANY))
        if kind in (int, float) and (least, most) != (0, MANY):
            text += f" At least {least}." if most == MANY else f" Between {least} and {most:,}."
        default = [] if field.default is MISSING else field.default
        list_one(field.name, kind, "auto" if field.name == "precision" else default, text)
    typer.echo("\nconfiguration fields, with the defaults of v3-16m (other presets differ)")
    under = pairwise(ast.parse(inspect.getsource(ChiarConfig)).body[0].body)  # type: ignore[attr-defined]
    pairs = [(a.target, b.value) for a, b in under if isinstance(a, ast.AnnAssign) and isinstance(b, ast.Expr)]
    texts = {ast.unparse(name): ast.literal_eval(text) for name, text in pairs}
    for name, kind in ChiarConfig.__annotations__.items():
        list_one(name, kind, ChiarConfig.__dataclass_fields__[name].default, texts[name])
    raise typer.Exit


def list_one(name: str, kind: Any, default: Any, text: str) -> None:
    typer.echo(f"  {name} ({kind.__name__ if isinstance(kind, type) else kind}) = {json.dumps(default)}")
    for line in textwrap.wrap(" ".join(text.split()), 92):
        typer.echo(f"      {line}")


@with_options
def train(
    model: Annotated[str, typer.Argument(metavar="PRESET|RUN", help="A preset, a folder with a configuration, a run.")],
    *,
    thresholds: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Those of chiar calibrate --json. [default: white noise's]")
    ] = None,
    **given: Any,
) -> None:
    """Train a model on prepared corpora; killed at any moment, --resume RUN continues exactly where it was saved."""
    launch, chosen, changes = sort_options(given)
    if launch.resume and launch.out is None:
        require(thresholds is None, "--thresholds are those the run was begun with: leave them out.")
        return go_on(Path(model), chosen, changes, launch)
    settings = TrainSettings.from_dict(starting(model, launch.device) | chosen)
    if "micro_batch" not in chosen:
        settings.micro_batch = micro_batch_of(settings.batch)
    corpus = Path(settings.data[0])
    if thresholds is not None:
        from chiar.routing.calibration import read_thresholds

        twice = "thresholds" in changes
        require(not twice, "--thresholds and --set thresholds say the same thing twice: give one of them.")
        changes["thresholds"] = read_thresholds(thresholds, configuration(model, changes, corpus))
    run(configuration(model, changes, corpus), settings, launch)


def starting(model: str, device: str) -> dict[str, Any]:
    """What chiar train begins with where nothing else is said."""
    from chiar import presets
    from chiar.model.load import choose_device

    small = model in presets.NAMES and model.endswith("-tiny") and choose_device(device).type == "cpu"
    return {"precision": "auto", **(TINY if small else {})}


@with_options
def finetune(
    model: Annotated[
        str, typer.Argument(metavar="MODEL|RUN", help="A model folder, a run (its best), a preset: anew.")
    ],
    *,
    epochs: Annotated[float | None, typer.Option(help="How often all documents are read. [default: 3]")] = None,
    **given: Any,
) -> None:
    """Train a classifier on labelled corpora, from a model's weights or from scratch; --resume as in chiar train."""
    from chiar import presets
    from chiar.data.shards import Corpus
    from chiar.model.load import resolve_model

    launch, chosen, changes = sort_options(given)
    if launch.resume and launch.out is None:
        require(epochs is None, "--epochs is for a new run: --steps N --extend makes one longer.")
        return go_on(Path(model), chosen, changes, launch)
    require("initial" not in chosen, "the weights to start from are MODEL's: leave --set initial out.")
    chosen["initial"] = "" if model in presets.NAMES else resolve_model(model)[0]
    TrainSettings.from_dict(chosen)  # refuses what cannot be
    config = configuration(chosen["initial"] or model, changes, Path(chosen["data"][0]))
    corpora = [Corpus.open(path) for path in chosen["data"]]
    for corpus in corpora:
        labelled = corpus.kind == "classification"
        require(labelled, f"{corpus.folder} is a language corpus without labels: train on it with chiar train.")
    documents = sum(corpus.split("train").documents for corpus in corpora)
    length, passes = config.max_position_embeddings, 3.0 if epochs is None else epochs
    run(config, finetune_settings(chosen, length, documents, passes), launch)


def go_on(path: Path, chosen: dict[str, Any], changes: dict[str, Any], launch: Launch) -> None:
    """Continue a run with what it was told itself."""
    from chiar.config import ChiarConfig
    from chiar.training.run_folder import RunFolder

    check_fields(changes)
    folder = RunFolder(path)
    config, settings = folder.begun()
    launch.out = path
    if launch.device == "auto":
        launch.device = folder.read().get("device", "auto")
    run(ChiarConfig(**{**config.to_dict(), **changes}), replace(settings, **chosen), launch)


def sort_options(given: dict[str, Any]) -> tuple[Launch, dict[str, Any], dict[str, Any]]:
    """The launch, the training settings asked for by options or --set, and the configuration fields of --set."""
    launch = Launch(**{field.name: given.pop(field.name) for field in fields(Launch)})
    del given["settings"]  # it ended the command
    require(launch.resume or not launch.extend, "--extend is for a run that goes on: add --resume, or leave it out.")
    asked = dict(parse(item) for item in launch.set or [])
    chosen = {name: value for name, value in given.items() if value is not None}
    chosen |= {name: value for name, value in asked.items() if name in SETTINGS}
    return launch, chosen, {name: value for name, value in asked.items() if name not in SETTINGS}


def parse(item: str) -> tuple[str, Any]:
    name, equals, value = item.partition("=")
    require(equals, f"--set takes NAME=VALUE, got {item!r}.")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def check_fields(changes: dict[str, Any]) -> None:
    from chiar.config import ChiarConfig

    for name in changes.keys() - ChiarConfig.__annotations__.keys():
        known = [*SETTINGS, *ChiarConfig.__annotations__]
        raise unknown_name("training setting or configuration field", name, known, ALL_SETTINGS)


def configuration(model: str, changes: dict[str, Any], corpus: Path) -> "ChiarConfig":
    """The model's configuration; a preset takes vocabulary and end of text from the corpus."""
    from chiar import presets
    from chiar.config import ChiarConfig
    from chiar.data.shards import Corpus
    from chiar.model.load import load_config

    check_fields(changes)
    if model not in presets.NAMES:
        return ChiarConfig(**{**load_config(model).to_dict(), **changes})
    opened = Corpus.open(corpus)
    taken = {"vocab_size": opened.vocab_size, **dict.fromkeys(("bos_token_id", "eos_token_id"), opened.end_of_text)}
    return presets.get(model, **{**taken, **changes})


def run(config: "ChiarConfig", settings: TrainSettings, launch: Launch) -> None:
    from chiar.training import checkpoint, loop

    require(launch.out is not None, "say where the run shall be written: --out RUN, a new folder.")
    assert launch.out is not None
    try:
        loop.train(config, settings, launch.out, launch.resume, launch.device, extend=launch.extend)
    except (checkpoint.TrainingStopped, loop.Interrupted) as ended:
        what, code = ("interrupted", 130) if isinstance(ended, loop.Interrupted) else ("stopped", 1)
        if os.environ.get("RANK", "0") == "0":  # of several processes one speaks
            typer.echo(f"{what}: {ended}", err=True)
        sys.exit(code)
