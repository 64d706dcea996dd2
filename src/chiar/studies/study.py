"""Studies as data: a TOML file gives what all runs share and the variants to compare; a plan fixes every run."""

import tomllib
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields, replace
from fnmatch import filter as matching
from pathlib import Path
from typing import Any, get_origin

from chiar import presets
from chiar.config import ChiarConfig
from chiar.config_checks import describe_type, fits
from chiar.data.shards import Corpus
from chiar.errors import InputError, first_line, require, unknown_name
from chiar.files import check_file
from chiar.training.loop import Rows, check_run
from chiar.training.settings import TrainSettings

STUDIES = Path("research/studies")
# What must be the same in every run of a study, so that all read the same tokens in the same order.
SHARED = {"data", "seed", "length", "batch", "steps", "mixing", "weights", "added_share", "initial"}


@dataclass(frozen=True)
class Variant:
    """One model of a study: how it differs from the others."""

    name: str
    role: str = ""  # control or candidate
    title: str = ""
    config: dict[str, Any] = field(default_factory=dict)  # configuration fields, on top of the study's
    settings: dict[str, Any] = field(default_factory=dict)  # training settings, on top of the study's
    preset: str = ""  # empty: the study's
    seeds: list[int] | None = None  # None: the study's
    # Names an earlier variant whose final `weights` to start from, or on whose best weights to calibrate the paper's
    # `thresholds`.
    after: dict[str, str] = field(default_factory=dict)
    paper: dict[str, float] = field(
        default_factory=dict
    )  # perplexities in the paper: validation (best weights) and test


@dataclass(frozen=True)
class Study:
    """What all variants share, and the variants. Differences are to `baseline`, a control, with the same seed."""

    name: str = ""
    title: str = ""
    preset: str = ""
    baseline: str = ""
    variants: dict[str, Variant] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    epochs: float | None = None  # passes over the train split, rounded down to whole steps, or
    tokens: int | None = None  # training tokens of a run, rounded down to whole steps
    seeds: list[int] = field(default_factory=lambda: [0])
    test_rows: int | None = None  # limit on the rows of the test split
    notes: list[str] = field(default_factory=list)  # printed below the table

    @property
    def duration(self) -> str:
        if self.tokens is not None:
            return f"{self.tokens:,} tokens"
        return f"{self.epochs:g} epoch{'s' * (self.epochs != 1)} of the corpus"


def one_of(kind: str, received: str, allowed: Iterable[str]) -> str:
    if received not in allowed:
        raise unknown_name(kind, received, allowed)
    return received


def declared() -> list[Path]:
    """The files of ./research/studies. InputError if there are none."""
    found = sorted(STUDIES.glob("*.toml"))
    require(found, f"there is no ./{STUDIES} here: go to a checkout of the project, or name a .toml file.")
    return found


def find(name: str, beside: Path = STUDIES) -> Study:
    """The study of a TOML file, or of this name in the folder `beside` or in ./research/studies."""
    path = next((file for folder in (beside, STUDIES) if (file := folder / f"{name}.toml").is_file()), Path(name))
    if path.suffix != ".toml":
        known = [found.stem for found in declared()]
        raise unknown_name("study", name, known, f"Names are those of ./{STUDIES}; or give a .toml file.")
    check_file(path)
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
        base = find(str(data.pop("extends")), path.parent) if "extends" in data else Study()
        given, variants = {"name": path.stem, **typed("study", data, Study)}, dict(base.variants)
        for variant, table in given.get("variants", {}).items():
            variants[variant] = Variant(**{"name": variant, **typed(f"variant {variant}", table, Variant)})
        given |= {part: {**getattr(base, part), **given.get(part, {})} for part in ("config", "settings")}
        once = {"tokens": None, "epochs": None} if {"tokens", "epochs"} & {*data} else {}
        return check(replace(base, **{**once, **given, "variants": variants}))
    except InputError as error:
        raise InputError(f"{path}: {error}") from error
    except ValueError as error:
        raise InputError(f"{path} is not TOML: {first_line(error)}.") from error


def typed(where: str, data: dict[str, Any], kind: type) -> dict[str, Any]:
    """The table itself, with the names and types of its fields checked."""
    require(isinstance(data, dict), f"{where} must be a table, got {data!r}.")
    hints: dict[str, Any] = {part.name: dict if get_origin(part.type) is dict else part.type for part in fields(kind)}
    for name, value in data.items():
        hint = hints[one_of(f"field of {where}", name, hints)]
        require(fits(value, hint), f"{name} of {where} must be {describe_type(hint)}, got {value!r}.")
    return data


