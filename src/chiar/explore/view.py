"""A routed text as the page and its export show it: plain data, made in one place for both."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from chiar.config import ChiarConfig
from chiar.data.tokens import TextCodec
from chiar.errors import InputError
from chiar.explore.steering import Steering, moved_thresholds, steered, ways_to_steer, why_not
from chiar.generation.writer import Characters, Row, Sampling, Writer, darkness, open_writer, room_behind, score_prompt
from chiar.kernels.spectral_entropy import spectral_entropy
from chiar.kernels.transform import Transform
from chiar.kernels.white_noise import white_noise_entropy
from chiar.model.load import count_parameters
from chiar.model.modeling import ChiarForCausalLM
from chiar.model.trace import LayerTrace, RoutingTrace
from chiar.routing.flops import compare_flops
from chiar.visible import visible

# Bins of a histogram of H, white Gaussian vectors to compare it with, and what stands for a part of a character.
BINS, NOISE, PART = 30, 8192, "◦"


class TooLong(InputError):
    """A text over a limit."""

    status = 413


@dataclass
class LoadedModel:
    """A model to look at, with what a reader should know of it."""

    name: str
    model: ChiarForCausalLM
    codec: TextCodec
    notes: list[str]

    @classmethod
    def open(cls, name: str, tokenizer: Path | None = None, seed: int = 0) -> "LoadedModel":
        notes: list[str] = []
        model, codec, found = open_writer(name, "prefill", False, tokenizer, "cpu", seed, notes.append)
        config = model.config
        if found is not None:
            notes.append(f"trained on {config.max_position_embeddings:,} tokens in a row: beyond that it guesses.")
        if config.routing == "soft":
            notes.append("soft routing: both paths run for every token and are blended; the darker one is marked.")
        if config.target_fraction is not None:
            notes.append("its thresholds were found in training, to hold a share; moving them here changes no file.")
        return cls(visible(Path(name).as_posix(), keep=""), model, codec, [n[0].upper() + n[1:] for n in notes])

    @property
    def config(self) -> ChiarConfig:
        return self.model.config

    @cached_property
    def noise(self) -> tuple[Tensor, float, float]:
        """H of white noise for this model, its mean and deviation, exact where they are known. Any orthonormal basis
        leaves noise white, so no transform is needed."""
        width, eps, dc_weight = self.config.hidden_size, self.config.entropy_eps, self.config.entropy_dc_weight
        noise_ND = torch.randn(NOISE, width, generator=torch.Generator().manual_seed(0))
        entropy_N = spectral_entropy(noise_ND, Transform(), eps, dc_weight)
        exact = white_noise_entropy(width) if (eps, dc_weight) == (0.0, 1.0) else None
        return entropy_N, *(exact or (float(entropy_N.mean()), float(entropy_N.std())))

    @cached_property
    def about(self) -> dict[str, Any]:
        """What the page says of it before any text is routed."""
        config = self.config
        routers = {
            "entropy": "routed by spectral entropy, H\u00a0>\u00a0τ",
            "learned": f"routed by a learned router ({config.routing})",
            "random": f"routed by a random hash of the {config.random_key}",
            "static": "routed by layer, whatever the token",
        }
        how = routers.get(str(config.router), f"routed by {config.router}")
        return {
            "name": self.name,
            "parameters": count_parameters(config),
            "width": config.hidden_size,
            "kinds": list(config.layer_types or []),
            "router": how if config.routed_layers else "no routing",
            "notes": self.notes,
            "steer": ways_to_steer(config),
            "unsteerable": why_not(config),
        }


def open_models(names: list[str], tokenizer: Path | None = None, seed: int = 0) -> list[LoadedModel]:
    if len(set(names)) < len(names):
        raise InputError(f"{names[0]} is named twice: two different models are compared.")
    models = [LoadedModel.open(name, tokenizer, seed) for name in names]
    for loaded in models:
        _ = loaded.noise, loaded.about  # before anybody waits for them
    return models


class Pieces(Characters):
    """What to show of each token: a character that several tokens make up stands where it is whole."""

    def next(self, token: int) -> str:
        """Safe to show; line breaks and tabs are kept."""
        count, text = self.add(token)
        return (visible(text) or self.codec.pieces([token])[0]) if count else PART


def encode_text(loaded: LoadedModel, text: str, most: int) -> list[int]:
    """Token ids, at least one and at most `most`."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InputError("the text holds half of a surrogate pair, which is no character: remove it.") from None
    ids = loaded.codec.encode(text)
    if not ids:
        raise InputError("the text is empty: type something to route.")
    if len(ids) > most:
        raise TooLong(f"the text has {len(ids):,} tokens and {most:,} are the most here: shorten it.")
    return ids


