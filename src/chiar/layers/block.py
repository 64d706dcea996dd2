"""One layer: route every token, run the operators, combine, feed forward.

The formula is written once (`pre_norm`, `post_norm`), for two executions: dense, the definition, runs every operator on
every token and selects by the route (`DenseTokens`); sparse runs only the chosen operators (`PackedTokens`)."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from chiar import registry
from chiar.config import ChiarConfig
from chiar.kernels.spectral_entropy import spectral_entropy
from chiar.layers.context import LayerMemory, Maybe, Memory, TokenContext
from chiar.layers.operator import Adopted, Operator, Tokens
from chiar.layers.routers import ChoiceRouter, Route, check_route
from chiar.layers.sparse import PackedTokens
from chiar.layers.temporal import TemporalSublayer
from chiar.registry import is_light

Summands = tuple[Tensor, Maybe]  # a state, or two tensors whose sum it is


def pre_norm(block: "Block", tokens: Tokens) -> Summands:
    """u = x + op(LN_op(x)); y = u + FFN(LN_f(u)), as two summands. Weights act on what is added, never on the residual.
    Without `light_ffn` light tokens end at u."""
    if block.light_ffn:
        u = tokens.x + tokens.select({name: tokens.operate(name) for name in block.operators})
        return u, block.ffn(block.ffn_norm(u))
    y = tokens.fused_ends()
    if y is not None:
        return y, None
    changes = {}
    for name in block.operators:
        changes[name] = change = tokens.operate(name)
        if not is_light(name):
            seen = tokens.norm(block.ffn_norm, tokens.view(name) + change, name)
            changes[name] = change + tokens.feed(seen, name)
    return tokens.x, tokens.select(changes)


def post_norm(block: "Block", tokens: Tokens) -> Summands:
    """u = LN_op(x + op(x)); y = LN_f(u + FFN(u)). In the equation form light tokens get Eq. 3: LN_f(x + FFN(op(x))).
    Without `light_ffn` light tokens end at u."""
    residuals, inputs = {}, {}
    for name in block.operators:
        x, output = tokens.view(name), tokens.operate(name)
        if block.equation and is_light(name):
            residuals[name], inputs[name] = x, output
        else:
            residuals[name] = inputs[name] = tokens.norm(block.norms[name], x + output, name)
    if block.light_ffn:
        residual = tokens.select(residuals)
        return block.ffn_norm(residual + block.ffn(tokens.select(inputs) if block.equation else residual)), None
    for name, u in residuals.items():
        if not is_light(name):
            residuals[name] = tokens.norm(block.ffn_norm, u + tokens.feed(u, name), name)
    return tokens.select(residuals), None


class DenseTokens(Tokens):
    """Every operator on every token; the route's weights select."""

    attention_weights: Maybe = None  # of eager attention

    def operate(self, name: str) -> Tensor:
        output = self.run_all(self.block.run(name), name)
        if isinstance(output, tuple):
            output, self.attention_weights = output
        return output

    def select(self, parts: dict[str, Tensor]) -> Tensor:
        first, *others = parts.values()
        if self.route is None:
            return first
        weights_BTK = self.route.weights_BTK.to(first.dtype)
        mixed = weights_BTK[..., :1] * first
        for k, part in enumerate(others, start=1):
            mixed = mixed + weights_BTK[..., k : k + 1] * part
        return mixed


