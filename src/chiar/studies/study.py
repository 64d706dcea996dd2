"""A study as data: a TOML file (docs/studies.md) says what all runs share and which variants are compared; a plan makes
every choice, so that what cannot be trained is refused before anything is written."""

import math
import re
import tomllib
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from chiar import presets
from chiar.config import ChiarConfig
from chiar.data.shards import Corpus
from chiar.errors import InputError, first_line, unknown_name
from chiar.files import check_file
from chiar.training.batches import Rows
from chiar.training.cli import configuration
from chiar.training.loop import check_run
from chiar.training.settings import TrainSettings

STUDIES = Path("research/studies")
# What must be the same in every run of a study, so that all read the same tokens in the same order.
SHARED = ("data", "seed", "length", "batch", "steps", "mixing", "weights", "added_share", "initial")
# Recorded studies name these fields and operators; they left the code after LAST_COMMIT, with what they were tried for.
REMOVED = {"settle", "turns", "together", "entropy_gradient", "router_temperature", "entropy_weights", "router_reads"}
REMOVED |= {"router_hidden", "anneal", "budget_weight", "benefit_weight", "own_ffn", "signal", "temporal_channels"}
REMOVED |= {"skip", "bypass"}
LAST_COMMIT = "bde4d4f"
TYPES: dict[str, tuple[Any, str]] = {
    **dict.fromkeys(("name", "title", "preset", "baseline", "role", "extends"), (str, "text")),
    **dict.fromkeys(("config", "settings", "variants", "after", "paper"), (dict, "a table")),
    **dict.fromkeys(("epochs", "fraction"), (float | int, "a number")),
    **dict.fromkeys(("tokens", "test_rows"), (int, "a whole number")),
    **dict.fromkeys(("data", "notes"), (str, "a list of texts")),
    **{"seeds": (int, "a list of whole numbers"), "scaled": (bool, "true or false")},
}


@dataclass(frozen=True)
class Variant:
    """One model of a study: how it differs from what all share."""

    name: str
    role: str  # control or candidate
    title: str = ""
    config: dict[str, Any] = field(default_factory=dict)  # configuration fields, on top of the study's
    settings: dict[str, Any] = field(default_factory=dict)  # training settings, likewise
    preset: str = ""  # another than the study's
    fraction: float | None = None  # f it aims at, to count FLOPs before it has run; otherwise the router's own, or ½
    seeds: tuple[int, ...] | None = None  # the study's when not given
    after: dict[str, str] = field(default_factory=dict)
    """What it takes from the run of an earlier variant with the same seed: `weights` (the final ones) to start from, or
    `thresholds`: the paper's τ, measured on the embeddings of its best weights."""
    paper: dict[str, float] = field(default_factory=dict)
    """The paper's perplexities, `validation` (of the best weights) and `test`, shown beside ours."""

    @property
    def mixed(self) -> bool:
        """Whether it reads the other corpora beside the first one, which all read alike."""
        return self.settings.get("mixing") == "added"


@dataclass(frozen=True)
class Study:
    """What all variants share, and the variants. Differences are to `baseline`, a dense control, with the same seed."""

    name: str
    title: str
    preset: str
    baseline: str
    variants: tuple[Variant, ...]
    config: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    epochs: float | None = None  # passes over the train split, rounded down to whole steps …
    tokens: int | None = None  # … or training tokens of a run, alike
    scaled: bool = False  # with other tokens or batches, warm-up and evaluate_every keep their share of the steps
    seeds: tuple[int, ...] = (0,)
    test_rows: int | None = None  # limit on the rows of the test split
    data: tuple[str, ...] = ()  # corpora, where the command names none
    notes: tuple[str, ...] = ()  # what a reader of the table must know

    @property
    def duration(self) -> str:
        return f"{self.epochs:g} epoch(s) of the corpus" if self.tokens is None else f"{self.tokens:,} tokens"

    def variant(self, name: str) -> Variant:
        return next(variant for variant in self.variants if variant.name == name)


def one_of(kind: str, received: str, allowed: Iterable[str]) -> str:
    if received not in allowed:
        raise unknown_name(kind, received, allowed)
    return received


