"""Routing thresholds, calibrated on the scores a model produces, and carried over to another model in a file."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from chiar.config import ChiarConfig
from chiar.errors import InputError, errors_as, require, unknown_name
from chiar.files import check_file
from chiar.kernels.spectral_entropy import spectral_entropy
from chiar.kernels.transform import Transform
from chiar.model.decoder import ChiarModel
from chiar.model.inputs import check_tokens
from chiar.registry import ROUTERS

RULES, PERCENTILES, FORMAT = ("embeddings", "layers"), (5, 33, 50, 67, 95), "chiar-calibration/1"
SPECTRAL = "spectral entropy"
# Thresholds carry over to another model only if H is the same function of the same kind of vector.
MUST_AGREE = ("hidden_size", "vocab_size", "basis", "entropy_eps", "entropy_dc_weight")
Batches = Iterable[dict[str, Tensor]]
Progress = Callable[[int], None]


@dataclass
class LayerReport:
    """The scores of one routed layer or dark stack (layer None: H of the token embeddings), and its thresholds."""

    layer: int | None
    tokens: int
    percentiles: dict[int, float]
    mean: float
    thresholds: list[float]
    split: list[float]  # fraction of tokens each operator gets at these thresholds
    # Only for spectral entropies, compared with those of white noise of the same width:
    distance_from_noise: float | None  # Kolmogorov–Smirnov distance
    shift_from_noise: float | None  # (mean − noise's mean) / noise's standard deviation


@dataclass
class Calibration:
    """Thresholds for a model, and the scores they were calibrated on."""

    rule: str
    layers: list[LayerReport]  # under rule `embeddings` the embeddings come first, then the routed layers
    noise_mean: float | None
    noise_deviation: float | None
    passes: int = 1  # times the batches were read
    converged: bool = True  # under rule `layers`: whether no split moved by more than the tolerance
    score: str = SPECTRAL  # what is compared with the thresholds

    def thresholds(self, routed_layers: int) -> list:
        return expand_thresholds([layer.thresholds for layer in self.layers], self.rule, routed_layers)


def expand_thresholds(measured: list[list[float]], rule: str, routed_layers: int) -> list:
    """As `ChiarConfig.thresholds` stores them: a number per routed layer, or a pair with three operators."""
    layers = measured[:1] * routed_layers if rule == "embeddings" else measured
    return [values[0] if len(values) == 1 else values for values in layers]


def choose_thresholds(score_N: np.ndarray, boundaries: int, fraction: float | None) -> list[float]:
    """The paper's rule: the midpoint of the 33rd and 67th percentiles, or both of them with three operators. With
    `fraction`, the quantiles that send this share to attention and split the rest evenly."""
    if fraction is not None:
        return np.quantile(score_N, [(1.0 - fraction) * (k + 1) / boundaries for k in range(boundaries)]).tolist()
    low, high = np.quantile(score_N, [0.33, 0.67]).tolist()
    return [(low + high) / 2] if boundaries == 1 else [low, high]


def noise_entropies(width: int, eps: float, dc_weight: float) -> np.ndarray:
    """H of white Gaussian vectors, sorted. They need no transform: an orthonormal basis leaves them white."""
    noise = torch.randn(16384, width, generator=torch.Generator().manual_seed(0))
    return np.sort(spectral_entropy(noise, Transform(), eps, dc_weight).double().numpy())


def layer_report(layer: int | None, score_N: np.ndarray, taus: list[float], noise_N: np.ndarray | None) -> LayerReport:
    sorted_N, mean = np.sort(score_N), float(score_N.mean())
    above = [1.0, *(float((sorted_N > tau).mean()) for tau in taus), 0.0]
    percentiles = dict(zip(PERCENTILES, np.percentile(sorted_N, PERCENTILES).tolist(), strict=True))
    split = [more - less for more, less in pairwise(above)]
    distance = shift = None
    if noise_N is not None:
        all_N = np.concatenate([sorted_N, noise_N])
        cdf, noise_cdf = (np.searchsorted(values, all_N, "right") / len(values) for values in (sorted_N, noise_N))
        distance, shift = float(np.abs(cdf - noise_cdf).max()), float((mean - noise_N.mean()) / noise_N.std())
    return LayerReport(layer, len(sorted_N), percentiles, mean, taus, split, distance, shift)


@torch.no_grad()
def calibrate(
    model: Any, batches: Batches, rule: str = "layers", fraction: float | None = None, passes: int = 6,
    tolerance: float = 0.01, progress: Progress = lambda tokens: None,
) -> Calibration:  # fmt: skip
    """Thresholds for `set_thresholds`, from batches of {"input_ids", optionally "attention_mask"}. The model keeps its
    own. Rule "embeddings" is the paper's: one τ for all layers, from H of the token embeddings, also of a baseline's.
    Rule "layers" takes quantiles of each layer's own scores. These depend on the thresholds of earlier layers, so the
    batches are read up to `passes` times, until no split moves by more than `tolerance`. It applies to dark stacks too,
    by default at the configuration's f."""
    decoder: ChiarModel = getattr(model, "model", model)
    config = decoder.config
    if rule not in RULES:
        raise unknown_name("rule", rule, RULES)
    if fraction is not None and not 0.0 < fraction < 1.0:
        raise InputError(f"fraction must lie strictly between 0 and 1, got {fraction}.")
    if isinstance(batches, Iterator):
        raise InputError("the batches are read several times: pass a list or another re-iterable, not an iterator.")
    if config.target_fraction is not None and not config.stacks:
        raise InputError("a model with target_fraction sets its thresholds in training: it is not calibrated.")
    if rule == "layers" and not config.routed_layers:
        raise InputError("the model has no routed layers: use rule 'embeddings' to measure τ on a baseline.")
    kind = config.router_kind
    if config.stacks:
        check_stacks(config, rule)
    elif rule == "layers" and not kind.has_thresholds:
        raise InputError(f"router={config.router!r} has no thresholds to calibrate: only the entropy router does.")
    assert config.operators is not None
    boundaries, training = len(config.operators) - 1, decoder.training
    before = [threshold for (threshold,) in current_thresholds(decoder)] if config.stacks else config.thresholds
    routed = config.routed_layers if kind.has_thresholds or config.stacks else []
    fractions = [fraction] * len(routed) if fraction or not config.stacks else config.layer_fractions() or []
    score = SPECTRAL if rule == "embeddings" else kind.score or "margin of attention's logit"
    noise_N = None
    if score == SPECTRAL:
        noise_N = noise_entropies(config.hidden_size, config.entropy_eps, config.entropy_dc_weight)
    moved, reads = 0.0, 1
    try:
        decoder.eval()
        if rule == "embeddings":
            scores = measure(decoder, batches, [None], progress)
            used = [choose_thresholds(scores[None], boundaries, fraction)]
            if routed:
                decoder.set_thresholds(expand_thresholds(used, rule, len(routed)))
                scores |= measure(decoder, batches, routed, progress)
                used, reads = used * len(scores), 2
        for reads in range(1, passes + 1) if rule == "layers" else ():
            scores = measure(decoder, batches, routed, progress)
            # The thresholds used in the last pass are returned, so that the reported splits are measured ones.
            used = current_thresholds(decoder)
            chosen = [choose_thresholds(s_N, boundaries, f) for s_N, f in zip(scores.values(), fractions, strict=True)]
            moved = max(
                abs(float((score_N > old).mean() - (score_N > new).mean()))
                for score_N, olds, news in zip(scores.values(), used, chosen, strict=True)
                for old, new in zip(olds, news, strict=True)
            )
            if moved <= tolerance or reads == passes:
                break
            decoder.set_thresholds(expand_thresholds(chosen, rule, len(chosen)))
    finally:
        decoder.set_thresholds(before)
        decoder.train(training)
    reports = [layer_report(layer, scores[layer], taus, noise_N) for layer, taus in zip(scores, used, strict=True)]
    mean, deviation = (None, None) if noise_N is None else (float(noise_N.mean()), float(noise_N.std()))
    return Calibration(rule, reports, mean, deviation, reads, moved <= tolerance, score)


