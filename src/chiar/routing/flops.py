"""Counted floating-point operations of a forward pass, per token, by layer, operator and route. A multiply-add is 2.

Counted: every matrix product (projections, scores, DCT, router, carry, gate, output projection), and filters along
time. A dark layer counts for dark tokens only, and the router and carry of a dark stack in its first layer. Not
counted: norms, activations, softmax, biases, residual sums, dropout, the embedding look-up, the reduction of a spectrum
or a prediction to H (all O(D) or O(V) per token), and a gate computed once per batch or row. Training costs about three
times as much, in the same proportions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from chiar.config import ChiarConfig
from chiar.errors import InputError, require, unknown_name
from chiar.kernels.carry import AT_ONCE
from chiar.registry import OPERATORS, PARTS, Work, is_light

TRANSFORMS = ("gemm", "even_odd", "free")
"""The cost of a transform to or from the basis: its full matrix, the DCT's two halves (as executed), or nothing."""
Shares = Sequence[Mapping[str, float]]
"""For each routed layer, the share of tokens each operator runs on."""
Costs = dict[tuple[int | None, str], float]


@dataclass(frozen=True)
class FlopCount:
    """FLOPs per token of one model at one length, by layer (None: outside the layers) and part."""

    costs: Costs
    length: int

    @property
    def total(self) -> float:
        return sum(self.costs.values())

    def part(self, *parts: str, layers: Sequence[int] | None = None) -> float:
        """FLOPs of the named parts, in all layers or only some."""
        return sum(n for (i, part), n in self.costs.items() if part in parts and (layers is None or i in layers))


def count_flops(
    config: ChiarConfig, length: int, shares: Shares | None = None, transform: str = "even_odd"
) -> FlopCount:
    """FLOPs if each token runs only its own operator. `shares` are measured by a trace, or the `operator_shares` of an
    f, by default the configuration's. The filter Cᵀ diag(w) C costs two transforms."""
    require(length >= 1, f"length must be at least 1, got {length}.")
    costs, basis_flops = model_costs(config), transform_cost(config, transform)
    for layer, layer_share in enumerate(layer_shares(config, shares)):
        works = {}
        for name, share in layer_share.items():
            keys = share if config.keys == "routed" or layer in dark_layers(config) else float(share > 0)
            works[name] = Work(share, keys, visible_pairs(length, share, keys, window_of(config, layer)), basis_flops)
        costs |= layer_costs(config, layer, works, basis_flops, length)
    return FlopCount(costs, length)


def dark_layers(config: ChiarConfig) -> list[int]:
    return [layer for stack in config.stacks.values() for layer in stack]


def window_of(config: ChiarConfig, layer: int) -> int | None:
    return config.window if (config.layer_types or [])[layer] == "attention" else None


def layer_shares(config: ChiarConfig, shares: Shares | None) -> list[Mapping[str, float]]:
    """For every layer, the share of tokens each of its operators runs on."""
    result: list[Mapping[str, float]] = [{kind: 1.0} for kind in config.layer_types or []]
    for first, share in zip(config.routed_layers, checked_shares(config, shares), strict=True):
        result[first] = share
        for layer in config.stacks.get(first, ()):
            result[layer] = {"attention": share["attention"]}
    return result


def operator_shares(config: ChiarConfig, fraction: float | Sequence[float] | None = None) -> list[dict[str, float]]:
    """The shares for one f, or one per routed layer; with three operators the others split the rest evenly. f defaults
    to target_fraction, to that of the random router, else to ½. A static router assigns whole layers."""
    assert config.operators is not None
    count, others = len(config.routed_layers), len(config.operators) - 1
    if config.routing == "soft":
        return [dict.fromkeys(config.operators, 1.0)] * count
    kind = config.router_kind
    if kind.decides_by_layer:
        require(fraction is None, "a static router determines f: leave the fraction out.")
        return [{name: float(name == chosen) for name in config.operators} for chosen in config.static_operators or []]
    if fraction is None:
        fraction = kind.fraction(config) if kind.fraction else config.layer_fractions() or 0.5
    fractions = [fraction] * count if isinstance(fraction, int | float) else list(fraction)
    require(len(fractions) == count, f"{len(fractions)} fractions for {count} routed layers.")
    require(all(0.0 <= f <= 1.0 for f in fractions), f"fractions must lie between 0 and 1, got {fraction}.")
    return [{name: f if name == "attention" else (1.0 - f) / others for name in config.operators} for f in fractions]


