"""A user's own study, from a TOML file.

    title = "What keys are worth"
    preset = "v3-tiny"
    baseline = "dense"
    epochs = 1
    config = { dropout = 0.0 }
    settings = { learning_rate = 3e-3, batch = 16 }

    [variants.dense]
    role = "control"
    preset = "baseline-tiny"

    [variants.routed-keys]
    role = "candidate"
    config = { keys = "routed" }

With `extends = "NAME"` the file changes a declared study: its fields replace the study's, its `config` and `settings`
are added to the study's, and its variants come after them or replace those of the same name.
"""

import tomllib
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from chiar.errors import InputError, first_line, unknown_name
from chiar.files import check_file
from chiar.studies.declaration import Study, Variant, check

TYPES: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("name", "title", "preset", "baseline", "role"), (str,)),
    **dict.fromkeys(("config", "settings", "variants"), (dict,)),
    **dict.fromkeys(("epochs", "fraction"), (float, int)),
    **dict.fromkeys(("tokens", "test_rows", "rank"), (int,)),
    "seeds": (list,),
}
NAMES = {str: "text", dict: "a table", float: "a number", int: "a whole number", list: "a list of whole numbers"}


def read_study(path: Path) -> Study:
    """The study a file declares; InputError, naming the file, where it cannot be one."""
    from chiar.studies.catalog import find

    check_file(path)
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (ValueError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is not TOML: {first_line(error)}.") from error
    try:
        base = find(data.pop("extends")) if "extends" in data else None
        return check(extended(base, path.stem, data) if base else made(path.stem, data))
    except InputError as error:
        raise InputError(f"{path}: {error}") from error


def made(stem: str, data: dict[str, Any]) -> Study:
    given = {"name": stem, "title": stem, **values_of("study", data, Study)}
    for name in ("preset", "baseline", "variants"):
        if name not in given:
            raise InputError(f"the study says no {name}.")
    return Study(**{**given, "variants": tuple(variants_of(given["variants"]))})


def extended(base: Study, stem: str, data: dict[str, Any]) -> Study:
    given = {"name": stem, **values_of("study", data, Study)}
    for name in ("config", "settings"):
        given[name] = {**getattr(base, name), **given.get(name, {})}
    if "tokens" in given or "epochs" in given:
        given = {"tokens": None, "epochs": None, **given}
    variants = {variant.name: variant for variant in (*base.variants, *variants_of(given.pop("variants", {})))}
    return replace(base, **given, variants=tuple(variants.values()))


def variants_of(tables: dict[str, Any]) -> list[Variant]:
    found = []
    for name, table in tables.items():
        if not isinstance(table, dict):
            raise InputError(f"variant {name} must be a table: [variants.{name}].")
        given = values_of(f"variant {name}", table, Variant)
        if "role" not in given:
            raise InputError(f"variant {name} says no role: control or candidate.")
        found.append(Variant(**{**given, "name": name}))
    return found


def values_of(where: str, data: dict[str, Any], kind: type) -> dict[str, Any]:
    """The fields a table gives, each with its type; lists of seeds become tuples."""
    allowed = [part.name for part in fields(kind) if not (kind is Variant and part.name == "name")]
    for name, value in data.items():
        if name not in allowed:
            raise unknown_name(f"field of {where}", name, [*allowed, "extends"] if kind is Study else allowed)
        types = TYPES[name]
        right = isinstance(value, types) and not isinstance(value, bool)
        if name == "seeds" and right:
            right = all(isinstance(seed, int) and not isinstance(seed, bool) for seed in value)
        if not right:
            raise InputError(f"{name} of {where} must be {NAMES[types[0]]}, got {value!r}.")
    return {name: tuple(value) if name == "seeds" else value for name, value in data.items()}
