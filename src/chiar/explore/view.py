"""A routed text as the page and the report show it: plain data, made in one place for both."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from chiar.errors import InputError
from chiar.explore.loaded import LoadedModel
from chiar.explore.pieces import Pieces
from chiar.explore.steering import Steering, moved_thresholds, steered
from chiar.model.trace import LayerTrace, RoutingTrace
from chiar.routing.flops import compare_flops

BINS = 30
CHUNK = 128
"""Tokens whose logits are held at a time: a vocabulary of 50,257 takes 26 MB for them."""


class TooLong(InputError):
    """A text over a limit; over HTTP 413."""


def encode_text(loaded: LoadedModel, text: str, most: int | None = None) -> list[int]:
    """Token ids, at least one and at most `most` or as many as the model has positions for."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InputError("the text holds half of a surrogate pair, which is no character: remove it.") from None
    ids = loaded.codec.encode(text)
    if not ids:
        raise InputError("the text is empty: type something to route.")
    bounds = [bound for bound in (most, loaded.most_tokens) if bound is not None]
    if bounds and len(ids) > min(bounds):
        raise TooLong(f"the text has {len(ids):,} tokens and {min(bounds):,} are the most here: shorten it.")
    return ids


@torch.no_grad()
def route_view(loaded: LoadedModel, text: str, steering: Steering | None = None, most: int | None = None) -> dict:
    """Route a text and describe everything the page shows of it."""
    ids = encode_text(loaded, text, most)
    ids_BT = torch.tensor([ids])
    with steered(loaded.model.model, steering):
        output = loaded.model.model(ids_BT, output_routing=True)
    if steering is not None:
        moved_thresholds(loaded.config, steering, output.routing)
    pieces, nats = Pieces(loaded.codec), token_nats(loaded.model, output.last_hidden_state, ids_BT)
    return describe_view(loaded, [pieces.next(token) for token in ids], output.routing, nats)


def token_nats(model: Any, states_BTD: Tensor, ids_BT: Tensor) -> list[float | None]:
    """−ln p of each token given those before it; the first has none before it."""
    found: list[float | None] = [None]
    for start in range(0, ids_BT.shape[1] - 1, CHUNK):
        targets = ids_BT[0, start + 1 : start + 1 + CHUNK]
        logits = model.lm_head(states_BTD[0, start : start + len(targets)]).float()
        found += F.cross_entropy(logits, targets, reduction="none").tolist()
    return found


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


def darkness(trace: RoutingTrace) -> list[float]:
    """For each token the weight of attention, averaged over the routed layers; over all layers where none routes."""
    indices = trace.routed_layers or range(len(trace.layers))
    return torch.stack([attention_weight(trace.layers[index]) for index in indices]).mean(0).tolist()


def attention_weight(layer: LayerTrace) -> Tensor:
    """Of each token; what multiplies a chosen operator's output for its gradient's sake counts as 1."""
    if "attention" not in layer.operators:
        return torch.zeros(layer.choice_BT.shape[1])
    return layer.weights_BTK[0, :, layer.operators.index("attention")].float().clamp(max=1.0).cpu()


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


def describe_flops(config: Any, trace: RoutingTrace) -> dict[str, float]:
    """Counted, forward, per token, for these routes; the baseline has attention in every layer."""
    every = dict.fromkeys(config.operators, 1.0)
    shares = [every if config.routing == "soft" else trace.operator_use(index) for index in trace.routed_layers]
    savings = compare_flops(config, trace.real_BT.shape[1], shares)
    return {"model": savings.chiar.total, "baseline": savings.baseline.total, "saved": savings.total}


def describe_histogram(loaded: LoadedModel, trace: RoutingTrace) -> dict[str, Any] | None:
    """H of every layer's input, and of white noise, as densities over the same bins."""
    seen = [(layer.index + 1, layer.entropy_BT[0]) for layer in trace.layers if layer.entropy_BT is not None]
    if not seen:
        return None
    null = loaded.null
    everything = torch.cat([null.sample_N.float(), *(values.float().cpu() for _, values in seen)])
    low, high = float(everything.min()), float(everything.max())
    high = max(high, low + 1e-6)

    def density(values: Tensor) -> list[float | None]:
        counts = torch.histc(values.float().cpu(), BINS, low, high)
        return numbers(counts / counts.sum().clamp_min(1) * BINS)

    return {
        "low": low,
        "high": high,
        "null": density(null.sample_N),
        "null_mean": null.mean,
        "null_deviation": null.deviation,
        "layers": [{"number": number, "density": density(values)} for number, values in seen],
    }


def short(value: float | None) -> float | None:
    """Six digits; None for what JSON has no word for."""
    return float(f"{value:.6g}") if value is not None and math.isfinite(value) else None


def numbers(values_T: Tensor) -> list[float | None]:
    return [short(value) for value in values_T.tolist()]


def first_row(values_BT: Tensor | None) -> list[float | None] | None:
    return None if values_BT is None else numbers(values_BT[0])
