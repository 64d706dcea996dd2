"""Where to cut: thresholds from the entropies a model really produces, on disk, and in another model."""

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
# One model's thresholds mean something in another only if H is the same function of the same kind of vector.
MUST_AGREE = ("hidden_size", "vocab_size", "basis", "entropy_eps", "entropy_dc_weight")
Batches = Iterable[dict[str, Tensor]]
Progress = Callable[[int], None]


@dataclass
class LayerReport:
    """The scores one layer or dark stack cuts (layer None: H of the token embeddings)."""

    layer: int | None
    tokens: int
    percentiles: dict[int, float]
    mean: float
    thresholds: list[float]
    split: list[float]  # fraction of tokens each operator gets at these thresholds
    # Of spectral entropies: the Kolmogorov–Smirnov distance to white noise of the same width, and
    distance_from_noise: float | None
    shift_from_noise: float | None  # (mean − white noise's mean) / white noise's standard deviation


@dataclass
class Calibration:
    """New thresholds and what they were taken from."""

    rule: str
    layers: list[LayerReport]  # the embeddings first, under that rule; then the routed layers, with the split they get
    noise_mean: float | None
    noise_deviation: float | None
    passes: int = 1  # how often the stream was read
    converged: bool = True  # whether every split of the rule `layers` was stable in the last pass
    score: str = SPECTRAL  # what is cut

    def thresholds(self, routed_layers: int) -> list:
        return spread([layer.thresholds for layer in self.layers], self.rule, routed_layers)


def spread(measured: list[list[float]], rule: str, routed_layers: int) -> list:
    """As `ChiarConfig.thresholds` stores them: a number a routed layer, or a pair with three operators."""
    layers = measured[:1] * routed_layers if rule == "embeddings" else measured
    return [values[0] if len(values) == 1 else values for values in layers]


def cut(entropy_N: np.ndarray, boundaries: int, fraction: float | None) -> list[float]:
    """The paper's rule: the midpoint of the 33rd and 67th percentiles, or both of them with three operators. With
    `fraction`, the quantiles that send this share to attention (and share the rest evenly)."""
    if fraction is not None:
        return np.quantile(entropy_N, [(1.0 - fraction) * (k + 1) / boundaries for k in range(boundaries)]).tolist()
    low, high = np.quantile(entropy_N, [0.33, 0.67]).tolist()
    return [(low + high) / 2] if boundaries == 1 else [low, high]


def noise_entropies(width: int, eps: float, dc_weight: float) -> np.ndarray:
    """H of white Gaussian vectors, computed by the same operator. An orthonormal basis leaves them white."""
    noise = torch.randn(16384, width, generator=torch.Generator().manual_seed(0))
    return np.sort(spectral_entropy(noise, Transform(), eps, dc_weight).double().numpy())


def report(layer: int | None, entropy_N: np.ndarray, cuts: list[float], noise_N: np.ndarray | None) -> LayerReport:
    seen_N, mean = np.sort(entropy_N), float(entropy_N.mean())
    above = [1.0, *(float((seen_N > cut).mean()) for cut in cuts), 0.0]
    percentiles = dict(zip(PERCENTILES, np.percentile(seen_N, PERCENTILES).tolist(), strict=True))
    split = [more - less for more, less in pairwise(above)]
    distance = shift = None
    if noise_N is not None:
        both = np.concatenate([seen_N, noise_N])
        ours, white = (np.searchsorted(values, both, "right") / len(values) for values in (seen_N, noise_N))
        distance, shift = float(np.abs(ours - white).max()), float((mean - noise_N.mean()) / noise_N.std())
    return LayerReport(layer, len(seen_N), percentiles, mean, cuts, split, distance, shift)


@torch.no_grad()
def calibrate(
    model: Any, batches: Batches, rule: str = "layers", fraction: float | None = None, passes: int = 6,
    tolerance: float = 0.01, progress: Progress = lambda tokens: None,
) -> Calibration:  # fmt: skip
    """Thresholds from batches of {"input_ids", optionally "attention_mask"}, for `set_thresholds`. The model stays.

    "embeddings" is the paper's rule: H of the token embeddings, one τ for all layers; the model may be a baseline.
    "layers" cuts each routed layer at quantiles of the states it really sees. Those depend on the thresholds of the
    layers before, so the stream is read again, at most `passes` times, until no split moves more than `tolerance`.
    It moves dark stacks too: without `fraction` to the configuration's own f."""
    decoder: ChiarModel = getattr(model, "model", model)
    config = decoder.config
    if rule not in RULES:
        raise unknown_name("rule", rule, RULES)
    if fraction is not None and not 0.0 < fraction < 1.0:
        raise InputError(f"fraction must lie strictly between 0 and 1, got {fraction}.")
    if isinstance(batches, Iterator):
        raise InputError("the batches are read several times: give a list or another re-iterable, not an iterator.")
    if config.target_fraction is not None and not config.stacks:
        raise InputError("a model with target_fraction found its thresholds in training: it is not calibrated.")
    if rule == "layers" and not config.routed_layers:
        raise InputError("the model has no routed layers: use rule 'embeddings' to take τ from a baseline.")
    kind = config.router_kind
    if config.stacks:
        check_stacks(config, rule)
    elif rule == "layers" and not kind.has_thresholds:
        raise InputError(f"router={config.router!r} has no thresholds to calibrate: only the entropy router does.")
    assert config.operators is not None
    boundaries, training = len(config.operators) - 1, decoder.training
    before = [cut for (cut,) in in_force(decoder)] if config.stacks else config.thresholds
    routed = config.routed_layers if kind.has_thresholds or config.stacks else []
    fractions = [fraction] * len(routed) if fraction or not config.stacks else config.layer_fractions() or []
    score = SPECTRAL if rule == "embeddings" else kind.score or "lead of attention's logit"
    noise_N = None
    if score == SPECTRAL:
        noise_N = noise_entropies(config.hidden_size, config.entropy_eps, config.entropy_dc_weight)
    moved, done = 0.0, 1
    try:
        decoder.eval()
        if rule == "embeddings":
            seen = measure(decoder, batches, [None], progress)
            used = [cut(seen[None], boundaries, fraction)]
            if routed:
                decoder.set_thresholds(spread(used, rule, len(routed)))
                seen |= measure(decoder, batches, routed, progress)
                used, done = used * len(seen), 2
        for done in range(1, passes + 1) if rule == "layers" else ():
            seen = measure(decoder, batches, routed, progress)
            # Reported are the thresholds in force in the last pass, so that the split shown is the split had.
            used = in_force(decoder)
            found = [cut(score_N, boundaries, f) for score_N, f in zip(seen.values(), fractions, strict=True)]
            moved = max(
                abs(float((entropy_N > old).mean() - (entropy_N > new).mean()))
                for entropy_N, olds, news in zip(seen.values(), used, found, strict=True)
                for old, new in zip(olds, news, strict=True)
            )
            if moved <= tolerance or done == passes:
                break
            decoder.set_thresholds(spread(found, rule, len(found)))
    finally:
        decoder.set_thresholds(before)
        decoder.train(training)
    reports = [report(layer, seen[layer], cuts, noise_N) for layer, cuts in zip(seen, used, strict=True)]
    mean, deviation = (None, None) if noise_N is None else (float(noise_N.mean()), float(noise_N.std()))
    return Calibration(rule, reports, mean, deviation, done, moved <= tolerance, score)


