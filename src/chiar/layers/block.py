"""One layer: route every token, run the operators, combine, feed forward.

This is dense execution, the definition of truth: every operator runs on every token and the route selects. sparse.py
computes the same with what was chosen only.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from chiar import registry
from chiar.kernels.spectral_entropy import spectral_entropy
from chiar.layers.attention import CausalAttention
from chiar.layers.benefit import attention_benefit, benefit_loss
from chiar.layers.context import LayerMemory, TokenContext, is_light
from chiar.layers.groups import leads
from chiar.layers.light import Bypass, Skip, SpectralWeights
from chiar.layers.rbf import RBFMixing
from chiar.layers.routers import Route, make_router
from chiar.layers.sparse import run_sparse
from chiar.layers.spectral import SpectralFilter
from chiar.layers.temporal import TemporalFilter, TemporalSignal, TemporalSublayer
from chiar.registry import OPERATORS

LIGHT = "spectral"


class FeedForward(nn.Module):
    """Linear D→4D, exact GELU, Linear 4D→D: one per layer, shared by all its operators unless light ones have their
    own."""

    def __init__(self, width: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.dropout = dropout

    def forward(self, x_BTD: Tensor) -> Tensor:
        hidden = F.dropout(F.gelu(self.up(x_BTD)), self.dropout, self.training)
        return F.dropout(self.down(hidden), self.dropout, self.training)


def make_norm(config: Any, operator: str | None = None) -> nn.Module:
    norm = nn.RMSNorm if config.norm == "rmsnorm" else nn.LayerNorm
    weighted = config.filter_gamma or operator != LIGHT
    return norm(config.hidden_size, eps=config.norm_eps, elementwise_affine=weighted)


def make_operator(name: str, config: Any) -> nn.Module:
    if name in OPERATORS:
        return registry.make_operator(name, config)
    if name == "attention":
        return CausalAttention(config.hidden_size, config.num_attention_heads, config.dropout)
    if name == "rbf":
        return RBFMixing(config.hidden_size, config.rbf_features, config.rbf_gamma)
    if name == "temporal":
        sizes = config.hidden_size, config.temporal_window, config.temporal_coefficients
        return TemporalFilter(*sizes, initial=float(config.filter_init))
    if name in ("skip", "bypass"):
        return Skip() if name == "skip" else Bypass()
    return SpectralFilter(config.hidden_size)


def make_sublayer(config: Any) -> TemporalSublayer:
    """The filter along time that every token passes before a layer's own operators."""
    sizes = config.hidden_size, config.temporal_window, config.temporal_coefficients
    filter = TemporalFilter(*sizes, initial=0.0, name="everywhere")
    return TemporalSublayer(make_norm(config), config.norm_position == "pre", filter)


def make_signal(config: Any) -> TemporalSignal:
    return TemporalSignal(config.hidden_size, config.temporal_window, config.temporal_channels, config.basis_seed)


def blend(parts: list[Tensor], weights_BTK: Tensor | None) -> Tensor:
    """Σ w_k part_k; without weights there is one part."""
    if weights_BTK is None:
        return parts[0]
    weights_BTK = weights_BTK.to(parts[0].dtype)
    mixed = weights_BTK[..., :1] * parts[0]
    for k in range(1, len(parts)):
        mixed = mixed + weights_BTK[..., k : k + 1] * parts[k]
    return mixed


@dataclass
class LayerOutput:
    """What a layer gives back: its output, and what it did to get there."""

    y_BTD: Tensor
    route: Route | None = None
    """The decision of a routed layer."""
    entropy_BT: Tensor | None = None
    """H of what the layer's operators read, where computed: its input, or what `temporal_everywhere` makes of it."""
    attention_weights: Tensor | None = None
    """Of eager attention."""
    gate_BT1: Tensor | None = None
    """The MetaRouter's g, on layer 1."""
    summands: tuple[Tensor, Tensor] | None = None
    """Whose sum y is, where it is one: a compiled next layer can add them where it reads them."""


