"""A saved null test read back, for pictures."""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

import torch

from chiar.errors import InputError, first_line
from chiar.files import check_file
from chiar.nulltest.compaction import Compaction
from chiar.nulltest.flips import Flip, Mean, Worth
from chiar.nulltest.information import Information
from chiar.nulltest.report import FORMAT, ClassMean, Contrast, LayerNull, NullTest, Signal
from chiar.nulltest.white import Whiteness

NAME = "nulltest.json"
Part = TypeVar("Part")


def read_report(path: Path) -> NullTest:
    """From the file or the folder `chiar nulltest` wrote. H of single tokens is not in it: those fields are empty."""
    if path.is_dir():
        path = path / NAME
    check_file(path)
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"{path} is not a null test: {first_line(error)}") from error
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise InputError(f"{path} is not a null test: it does not say format {FORMAT!r}.")
    if not record.get("layers"):
        raise InputError(f"{path} is damaged: it has no layers.")
    try:
        return build(
            NullTest,
            record,
            layers=[read_layer(layer) for layer in record["layers"]],
            worth=read_worth(record["worth"]),
            flips=[build(Flip, flip) for flip in record["flips"]],
            null_sample=torch.empty(0),
        )
    except KeyError as error:
        raise InputError(f"{path} is damaged: it has no {first_line(error)}.") from error
    except (TypeError, AttributeError) as error:
        raise InputError(f"{path} is damaged: {first_line(error)}") from error


def build(kind: type[Part], record: dict[str, Any], **parts: Any) -> Part:
    """A dataclass from what the file says; derived figures there are left out."""
    names = [field.name for field in fields(kind) if field.name not in parts]  # type: ignore[arg-type]
    return kind(**{name: record[name] for name in names}, **parts)


def read_layer(record: dict[str, Any]) -> LayerNull:
    return build(
        LayerNull,
        record,
        whiteness=[build(Whiteness, part) for part in record["whiteness"]],
        signals=[read_signal(part) for part in record["signals"]],
        classes=[build(ClassMean, part) for part in record["classes"]],
        contrasts=[build(Contrast, part) for part in record["contrasts"]],
        worth=read_worth(record["worth"]),
        compaction=[build(Compaction, part) for part in record["compaction"]],
        entropies={},
    )


def read_signal(record: dict[str, Any]) -> Signal:
    return build(
        Signal, record, **{name: build(Information, record[name]) for name in ("token", "word_class", "position")}
    )


def read_worth(record: dict[str, Any] | None) -> Worth | None:
    if record is None:
        return None
    means = ("to_attention", "to_filter", "own_to_attention", "own_to_filter")
    benefit = [build(Mean, part) for part in record["benefit"]]
    return build(Worth, record, **{name: build(Mean, record[name]) for name in means}, benefit=benefit)