def checked_shares(config: ChiarConfig, shares: Shares | None) -> Shares:
    """The given shares, by default those of the configuration's f; InputError unless they fit the routed layers."""
    assert config.operators is not None
    if shares is None:
        return operator_shares(config)
    if len(shares) != len(config.routed_layers):
        raise InputError(f"got shares of {len(shares)} layers for {len(config.routed_layers)} routed layers.")
    total = len(config.operators) if config.routing == "soft" else 1
    for share in map(dict, shares):
        if set(share) != set(config.operators) or not all(0.0 <= value <= 1.0 for value in share.values()):
            raise InputError(f"a share between 0 and 1 is needed for each of {config.operators}, got {share}.")
        if abs(sum(share.values()) - total) > 1e-5:  # measured shares are rounded to six digits in metrics
            raise InputError(f"shares of a layer must add up to {total} under {config.routing} routing, got {share}.")
    return shares


def transform_cost(config: ChiarConfig, transform: str = "even_odd") -> float:
    """Of one token. Only a DCT of even width has halves, and the identity costs nothing."""
    if transform not in TRANSFORMS:
        raise unknown_name("transform", transform, TRANSFORMS)
    if transform == "free" or config.basis == "identity":
        return 0.0
    halved = transform == "even_odd" and config.basis == "dct" and config.hidden_size % 2 == 0
    return (1.0 if halved else 2.0) * config.hidden_size**2


def route_costs(config: ChiarConfig, length: int, shares: Shares) -> dict[str, float]:
    """FLOPs of one token in the first routed layer, or in the whole first dark stack, by the operator it takes. They
    include the keys it provides to other tokens."""
    basis_flops, layer_share, result = transform_cost(config), checked_shares(config, shares)[0], {}
    first = config.routed_layers[0]
    stack = config.stacks.get(first)
    for chosen in layer_share:
        works = {}
        for name, share in layer_share.items():
            runs = float(name == chosen)
            own_key, visible = (runs, share) if config.keys == "routed" or stack else (1.0, 1.0)
            works[name] = Work(runs, own_key, visible_pairs(length, runs, visible), basis_flops)
        if stack:
            works = {"attention": works["attention"]}
        costs = [layer_costs(config, layer, works, basis_flops, length) for layer in stack or [first]]
        result[chosen] = sum(sum(cost.values()) for cost in costs)
    return result


def count_dense_execution(config: ChiarConfig, length: int) -> FlopCount:
    """FLOPs of dense execution: every operator on every token, full T×T score matrices. Except for temporal filters,
    the count agrees exactly with `torch.utils.flop_counter`."""
    assert config.layer_types is not None and config.operators is not None
    costs, basis_flops = model_costs(config), transform_cost(config)
    for layer, kind in enumerate(config.layer_types):
        names = config.operators if kind == "routed" else ["attention" if kind == "dark" else kind]
        works = dict.fromkeys(names, Work(1.0, 1.0, float(length), basis_flops))
        costs |= layer_costs(config, layer, works, basis_flops, length)
    return FlopCount(costs, length)


def counted_parts() -> tuple[str, ...]:
    """The parts FLOPs are counted under, including registered operators."""
    return *PARTS, *(name for name in OPERATORS if name not in (*PARTS, "attention"))


def visible_pairs(length: int, queries: float, keys: float, window: int | None = None) -> float:
    """Expected causal (query, key) pairs per token, given the shares of queries and keys. Every query sees itself."""
    reach = min(length, window or length)
    return queries * (keys * (reach - 1) * (1 - reach / (2 * length)) + 1)