def require(right: bool, otherwise: str) -> None:
    if not right:
        raise InputError(otherwise)


def removed(config: dict[str, Any]) -> list[str]:
    """What a configuration names that this version does not have any more."""
    return sorted(REMOVED & {*config, *(config.get("operators") or ())})


def study_names() -> list[str]:
    return sorted(path.stem for path in STUDIES.glob("*.toml"))


def find(name: str, beside: Path = STUDIES) -> Study:
    """The study of a TOML file, or of this name beside another file or in ./research/studies."""
    for path in (Path(name), beside / f"{name}.toml", STUDIES / f"{name}.toml"):
        if path.suffix == ".toml" and (path.is_file() or path == Path(name)):
            return read_study(path)
    raise unknown_name("study", name, study_names(), f"Names are those of ./{STUDIES}; or give a .toml file.")


def read_study(path: Path) -> Study:
    """The study a file declares; InputError, naming the file, where it cannot be one."""
    check_file(path)
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"{path} is not TOML: {first_line(error)}.") from error
    try:
        given = typed("study", data, ["extends", *(part.name for part in fields(Study))])
        base = find(given.pop("extends"), path.parent) if "extends" in given else None
        variants = {variant.name: variant for variant in base.variants} if base else {}
        for name, table in given.pop("variants", {}).items():
            require(isinstance(table, dict), f"variant {name} must be a table: [variants.{name}].")
            values = typed(f"variant {name}", table, [part.name for part in fields(Variant)[1:]])
            require("role" in values, f"variant {name} says no role: control or candidate.")
            variants[name] = Variant(name, **values)
        given = {"name": path.stem, **given, "variants": tuple(variants.values())}
        if base is not None:
            given = {**({"tokens": None, "epochs": None} if {"tokens", "epochs"} & {*given} else {}), **given}
            given |= {part: {**getattr(base, part), **given.get(part, {})} for part in ("config", "settings")}
            return check(replace(base, **given))
        for name in ("preset", "baseline"):
            require(name in given, f"the study says no {name}.")
        return check(Study(**{"title": path.stem, **given}))
    except InputError as error:
        raise InputError(f"{path}: {error}") from error


def typed(where: str, data: dict[str, Any], allowed: list[str]) -> dict[str, Any]:
    """The fields a table gives, each with its type; lists become tuples."""
    for name, value in data.items():
        kind, words = TYPES[one_of(f"field of {where}", name, allowed)]
        parts = value if isinstance(value, list) else [value]
        right = all(isinstance(part, kind) and (kind is bool or not isinstance(part, bool)) for part in parts)
        right = right and isinstance(value, list) == words.startswith("a list")
        require(right, f"{name} of {where} must be {words}, got {value!r}.")
    return {name: tuple(value) if isinstance(value, list) else value for name, value in data.items()}


def check(study: Study) -> Study:
    """The study itself; InputError where it contradicts itself. Configurations are checked when runs are planned."""
    names, this = [variant.name for variant in study.variants], f"study {study.name}"
    baseline = study.variant(one_of("baseline variant", study.baseline, names))
    require(baseline.role == "control", f"the baseline of {this} must be a control.")
    right = (study.epochs is None) != (study.tokens is None) and (study.epochs is None or not study.scaled)
    require(right, f"{this} must say either epochs or tokens (if scaled, tokens): how long each run trains.")
    numbers = [number for number in (study.epochs, study.tokens, study.test_rows) if number is not None]
    require(min(numbers) > 0, f"{this}: epochs, tokens and test_rows must be positive.")
    refuse_shared(study.settings, this, "length", "batch")
    for number, variant in enumerate(study.variants):
        where, seeds = f"variant {variant.name}", study.seeds if variant.seeds is None else variant.seeds
        named = bool(re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._+-]*", variant.name))
        require(named, f"a name becomes a folder: {variant.name!r} may hold letters, digits, '.', '-', '_', '+'.")
        one_of(f"role of {where}", variant.role, ("control", "candidate"))
        require(0.0 <= (variant.fraction or 0.0) <= 1.0, f"{where}: fraction must lie between 0 and 1.")
        refuse_shared(variant.settings, where, *(["mixing", "added_share"] if variant.mixed else []))
        right = bool(seeds) and len(set(seeds)) == len(seeds) and min(seeds) >= 0
        require(right, f"{where}: seeds must be different whole numbers from 0 on, got {list(seeds)}.")
        for what, other in variant.after.items():
            one_of(f"field of after of {where}", what, ("weights", "thresholds"))
            one_of(f"variant before {variant.name}", other, names[:number])
        for name in variant.paper:
            one_of(f"field of paper of {where}", name, ("validation", "test"))
    return study


