"""A recipe with every choice made: which model and settings each row trains with, checked before anything runs."""

import math
import shlex
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from chiar import presets
from chiar.config import ChiarConfig
from chiar.data.shards import Corpus
from chiar.errors import InputError, unknown_name
from chiar.reproduce.recipes import PAPER_BATCH, PAPER_LENGTH, RECIPES, Recipe, Row
from chiar.training.cli import configuration, parse
from chiar.training.loop import check_run
from chiar.training.settings import TrainSettings, train_arguments
from chiar.training.trainer import open_rows

EVALUATIONS = 20
EVALUATE_ROWS = 1024
# What makes the rows what they are, and how to change it instead (None: not at all).
DECIDED = {
    "data": "--data",
    "seed": "--seed",
    "steps": "--budget",
    **dict.fromkeys(("mixing", "weights", "layer_types", "operators", "router", "routing", "thresholds")),
    **dict.fromkeys(("static_operators", "collapse_regulariser", "recalibrate_every")),
}


@dataclass(frozen=True)
class PlannedRow:
    row: Row
    preset: str
    changes: dict[str, Any]
    """Configuration fields changed in the preset; τ comes after calibration."""
    settings: TrainSettings

    def config(self, tau: float | None = None) -> ChiarConfig:
        changes = self.changes if tau is None else {**self.changes, "thresholds": tau}
        return configuration(self.preset, changes, Path(self.settings.data[0]))

    @property
    def calibrated(self) -> bool:
        """Whether the row has thresholds, to be taken from the baseline."""
        config = self.config()
        return bool(config.routed_layers) and config.router == "entropy"

    def command(self, out: Path, tau: float | None) -> str:
        """The `chiar train` that trains this row alone."""
        changes = self.changes | ({} if tau is None else {"thresholds": tau})
        return shlex.join(["chiar", *train_arguments(self.preset, changes, self.settings, out)])


@dataclass(frozen=True)
class Plan:
    recipe: Recipe
    size: str
    seed: int
    data: list[str]
    corpora: list[Corpus]
    changes: dict[str, Any]
    """What --set changed for all rows."""
    rows: list[PlannedRow]

    @property
    def settings(self) -> TrainSettings:
        return self.rows[0].settings

    @property
    def tokens(self) -> int:
        """Training tokens of a row, those of the language corpus."""
        return self.settings.steps * self.settings.batch * self.settings.length

    def identity(self) -> dict[str, Any]:
        """What must be the same when a folder is continued."""
        return {
            "recipe": self.recipe.name,
            "size": self.size,
            "tokens": self.tokens,
            "seed": self.seed,
            "data": {path: corpus.fingerprint for path, corpus in zip(self.data, self.corpora, strict=True)},
            "changes": self.changes,
            "rows": {
                planned.row.name: {
                    "preset": planned.preset,
                    "config": planned.changes,
                    "settings": planned.settings.to_dict(),
                }
                for planned in self.rows
            },
        }


def make_plan(
    name: str,
    data: list[str],
    *,
    budget: int | None = None,
    size: str | None = None,
    seed: int = 0,
    changes: dict[str, Any] | None = None,
) -> Plan:
    """Every row with its settings; InputError if one of them could not be trained or evaluated."""
    if name not in RECIPES:
        raise unknown_name("recipe", name, RECIPES)
    recipe, changes = RECIPES[name], changes or {}
    size = size or recipe.size
    for row in recipe.rows:
        if row.of_size(size) not in presets.NAMES:
            raise unknown_name("size", size, presets.SIZES)
    check_data(recipe, data)
    corpora = [Corpus.open(path) for path in data]
    known = {field.name for field in fields(TrainSettings)}
    check_changes(changes, known)
    chosen = {key: value for key, value in changes.items() if key in known}
    fields_changed = {key: value for key, value in changes.items() if key not in known}
    base = scheduled(recipe, chosen, budget) | {"seed": seed}
    rows = []
    for row in recipe.rows:
        read = data if row.mixed else data[:1]
        settings = TrainSettings.from_dict({**base, **row.settings, **chosen, "data": list(read)})
        settings.validate()
        settings.accumulation(1)
        planned = PlannedRow(row, row.of_size(size), {**row.config, **fields_changed}, settings)
        check_run(planned.config(), settings, corpora[: len(read)])
        for corpus in corpora[: len(read)]:
            open_rows(corpus, "train", settings.length)
            open_rows(corpus, "valid", settings.length)
        rows.append(planned)
    open_rows(corpora[0], "test", 1)
    return Plan(recipe, size, seed, list(data), corpora, changes, rows)


def check_changes(changes: dict[str, Any], settings: set[str]) -> None:
    allowed = sorted({*settings, *ChiarConfig.__annotations__, *presets.GENERAL_FIELDS} - set(DECIDED))
    for name in changes:
        if name in DECIDED:
            instead = f"use {DECIDED[name]}" if DECIDED[name] else "the recipe decides it for each row"
            raise InputError(f"--set cannot change {name}: {instead}.")
        if name not in allowed:
            raise unknown_name("training setting or configuration field", name, allowed)


def check_data(recipe: Recipe, data: list[str]) -> None:
    if recipe.mixed and len(data) < 2:
        raise InputError(f"{recipe.name} needs a language corpus and what is mixed into it: give --data several times.")
    if not recipe.mixed and len(data) != 1:
        raise InputError(f"{recipe.name} trains on one corpus: give --data once, not {len(data)} times.")


def scheduled(recipe: Recipe, chosen: dict[str, Any], budget: int | None) -> dict[str, Any]:
    """The paper's schedule for this budget: warm-up keeps its share of the steps, the cosine is complete."""
    batch, length = chosen.get("batch", PAPER_BATCH), chosen.get("length", PAPER_LENGTH)
    TrainSettings(data=["-"], batch=batch, length=length).validate()
    budget = recipe.tokens if budget is None else budget
    steps = budget // (batch * length)
    if steps < 1:
        raise InputError(
            f"a budget of {budget:,} tokens is less than one step of {batch} × {length} = {batch * length:,}: "
            "give more, or a smaller step with --set batch=… or --set length=…."
        )
    return {
        "batch": batch,
        "length": length,
        "micro_batch": min(recipe.micro_batch, batch),
        "steps": steps,
        "warmup": max(1, round(recipe.warmup / recipe.steps * steps)),
        "evaluate_every": math.ceil(steps / EVALUATIONS),
        "evaluate_rows": EVALUATE_ROWS,
    }


def parse_changes(items: list[str]) -> dict[str, Any]:
    """NAME=VALUE pairs of --set."""
    return dict(parse(item) for item in items)
