"""Where to cut: thresholds from the entropies a model really produces."""

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from chiar.errors import InputError, unknown_name
from chiar.ops.spectral_entropy import spectral_entropy
from chiar.ops.white_noise import white_noise_entropy

RULES = ("embeddings", "layers")
PERCENTILES = (5, 33, 50, 67, 95)


class StreamingQuantiles:
    """Quantiles of numbers in [0, 1] from a fixed histogram: 512 KiB whatever the stream, exact to 1/65,536.

    At width 1024 the bulk of H spans some 600 bins. Histograms of parts of a stream add up, in any order.
    """

    BINS = 1 << 16

    def __init__(self) -> None:
        self.counts = torch.zeros(self.BINS, dtype=torch.int64)

    def add(self, values: Tensor) -> None:
        bins = (values.detach().double().cpu().flatten() * self.BINS).long().clamp(0, self.BINS - 1)
        self.counts += torch.bincount(bins, minlength=self.BINS)

    def merge(self, other: "StreamingQuantiles") -> None:
        self.counts += other.counts

    @property
    def total(self) -> int:
        return int(self.counts.sum())

    def quantile(self, q: float) -> float:
        """The value below which a fraction q lies, linear inside a bin."""
        if self.total == 0:
            raise InputError("no entropies were seen: the token stream is empty.")
        cumulative = self.counts.cumsum(0)
        target = max(q * self.total, 1e-9)
        index = min(int(torch.searchsorted(cumulative, target)), self.BINS - 1)
        inside = float(self.counts[index])
        below = float(cumulative[index]) - inside
        return (index + ((target - below) / inside if inside else 0.0)) / self.BINS

    def fraction_above(self, threshold: float) -> float:
        index = min(int(threshold * self.BINS), self.BINS - 1)
        above = float(self.counts[index + 1 :].sum())
        within = float(self.counts[index]) * (index + 1 - threshold * self.BINS)
        return (above + within) / max(self.total, 1)

    def mean(self) -> float:
        centres = (torch.arange(self.BINS, dtype=torch.float64) + 0.5) / self.BINS
        return float((self.counts * centres).sum()) / max(self.total, 1)

    def distance(self, other: "StreamingQuantiles") -> float:
        """Kolmogorov–Smirnov: the largest gap between the two distribution functions, 0 (same) to 1 (disjoint)."""
        ours, theirs = self.counts.cumsum(0) / self.total, other.counts.cumsum(0) / other.total
        return float((ours - theirs).abs().max())


@dataclass
class LayerReport:
    """The entropies one layer sees (layer None: the token embeddings)."""

    layer: int | None
    tokens: int
    percentiles: dict[int, float]
    mean: float
    thresholds: list[float]
    split: list[float]
    """Fraction of tokens each operator gets at these thresholds."""
    distance_from_noise: float
    """Kolmogorov–Smirnov distance to white noise of the same width."""
    shift_from_noise: float
    """(mean − white-noise mean) / white-noise standard deviation."""


@dataclass
class Calibration:
    """New thresholds and what they were taken from."""

    rule: str
    layers: list[LayerReport]
    """One entry for the embeddings, or one a routed layer."""
    noise_mean: float
    noise_deviation: float
    rounds: int = 1

    def thresholds(self, routed_layers: int) -> list:
        """As `ChiarConfig.thresholds` stores them: a number a routed layer, or a pair with three operators."""
        found = [layer.thresholds for layer in self.layers]
        if self.rule == "embeddings":
            found = found * routed_layers
        return plain(found)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def cut(quantiles: StreamingQuantiles, boundaries: int, fraction: float | None) -> list[float]:
    """The paper's rule: the midpoint of the 33rd and 67th percentiles, or both of them with three operators.

    With `fraction`, the quantiles that send this share to attention (and share the rest evenly).
    """
    if fraction is not None:
        return [quantiles.quantile((1.0 - fraction) * (k + 1) / boundaries) for k in range(boundaries)]
    low, high = quantiles.quantile(0.33), quantiles.quantile(0.67)
    return [(low + high) / 2] if boundaries == 1 else [low, high]


def noise_quantiles(width: int, eps: float, dc_weight: float, samples: int = 16384) -> StreamingQuantiles:
    """H of white Gaussian vectors, computed by the same operator. An orthonormal basis leaves them white."""
    generator = torch.Generator().manual_seed(0)
    identity_DD, quantiles = torch.eye(width), StreamingQuantiles()
    for _ in range(0, samples, 2048):
        noise = torch.randn(2048, width, generator=generator)
        quantiles.add(spectral_entropy(noise, identity_DD, eps, dc_weight))
    return quantiles