def check_stacks(config: ChiarConfig, rule: str) -> None:
    """InputError unless the router of dark stacks compares a score with a threshold, and is asked for that."""
    if not config.router_kind.can_follow:
        known = [name for name, kind in ROUTERS.items() if kind.of_stacks and kind.can_follow]
        own = ": its share is random_fraction" if config.router_kind.fraction else ""
        raise InputError(f"router={config.router!r} compares nothing with a threshold{own}: {', '.join(known)} do.")
    require(rule == "layers", "what chooses for a dark stack does not read embeddings: use rule 'layers'.")


def in_force(decoder: ChiarModel) -> list[list[float]]:
    """The thresholds of each routed layer or dark stack."""
    state = decoder.router_state
    if state is None:
        return [list(cuts) for cuts in decoder.config.layer_thresholds()]
    return [[threshold] for threshold in state.threshold_L.tolist()]


def measure(
    decoder: ChiarModel, batches: Batches, layers: Sequence[int | None], progress: Progress
) -> dict[int | None, np.ndarray]:
    """The scores that layers cut under the thresholds in force; [None]: entropies of the token embeddings."""
    config = decoder.config
    seen: dict[int | None, list[np.ndarray]] = {layer: [] for layer in layers}
    for batch in batches:
        inputs = {name: value.to(decoder.device) for name, value in batch.items()}
        mask_BT = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).bool()
        if None in seen:
            check_tokens(batch["input_ids"], None, config.vocab_size)
            x_BTD = decoder.begin_stream(decoder.embed_tokens(inputs["input_ids"]))
            how = decoder.basis.transform(), config.entropy_eps, config.entropy_dc_weight
            found: dict[int | None, Tensor] = {None: spectral_entropy(x_BTD, *how)[mask_BT]}
        else:
            routes = decoder(**inputs, output_routes=True).routes
            found = {layer: route.score_BT[mask_BT] for layer, route in zip(seen, routes, strict=True)}
        for layer, entropy_N in found.items():
            seen[layer].append(entropy_N.double().cpu().numpy())
        progress(batch["input_ids"].numel())
    require(all(seen.values()), "no entropies were seen: the token stream is empty.")
    return {layer: np.concatenate(parts) for layer, parts in seen.items()}


def to_json(found: Calibration, config: ChiarConfig) -> str:
    measured = {name: getattr(config, name) for name in MUST_AGREE}
    return json.dumps({"format": FORMAT, "measured": measured, **asdict(found)}, indent=2)


def read_thresholds(path: Path, target: ChiarConfig) -> list:
    """Thresholds for `target` as its configuration stores them: one τ everywhere, or those measured layer by layer."""
    check_file(path)
    with errors_as(f"{path} is not a calibration", ValueError, KeyError, TypeError):
        stored = json.loads(path.read_text(encoding="utf-8"))
        if stored["format"] != FORMAT:
            raise ValueError(f"it does not say format {FORMAT!r}.")
        measured = [[float(value) for value in layer["thresholds"]] for layer in stored["layers"]]
        rule, routed = stored["rule"], len(target.routed_layers)
        differing = {name: (stored["measured"][name], getattr(target, name)) for name in MUST_AGREE}
    for name, (ours, theirs) in differing.items():
        require(ours == theirs, f"the two models differ in {name} ({ours!r}, {theirs!r}), so thresholds do not carry.")
    require(not target.stacks, "a dark stack finds its threshold in training: leave --thresholds out.")
    require(target.router_kind.has_thresholds, f"the model has router={target.router!r}, which has no thresholds.")
    require(routed, "the model has no routed layers, so thresholds have no effect: leave --thresholds out.")
    thresholds = spread(measured, rule, routed)
    if len(thresholds) != routed:
        raise InputError(f"{path} has thresholds for {len(thresholds)} routed layers, the model has {routed}.")
    return thresholds