def check(study: Study) -> Study:
    """The study itself. InputError if it is inconsistent. Configurations are checked when runs are planned."""
    names, same = list(study.variants), "all runs of a study read the same tokens in the same order"
    one_of("control as baseline", study.baseline, [name for name in names if study.variants[name].role == "control"])
    require((study.epochs is None) != (study.tokens is None), "a study says how long runs train: epochs or tokens.")
    numbers = [number for number in (study.epochs, study.tokens, study.test_rows) if number is not None]
    require(min(numbers) > 0, "epochs, tokens and test_rows must be positive.")
    wrong = ", ".join(sorted({*study.settings} & SHARED - {"length", "batch"}))
    require(not wrong, f"the study cannot set {wrong}: {same}.")
    for number, (name, variant) in enumerate(study.variants.items()):
        where = f"variant {name}"
        require(Path(name).name == name, f"a name becomes a folder: {name!r} cannot.")
        one_of(f"role of {where}", variant.role, ("control", "candidate"))
        wrong = ", ".join(sorted({*variant.settings} & SHARED - {"mixing", "added_share"}))
        require(not wrong, f"{where} cannot set {wrong}: {same}.")
        require(min([0, *study.seeds, *(variant.seeds or [])]) == 0, f"{where}: seeds must not be negative.")
        for what, other in variant.after.items():
            one_of(f"field of after of {where}", what, ("weights", "thresholds"))
            one_of(f"variant before {name}", other, names[:number])
        for split in variant.paper:
            one_of(f"field of paper of {where}", split, ("validation", "test"))
    return study


@dataclass(frozen=True)
class Run:
    """One variant with one seed: an ordinary training run, as stored in the record."""

    name: str
    variant: str
    seed: int
    preset: str
    config: dict[str, Any]  # fields that differ from the preset's
    settings: dict[str, Any]  # those that differ from the defaults
    fingerprint: str  # of the corpora
    test_rows: int | None
    data: list[str]  # empty if nothing is trained
    after: dict[str, str] = field(default_factory=dict)  # names of runs
    validate: bool = False  # measure the best weights on the whole validation split too
    # Each with jobs, the number of concurrent runs, and then seconds or failed.
    attempts: list[dict[str, Any]] = field(default_factory=list)

    def train_settings(self) -> TrainSettings:
        return TrainSettings.from_dict({**self.settings, "data": self.data or ["-"]})

    def model_config(self, **more: Any) -> ChiarConfig:
        """With the vocabulary of the corpus, if there is one."""
        corpus = Corpus.open(self.data[0]) if self.data else None
        ends = dict.fromkeys(("bos_token_id", "eos_token_id"), corpus.end_of_text) if corpus else {}
        taken = {"vocab_size": corpus.vocab_size, **ends} if corpus else {}
        return presets.get(self.preset, **{**taken, **self.config, **more})

    def declaration(self) -> dict[str, Any]:
        """Everything that determines the run."""
        given = {name: value for name, value in asdict(self).items() if name not in ("data", "attempts")}
        return {name: value for name, value in given.items() if value or name not in ("after", "validate")}


@dataclass(frozen=True)
class Plan:
    study: Study  # with the changes of the command
    corpora: list[Corpus]
    runs: list[Run]  # in order of start: by seed, then as declared
    steps: int


def make_plan(study: Study, data: list[str], only: list[str] | None = None, seeds: str = "") -> Plan:
    """Every run with its settings. With data, InputError if a run could not be trained or evaluated."""
    require(not seeds or seeds.replace(",", "").isdigit(), f"--seeds takes numbers like 0,1,2, got {seeds!r}.")
    wanted, numbers = set[str](), [int(part) for part in seeds.split(",") if part]
    for pattern in only or ["*"]:
        wanted |= {*matching(study.variants, pattern)} or {one_of("variant", pattern, study.variants)}
    for variant in reversed(study.variants.values()):  # what it comes after was declared before
        wanted |= {*variant.after.values()} if variant.name in wanted else set()
    mixed = [name for name in sorted(wanted) if study.variants[name].settings.get("mixing") == "added"]
    require(not mixed or len(data) != 1, f"{', '.join(mixed)} needs more corpora: give --data again for each.")
    require(mixed or len(data) < 2, f"a study trains on one corpus: give --data once, not {len(data)} times.")
    corpora, steps, runs = [Corpus.open(path) for path in data], 0, list[Run]()
    common = TrainSettings.from_dict({"data": ["-"], **study.settings})
    if corpora:
        kind, size = corpora[0].kind, f"one step of {common.batch} × {common.length} tokens"
        require(kind == "language", f"{data[0]} is a {kind} corpus: name a text first, studies train language models.")
        rows = [Rows(corpora[0], split, common.length) for split in ("train", "valid")]
        Rows(corpora[0], "test", 1)
        tokens = study.tokens or int((study.epochs or 0) * rows[0].count) * common.length
        steps = tokens // (common.batch * common.length)
        require(steps, f"{study.duration} is less than {size}: train longer, or make batch or length smaller.")
    for variant in (study.variants[name] for name in study.variants if name in wanted):
        preset, read = variant.preset or study.preset, len(data) if variant.name in mixed else 1
        config, settings = study.config | variant.config, study.settings | variant.settings | {"steps": steps or 1}
        prints = " + ".join(corpus.fingerprint for corpus in corpora[:read])
        for seed in dict.fromkeys(numbers or variant.seeds or study.seeds):
            after = {what: f"{other}-s{seed}" for what, other in variant.after.items()}
            about = (prints, study.test_rows, data[:read], after, bool(variant.paper))
            name, settings = f"{variant.name}-s{seed}", {**settings, "seed": seed}
            runs.append(run := Run(name, variant.name, seed, preset, config, settings, *about))
            try:
                run.train_settings().accumulation(1)
                model = run.model_config()
                if corpora:
                    check_run(model, run.train_settings(), corpora[:read])
            except InputError as error:
                raise InputError(f"variant {variant.name}: {error}") from error
    return Plan(study, corpora, sorted(runs, key=lambda run: run.seed), steps)