def refuse_shared(settings: dict[str, Any], where: str, *allowed: str) -> None:
    for name in settings:
        if name in SHARED and name not in allowed:
            raise InputError(f"{where} cannot set {name}: all runs of a study read the same tokens in the same order.")


def changed(study: Study, changes: dict[str, Any]) -> Study:
    """The study with other tokens, test_rows, training settings and configuration fields for all, or models of another
    size; what a variant says itself still holds for it."""
    known, before = [part.name for part in fields(TrainSettings)], common_settings(study)
    allowed = ["tokens", "test_rows", "size", *known, *ChiarConfig.__annotations__]
    refuse_shared(changes, "--set", "length", "batch")
    given = {one_of("training setting or configuration field", name, allowed): changes[name] for name in changes}
    own = typed("--set", {name: given.pop(name) for name in ("tokens", "test_rows") if name in given}, allowed)
    size = one_of("size", given.pop("size", ""), ("", *presets.SIZES))
    settings = {name: given.pop(name) for name in known if name in given}
    if isinstance(settings.get("batch"), int):
        settings = {"micro_batch": min(before.micro_batch, settings["batch"]), **settings}
    own |= {"epochs": None} if "tokens" in own else {}
    new = check(replace(study, settings={**study.settings, **settings}, config={**study.config, **given}, **own))
    if study.scaled:
        now, was = step_count(new, common_settings(new)), step_count(study, before)
        scaled = {name: math.ceil(getattr(before, name) * now / was) for name in ("warmup", "evaluate_every")}
        new = replace(new, settings={**new.settings, **scaled, **settings})
    if size:
        sized = [replace(one, preset=re.sub("-.*", f"-{size}", one.preset)) for one in study.variants]
        new = replace(new, preset=re.sub("-.*", f"-{size}", study.preset), variants=tuple(sized))
    note = f"Changed in all runs: {', '.join(f'{name} = {value}' for name, value in changes.items())}."
    return replace(new, notes=(*study.notes, note)) if changes else new


def common_settings(study: Study) -> TrainSettings:
    return checked({**study.settings, "data": ["-"]})


def checked(given: dict[str, Any]) -> TrainSettings:
    settings = TrainSettings.from_dict(given)
    settings.validate()
    return settings


def step_count(study: Study, settings: TrainSettings, corpus: Corpus | None = None) -> int:
    """Whole optimiser steps of the study's epochs or tokens."""
    tokens = study.tokens
    if tokens is None:
        assert study.epochs is not None and corpus is not None
        tokens = int(study.epochs * Rows(corpus, "train", settings.length).count) * settings.length
    step = settings.batch * settings.length
    short = f"{study.duration} is less than one step of {settings.batch} × {settings.length} tokens"
    require(tokens >= step, f"{short}: train longer, or make it smaller with --set batch=… or --set length=….")
    return tokens // step


def chosen(study: Study, only: list[str] | None) -> list[Variant]:
    """The variants that match one of the patterns, and those they come after; all without any."""
    names, wanted = [variant.name for variant in study.variants], set()
    for pattern in only or ["*"]:
        found = {name for name in names if fnmatchcase(name, pattern)}
        wanted |= found or {one_of("variant", pattern, names)}
    for variant in reversed(study.variants):  # what it comes after is declared before it
        wanted |= {*variant.after.values()} if variant.name in wanted else set()
    return [variant for variant in study.variants if variant.name in wanted]


