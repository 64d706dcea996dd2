"""Where to cut: thresholds from the entropies a model really produces."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from chiar.errors import InputError, unknown_name
from chiar.kernels.spectral_entropy import spectral_entropy
from chiar.kernels.transform import Transform
from chiar.model.inputs import check_tokens
from chiar.routing.quantiles import StreamingQuantiles

RULES = ("embeddings", "layers")
PERCENTILES = (5, 33, 50, 67, 95)
Batches = Iterable[dict[str, Tensor]]
Progress = Callable[[int], None]


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
    """Kolmogorov–Smirnov distance to white noise of the same width (under the temporal signal: of as many terms)."""
    shift_from_noise: float
    """(mean − white noise's mean) / white noise's standard deviation."""


@dataclass
class Calibration:
    """New thresholds and what they were taken from."""

    rule: str
    layers: list[LayerReport]
    """The embeddings first, under that rule; then the routed layers, with the split they get."""
    noise_mean: float
    noise_deviation: float
    passes: int = 1
    """How often the stream was read."""
    converged: bool = True
    """Whether every split of the rule `layers` was stable in the last pass."""

    def thresholds(self, routed_layers: int) -> list:
        """As `ChiarConfig.thresholds` stores them: a number a routed layer, or a pair with three operators."""
        if self.rule == "embeddings":
            return plain([self.layers[0].thresholds] * routed_layers)
        return plain([layer.thresholds for layer in self.layers])

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def plain(thresholds: list[list[float]]) -> list:
    return [values[0] if len(values) == 1 else values for values in thresholds]


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
    quantiles = StreamingQuantiles()
    for _ in range(0, samples, 2048):
        noise = torch.randn(2048, width, generator=generator)
        quantiles.add(spectral_entropy(noise, Transform(), eps, dc_weight))
    return quantiles


def noise_of(decoder: Any, receiver: Any) -> StreamingQuantiles:
    """White noise's H, as the receiver's signal sees it in the decoder's states."""
    config = decoder.config
    eps, dc_weight = config.entropy_eps, config.entropy_dc_weight
    return noise_quantiles(config.hidden_size, eps, dc_weight)


def embedding_entropy(decoder: Any, receiver: Any) -> Callable[[Tensor, Tensor | None], Tensor]:
    """H of the decoder's embeddings (B, T, D), some of them real, as the receiver's signal sees it."""
    config = decoder.config
    eps, dc_weight = config.entropy_eps, config.entropy_dc_weight
    return lambda x_BTD, real_BT: spectral_entropy(x_BTD, decoder.basis.transform(), eps, dc_weight)


def report(
    layer: int | None, seen: StreamingQuantiles, thresholds: list[float], noise: StreamingQuantiles
) -> LayerReport:
    above = [1.0, *(seen.fraction_above(t) for t in thresholds), 0.0]
    return LayerReport(
        layer=layer,
        tokens=seen.total,
        percentiles={p: seen.quantile(p / 100) for p in PERCENTILES},
        mean=seen.mean(),
        thresholds=thresholds,
        split=[above[k] - above[k + 1] for k in range(len(above) - 1)],
        distance_from_noise=seen.distance(noise),
        shift_from_noise=(seen.mean() - noise.mean()) / noise.deviation(),
    )


@torch.no_grad()
def calibrate(
    model: Any,
    batches: Batches,
    rule: str = "layers",
    fraction: float | None = None,
    target: Any = None,
    passes: int = 6,
    tolerance: float = 0.01,
    progress: Progress | None = None,
) -> Calibration:
    """Thresholds for `target` (`model` itself by default) from batches of {"input_ids", optionally "attention_mask"}.

    "embeddings" is the paper's rule: H of `model`'s token embeddings, one τ for all layers; `model` may be a baseline.
    "layers" cuts each routed layer at quantiles of the states it really sees. Those depend on the thresholds of the
    layers before, so the stream is read again, at most `passes` times, until no split moves by more than `tolerance`.
    `batches` must be something that can be iterated again, such as a list; memory does not grow with it. The models are
    left as they were: apply the result with `set_thresholds`.
    """
    if rule not in RULES:
        raise unknown_name("rule", rule, RULES)
    if fraction is not None and not 0.0 < fraction < 1.0:
        raise InputError(f"fraction must lie strictly between 0 and 1, got {fraction}.")
    if isinstance(batches, Iterator):
        raise InputError("the batches are read several times: give a list or another re-iterable, not an iterator.")
    decoder = getattr(model, "model", model)
    receiver = decoder if target is None else getattr(target, "model", target)
    if receiver.config.target_fraction is not None:
        raise InputError(
            f"target_fraction={receiver.config.target_fraction} found the thresholds in training: only a model without "
            "it is calibrated."
        )
    noise = noise_of(decoder, receiver)
    modes = {part: part.training for part in (decoder, receiver)}
    before = receiver.config.thresholds
    decoder.eval()
    receiver.eval()
    try:
        if rule == "embeddings":
            return calibrate_embeddings(decoder, receiver, batches, fraction, noise, progress)
        return calibrate_layers(decoder, batches, fraction, passes, tolerance, noise, progress)
    finally:
        receiver.set_thresholds(before)
        for part, training in modes.items():
            part.train(training)


def calibrate_embeddings(
    decoder: Any,
    receiver: Any,
    batches: Batches,
    fraction: float | None,
    noise: StreamingQuantiles,
    progress: Progress | None,
) -> Calibration:
    seen, entropy_of = StreamingQuantiles(), embedding_entropy(decoder, receiver)
    for batch in batches:
        ids = batch["input_ids"]
        check_tokens(ids, None, decoder.embed_tokens.num_embeddings)
        x_BTD = decoder.begin_stream(decoder.embed_tokens(ids.to(decoder.device)))
        mask = batch.get("attention_mask")
        real_BT = None if mask is None else mask.bool().to(x_BTD.device)
        entropy_BT = entropy_of(x_BTD, real_BT)
        seen.add(entropy_BT if real_BT is None else entropy_BT[real_BT])
        if progress:
            progress(ids.numel())
    thresholds = cut(seen, len(receiver.config.operators) - 1, fraction)
    reports = [report(None, seen, thresholds, noise)]
    routed = receiver.config.routed_layers if receiver.config.router == "entropy" else []
    if routed:
        receiver.set_thresholds(plain([thresholds] * len(routed)))
        measured = layer_quantiles(receiver, batches, progress)
        reports += [report(layer, measured[layer], thresholds, noise) for layer in routed]
    return Calibration("embeddings", reports, noise.mean(), noise.deviation(), passes=1 + bool(routed))


def calibrate_layers(
    decoder: Any,
    batches: Batches,
    fraction: float | None,
    passes: int,
    tolerance: float,
    noise: StreamingQuantiles,
    progress: Progress | None,
) -> Calibration:
    config = decoder.config
    if not config.routed_layers:
        raise InputError("the model has no routed layers: use rule 'embeddings' to take τ from a baseline.")
    if config.router != "entropy":
        raise InputError(f"router={config.router!r} has no thresholds to calibrate: only the entropy router does.")
    boundaries = len(config.operators) - 1
    for done in range(1, passes + 1):
        seen = layer_quantiles(decoder, batches, progress)
        used = [list(values) for values in config.layer_thresholds()]
        wanted = [cut(quantiles, boundaries, fraction) for quantiles in seen.values()]
        moved = max(
            abs(quantiles.fraction_above(old) - quantiles.fraction_above(new))
            for quantiles, olds, news in zip(seen.values(), used, wanted, strict=True)
            for old, new in zip(olds, news, strict=True)
        )
        if moved <= tolerance or done == passes:
            break
        decoder.set_thresholds(plain(wanted))
    # The thresholds that were in force while the last pass was measured, so that the split shown is the split had.
    reports = [report(layer, seen[layer], values, noise) for layer, values in zip(seen, used, strict=True)]
    return Calibration("layers", reports, noise.mean(), noise.deviation(), done, converged=moved <= tolerance)


def layer_quantiles(decoder: Any, batches: Batches, progress: Progress | None) -> dict[int, StreamingQuantiles]:
    """The entropies each routed layer sees under the thresholds in force."""
    seen = {layer: StreamingQuantiles() for layer in decoder.config.routed_layers}
    for batch in batches:
        inputs = {name: value.to(decoder.device) for name, value in batch.items()}
        trace = decoder(**inputs, output_routing=True).routing
        for layer, quantiles in seen.items():
            quantiles.add(trace.layers[layer].entropy_BT[trace.real_BT])
        if progress:
            progress(batch["input_ids"].numel())
    return seen