class FeedForward(nn.Module):
    """Linear D→4D, exact GELU, Linear 4D→D: one per layer, shared by all its operators."""

    def __init__(self, width: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.dropout = dropout

    def forward(self, x_BTD: Tensor) -> Tensor:
        hidden = F.dropout(F.gelu(self.up(x_BTD)), self.dropout, self.training)
        return F.dropout(self.down(hidden), self.dropout, self.training)


def make_norm(config: ChiarConfig, operator: str | None = None) -> nn.Module:
    norm = nn.RMSNorm if config.norm == "rmsnorm" else nn.LayerNorm
    weighted = config.filter_gamma or operator is None or not registry.OPERATORS[operator].in_basis
    return norm(config.hidden_size, eps=1e-5, elementwise_affine=weighted)


@dataclass
class LayerOutput:
    """How a layer routed its tokens, and what a trace shows of it."""

    route: Route | None = None  # the decision of a routed layer
    entropy_BT: Tensor | None = None
    """H of what the layer's operators read, where computed: its input, or what `temporal_everywhere` makes of it."""
    attention_weights: Tensor | None = None  # of eager attention
    gate_BT1: Tensor | None = None  # the MetaRouter's g, on layer 1


class Block(nn.Module):
    """A spectral, temporal or attention layer has one operator, a routed layer several and a router that chooses."""

    def __init__(self, config: ChiarConfig, index: int) -> None:
        super().__init__()
        assert config.layer_types is not None
        self.kind, config = config.layer_types[index], config.of_layer(index)
        assert config.operators is not None and config.intermediate_size is not None
        routed = self.kind == "routed"
        self.names = list(config.operators) if routed else ["attention" if self.kind == "dark" else self.kind]
        self.pre_norm = config.norm_position == "pre"
        self.equation = config.spectral_form == "equation"
        self.light_ffn = config.light_ffn or not routed
        self.routed_keys = routed and config.keys == "routed" and config.routing != "soft"
        self.entropy_eps, self.entropy_dc_weight = config.entropy_eps, config.entropy_dc_weight

        self.operators = nn.ModuleDict({name: registry.OPERATORS[name].make(name, config) for name in self.names})
        if self.kind == "attention":
            self.operators["attention"].window = config.window  # type: ignore[assignment]
        normed = [name for name in self.names if not (self.equation and is_light(name))]
        self.norms = nn.ModuleDict({name: make_norm(config, name) for name in normed})
        self.ffn = FeedForward(config.hidden_size, config.intermediate_size, config.dropout)
        self.ffn_norm = make_norm(config)
        self.router: nn.Module | None = config.router_kind.make(config, index) if routed else None
        self.router_reads_entropy = routed and config.router_kind.reads_entropy
        self.router_reads_state = routed and config.router_kind.reads_state
        self.weights_have_gradient = config.router_kind.has_gradient
        self.everywhere = TemporalSublayer(make_norm(config), config) if config.temporal_everywhere else None
        self.looks_back = self.everywhere is not None or any(self.run(name).looks_back for name in self.names)

    def forward(
        self, x_BTD: Tensor, context: TokenContext, memory: Memory = None, forced_BT: Maybe = None
    ) -> tuple[Summands, LayerOutput]:
        """The output and how it was routed. In a fixed decoding step a pre-norm layer returns two summands, which the
        next compiled layer adds where it reads them."""
        if self.everywhere is not None:
            x_BTD = self.everywhere(x_BTD, context, memory)
        entropy_BT = self.entropy(x_BTD, context)
        route = self.choose(x_BTD, entropy_BT, context.of("router", memory), forced_BT)
        combine = pre_norm if self.pre_norm else post_norm
        if context.sparse and route is not None:
            tokens = PackedTokens(self, x_BTD, context, route, memory)
            y, more = combine(self, tokens)
            return (tokens.together(y if more is None else y + more), None), LayerOutput(route, entropy_BT)
        dense = DenseTokens(self, x_BTD, context, route, memory)
        y, more = combine(self, dense)
        if more is not None and not context.room_is_made:
            y, more = y + more, None
        return (y, more), LayerOutput(route, entropy_BT, dense.attention_weights)

    def begin(self, memory: LayerMemory, rows: int) -> None:
        for name in self.names:
            self.run(name).begin(memory, rows)
        if self.everywhere is not None:
            self.everywhere.filter.begin(memory, rows)

    def run(self, name: str) -> Any:
        """The operator as an `Operator`. Looked up on each use, because users may replace the module."""
        operator = self.operators[name]
        return operator if isinstance(operator, Operator) else Adopted(operator)

    def entropy(self, x_BTD: Tensor, context: TokenContext) -> Maybe:
        if not (self.router_reads_entropy or context.keep_entropy):
            return None
        learns = self.router_reads_entropy and self.weights_have_gradient
        with torch.set_grad_enabled(torch.is_grad_enabled() and learns):
            return spectral_entropy(x_BTD, context.transform, self.entropy_eps, self.entropy_dc_weight)

    def choose(self, x_BTD: Tensor, entropy_BT: Maybe, context: TokenContext, forced_BT: Maybe) -> Route | None:
        if self.router is None:
            return None
        # The router decides about attention, so under pre-norm it reads what attention would read.
        seen_BTD = self.norms["attention"](x_BTD) if self.pre_norm and self.router_reads_state else x_BTD
        route = self.router(seen_BTD, entropy_BT, context, forced_BT)
        if not isinstance(self.router, ChoiceRouter):
            check_route(self.router, route, seen_BTD, len(self.names), context)
        return route