def route_text(
    loaded: LoadedModel, text: str, steering: Steering | None = None, most: int = 2**31, then: Sampling | None = None
) -> Iterator[dict[str, Any]]:
    """All the page shows of a text; `then` each token that continues it: itself, its route in every layer, all that was
    written. Each is one pass of the model, so others get their turn in between."""
    model, config, codec = loaded.model, loaded.config, loaded.codec
    most = room_behind(config, 0, most)
    ids = encode_text(loaded, text, most)
    if then is not None and len(ids) == most:
        raise InputError(f"the text fills all {most:,} tokens there is room for: shorten it.")
    writer, pieces = Writer(model, traced=True, around=partial(steered, model.model, steering)), Pieces(codec)

    def routes() -> RoutingTrace:
        assert writer.trace is not None
        return moved_thresholds(config, steering, writer.trace)

    read = writer.read_prompt(ids)
    nats = [score.logprob and -score.logprob for score in score_prompt(model, ids, read)]
    yield describe_text(loaded, [pieces.next(token) for token in ids], routes(), nats)
    if then is None:
        return
    row, written = Row(codec, replace(then, max_new_tokens=min(then.max_new_tokens, most - len(ids)), logprobs=0)), []
    writer.begin(read, [row])
    for score in writer.follow(row):
        written.append(score.id)
        shown = describe_tokens([pieces.next(score.id)], routes(), [-(score.logprob or 0.0)])
        yield {"token": shown[0], "id": score.id, "layers": describe_layers(routes()), "text": codec.decode(written)}


def describe_text(loaded: LoadedModel, pieces: list[str], trace: RoutingTrace, nats: list[Any]) -> dict[str, Any]:
    loss = sum(nats[1:]) / len(nats[1:]) if nats[1:] else None
    return {
        "model": loaded.about,
        "tokens": describe_tokens(pieces, trace, nats),
        "layers": describe_layers(trace),
        "loss": loss,
        "perplexity": None if loss is None else math.exp(min(loss, 700)),
        "flops": describe_flops(loaded.config, trace),
        "histogram": describe_histogram(loaded, trace),
        "reach": plain(max(map(reach, trace.layers), default=0.0) or None),
    }


def describe_tokens(pieces: list[str], trace: RoutingTrace, nats: list[Any]) -> list[dict[str, Any]]:
    columns = zip(pieces, darkness(trace), nats, strict=True)
    return [{"piece": piece, "dark": plain(dark), "nats": plain(value)} for piece, dark, value in columns]


def describe_layers(trace: RoutingTrace) -> list[dict[str, Any]]:
    def first(values_BT: Tensor | None) -> Any:
        return None if values_BT is None else plain(values_BT[0])

    return [
        {
            "number": layer.index + 1,
            "kind": layer.kind,
            "operators": layer.operators,
            "choice": layer.choice_BT[0].tolist(),
            "entropy": first(layer.entropy_BT),
            "thresholds": layer.thresholds,
            "gate": first(layer.gate_BT),
            "probability": first(None if layer.probabilities_BTK is None else layer.probabilities_BTK[..., -1]),
            "use": trace.operator_use(layer.index),
        }
        for layer in trace.layers
    ]


def reach(layer: LayerTrace) -> float:
    """The largest shift that still changes a route of this text; 0 where nothing is compared with a cut."""
    if layer.thresholds and layer.entropy_BT is not None:
        return max(float((layer.entropy_BT - cut).abs().max()) for cut in layer.thresholds)
    if layer.probabilities_BTK is None:
        return 0.0
    log_p_BTK = layer.probabilities_BTK.float().clamp_min(1e-30).log()
    return float((log_p_BTK[..., -1] - log_p_BTK[..., :-1].amax(-1)).abs().max())


def describe_flops(config: ChiarConfig, trace: RoutingTrace) -> dict[str, float]:
    """Counted, forward, per token, for these routes; the baseline has attention in every layer."""
    every = dict.fromkeys(config.operators or [], 1.0)
    shares = [every if config.routing == "soft" else trace.operator_use(index) for index in trace.routed_layers]
    savings = compare_flops(config, trace.real_BT.shape[1], shares)
    return {"model": savings.chiar.total, "baseline": savings.baseline.total, "saved": savings.total}


def describe_histogram(loaded: LoadedModel, trace: RoutingTrace) -> dict[str, Any] | None:
    """H of every layer's input, and of white noise, as densities over the same bins."""
    seen = {layer.index + 1: layer.entropy_BT[0].float() for layer in trace.layers if layer.entropy_BT is not None}
    if not seen:
        return None
    noise_N, mean, deviation = loaded.noise
    everything = torch.cat([noise_N, *seen.values()])
    low, high = float(everything.min()), max(float(everything.max()), float(everything.min()) + 1e-6)

    def density(values: Tensor) -> Any:
        counts = torch.histc(values, BINS, low, high)
        return plain(counts / counts.sum().clamp_min(1) * BINS)

    layers = [{"number": number, "density": density(values)} for number, values in seen.items()]
    null = {"null": density(noise_N), "null_mean": mean, "null_deviation": deviation}
    return {"low": low, "high": high, "layers": layers, **null}


def plain(value: Any) -> Any:
    """A number of six digits, or as many as a tensor has; None for what JSON has no word for."""
    if isinstance(value, Tensor):
        return [plain(number) for number in value.tolist()]
    return float(f"{value:.6g}") if value is not None and math.isfinite(value) else None