def check_stacks(config: ChiarConfig, rule: str) -> None:
    """InputError unless the router of the dark stacks compares a score with a threshold, and the rule is "layers"."""
    if not config.router_kind.can_follow:
        known = [name for name, kind in ROUTERS.items() if kind.of_stacks and kind.can_follow]
        own = " (its share is random_fraction)" if config.router_kind.fraction else ""
        others = f"Those that have: {', '.join(known)}."
        raise InputError(f"router={config.router!r} has no threshold to calibrate{own}. {others}")
    require(rule == "layers", "the router of a dark stack does not read embeddings: use rule 'layers'.")


def current_thresholds(decoder: ChiarModel) -> list[list[float]]:
    """The thresholds of each routed layer or dark stack."""
    state = decoder.router_state
    if state is None:
        return [list(thresholds) for thresholds in decoder.config.layer_thresholds()]
    return [[threshold] for threshold in state.threshold_L.tolist()]


def measure(
    decoder: ChiarModel, batches: Batches, layers: Sequence[int | None], progress: Progress
) -> dict[int | None, np.ndarray]:
    """The scores of layers under the current thresholds; layers [None]: H of the token embeddings."""
    config = decoder.config
    parts: dict[int | None, list[np.ndarray]] = {layer: [] for layer in layers}
    for batch in batches:
        inputs = {name: value.to(decoder.device) for name, value in batch.items()}
        mask_BT = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).bool()
        if None in parts:
            check_tokens(batch["input_ids"], None, config.vocab_size)
            x_BTD = decoder.begin_stream(decoder.embed_tokens(inputs["input_ids"]))
            how = decoder.basis.transform(), config.entropy_eps, config.entropy_dc_weight
            scores: dict[int | None, Tensor] = {None: spectral_entropy(x_BTD, *how)[mask_BT]}
        else:
            routes = decoder(**inputs, output_routes=True).routes
            scores = {layer: route.score_BT[mask_BT] for layer, route in zip(parts, routes, strict=True)}
        for layer, score_N in scores.items():
            parts[layer].append(score_N.double().cpu().numpy())
        progress(batch["input_ids"].numel())
    require(all(parts.values()), "the batches to calibrate on are empty.")
    return {layer: np.concatenate(arrays) for layer, arrays in parts.items()}