def report(
    layer: int | None, seen: StreamingQuantiles, thresholds: list[float], config: Any, noise: StreamingQuantiles
) -> LayerReport:
    mean, deviation = white_noise_entropy(config.hidden_size)
    above = [1.0, *(seen.fraction_above(t) for t in thresholds), 0.0]
    return LayerReport(
        layer=layer,
        tokens=seen.total,
        percentiles={p: seen.quantile(p / 100) for p in PERCENTILES},
        mean=seen.mean(),
        thresholds=thresholds,
        split=[above[k] - above[k + 1] for k in range(len(above) - 1)],
        distance_from_noise=seen.distance(noise),
        shift_from_noise=(seen.mean() - mean) / deviation,
    )


@torch.no_grad()
def calibrate(
    model: Any,
    batches: Iterable[dict[str, Tensor]],
    rule: str = "layers",
    fraction: float | None = None,
    operators: int | None = None,
    rounds: int = 4,
    tolerance: float = 0.01,
    progress: Callable[[int], None] | None = None,
) -> Calibration:
    """Thresholds for `model` from batches of {"input_ids", optionally "attention_mask"}, which are read several times.

    "embeddings" is the paper's rule: H of the token embeddings, one τ for all layers; it also takes a baseline, and
    `operators` is then the number of operators of the model the thresholds are for.
    "layers" cuts each routed layer at quantiles of the states it really sees. Those depend on the thresholds of the
    layers before, so the stream is read again, up to `rounds` times, until every split is stable within `tolerance`.
    The model itself is left as it was: apply the result with `set_thresholds`.
    """
    if rule not in RULES:
        raise unknown_name("rule", rule, RULES)
    if fraction is not None and not 0.0 < fraction < 1.0:
        raise InputError(f"fraction must lie strictly between 0 and 1, got {fraction}.")
    decoder = getattr(model, "model", model)
    config, batches = decoder.config, list(batches)
    boundaries = (operators or len(config.operators)) - 1
    noise = noise_quantiles(config.hidden_size, config.entropy_eps, config.entropy_dc_weight)
    mean, deviation = white_noise_entropy(config.hidden_size)
    was_training = decoder.training
    decoder.eval()
    try:
        if rule == "embeddings":
            seen = embedding_quantiles(decoder, batches, progress)
            thresholds = cut(seen, boundaries, fraction)
            reports = [report(None, seen, thresholds, config, noise)]
            return Calibration(rule, reports, mean, deviation)
        return calibrate_layers(decoder, batches, fraction, rounds, tolerance, noise, progress)
    finally:
        decoder.train(was_training)


def embedding_quantiles(
    decoder: Any, batches: list[dict[str, Tensor]], progress: Callable[[int], None] | None
) -> StreamingQuantiles:
    config, seen = decoder.config, StreamingQuantiles()
    for batch in batches:
        ids = batch["input_ids"]
        x_BTD = decoder.embed_tokens(ids.to(decoder.device))
        entropy_BT = spectral_entropy(x_BTD, decoder.basis.matrix_DD, config.entropy_eps, config.entropy_dc_weight)
        mask = batch.get("attention_mask")
        seen.add(entropy_BT if mask is None else entropy_BT[mask.bool().to(entropy_BT.device)])
        if progress:
            progress(ids.numel())
    return seen


def calibrate_layers(
    decoder: Any,
    batches: list[dict[str, Tensor]],
    fraction: float | None,
    rounds: int,
    tolerance: float,
    noise: StreamingQuantiles,
    progress: Callable[[int], None] | None,
) -> Calibration:
    config = decoder.config
    routed, before = config.routed_layers, config.thresholds
    if not routed:
        raise InputError("the model has no routed layers: use rule 'embeddings' to take τ from a baseline.")
    if config.router != "entropy":
        raise InputError(f"router={config.router!r} has no thresholds to calibrate: only the entropy router does.")
    boundaries = len(config.operators) - 1
    try:
        done = 0
        while True:
            seen = {layer: StreamingQuantiles() for layer in routed}
            for batch in batches:
                inputs = {name: value.to(decoder.device) for name, value in batch.items()}
                trace = decoder(**inputs, output_routing=True).routing
                for layer in routed:
                    seen[layer].add(trace.layers[layer].entropy_BT[trace.real_BT])
                if progress:
                    progress(batch["input_ids"].numel())
            done += 1
            used = [list(values) for values in config.layer_thresholds()]
            wanted = [cut(seen[layer], boundaries, fraction) for layer in routed]
            moved = max(
                abs(seen[layer].fraction_above(old) - seen[layer].fraction_above(new))
                for layer, olds, news in zip(routed, used, wanted, strict=True)
                for old, new in zip(olds, news, strict=True)
            )
            if (done > 1 and moved <= tolerance) or done > rounds:
                break
            decoder.set_thresholds(plain(wanted))
    finally:
        decoder.set_thresholds(before)
    # The thresholds that were in force while the last pass was measured, so that the split shown is the split had.
    mean, deviation = white_noise_entropy(config.hidden_size)
    reports = [report(layer, seen[layer], used[i], config, noise) for i, layer in enumerate(routed)]
    return Calibration("layers", reports, mean, deviation, rounds=done)


def plain(thresholds: list[list[float]]) -> list:
    return [values[0] if len(values) == 1 else values for values in thresholds]
