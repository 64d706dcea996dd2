"""Where to cut: thresholds from the entropies a model really produces, on disk, and in another model."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.utils import logging

from chiar.config import ChiarConfig
from chiar.errors import InputError, first_line, unknown_name
from chiar.files import check_file, new_folder
from chiar.kernels.spectral_entropy import spectral_entropy
from chiar.kernels.transform import Transform
from chiar.model.decoder import ChiarModel
from chiar.model.inputs import check_tokens
from chiar.model.load import copy_tokenizer

RULES = ("embeddings", "layers")
PERCENTILES = (5, 33, 50, 67, 95)
FORMAT = "chiar-calibration/1"
# One model's thresholds mean something in another only if H is the same function of the same kind of vector.
MUST_AGREE = ("hidden_size", "vocab_size", "basis", "basis_seed", "entropy_eps", "entropy_dc_weight")
Batches = Iterable[dict[str, Tensor]]
Progress = Callable[[int], None]


class StreamingQuantiles:
    """Quantiles of numbers in [0, 1] from a fixed histogram: 512 KiB whatever the stream, exact to 1/65,536.

    At width 1024 the bulk of H spans some 600 bins.
    """

    BINS = 1 << 16

    def __init__(self) -> None:
        self.counts = torch.zeros(self.BINS, dtype=torch.int64)

    def add(self, values: Tensor) -> None:
        bins = (values.detach().double().cpu().flatten() * self.BINS).long().clamp(0, self.BINS - 1)
        self.counts += torch.bincount(bins, minlength=self.BINS)

    @property
    def total(self) -> int:
        return int(self.counts.sum())

    def quantile(self, q: float) -> float:
        """The value below which a fraction q lies, linear inside a bin."""
        if self.total == 0:
            raise InputError("no entropies were seen: the token stream is empty.")
        cumulative, target = self.counts.cumsum(0), max(q * self.total, 1e-9)
        index = min(int(torch.searchsorted(cumulative, target)), self.BINS - 1)
        inside = float(self.counts[index])
        below = float(cumulative[index]) - inside
        return (index + ((target - below) / inside if inside else 0.0)) / self.BINS

    def fraction_above(self, threshold: float) -> float:
        index = min(int(threshold * self.BINS), self.BINS - 1)
        within = float(self.counts[index]) * (index + 1 - threshold * self.BINS)
        return (float(self.counts[index + 1 :].sum()) + within) / max(self.total, 1)

    def moments(self) -> tuple[float, float]:
        """Mean and standard deviation."""
        centres = (torch.arange(self.BINS, dtype=torch.float64) + 0.5) / self.BINS
        share = self.counts / max(self.total, 1)
        mean = (share * centres).sum()
        return float(mean), float((share * (centres - mean) ** 2).sum().sqrt())

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
        return spread([layer.thresholds for layer in self.layers], self.rule, routed_layers)


def spread(measured: list[list[float]], rule: str, routed_layers: int) -> list:
    """As `ChiarConfig.thresholds` stores them: a number a routed layer, or a pair with three operators."""
    layers = measured[:1] * routed_layers if rule == "embeddings" else measured
    return [values[0] if len(values) == 1 else values for values in layers]


def cut(seen: StreamingQuantiles, boundaries: int, fraction: float | None) -> list[float]:
    """The paper's rule: the midpoint of the 33rd and 67th percentiles, or both of them with three operators.

    With `fraction`, the quantiles that send this share to attention (and share the rest evenly).
    """
    if fraction is not None:
        return [seen.quantile((1.0 - fraction) * (k + 1) / boundaries) for k in range(boundaries)]
    low, high = seen.quantile(0.33), seen.quantile(0.67)
    return [(low + high) / 2] if boundaries == 1 else [low, high]


def noise_quantiles(width: int, eps: float, dc_weight: float, samples: int = 16384) -> StreamingQuantiles:
    """H of white Gaussian vectors, computed by the same operator. An orthonormal basis leaves them white."""
    generator, seen = torch.Generator().manual_seed(0), StreamingQuantiles()
    for _ in range(0, samples, 2048):
        seen.add(spectral_entropy(torch.randn(2048, width, generator=generator), Transform(), eps, dc_weight))
    return seen


def report(layer: int | None, seen: StreamingQuantiles, cuts: list[float], noise: StreamingQuantiles) -> LayerReport:
    above = [1.0, *(seen.fraction_above(t) for t in cuts), 0.0]
    mean, (noise_mean, deviation) = seen.moments()[0], noise.moments()
    return LayerReport(
        layer=layer,
        tokens=seen.total,
        percentiles={p: seen.quantile(p / 100) for p in PERCENTILES},
        mean=mean,
        thresholds=cuts,
        split=[above[k] - above[k + 1] for k in range(len(above) - 1)],
        distance_from_noise=seen.distance(noise),
        shift_from_noise=(mean - noise_mean) / deviation,
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
    decoder: ChiarModel = getattr(model, "model", model)
    receiver: ChiarModel = decoder if target is None else getattr(target, "model", target)
    if receiver.config.target_fraction is not None:
        raise InputError(
            f"target_fraction={receiver.config.target_fraction} found the thresholds in training: only a model without "
            "it is calibrated."
        )
    config, wanted = decoder.config, receiver.config
    if rule == "layers" and not config.routed_layers:
        raise InputError("the model has no routed layers: use rule 'embeddings' to take τ from a baseline.")
    if rule == "layers" and config.router != "entropy":
        raise InputError(f"router={config.router!r} has no thresholds to calibrate: only the entropy router does.")
    assert wanted.operators is not None
    boundaries, before = len(wanted.operators) - 1, wanted.thresholds
    noise = noise_quantiles(config.hidden_size, config.entropy_eps, config.entropy_dc_weight)
    modes = {part: part.training for part in (decoder, receiver)}
    try:
        for part in modes:
            part.eval()
        if rule == "embeddings":
            seen = measure(decoder, batches, [None], progress)
            cuts = cut(seen[None], boundaries, fraction)
            routed = wanted.routed_layers if wanted.router == "entropy" else []
            if routed:
                receiver.set_thresholds(spread([cuts], rule, len(routed)))
                seen |= measure(receiver, batches, routed, progress)
            reports = [report(layer, quantiles, cuts, noise) for layer, quantiles in seen.items()]
            return Calibration(rule, reports, *noise.moments(), passes=1 + bool(routed))
        for done in range(1, passes + 1):
            seen = measure(decoder, batches, config.routed_layers, progress)
            used = [list(cuts) for cuts in config.layer_thresholds()]
            found = [cut(quantiles, boundaries, fraction) for quantiles in seen.values()]
            moved = max(
                abs(quantiles.fraction_above(old) - quantiles.fraction_above(new))
                for quantiles, olds, news in zip(seen.values(), used, found, strict=True)
                for old, new in zip(olds, news, strict=True)
            )
            if moved <= tolerance or done == passes:
                break
            decoder.set_thresholds(spread(found, rule, len(found)))
        # The thresholds that were in force while the last pass was measured, so that the split shown is the split had.
        reports = [report(layer, seen[layer], cuts, noise) for layer, cuts in zip(seen, used, strict=True)]
        return Calibration(rule, reports, *noise.moments(), passes=done, converged=moved <= tolerance)
    finally:
        receiver.set_thresholds(before)
        for part, training in modes.items():
            part.train(training)


def measure(
    decoder: ChiarModel, batches: Batches, layers: Sequence[int | None], progress: Progress | None
) -> dict[int | None, StreamingQuantiles]:
    """The entropies that layers see under the thresholds in force; [None]: those of the token embeddings."""
    config = decoder.config
    seen: dict[int | None, StreamingQuantiles] = {layer: StreamingQuantiles() for layer in layers}
    for batch in batches:
        inputs = {name: value.to(decoder.device) for name, value in batch.items()}
        if None in seen:
            check_tokens(batch["input_ids"], None, config.vocab_size)
            x_BTD = decoder.begin_stream(decoder.embed_tokens(inputs["input_ids"]))
            transform = decoder.basis.transform()
            entropy_BT = spectral_entropy(x_BTD, transform, config.entropy_eps, config.entropy_dc_weight)
            mask = inputs.get("attention_mask")
            seen[None].add(entropy_BT if mask is None else entropy_BT[mask.bool()])
        else:
            trace = decoder(**inputs, output_routing=True).routing
            for layer, quantiles in seen.items():
                quantiles.add(trace.layers[layer].entropy_BT[trace.real_BT])
        if progress:
            progress(batch["input_ids"].numel())
    return seen


def to_json(found: Calibration, config: ChiarConfig) -> str:
    measured = {name: getattr(config, name) for name in MUST_AGREE}
    return json.dumps({"format": FORMAT, "measured": measured, **asdict(found)}, indent=2)


def check_comparable(measured: dict[str, Any], target: ChiarConfig) -> None:
    for field in MUST_AGREE:
        ours, theirs = measured.get(field), getattr(target, field)
        if ours != theirs:
            raise InputError(f"the two models differ in {field} ({ours!r}, {theirs!r}), so thresholds do not carry.")
    if target.router != "entropy":
        raise InputError(f"the model has router={target.router!r}, which has no thresholds.")


def read_thresholds(path: Path, target: ChiarConfig) -> list:
    """Thresholds for `target` as its configuration stores them: one τ everywhere, or those measured layer by layer."""
    check_file(path)
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(stored, dict) or stored.get("format") != FORMAT:
            raise InputError(f"{path} is not a calibration: it does not say format {FORMAT!r}.")
        measured = [[float(value) for value in layer["thresholds"]] for layer in stored["layers"]]
        rule, made_for = stored["rule"], stored["measured"]
    except InputError:
        raise
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path} is not a readable calibration: {first_line(error)}") from error
    check_comparable(made_for, target)
    routed = len(target.routed_layers)
    if not routed:
        raise InputError("the model has no routed layers, so thresholds have no effect: leave --thresholds out.")
    thresholds = spread(measured, rule, routed)
    if len(thresholds) != routed:
        raise InputError(f"{path} has thresholds for {len(thresholds)} routed layers, the model has {routed}.")
    return thresholds


def save_calibrated(model: Any, found: Calibration, out: Path, tokenizers: Iterable[Path | None]) -> None:
    """The model with its new thresholds as a new folder, with what they were taken from and the first tokenizer."""
    model.model.set_thresholds(found.thresholds(len(model.config.routed_layers)))
    logging.disable_progress_bar()
    with new_folder(out) as aside:
        model.save_pretrained(aside)
        (aside / "calibration.json").write_text(to_json(found, model.config), encoding="utf-8")
        for folder in tokenizers:
            copy_tokenizer(folder, aside)
