"""`chiar train`, also as `torchrun -m chiar.train`, and `chiar finetune`. Slow imports are inside the functions."""

import ast
import inspect
import json
import os
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from inspect import Parameter
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from chiar.config_checks import ALL_SETTINGS
from chiar.errors import InputError, require, unknown_name
from chiar.training.settings import FINETUNE, MANY, RANGES, TINY, TrainSettings, finetune_settings, micro_batch_of

if TYPE_CHECKING:
    from chiar.config import ChiarConfig

# Settings with an option of their own, besides the fields of Launch; --set takes all settings.
OPTIONS = ("data", "steps", "batch", "micro_batch", "length", "learning_rate", "seed", "compile", "deterministic")
NOT_IN_FINETUNE = ("initial", "sample")  # the model is its argument, and labelled documents are not continued
METAVARS = {"data": "CORPUS", "out": "RUN", "set": "NAME=VALUE", "device": "auto|cpu|cuda"}
SETTINGS = {field.name: field for field in fields(TrainSettings)}
# Defaults as help shows them, where they are not simply those of the settings.
TRAIN_DEFAULTS = {"data": "required", "out": "required", "set": "default: none"}
TRAIN_DEFAULTS["micro_batch"] = "default: the batch up to 32, else gcd(batch, 32)"
FINETUNE_DEFAULTS = {"batch": "default: 32", "steps": "default: set by --epochs"}
FINETUNE_DEFAULTS |= {"length": "default: the model's max_position_embeddings", "compile": "default: off"}
FINETUNE_DEFAULTS |= {"learning_rate": "default: 1e-4; 5e-4 from scratch", "warmup": "default: 6% of the steps"}
FINETUNE_DEFAULTS |= dict.fromkeys(("evaluate_every", "save_every"), "default: one epoch")


@dataclass
class Launch:
    out: Annotated[Path | None, "New run folder."] = None
    resume: Annotated[bool, "Continue RUN; no other option is needed."] = False
    extend: Annotated[bool, "With --resume: allow another --steps, and with it other learning rates."] = False
    set: Annotated[list[str] | None, "Set a training setting or configuration field; repeatable."] = None
    device: Annotated[str, "Device; auto uses a GPU if there is one."] = "auto"


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Replaces a command's **given by the shared options. A setting that is not given is None."""
    signature, shared = inspect.signature(command), []
    defaults = TRAIN_DEFAULTS | (FINETUNE_DEFAULTS if command.__name__ == "finetune" else {})
    for field in (*(SETTINGS[name] for name in OPTIONS), *fields(Launch)):
        (kind,), (text,) = field.type.__args__, field.type.__metadata__  # type: ignore[union-attr]
        flag, own = f"--{field.name.replace('_', '-')}", field.name not in SETTINGS
        if kind is bool and field.default:
            flag += f"/--no-{flag[2:]}"
        default, note = field.default if own else None, defaults.get(field.name) or f"default: {shown(field.default)}"
        if field.name in TINY and field.name not in defaults:
            note += f"; tiny presets on a CPU: {shown(TINY[field.name])}"
        option = typer.Option(flag, metavar=METAVARS.get(field.name), help=f"{text} [{note}]", show_default=False)
        annotation: Any = Annotated[kind | None if default is None else kind, option]
        shared.append(Parameter(field.name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation))
    listing = typer.Option("--settings", callback=list_settings, is_eager=True, help="List all names --set takes.")
    shared.append(Parameter("settings", Parameter.KEYWORD_ONLY, default=False, annotation=Annotated[bool, listing]))
    model, *more, _ = signature.parameters.values()
    command.__signature__ = signature.replace(parameters=[model, *shared, *more])  # type: ignore[attr-defined]
    return command


def shown(default: Any) -> str:
    return ("on" if default else "off") if isinstance(default, bool) else f"{default}"


def list_settings(context: typer.Context, wanted: bool) -> None:
    """Print every name that --set takes, with its type, default, description and range."""
    if not wanted:
        return
    from chiar.config import ChiarConfig

    finetunes = context.info_name == "finetune"
    notes = TRAIN_DEFAULTS | (FINETUNE_DEFAULTS if finetunes else {})
    defaults = {"precision": "auto"} | (FINETUNE if finetunes else {})
    tiny = ", ".join(f"{name}={json.dumps(value)}" for name, value in TINY.items())
    typer.echo("training settings" + f" (tiny presets on a CPU: {tiny})" * (not finetunes))
    for field in (field for name, field in SETTINGS.items() if not (finetunes and name in NOT_IN_FINETUNE)):
        (kind,), (text,) = field.type.__args__, field.type.__metadata__  # type: ignore[union-attr]
        least, most = RANGES.get(field.name, (0, MANY))
        if kind in (int, float) and (least, most) != (0, MANY):
            text += f" At least {least}." if most == MANY else f" Between {least} and {most:,}."
        own = defaults.get(field.name, field.default)
        list_one(field.name, kind, f"[{notes[field.name]}]" if field.name in notes else f"= {json.dumps(own)}", text)
    typer.echo("\nconfiguration fields, with the defaults of v3-16m (other presets differ)")
    statements = pairwise(ast.parse(inspect.getsource(ChiarConfig)).body[0].body)  # type: ignore[attr-defined]
    pairs = [(a.target, b.value) for a, b in statements if isinstance(a, ast.AnnAssign) and isinstance(b, ast.Expr)]
    texts = {ast.unparse(name): ast.literal_eval(text) for name, text in pairs}
    for name, kind in ChiarConfig.__annotations__.items():
        list_one(name, kind, f"= {json.dumps(ChiarConfig.__dataclass_fields__[name].default)}", texts[name])
    raise typer.Exit


