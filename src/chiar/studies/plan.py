"""A study with every choice made: which model and settings each run has, checked before anything is trained."""

import shlex
from dataclasses import dataclass, fields, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from chiar import presets
from chiar.config import ChiarConfig
from chiar.data.shards import Corpus
from chiar.errors import InputError, unknown_name
from chiar.studies.declaration import Study, Variant, check, refuse_shared, to_dict
from chiar.training.batches import LanguageRows
from chiar.training.cli import configuration
from chiar.training.loop import check_run
from chiar.training.run_folder import MAY_CHANGE
from chiar.training.settings import TrainSettings, train_arguments
from chiar.training.trainer import open_rows

# What a run may be continued with otherwise: it changes no token read and no weight learned.
COSMETIC = frozenset(MAY_CHANGE) - {"steps"}


@dataclass(frozen=True)
class PlannedRun:
    """One variant with one seed: an ordinary training run."""

    variant: Variant
    preset: str
    changes: dict[str, Any]
    """Configuration fields changed in the preset."""
    given: dict[str, Any]
    """Training settings that are not left at their defaults."""

    @property
    def seed(self) -> int:
        return int(self.given["seed"])

    @property
    def name(self) -> str:
        return f"{self.variant.name}-s{self.seed}"

    @property
    def settings(self) -> TrainSettings:
        return TrainSettings.from_dict(self.given)

    def config(self) -> ChiarConfig:
        return configuration(self.preset, self.changes, Path(self.given["data"][0]))

    def command(self, out: Path) -> str:
        """The `chiar train` that trains this run by hand."""
        return shlex.join(["chiar", *train_arguments(self.preset, self.changes, self.settings, out)])


@dataclass(frozen=True)
class Plan:
    study: Study
    """With what --set and --tokens changed."""
    corpus: Corpus
    runs: list[PlannedRun]
    """In the order they are run: by rank, then seed, then as declared."""
    steps: int

    def identity(self) -> dict[str, Any]:
        """What all runs of a folder have in common."""
        common = to_dict(self.study) | {"steps": self.steps, "data": self.corpus.fingerprint}
        for part in ("title", "seeds", "epochs", "tokens"):  # of these only the steps matter
            del common[part]
        return common


def make_plan(
    study: Study,
    data: str,
    *,
    only: list[str] | None = None,
    seeds: list[int] | None = None,
    tokens: int | None = None,
    changes: dict[str, Any] | None = None,
) -> Plan:
    """Every run with its settings; InputError if one of them could not be trained or evaluated."""
    study = changed(study, tokens, changes or {})
    corpus = Corpus.open(data)
    if corpus.kind != "language":
        raise InputError(f"{data} is a {corpus.kind} corpus: a study trains language models.")
    if seeds is not None:
        study = check(replace(study, seeds=tuple(seeds)))
    common = TrainSettings.from_dict({**study.settings, "data": [data]})
    common.validate()
    steps = step_count(study, common, corpus)
    runs = []
    for variant in chosen(study, only):
        for seed in study.seeds if seeds is not None or variant.seeds is None else variant.seeds:
            given = {**study.settings, **variant.settings, "data": [data], "steps": steps, "seed": seed}
            run = PlannedRun(variant, variant.preset or study.preset, {**study.config, **variant.config}, given)
            check_planned(run, corpus)
            runs.append(run)
    open_rows(corpus, "train", common.length)
    open_rows(corpus, "valid", common.length)
    open_rows(corpus, "test", 1)
    runs.sort(key=lambda run: (run.variant.rank, run.seed))
    return Plan(study, corpus, runs, steps)


def check_planned(run: PlannedRun, corpus: Corpus) -> None:
    try:
        settings = run.settings
        settings.validate()
        settings.accumulation(1)
        check_run(run.config(), settings, [corpus])
    except InputError as error:
        raise InputError(f"variant {run.variant.name}: {error}") from error


def changed(study: Study, tokens: int | None, changes: dict[str, Any]) -> Study:
    """The study with other common fields; what a variant says itself still holds for it."""
    settings = {field.name for field in fields(TrainSettings)}
    refuse_shared(changes, "--set", ("length", "batch"))
    for name in changes:
        if name not in settings and name not in ChiarConfig.__annotations__:
            raise unknown_name(
                "training setting or configuration field", name, [*settings, *ChiarConfig.__annotations__]
            )
    own = {name: value for name, value in changes.items() if name in settings}
    rest = {name: value for name, value in changes.items() if name not in settings}
    if "batch" in own and "micro_batch" not in own:
        own["micro_batch"] = own["batch"]
    study = replace(study, settings={**study.settings, **own}, config={**study.config, **rest})
    return study if tokens is None else check(replace(study, tokens=tokens, epochs=None))


def chosen(study: Study, only: list[str] | None) -> list[Variant]:
    """The variants that match one of the patterns; all without any."""
    names = [variant.name for variant in study.variants]
    for pattern in only or []:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise unknown_name("variant", pattern, names)
    return [
        variant for variant in study.variants if not only or any(fnmatchcase(variant.name, pattern) for pattern in only)
    ]


def step_count(study: Study, settings: TrainSettings, corpus: Corpus) -> int:
    """Whole optimiser steps of the study's epochs or tokens."""
    if study.tokens is not None:
        steps, asked = study.tokens // (settings.batch * settings.length), f"{study.tokens:,} tokens"
    else:
        assert study.epochs is not None
        rows = LanguageRows(corpus.split("train"), settings.length).count
        steps, asked = int(study.epochs * rows) // settings.batch, f"{study.epochs:g} epoch(s) of {corpus.name}"
    if steps < 1:
        raise InputError(
            f"{asked} is less than one step of {settings.batch} × {settings.length} tokens: train longer, or make the "
            "step smaller with --set batch=… or --set length=…."
        )
    return steps


def plain_config(study: Study, variant: Variant, vocabulary: int | None = None) -> ChiarConfig:
    """A variant's configuration without a corpus, or with the vocabulary of one."""
    fields_of = {**({} if vocabulary is None else {"vocab_size": vocabulary}), **study.config, **variant.config}
    if vocabulary is not None:
        fields_of |= {"bos_token_id": None, "eos_token_id": None}
    try:
        return presets.get(variant.preset or study.preset, **fields_of)
    except InputError as error:
        raise InputError(f"variant {variant.name}: {error}") from error
