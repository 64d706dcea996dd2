"""A routed text as plain data, as the page and its export show it."""

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from chiar.colours import layer_numbers
from chiar.data.tokens import Pieces
from chiar.errors import InputError, require
from chiar.explore.steering import Steering, lead, steered, ways_to_steer, why_not
from chiar.generation.writer import Row, Sampling, Writer, darkness, open_writer, room_after, score_prompt
from chiar.model.load import count_parameters
from chiar.model.trace import LayerTrace, RoutingTrace
from chiar.plots.model import RULES
from chiar.routing.calibration import noise_entropies
from chiar.routing.flops import compare_flops
from chiar.visible import SURROGATES, visible

STATIC = Path(__file__).parent / "static"
BINS = 30  # of a histogram of H


class TooLong(InputError):
    status = 413


class LoadedModel:
    """A model to explore. `about`: what the page shows of it before any text is routed. `noise_N`: H of white noise."""

    def __init__(self, name: str, tokenizer: Path | None, seed: int) -> None:
        notes: list[str] = []
        self.model, self.codec, folder = open_writer(name, "prefill", False, tokenizer, "cpu", notes.append, seed)
        self.name, self.config = visible(Path(name).as_posix(), keep=""), self.model.config
        config, width = self.config, self.config.hidden_size
        if config.routing == "soft":
            notes.append("soft routing: both paths run for every token and are blended; the darker one is marked.")
        rule = RULES.get(str(config.router), "{router}, a custom router").format(**config.to_dict())
        self.about: dict[str, Any] = {"name": self.name, "parameters": count_parameters(config), "width": width}
        self.about["trained"] = None if folder is None else config.max_position_embeddings
        self.about |= {"router": f"routed by {rule}" if config.routed_layers else "no routing"}
        self.about |= {"kinds": config.layer_types or [], "notes": [note[0].upper() + note[1:] for note in notes]}
        self.about |= {"steer": ways_to_steer(config), "unsteerable": why_not(config)}
        self.noise_N = torch.tensor(noise_entropies(width, config.entropy_eps, config.entropy_dc_weight)).float()


def open_models(names: list[str], tokenizer: Path | None = None, seed: int = 0) -> list[LoadedModel]:
    if len(set(names)) < len(names):
        raise InputError(f"{names[0]} is given twice: name two different models to compare.")
    return [LoadedModel(name, tokenizer, seed) for name in names]


def route_text(
    loaded: LoadedModel,
    text: str,
    steering: Steering | None = None,
    most: int = 2**31,
    sampling: Sampling | None = None,
) -> Iterator[dict[str, Any]]:
    """All the page shows of a text; with `sampling`, then of each token that continues it. Each takes one pass."""
    model, config, codec = loaded.model, loaded.config, loaded.codec
    most = room_after(config, 0, most)
    require(not SURROGATES.search(text), "the text holds half of a surrogate pair, which is no character: remove it.")
    ids = codec.encode(text)
    require(ids, "the text is empty: type something to route.")
    if len(ids) > most:
        raise TooLong(f"the text has {len(ids):,} tokens, and at most {most:,} are allowed here: shorten it.")
    if sampling is not None and len(ids) == most:
        raise InputError(f"the text fills all {most:,} tokens there is room for: shorten it.")
    writer, pieces = Writer(model, traced=True, around=partial(steered, model.model, steering)), Pieces(codec)
    output = writer.read_prompt(ids)
    assert writer.trace is not None
    nats = [score.logprob and -score.logprob for score in score_prompt(model, ids, output)]
    yield describe_text(loaded, [pieces.next(token) for token in ids], writer.trace, nats)
    if sampling is None:
        return
    room = min(sampling.max_new_tokens, most - len(ids))
    row, written = Row(codec, replace(sampling, max_new_tokens=room, logprobs=0)), []
    writer.begin(output, [row])
    for score in writer.follow(row):
        written.append(score.id)
        token = describe_tokens([pieces.next(score.id)], writer.trace, [-(score.logprob or 0.0)])[0]
        yield {"token": token, "id": score.id, "layers": describe_layers(writer.trace), "text": codec.decode(written)}


