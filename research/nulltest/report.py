"""The results of a null test, written as JSON and read back for pictures."""

import json
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

import numpy as np
from scipy import stats

from chiar.errors import InputError, first_line
from chiar.files import check_file
from research.nulltest.measures import Compaction, Information, Whiteness, finite, mean_and_error
from research.nulltest.sample import Flip

FORMAT, NAME = "chiar-nulltest/1", "nulltest.json"
BINS = 4
"""Bins of H, with equal numbers of the layer's tokens."""


@dataclass(frozen=True)
class Signal:
    """A split of a layer's tokens in two (or three), and its mutual information with three labels."""

    name: str
    """"route": the model's choice; a basis: its H, thresholded to the same share of dark tokens; "hash": a random
    function of the token with that share."""
    dark: float
    """Share of dark tokens."""
    token: Information
    word_class: Information
    position: Information


@dataclass(frozen=True)
class ClassMean:
    """H of the tokens of one word class in the model's basis."""

    name: str
    function: bool
    tokens: int
    mean: float
    effect: float
    """(mean − the null's mean) / the null's standard deviation."""
    error: float | None
    """Its standard error; equal tokens count as one sample."""
    light: float
    """Share of light tokens: as routed, or H at most the median if the layer does not route."""


@dataclass(frozen=True)
class Contrast:
    """Function words against content words: `words` is "all" or "without a capital"."""

    words: str
    function_tokens: int
    content_tokens: int
    difference: float
    """Mean H of function words − of content words, in standard deviations of the null."""
    error: float | None
    """Its standard error; equal tokens count as one sample."""
    separation: float
    """P(H of a function word < H of a content word): ½ if H does not separate them, 1 if the claim holds."""


@dataclass(frozen=True)
class Mean:
    flips: int
    mean: float | None
    error: float | None
    """Standard error; flips in one row count as one sample."""

    @classmethod
    def of(cls, flips: list[Flip], part: str) -> "Mean":
        if not flips:
            return cls(0, None, None)
        values = np.array([getattr(flip, part) for flip in flips])
        mean, error = mean_and_error(values, np.array([flip.row for flip in flips]))
        return cls(len(flips), mean, finite(error))


@dataclass(frozen=True)
class Worth:
    """The effect of flips in one layer or in all: nats, summed over the predictions of the token and of later ones."""

    to_attention: Mean
    """Change of the loss if a light token is sent to attention."""
    to_filter: Mean
    """Change of the loss if a dark token is sent to the filter."""
    own_to_attention: Mean
    """The part in the token's own prediction."""
    own_to_filter: Mean
    benefit: list[Mean]
    """Of attention over the filter, by bins of rising H."""
    pearson: float | None
    """Correlation of H (over all layers: its rank within the layer) with the benefit of attention."""
    spearman: float | None
    correlation_error: float | None
    """Standard error of either under no correlation."""

    @classmethod
    def of(cls, flips: list[Flip], bins: list[int], signal: list[float]) -> "Worth":
        """`bins` holds the entropy bin of each flip, `signal` its H or rank, to correlate with its benefit."""
        light, dark = ([flip for flip in flips if flip.was_dark == was] for was in (False, True))
        groups = [[flip for flip, bin in zip(flips, bins, strict=True) if bin == wanted] for wanted in range(BINS)]
        benefit = [flip.benefit for flip in flips]
        varies = len(flips) > 2 and len(set(signal)) > 1 and len(set(benefit)) > 1
        return cls(
            to_attention=Mean.of(light, "change"), to_filter=Mean.of(dark, "change"),
            own_to_attention=Mean.of(light, "own"), own_to_filter=Mean.of(dark, "own"),
            benefit=[Mean.of(group, "benefit") for group in groups],
            pearson=float(stats.pearsonr(signal, benefit).statistic) if varies else None,
            spearman=float(stats.spearmanr(signal, benefit).statistic) if varies else None,
            correlation_error=(len(flips) - 1) ** -0.5 if len(flips) > 2 else None,
        )  # fmt: skip


@dataclass(frozen=True)
class LayerNull:
    layer: int
    """Counted from 0."""
    kind: str
    operators: list[str]
    thresholds: list[float] | None
    dark: float | None
    """f: share of tokens sent to attention, in routed layers."""
    whiteness: list[Whiteness]
    """The model's basis first."""
    signals: list[Signal]
    classes: list[ClassMean]
    contrasts: list[Contrast]
    worth: Worth | None
    compaction: list[Compaction]


@dataclass(frozen=True)
class NullTest:
    model: str
    run: str | None
    corpus: str
    fingerprint: str
    split: str
    tokens: int
    rows: int
    length: int
    batch_size: int
    seed: int
    device: str
    width: int
    shuffles: int
    null_mean: float
    null_deviation: float
    null_exact: bool
    """Whether mean and deviation are exact or those of a sample."""
    null_percentiles: dict[str, float]
    bins: int
    layers: list[LayerNull]
    worth: Worth | None
    """Of the flips of all layers together, with the rank within the layer for H."""
    flips: list[Flip]
    remarks: list[str]

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def build(kind: Any, record: Any) -> Any:
    """The inverse of `asdict`, guided by the types of the fields."""
    if get_origin(kind) is list:
        return [build(get_args(kind)[0], item) for item in record]
    if isinstance(kind, UnionType):
        return None if record is None else build(get_args(kind)[0], record)
    if not is_dataclass(kind):
        return record
    hints = get_type_hints(kind)
    return kind(**{part.name: build(hints[part.name], record[part.name]) for part in fields(kind)})


def read_report(path: Path) -> NullTest:
    """Read a report from its file or folder."""
    path = path / NAME if path.is_dir() else path
    check_file(path)
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        assert record["format"] == FORMAT and record["layers"]
        return build(NullTest, record)
    except (AssertionError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{path} is not a null test of format {FORMAT!r}, or damaged: {first_line(error)}") from error
