"""A routed text as the page and the report show it: plain data, made in one place for both."""

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
from chiar.generation.writer import Characters, Row, Sampling, Writer, darkness, open_writer, score_prompt
from chiar.kernels.spectral_entropy import spectral_entropy
from chiar.kernels.transform import Transform
from chiar.kernels.white_noise import white_noise_entropy
from chiar.model.load import count_parameters
from chiar.model.modeling import ChiarForCausalLM
from chiar.routing.flops import compare_flops
from chiar.routing.trace import LayerTrace, RoutingTrace
from chiar.visible import visible

BINS = 30
NOISE = 8192
"""White Gaussian vectors in the null."""
PART = "◦"
"""A token whose character is not whole yet."""


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
        capital = [note[0].upper() + note[1:] for note in notes]
        return cls(visible(Path(name).as_posix(), keep=""), model, codec, capital)

    @property
    def config(self) -> ChiarConfig:
        return self.model.config

    @cached_property
    def noise_N(self) -> Tensor:
        """H of white noise for this model. Any orthonormal basis leaves it white, so no transform is needed."""
        noise_ND = torch.randn(NOISE, self.config.hidden_size, generator=torch.Generator().manual_seed(0))
        return spectral_entropy(noise_ND, Transform(), self.config.entropy_eps, self.config.entropy_dc_weight)

    @cached_property
    def noise(self) -> tuple[float, float]:
        """Mean and deviation of that: exact where they are known."""
        if self.config.entropy_eps == 0.0 and self.config.entropy_dc_weight == 1.0:
            return white_noise_entropy(self.config.hidden_size)
        return float(self.noise_N.mean()), float(self.noise_N.std())

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
        return {
            "name": self.name,
            "parameters": count_parameters(config),
            "width": config.hidden_size,
            "kinds": list(config.layer_types or []),
            "router": routers.get(str(config.router), f"routed by {config.router}")
            if config.routed_layers
            else "no routing",
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


class Pieces:
    """What to show of each token: a character that several tokens make up stands where it is whole."""

    def __init__(self, codec: TextCodec) -> None:
        self.codec, self.characters = codec, Characters(codec)

    def next(self, token: int) -> str:
        """Safe to show; line breaks and tabs are kept."""
        count, text = self.characters.add(token)
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


def views(
    loaded: LoadedModel,
    text: str,
    steering: Steering | None = None,
    most: int = 2**31,
    sampling: Sampling | None = None,
) -> Iterator[dict[str, Any]]:
    """All the page shows of a text, then, with `sampling`, each token that continues it: itself, its route in every
    layer, all that was written. Each is one pass of the model, so others get their turn in between."""
    model, config = loaded.model, loaded.config
    most = min(most, config.max_position_embeddings) if config.positions == "learned" else most
    ids = encode_text(loaded, text, most)
    if sampling is not None and len(ids) == most:
        raise InputError(f"the text fills all {most:,} tokens there is room for: shorten it.")
    writer, pieces = Writer(model, traced=True, around=partial(steered, model.model, steering)), Pieces(loaded.codec)

    def trace() -> RoutingTrace:
        assert writer.trace is not None
        return moved_thresholds(config, steering, writer.trace)

    read = writer.read_prompt(ids)
    nats = [score.logprob and -score.logprob for score in score_prompt(model, ids, read)]
    yield describe_view(loaded, [pieces.next(token) for token in ids], trace(), nats)
    if sampling is None:
        return
    room = min(sampling.max_new_tokens, most - len(ids))
    row = Row(loaded.codec, replace(sampling, max_new_tokens=room, logprobs=0))
    writer.begin(read, [row])
    written = []
    for score in writer.follow(row):
        written.append(score.id)
        token = describe_tokens([pieces.next(score.id)], trace(), [-(score.logprob or 0.0)])[0]
        layers = [describe_layer(trace(), layer) for layer in trace().layers]
        yield {"token": token, "id": score.id, "layers": layers, "text": loaded.codec.decode(written)}


def describe_view(
    loaded: LoadedModel, pieces: list[str], trace: RoutingTrace, nats: list[float | None]
) -> dict[str, Any]:
    known = [value for value in nats if value is not None]
    loss = sum(known) / len(known) if known else None
    return {
        "model": loaded.about,
        "tokens": describe_tokens(pieces, trace, nats),
        "layers": [describe_layer(trace, layer) for layer in trace.layers],
        "loss": loss,
        "perplexity": math.exp(min(loss, 700)) if loss is not None else None,
        "flops": describe_flops(loaded.config, trace),
        "histogram": describe_histogram(loaded, trace),
        "reach": short(reach(trace)),
    }


def describe_tokens(pieces: list[str], trace: RoutingTrace, nats: list[float | None]) -> list[dict[str, Any]]:
    columns = zip(pieces, darkness(trace), nats, strict=True)
    return [{"piece": piece, "dark": short(dark), "nats": short(value)} for piece, dark, value in columns]


def describe_layer(trace: RoutingTrace, layer: LayerTrace) -> dict[str, Any]:
    probabilities_BTK = layer.probabilities_BTK
    return {
        "number": layer.index + 1,
        "kind": layer.kind,
        "operators": layer.operators,
        "choice": layer.choice_BT[0].tolist(),
        "entropy": first_row(layer.entropy_BT),
        "thresholds": layer.thresholds,
        "gate": first_row(layer.gate_BT),
        "probability": first_row(None if probabilities_BTK is None else probabilities_BTK[..., -1]),
        "use": trace.operator_use(layer.index),
    }


def reach(trace: RoutingTrace) -> float | None:
    """The largest shift that still changes a route of this text; None where nothing is compared with a cut."""
    gaps = [0.0]
    for layer in (trace.layers[index] for index in trace.routed_layers):
        if layer.thresholds and layer.entropy_BT is not None:
            gaps += [float((layer.entropy_BT - cut).abs().max()) for cut in layer.thresholds]
        elif layer.probabilities_BTK is not None:
            log_p_BTK = layer.probabilities_BTK.float().clamp_min(1e-30).log()
            gaps.append(float((log_p_BTK[..., -1] - log_p_BTK[..., :-1].amax(-1)).abs().max()))
    return max(gaps) or None


def describe_flops(config: ChiarConfig, trace: RoutingTrace) -> dict[str, float]:
    """Counted, forward, per token, for these routes; the baseline has attention in every layer."""
    every = dict.fromkeys(config.operators or [], 1.0)
    shares = [every if config.routing == "soft" else trace.operator_use(index) for index in trace.routed_layers]
    savings = compare_flops(config, trace.real_BT.shape[1], shares)
    return {"model": savings.chiar.total, "baseline": savings.baseline.total, "saved": savings.total}


def describe_histogram(loaded: LoadedModel, trace: RoutingTrace) -> dict[str, Any] | None:
    """H of every layer's input, and of white noise, as densities over the same bins."""
    seen = [(layer.index + 1, layer.entropy_BT[0].float()) for layer in trace.layers if layer.entropy_BT is not None]
    if not seen:
        return None
    everything = torch.cat([loaded.noise_N, *(values for _, values in seen)])
    low, high = float(everything.min()), float(everything.max())
    high = max(high, low + 1e-6)

    def density(values: Tensor) -> list[float | None]:
        counts = torch.histc(values, BINS, low, high)
        return numbers(counts / counts.sum().clamp_min(1) * BINS)

    return {
        "low": low,
        "high": high,
        "null": density(loaded.noise_N),
        "null_mean": loaded.noise[0],
        "null_deviation": loaded.noise[1],
        "layers": [{"number": number, "density": density(values)} for number, values in seen],
    }


def short(value: float | None) -> float | None:
    """Six digits; None for what JSON has no word for."""
    return float(f"{value:.6g}") if value is not None and math.isfinite(value) else None


def numbers(values_T: Tensor) -> list[float | None]:
    return [short(value) for value in values_T.tolist()]


def first_row(values_BT: Tensor | None) -> list[float | None] | None:
    return None if values_BT is None else numbers(values_BT[0])