class Block(nn.Module):
    """A spectral, temporal or attention layer has one operator, a routed layer several and a router that chooses."""

    def __init__(self, config: Any, index: int) -> None:
        super().__init__()
        self.kind = config.layer_types[index]
        names = config.operators if self.kind == "routed" else [self.kind]
        self.pre_norm = config.norm_position == "pre"
        self.equation = config.spectral_form == "equation"
        self.light_ffn = config.light_ffn or self.kind != "routed"
        self.soft = config.routing == "soft"
        self.routed_keys = config.keys == "routed" and config.routing != "soft"
        self.entropy_eps, self.entropy_dc_weight = config.entropy_eps, config.entropy_dc_weight
        """The operator of light tokens, in a routed layer the first."""

        self.operators = nn.ModuleDict({name: make_operator(name, config) for name in names})
        self.norms = nn.ModuleDict(
            {
                name: make_norm(config, name)
                for name in names
                if not (self.equation and is_light(name)) and name not in ("skip", "bypass")
            }
        )
        self.ffn = FeedForward(config.hidden_size, config.intermediate_size, config.dropout)
        self.ffn_norm = make_norm(config)
        own = config.own_ffn and self.kind == "routed"
        self.own_ffn = FeedForward(config.hidden_size, config.intermediate_size, config.dropout) if own else None
        self.router = make_router(config, index) if self.kind == "routed" else None
        chooses = self.kind == "routed" and leads(config, index)
        self.in_group = self.kind == "routed" and bool(config.turns or config.together)
        self.router_reads_entropy = chooses and config.router_reads_entropy
        self.router_reads_state = chooses and config.router_reads_state
        self.weights_have_gradient = config.weights_have_gradient
        self.measures_benefit = config.benefit_weight > 0
        weighted = chooses and config.entropy_weights == "learned"
        self.entropy_weights = SpectralWeights(config.hidden_size) if weighted else None
        self.everywhere = make_sublayer(config) if config.temporal_everywhere else None
        self.signal = make_signal(config) if config.signal == "temporal" else None
        self.looks_back = "temporal" in names or self.everywhere is not None or self.signal is not None

    def forward(
        self,
        x_BTD: Tensor,
        context: TokenContext,
        memory: LayerMemory | None = None,
        forced_BT: Tensor | None = None,
    ) -> LayerOutput:
        if self.everywhere is not None:
            x_BTD = self.everywhere(x_BTD, context, memory)
        entropy_BT = self.entropy(x_BTD, context, memory)
        route = self.choose(x_BTD, entropy_BT, context, forced_BT)
        if context.sparse and route is not None:
            return LayerOutput(run_sparse(self, x_BTD, context, route, memory), route, entropy_BT)
        outputs, attention_weights = self.run_operators(x_BTD, context, route, memory)
        if self.measures_benefit and self.training and route is not None:
            route.benefit_loss = self.benefit_loss(x_BTD, entropy_BT, outputs["attention"], context)
        combine: Any = self.combine_pre_norm if self.pre_norm else self.combine_post_norm
        weights_BTK = None if route is None else route.weights_BTK
        summands = combine(x_BTD, outputs, weights_BTK, self.network_weights(route))
        if isinstance(summands, Tensor):
            return LayerOutput(summands, route, entropy_BT, attention_weights)
        return LayerOutput(summands[0] + summands[1], route, entropy_BT, attention_weights, summands=summands)

    def entropy(self, x_BTD: Tensor, context: TokenContext, memory: LayerMemory | None) -> Tensor | None:
        read = self.router is not None and self.router_reads_entropy
        # A window must be kept up in a cache, or a later trace would have gaps.
        if not (read or context.keep_entropy or (self.signal is not None and memory is not None)):
            return None
        with torch.set_grad_enabled(torch.is_grad_enabled() and read and self.weights_have_gradient):
            if self.signal is not None:
                return self.signal(x_BTD, context.real_BT, memory, self.entropy_eps, self.entropy_dc_weight)
            weight_D = None if self.entropy_weights is None else self.entropy_weights()
            return spectral_entropy(x_BTD, context.transform, self.entropy_eps, self.entropy_dc_weight, weight_D)

    def choose(
        self, x_BTD: Tensor, entropy_BT: Tensor | None, context: TokenContext, forced_BT: Tensor | None
    ) -> Route | None:
        if self.router is None:
            return None
        # The question is whether a token needs attention, so a pre-norm router reads what attention would read. Only
        # learned routers read more of x than its shape.
        seen_BTD = self.norms["attention"](x_BTD) if self.pre_norm and self.router_reads_state else x_BTD
        return self.router(seen_BTD, entropy_BT, context, forced_BT)

    def benefit_loss(
        self, x_BTD: Tensor, entropy_BT: Tensor | None, attended_BTD: Tensor, context: TokenContext
    ) -> Tensor:
        """Of the router alone: the states it reads are not drawn along."""
        router: Any = self.router
        x_BTD, entropy_BT = x_BTD.detach(), None if entropy_BT is None else entropy_BT.detach()
        seen_BTD = self.norms["attention"](x_BTD).detach() if self.pre_norm else x_BTD
        scores_BTK = router.scores(seen_BTD, entropy_BT)
        lead_BT = scores_BTK[..., 1] - scores_BTK[..., 0]
        return benefit_loss(lead_BT, attention_benefit(x_BTD, attended_BTD), context.real_BT)

    def run_operators(
        self, x_BTD: Tensor, context: TokenContext, route: Route | None, memory: LayerMemory | None
    ) -> tuple[dict[str, Tensor], Tensor | None]:
        """op(x), or op(LN_op(x)) under pre-norm, of every operator for every token."""
        outputs: dict[str, Tensor] = {}
        attention_weights = None
        for k, (name, operator) in enumerate(self.operators.items()):
            if name in ("skip", "bypass"):
                outputs[name] = self.run_plain(name, x_BTD)
                continue
            seen_BTD = self.norms[name](x_BTD) if self.pre_norm else x_BTD
            if name == LIGHT:
                outputs[name] = operator(seen_BTD, context.transform)
                continue
            if name == "temporal":
                outputs[name] = operator(seen_BTD, context, memory)
                continue
            if name in OPERATORS:
                outputs[name] = operator(seen_BTD)
                continue
            key_BT = context.real_BT
            only_keys = False
            if route is not None and self.routed_keys:
                only_keys, chosen_BT = True, route.choice_BT == k
                key_BT = chosen_BT if key_BT is None else key_BT & chosen_BT
            if name == "attention":
                outputs[name], attention_weights = operator(seen_BTD, context, key_BT, memory, only_keys)
            else:
                outputs[name] = operator(seen_BTD, context, key_BT, memory, only_keys)
        return outputs, attention_weights

    def run_plain(self, name: str, x: Tensor) -> Tensor:
        """A light operator without weights, under pre-norm."""
        if name == "skip":
            return self.operators[name](x)
        attention: Any = self.operators["attention"]
        return attention.bypass(self.norms["attention"](x))

    def network_weights(self, route: Route | None) -> Tensor | None:
        """Of light tokens' own network and the other: the choice itself, so that a router learns from its operators
        alone, as where they share one network. Soft routing blends networks like operators."""
        if route is None or self.own_ffn is None:
            return None
        return route.weights_BTK if self.soft else F.one_hot(route.choice_BT, len(self.operators))

    def feed(self, x_BTD: Tensor, weights_BTK: Tensor | None) -> Tensor:
        if self.own_ffn is None:
            return self.ffn(x_BTD)
        light_BTD, dark_BTD = self.own_ffn(x_BTD), self.ffn(x_BTD)
        return blend([light_BTD if is_light(name) else dark_BTD for name in self.operators], weights_BTK)

    def combine_post_norm(
        self, x_BTD: Tensor, outputs: dict[str, Tensor], weights_BTK: Tensor | None, networks_BTK: Tensor | None
    ) -> Tensor:
        """u = LN_op(x + op(x)); y = LN_f(u + FFN(u)). In the equation form light tokens get LN_f(x + FFN(op(x)))."""
        residuals, inputs = [], []
        for name, output_BTD in outputs.items():
            if self.equation and is_light(name):
                residuals.append(x_BTD)
                inputs.append(output_BTD)
            else:
                u_BTD = self.norms[name](x_BTD + output_BTD)
                residuals.append(u_BTD)
                inputs.append(u_BTD)
        if self.light_ffn:
            residual, input = blend(residuals, weights_BTK), blend(inputs, weights_BTK)
            return self.ffn_norm(residual + self.feed(input, networks_BTK))
        ends = [
            u if is_light(name) else self.ffn_norm(u + self.ffn(u)) for name, u in zip(outputs, residuals, strict=True)
        ]
        return blend(ends, weights_BTK)

    def combine_pre_norm(
        self, x_BTD: Tensor, outputs: dict[str, Tensor], weights_BTK: Tensor | None, networks_BTK: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """u = x + op(LN_op(x)); y = u + FFN(LN_f(u)). Weights act on what is added, never on the residual."""
        if self.light_ffn:
            u_BTD = x_BTD + blend(list(outputs.values()), weights_BTK)
            return u_BTD, self.feed(self.ffn_norm(u_BTD), networks_BTK)
        changes = [
            output if is_light(name) else output + self.ffn(self.ffn_norm(x_BTD + output))
            for name, output in outputs.items()
        ]
        return x_BTD, blend(changes, weights_BTK)