def layer_costs(config: ChiarConfig, layer: int, works: Mapping[str, Work], basis_flops: float, length: int) -> Costs:
    """Costs of a layer's operators, router, carry, FFN and temporal filter. A dark layer runs on dark tokens only."""
    assert config.layer_types is not None
    kind, own = config.layer_types[layer], config.of_layer(layer)
    assert own.intermediate_size is not None
    dark = sum(work.share for name, work in works.items() if not is_light(name))
    ffn_share = dark if kind == "dark" or (kind == "routed" and not config.light_ffn) else 1.0
    costs = {"ffn": ffn_share * 4 * own.hidden_size * own.intermediate_size}
    if layer in config.routed_layers:
        costs["router"] = router_cost(config, basis_flops)
    if layer in config.stacks:
        costs["carry"] = carry_cost(config, dark, length)
    counts = [OPERATORS[name].count(name, own, work) for name, work in works.items()]
    if config.temporal_everywhere:
        share = dark if kind == "dark" else 1.0
        counts.append(OPERATORS["temporal"].count("temporal", own, Work(share, share, 0.0, 0.0)))
    for count in counts:
        for part, flops in count.items():
            costs[part] = costs.get(part, 0.0) + flops
    return {(layer, part): flops for part, flops in costs.items() if flops}


def carry_cost(config: ChiarConfig, dark: float, length: int) -> float:
    """The maps into and out of a stack of another width, and the carry: its linear map runs on dark tokens, a running
    mean on all tokens, block by block."""
    D = config.hidden_size
    cost = dark * 4.0 * D * (config.inner_size or 0)
    if config.carry == "linear":
        cost += dark * 2.0 * D * D
    if config.carry == "smoothed":
        whole, rest = divmod(length, AT_ONCE)
        cost += 2.0 * D * (whole * AT_ONCE**2 + rest**2) / length
    return cost


def router_cost(config: ChiarConfig, basis_flops: float) -> float:
    """Per token: the router's products, and those of the spectrum or early head it reads. Without a router that reads
    it, an early head runs only in training."""
    kind = config.router_kind
    spectrum = basis_flops if kind.reads_entropy else 0.0
    return kind.count(config) + spectrum + (early_head_cost(config) if kind.reads_prediction else 0.0)


def early_head_cost(config: ChiarConfig) -> float:
    return 2.0 * config.hidden_size * config.vocab_size


def model_costs(config: ChiarConfig) -> Costs:
    """Gate and output projection. Under the batch and sequence pools the gate costs next to nothing per token."""
    gate = 2.0 * config.hidden_size if config.meta_router and config.gate_pool == "causal" else 0.0
    return {(0, "gate"): gate, (None, "logits"): 2.0 * config.hidden_size * config.vocab_size}


SIZES = ("vocab_size", "hidden_size", "num_attention_heads", "intermediate_size")
FILTER = ("temporal_everywhere", "temporal_window", "temporal_coefficients")
DESIGN = ("norm", "norm_position", "embedding_norm", "positions", *FILTER)


def baseline_of(config: ChiarConfig) -> ChiarConfig:
    """The dense baseline: same sizes, design and temporal filters, with attention to all earlier tokens in every
    layer. A model of such layers alone is its own baseline."""
    layer_types = ["attention"] * len(config.layer_types or [])
    return ChiarConfig(layer_types=layer_types, **{name: getattr(config, name) for name in (*SIZES, *DESIGN)})


class Savings(NamedTuple):
    """CHIAR and its baseline at one length, and the fractions saved."""

    chiar: FlopCount
    baseline: FlopCount
    total: float
    attention_in_routed_layers: float | None
    attention_share_of_baseline: float


def compare_flops(
    config: ChiarConfig, length: int, shares: Shares | None = None, transform: str = "even_odd"
) -> Savings:
    chiar, baseline = count_flops(config, length, shares, transform), count_flops(baseline_of(config), length)
    routed, attention = sorted({*config.routed_layers, *dark_layers(config)}), ("projections", "scores")
    before, after = (count.part(*attention, layers=routed) for count in (baseline, chiar))
    share = baseline.part(*attention) / baseline.total
    return Savings(chiar, baseline, 1.0 - chiar.total / baseline.total, 1.0 - after / before if routed else None, share)