def list_one(name: str, kind: Any, default: str, text: str) -> None:
    from chiar.config_checks import describe_type

    typer.echo(f"  {name} ({describe_type(kind)}) {default}")
    for line in textwrap.wrap(" ".join(text.split()), 92):
        typer.echo(f"      {line}")


@with_options
def train(
    model: Annotated[
        str, typer.Argument(metavar="PRESET|RUN", help="A preset, model folder or run that gives the configuration.")
    ],
    *,
    thresholds: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Thresholds from chiar calibrate --json. [default: the configuration's]"),
    ] = None,
    **given: Any,
) -> None:
    """Train a model on prepared corpora. --resume RUN continues a stopped or crashed run from its last checkpoint."""
    launch, chosen, changes = sort_options(given)
    if launch.resume and launch.out is None:
        require(thresholds is None, "--thresholds of a run cannot change when it is resumed: leave them out.")
        return resume_run(Path(model), chosen, changes, launch)
    settings = TrainSettings.from_dict(default_settings(model, launch.device) | chosen)
    if "micro_batch" not in chosen:
        settings.micro_batch = micro_batch_of(settings.batch)
    corpus = Path(settings.data[0])
    if thresholds is not None:
        from chiar.routing.calibration import read_thresholds

        twice = "thresholds" in changes
        require(not twice, "--thresholds and --set thresholds say the same thing twice: give one of them.")
        changes["thresholds"] = read_thresholds(thresholds, configuration(model, changes, corpus))
    run(configuration(model, changes, corpus), settings, launch)


def default_settings(model: str, device: str) -> dict[str, Any]:
    """Defaults of chiar train that differ from those of TrainSettings."""
    from chiar import presets
    from chiar.model.load import choose_device

    small = model in presets.NAMES and model.endswith("-tiny") and choose_device(device).type == "cpu"
    return {"precision": "auto", **(TINY if small else {})}


@with_options
def finetune(
    model: Annotated[
        str, typer.Argument(metavar="MODEL|RUN", help="A model folder, a run (its best model), or a preset (new).")
    ],
    *,
    epochs: Annotated[float | None, typer.Option(help="Epochs over the training documents. [default: 3]")] = None,
    **given: Any,
) -> None:
    """Train a classifier on labelled corpora. It starts from a model's weights, or new ones. --resume RUN continues."""
    from chiar import presets
    from chiar.data.shards import Corpus
    from chiar.model.load import resolve_model

    launch, chosen, changes = sort_options(given)
    if launch.resume and launch.out is None:
        require(epochs is None, "--epochs is for a new run: --steps N --extend makes one longer.")
        return resume_run(Path(model), chosen, changes, launch)
    require("initial" not in chosen, "the weights to start from are MODEL's: leave --set initial out.")
    chosen["initial"] = "" if model in presets.NAMES else resolve_model(model)[0]
    TrainSettings.from_dict(chosen)  # validates them: below, data must be given
    config = configuration(chosen["initial"] or model, changes, Path(chosen["data"][0]))
    corpora = [Corpus.open(path) for path in chosen["data"]]
    for corpus in corpora:
        labelled = corpus.kind == "classification"
        require(labelled, f"{corpus.folder} is a language corpus without labels: train on it with chiar train.")
    documents = sum(corpus.split("train").documents for corpus in corpora)
    length, passes = config.max_position_embeddings, 3.0 if epochs is None else epochs
    run(config, finetune_settings(chosen, length, documents, passes), launch)


def resume_run(path: Path, chosen: dict[str, Any], changes: dict[str, Any], launch: Launch) -> None:
    """Continue a run with its own configuration and settings, but for what the command changes."""
    from chiar.config import ChiarConfig
    from chiar.training.run_folder import RunFolder

    check_fields(changes)
    folder = RunFolder(path)
    config, settings = folder.config_and_settings()
    launch.out = path
    if launch.device == "auto":
        launch.device = folder.read().get("device", "auto")
    run(ChiarConfig(**{**config.to_dict(), **changes}), replace(settings, **chosen), launch)


def sort_options(given: dict[str, Any]) -> tuple[Launch, dict[str, Any], dict[str, Any]]:
    """The launch options, the training settings of options or --set, and the configuration fields of --set."""
    launch = Launch(**{field.name: given.pop(field.name) for field in fields(Launch)})
    del given["settings"]  # with --settings the command has ended before
    require(launch.resume or not launch.extend, "--extend is for a resumed run: add --resume, or leave it out.")
    assigned = dict(parse(item) for item in launch.set or [])  # of two with the same name the last counts
    chosen = {name: value for name, value in given.items() if value is not None}
    for name in chosen.keys() & assigned.keys():
        raise InputError(f"--{name.replace('_', '-')} and --set {name} set the same thing: give one of them.")
    chosen |= {name: value for name, value in assigned.items() if name in SETTINGS}
    return launch, chosen, {name: value for name, value in assigned.items() if name not in SETTINGS}


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
    """The model's configuration; a preset takes its vocabulary size and end of text from the corpus."""
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

    require(launch.out is not None, "the run needs a folder to write to: --out RUN, a new one.")
    assert launch.out is not None
    try:
        loop.train(config, settings, launch.out, launch.resume, launch.device, extend=launch.extend)
    except (checkpoint.TrainingStopped, loop.Interrupted) as stopped:
        what, code = ("interrupted", 130) if isinstance(stopped, loop.Interrupted) else ("stopped", 1)
        if os.environ.get("RANK", "0") == "0":  # of several processes only the first prints
            typer.echo(f"{what}: {stopped}", err=True)
        sys.exit(code)
