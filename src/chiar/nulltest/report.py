"""A null test as data; saved as JSON."""

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor

from chiar.nulltest.compaction import Compaction
from chiar.nulltest.flips import Flip, Worth
from chiar.nulltest.information import Information
from chiar.nulltest.white import Whiteness

FORMAT = "chiar-nulltest/1"


@dataclass(frozen=True)
class Signal:
    """One way to split the tokens of a layer in two (or three), and what it says about them."""

    name: str
    """"route": what the model did; a basis: its H, cut to the same share of dark tokens; "hash": a random route that
    knows the token only, with that share too."""
    dark: float
    """Share of tokens above the cut."""
    token: Information
    word_class: Information
    position: Information

    def to_dict(self) -> dict[str, Any]:
        kinds = {name: getattr(self, name).to_dict() for name in ("token", "word_class", "position")}
        return {"name": self.name, "dark": self.dark, **kinds}


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
    """Share of the class that is light: as routed, or with H at most the median where there is no route."""


@dataclass(frozen=True)
class Contrast:
    """Function words against content words; `words`: all, or those without a capital."""

    words: str
    function_tokens: int
    content_tokens: int
    difference: float
    """Mean H of function words − of content words, in standard deviations of the null."""
    error: float | None
    """Its standard error; equal tokens count as one sample."""
    separation: float
    """P(H of a function word < H of a content word): ½ if H does not tell them apart, 1 if the claim is right."""


@dataclass(frozen=True)
class LayerNull:
    layer: int
    """From 0."""
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
    entropies: dict[str, Tensor] = field(repr=False)
    """H of every token by basis, for pictures; not in the JSON."""

    def to_dict(self) -> dict[str, Any]:
        kept = {name: value for name, value in vars(self).items() if name not in ("entropies", "signals")}
        parts = {
            name: [asdict(part) for part in value]
            if name in ("whiteness", "classes", "contrasts", "compaction")
            else value
            for name, value in kept.items()
        }
        worth = None if self.worth is None else asdict(self.worth)
        return {**parts, "worth": worth, "signals": [signal.to_dict() for signal in self.signals]}


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
    """Whether mean and deviation are exact; else they are the sample's."""
    null_percentiles: dict[str, float]
    bins: int
    """Of H, each with as many tokens of the layer."""
    layers: list[LayerNull]
    worth: Worth | None
    """Of all layers' flips together; H is its rank in its layer there."""
    flips: list[Flip]
    remarks: list[str]
    null_sample: Tensor = field(repr=False)

    def to_json(self) -> str:
        kept = {name: value for name, value in vars(self).items() if name != "null_sample"}
        kept["layers"] = [layer.to_dict() for layer in self.layers]
        kept["flips"] = [asdict(flip) for flip in self.flips]
        kept["worth"] = None if self.worth is None else asdict(self.worth)
        return json.dumps({"format": FORMAT, **kept}, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