def to_json(calibration: Calibration, config: ChiarConfig) -> str:
    measured = {name: getattr(config, name) for name in MUST_AGREE}
    return json.dumps({"format": FORMAT, "measured": measured, **asdict(calibration)}, indent=2)


def read_thresholds(path: Path, target: ChiarConfig) -> list:
    """Thresholds as the configuration of `target` stores them: one τ for all layers, or one measured for each."""
    check_file(path)
    with errors_as(f"{path} is not a calibration", ValueError, KeyError, TypeError):
        stored = json.loads(path.read_text(encoding="utf-8"))
        if stored["format"] != FORMAT:
            raise ValueError(f"it does not say format {FORMAT!r}.")
        measured = [[float(value) for value in layer["thresholds"]] for layer in stored["layers"]]
        rule, routed = stored["rule"], len(target.routed_layers)
        pairs = {name: (stored["measured"][name], getattr(target, name)) for name in MUST_AGREE}
    for name, (old, new) in pairs.items():
        require(old == new, f"the two models differ in {name} ({old!r}, {new!r}): thresholds do not carry over.")
    require(not target.stacks, "a dark stack sets its threshold in training: leave --thresholds out.")
    require(target.router_kind.has_thresholds, f"the model has router={target.router!r}, which has no thresholds.")
    require(routed, "the model has no routed layers, so thresholds have no effect: leave --thresholds out.")
    thresholds = expand_thresholds(measured, rule, routed)
    if len(thresholds) != routed:
        raise InputError(f"{path} has thresholds for {len(thresholds)} routed layers, the model has {routed}.")
    return thresholds
