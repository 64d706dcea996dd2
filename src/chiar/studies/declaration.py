"""A study as data: what all its runs share, and the variants that are compared."""

import re
from dataclasses import dataclass, field, fields
from typing import Any

from chiar.errors import InputError, unknown_name

ROLES = ("control", "candidate")
# What must be the same in every run of a study, so that all read the same tokens in the same order.
SHARED = ("data", "seed", "length", "batch", "steps", "mixing", "weights", "added_share", "initial")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*")


@dataclass(frozen=True)
class Variant:
    """One model of a study: how it differs from what all share."""

    name: str
    role: str
    title: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    """Configuration fields changed in the preset, on top of the study's."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Training settings, on top of the study's; not those that decide which tokens are read."""
    preset: str = ""
    """Another preset than the study's."""
    fraction: float | None = None
    """f the variant aims at, to count its FLOPs before it has run; the router's own, else ½, when not given."""
    rank: int = 1
    """Variants of rank 1 are run first."""
    seeds: tuple[int, ...] | None = None
    """The study's when not given."""


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
    epochs: float | None = None
    """Passes over the train split of the corpus, rounded down to whole steps …"""
    tokens: int | None = None
    """… or training tokens of a run, alike."""
    seeds: tuple[int, ...] = (0,)
    test_rows: int | None = None
    """Limit on the rows of the test split; all of it when not given."""

    def variant(self, name: str) -> Variant:
        for variant in self.variants:
            if variant.name == name:
                return variant
        raise unknown_name("variant", name, [variant.name for variant in self.variants])


def check(study: Study) -> Study:
    """The study itself; InputError where it contradicts itself. Configurations are checked when runs are planned."""
    names = [variant.name for variant in study.variants]
    if not names:
        raise InputError(f"study {study.name} has no variants.")
    for name in names:
        if not NAME.fullmatch(name):
            raise InputError(
                f"a variant's name becomes a folder: {name!r} may hold letters, digits, '.', '-', '_', '+'."
            )
        if names.count(name) > 1:
            raise InputError(f"study {study.name} has two variants called {name!r}.")
    if study.baseline not in names:
        raise unknown_name("baseline variant", study.baseline, names)
    if (study.epochs is None) == (study.tokens is None):
        raise InputError(f"study {study.name} must say either epochs or tokens: how long each run trains.")
    if (study.epochs or study.tokens or 0) <= 0 or (study.test_rows is not None and study.test_rows < 1):
        raise InputError(f"study {study.name}: epochs, tokens and test_rows must be positive.")
    refuse_shared(study.settings, f"study {study.name}", ("length", "batch"))
    check_seeds(study.seeds, f"study {study.name}")
    for variant in study.variants:
        where = f"variant {variant.name}"
        if variant.role not in ROLES:
            raise unknown_name(f"role of {where}", variant.role, ROLES)
        if variant.fraction is not None and not 0.0 <= variant.fraction <= 1.0:
            raise InputError(f"{where}: fraction must lie between 0 and 1, got {variant.fraction}.")
        refuse_shared(variant.settings, where)
        if variant.seeds is not None:
            check_seeds(variant.seeds, where)
    if study.variant(study.baseline).role != "control":
        raise InputError(f"the baseline of study {study.name} must be a control.")
    return study


def refuse_shared(settings: dict[str, Any], where: str, allowed: tuple[str, ...] = ()) -> None:
    for name in settings:
        if name in SHARED and name not in allowed:
            raise InputError(f"{where} cannot set {name}: all runs of a study read the same tokens in the same order.")


def check_seeds(seeds: tuple[int, ...], where: str) -> None:
    if not seeds or len(set(seeds)) < len(seeds) or min(seeds) < 0:
        raise InputError(f"{where}: seeds must be different whole numbers from 0 on, got {list(seeds)}.")


def to_dict(study: Study) -> dict[str, Any]:
    """The study without its variants, as plain data."""
    return {part.name: getattr(study, part.name) for part in fields(study) if part.name != "variants"}