def plain_config(study: Study, variant: Variant, vocabulary: int | None = None) -> ChiarConfig:
    """A variant's configuration without a corpus, or with the vocabulary of one."""
    known = {} if vocabulary is None else {"vocab_size": vocabulary, "bos_token_id": None, "eos_token_id": None}
    try:
        gone = ", ".join(removed(variant.config))
        require(not gone, f"it needs {gone}, which this version has not: commit {LAST_COMMIT} can run it.")
        return presets.get(variant.preset or study.preset, **{**known, **study.config, **variant.config})
    except InputError as error:
        raise InputError(f"variant {variant.name}: {error}") from error


@dataclass(frozen=True)
class Run:
    """One variant with one seed: an ordinary training run, and what its record says."""

    name: str
    variant: str
    seed: int
    preset: str
    config: dict[str, Any]  # fields changed in the preset
    settings: dict[str, Any]  # those not left at their defaults
    fingerprint: str  # of the corpus, wherever it lies
    test_rows: int | None
    data: list[str]
    added: list[str] = field(default_factory=list)  # fingerprints of what is mixed into the corpus
    after: dict[str, str] = field(default_factory=dict)  # names of runs
    validate: bool = False  # measure the best weights on the whole validation split too

    def train_settings(self) -> TrainSettings:
        return checked({**self.settings, "data": self.data})

    def model_config(self, **more: Any) -> ChiarConfig:
        return configuration(self.preset, {**self.config, **more}, Path(self.data[0]))

    def declaration(self) -> dict[str, Any]:
        """What makes the run what it is."""
        given = {name: value for name, value in asdict(self).items() if name != "data"}
        return {name: value for name, value in given.items() if value or name not in ("added", "after", "validate")}


@dataclass(frozen=True)
class Plan:
    study: Study  # with what the command changed
    corpora: list[Corpus]
    runs: list[Run]  # in the order they are begun: by seed, then as declared
    steps: int


def make_plan(study: Study, data: list[str], only: list[str] | None = None, seeds: list[int] | None = None) -> Plan:
    """Every run with its settings; InputError if one of them could not be trained or evaluated."""
    if seeds is not None:
        unseeded = tuple(replace(variant, seeds=None) for variant in study.variants)
        study = check(replace(study, seeds=tuple(seeds), variants=unseeded))
    data, variants, runs = list(data or study.data), chosen(study, only), []
    mixed = ", ".join(variant.name for variant in variants if variant.mixed)
    require(len(data) > bool(mixed), f"{mixed or study.name} needs more corpora: give --data {1 + bool(mixed)} times.")
    require(bool(mixed) or len(data) == 1, f"a study trains on one corpus: give --data once, not {len(data)} times.")
    corpora = [Corpus.open(path) for path in data]
    kind, common = corpora[0].kind, common_settings(study)
    require(kind == "language", f"{data[0]} is a {kind} corpus: a study trains language models, so name a text first.")
    for split, length in (("train", common.length), ("valid", common.length), ("test", 1)):
        Rows(corpora[0], split, length)
    steps = step_count(study, common, corpora[0])
    for variant in variants:
        read, preset = len(data) if variant.mixed else 1, variant.preset or study.preset
        config, settings = {**study.config, **variant.config}, {**study.settings, **variant.settings, "steps": steps}
        plain_config(study, variant, corpora[0].vocab_size)
        for seed in study.seeds if variant.seeds is None else variant.seeds:
            name, settings = f"{variant.name}-s{seed}", {**settings, "seed": seed}
            added = [corpus.fingerprint for corpus in corpora[1:read]]
            after = {what: f"{other}-s{seed}" for what, other in variant.after.items()}
            about = (corpora[0].fingerprint, study.test_rows, data[:read], added, after, bool(variant.paper))
            run = Run(name, variant.name, seed, preset, config, settings, *about)
            try:
                run.train_settings().accumulation(1)
                check_run(run.model_config(), run.train_settings(), corpora[:read])
            except InputError as error:
                raise InputError(f"variant {variant.name}: {error}") from error
            runs.append(run)
    return Plan(study, corpora, sorted(runs, key=lambda run: run.seed), steps)