def describe_text(loaded: LoadedModel, pieces: list[str], trace: RoutingTrace, nats: list[Any]) -> dict[str, Any]:
    """FLOPs are counted, forward, per token, for these routes; the baseline has attention in every layer."""
    loss, config = sum(nats[1:]) / len(nats[1:]) if nats[1:] else None, loaded.config
    every = dict.fromkeys(config.operators or [], 1.0)
    shares = [every if config.routing == "soft" else trace.operator_use(index) for index in trace.routed_layers]
    savings = compare_flops(config, len(pieces), shares)
    record: dict[str, Any] = {"model": loaded.about, "layers": describe_layers(trace)}
    record |= {"loss": loss, "perplexity": None if loss is None else math.exp(min(loss, 700))}
    record["tokens"] = describe_tokens(pieces, trace, nats)
    record["flops"] = {"model": savings.chiar.total, "baseline": savings.baseline.total, "saved": savings.total}
    furthest = plain(max(map(reach, trace.layers), default=0.0) or None)
    return {**record, "histogram": describe_histogram(loaded, trace), "reach": furthest}


def describe_tokens(pieces: list[str], trace: RoutingTrace, nats: list[Any]) -> list[dict[str, Any]]:
    columns = zip(pieces, darkness(trace), nats, strict=True)
    return [{"piece": piece, "dark": plain(dark), "nats": plain(value)} for piece, dark, value in columns]


def describe_layers(trace: RoutingTrace) -> list[dict[str, Any]]:
    """A record for each layer, or dark stack. If there are stacks, only theirs have an entropy."""
    layers, stacks = [], any(layer.kind == "dark" for layer in trace.layers)
    for part in trace.parts:
        layer = trace.layers[part[0]]
        entropy_BT = layer.entropy_BT if layer.kind == "dark" or not stacks else None
        record: dict[str, Any] = {"number": layer_numbers(part), "kind": layer.kind, "operators": layer.operators}
        record |= {"choice": layer.choice_BT[0].tolist(), "use": trace.operator_use(layer.index)}
        record |= {"entropy": plain(entropy_BT), "entropy_name": layer.entropy_name, "thresholds": layer.thresholds}
        record["gate"] = plain(layer.gate_BT)
        p_BTK = layer.probabilities_BTK
        layers.append({**record, "probability": plain(None if p_BTK is None else p_BTK[..., -1])})
    return layers


def reach(layer: LayerTrace) -> float:
    """The largest shift that still changes a route of this text; 0 if the layer compares nothing with a cut."""
    if layer.thresholds and layer.entropy_BT is not None:
        return max(float((layer.entropy_BT - cut).abs().max()) for cut in layer.thresholds)
    p_BTK = layer.probabilities_BTK
    return 0.0 if p_BTK is None else float(lead(p_BTK.float().clamp_min(1e-30).log()).abs().max())


def describe_histogram(loaded: LoadedModel, trace: RoutingTrace) -> dict[str, Any] | None:
    """H of every layer's input, or before the dark stacks, as densities over the same bins; for spectral entropy also
    that of white noise. `layer` is an index into the view's layers."""
    parts = [trace.layers[part[0]] for part in trace.parts]
    dark = {n: layer for n, layer in enumerate(parts) if layer.kind == "dark"}
    shown = dark or dict(enumerate(parts))
    entropies = {n: layer.entropy_BT[0].float() for n, layer in shown.items() if layer.entropy_BT is not None}
    if not entropies:
        return None
    name = next(layer.entropy_name for layer in shown.values())
    noise_N = loaded.noise_N if name == "spectral entropy" else None
    everything = torch.cat([*entropies.values(), *([] if noise_N is None else [noise_N])])
    low, high = float(everything.min()), max(float(everything.max()), float(everything.min()) + 1e-6)

    def density(values: Tensor) -> Any:
        return plain(torch.histc(values, BINS, low, high)[None] / len(values) * BINS)

    layers = [{"layer": n, "density": density(values)} for n, values in entropies.items()]
    null: dict[str, Any] = {"null": None}
    if noise_N is not None:
        null = {"null": density(noise_N), "null_mean": float(noise_N.mean()), "null_deviation": float(noise_N.std())}
    return {"name": name, "low": low, "high": high, "layers": layers, **null}


def plain(value: Any) -> Any:
    """A number with six digits, or those of a tensor's only row; None for what JSON cannot express."""
    if isinstance(value, Tensor):
        return [plain(number) for number in value[0].tolist()]
    return float(f"{value:.6g}") if value is not None and math.isfinite(value) else None
