"""The models that `speed.py` times, behind one interface, and the routes forced on them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from chiar.config import ChiarConfig
from chiar.kernels.linear_cross_entropy import linear_cross_entropy
from chiar.model.modeling import ChiarForCausalLM
from chiar.routing.flops import count_flops, operator_shares

Routes = Mapping[int, Tensor]
"""Routed layer → (B, T) int64: 1 for tokens sent to attention, 0 for others."""


@dataclass(frozen=True)
class Setting:
    """The size, sequence length and fraction of one measurement."""

    size: str
    layers: int | None
    length: int
    fraction: float

    @property
    def attending(self) -> int:
        """How many tokens of a row are sent to attention."""
        return max(1, round(self.fraction * self.length))


@dataclass(frozen=True)
class ForwardFlops:
    """Counted FLOPs per token of a forward pass."""

    layers: float
    logits: float
    without_gradient: float = 0.0
    """The part of the layers without a backward pass: a transform used only for H."""

    def training(self) -> float:
        """The backward pass has two products for each one of the forward pass."""
        return 3.0 * (self.layers + self.logits) - 2.0 * self.without_gradient

    def prefill(self, length: int) -> float:
        """Only the last token of a row has logits."""
        return self.layers + self.logits / length


def uniform_numbers(rows: int, tokens: int, layers: list[int], seed: int) -> dict[int, Tensor]:
    """Uniform (B, T) numbers. They depend on the index of the layer alone: the same for every contender that routes the
    layer, different for every layer."""
    generators = {layer: torch.Generator().manual_seed(1_000_003 * seed + layer) for layer in layers}
    return {layer: torch.rand(rows, tokens, generator=generator) for layer, generator in generators.items()}


def exact_routes(rows: int, tokens: int, attending: int, layers: list[int], device: str, seed: int = 0) -> Routes:
    """`attending` tokens of every row, at random positions."""
    numbers = uniform_numbers(rows, tokens, layers, seed)
    return {layer: (x_BT.argsort(1).argsort(1) < attending).long().to(device) for layer, x_BT in numbers.items()}


def ragged_routes(rows: int, tokens: int, fraction: float, layers: list[int], device: str, seed: int = 0) -> Routes:
    """Each token independently with probability `fraction`; but one row is all light, and the next all attention."""
    numbers = uniform_numbers(rows, tokens, layers, seed)
    routes = {layer: (x_BT < fraction).long() for layer, x_BT in numbers.items()}
    for layer, choice_BT in routes.items():
        choice_BT[layer % rows], choice_BT[(layer + 1) % rows] = 0, 1
    return {layer: choice_BT.to(device) for layer, choice_BT in routes.items()}


class TimedModel(nn.Module):
    """The interface of a language model in the benchmark."""

    routed_layers: list[int]
    ragged = False
    """Whether rows may differ in the number of attending tokens."""

    def states(self, ids_BT: Tensor, routes: Routes) -> tuple[Tensor, Tensor | None]:
        """The normed states before the output projection; and H, to keep a compiler from eliminating it, or None."""
        raise NotImplementedError

    def output_weight(self) -> Tensor:
        raise NotImplementedError

    def compile_parts(self) -> bool:
        """Compile the layers, and what lies between them, one by one; False if that is not possible."""
        return False

    def flops(self, setting: Setting) -> ForwardFlops | None:
        """Counted FLOPs; None if they are unknown."""
        raise NotImplementedError

    def forward(self, ids_BT: Tensor, targets_BT: Tensor | None, routes: Routes) -> tuple[Tensor, Tensor | None]:
        """The mean loss if there are targets, else the logits of the last token; and the second output of `states`."""
        states_BTD, entropy = self.states(ids_BT, routes)
        if targets_BT is None:
            return F.linear(states_BTD[:, -1], self.output_weight()), entropy
        return linear_cross_entropy(states_BTD.flatten(0, 1), self.output_weight(), targets_BT.flatten()), entropy


class TimedChiar(TimedModel):
    """A baseline or a CHIAR-Former.

    Forced routes replace the comparison H > τ but not H itself, which the block still computes and returns. A compiler
    of the whole model (`whole`) would eliminate it as unused, so the mean of H over the routed layers is an output
    then. (The H of other layers, also in the trace, is rightly eliminated.)
    """

    def __init__(self, config: ChiarConfig, whole: bool) -> None:
        super().__init__()
        self.language = ChiarForCausalLM(config)
        self.config: ChiarConfig = config
        static = config.router == "static"
        self.routed_layers = [] if static else config.routed_layers
        self.reads_entropy = bool(config.routed_layers) and config.router in ("entropy", "learned")
        self.returns_entropy = whole and self.reads_entropy
        self.ragged = bool(self.routed_layers)

    def states(self, ids_BT: Tensor, routes: Routes) -> tuple[Tensor, Tensor | None]:
        forced = {layer: routes[layer] for layer in self.routed_layers}
        output = self.language.model(ids_BT, forced_routes=forced or None, output_routing=self.returns_entropy)
        entropy = None
        if self.returns_entropy:
            entropies = [output.routing.layers[layer].entropy_BT for layer in self.config.routed_layers]
            entropy = torch.stack([entropy_BT.mean() for entropy_BT in entropies]).mean()
        return output.last_hidden_state, entropy

    def output_weight(self) -> Tensor:
        return self.language.lm_head.weight

    def compile_parts(self) -> bool:
        model: Any = self.language.model
        for part in (*model.layers, model.norm):
            part.compile(dynamic=False)
        model._run_gated = torch.compile(model._run_gated, dynamic=False)  # fuses the gate, its layer and their sum
        return True

    def flops(self, setting: Setting) -> ForwardFlops:
        """Counts only the operator each token is routed to, in any execution."""
        fraction = setting.attending / setting.length if self.routed_layers else None
        shares = operator_shares(self.config, fraction)
        # In spectral coordinates (the identity basis) the transform is part of the weights.
        transform = "free" if self.config.basis == "identity" else "gemm"
        count = count_flops(self.config, setting.length, shares, transform=transform)
        without_gradient = count.part("router") if self.config.router == "entropy" else 0.0
        return ForwardFlops(count.total - count.part("logits"), count.part("logits"), without_gradient)


def compiled(model: TimedModel, call: Callable[..., Any], whole: bool) -> Callable[..., Any]:
    """`call` of the model, compiled as a whole or layer by layer, where equal layers are compiled once."""
    if whole or not model.compile_parts():
        return torch.compile(call, dynamic=False)
    return call


def prepare_decoding(model: TimedModel, bf16: bool, compiled: bool) -> None:
    """Convert the weights to the precision of decoding, which is bound by reading them, and enable fast decoding."""
    assert isinstance(model, TimedChiar)
    if bf16:
        model.to(torch.bfloat16)
    model.language.enable_fast_decoding(compile=compiled)
