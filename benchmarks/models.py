"""What `speed.py` can time, by name: every contender as one module with the same call, and the routes forced on all."""

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
"""Routed layer → (B, T) int64: 1 for tokens sent to attention, 0 for the others."""


@dataclass(frozen=True)
class Setting:
    """One point of a measurement."""

    size: str
    layers: int | None
    length: int
    fraction: float

    @property
    def attending(self) -> int:
        """How many tokens of a row go to attention."""
        return max(1, round(self.fraction * self.length))


@dataclass(frozen=True)
class Work:
    """Counted FLOPs a token of one forward pass."""

    layers: float
    logits: float
    without_gradient: float = 0.0
    """The part of the layers that has no backward pass: the transform that only feeds H."""

    def training(self) -> float:
        """A backward pass is two products for each of the forward pass."""
        return 3.0 * (self.layers + self.logits) - 2.0 * self.without_gradient

    def prefill(self, length: int) -> float:
        """Only the last token of a row has logits."""
        return self.layers + self.logits / length


def drawn(rows: int, tokens: int, layers: list[int], seed: int) -> dict[int, Tensor]:
    """Uniform numbers, (B, T). They depend on a layer's number alone, so contenders that route it get the same routes,
    and no layer repeats another's."""
    generators = {layer: torch.Generator().manual_seed(1_000_003 * seed + layer) for layer in layers}
    return {layer: torch.rand(rows, tokens, generator=generator) for layer, generator in generators.items()}


def exact_routes(rows: int, tokens: int, attending: int, layers: list[int], device: str, seed: int = 0) -> Routes:
    """`attending` tokens of every row at random places."""
    numbers = drawn(rows, tokens, layers, seed)
    return {layer: (x_BT.argsort(1).argsort(1) < attending).long().to(device) for layer, x_BT in numbers.items()}


def ragged_routes(rows: int, tokens: int, fraction: float, layers: list[int], device: str, seed: int = 0) -> Routes:
    """Each token for itself with probability `fraction`; one row all light, the next all attention."""
    routes = {layer: (x_BT < fraction).long() for layer, x_BT in drawn(rows, tokens, layers, seed).items()}
    for layer, choice_BT in routes.items():
        choice_BT[layer % rows], choice_BT[(layer + 1) % rows] = 0, 1
    return {layer: choice_BT.to(device) for layer, choice_BT in routes.items()}


class TimedModel(nn.Module):
    """A language model as the benchmark calls it."""

    routed_layers: list[int]
    ragged = False
    """Whether rows may differ in how many tokens attend."""

    def states(self, ids_BT: Tensor, routes: Routes) -> tuple[Tensor, Tensor | None]:
        """The normed states before the output projection, and what only the router reads (to keep it computed)."""
        raise NotImplementedError

    def output_weight(self) -> Tensor:
        raise NotImplementedError

    def compile_parts(self) -> bool:
        """Compile the layers, and what lies between them, one by one; False where that is not possible."""
        return False

    def work(self, setting: Setting) -> Work | None:
        """Counted FLOPs; None where nobody has counted them."""
        raise NotImplementedError

    def forward(self, ids_BT: Tensor, targets_BT: Tensor | None, routes: Routes) -> tuple[Tensor, Tensor | None]:
        """With targets the mean loss, without them the logits of the last token."""
        states_BTD, read = self.states(ids_BT, routes)
        if targets_BT is None:
            return F.linear(states_BTD[:, -1], self.output_weight()), read
        return linear_cross_entropy(states_BTD.flatten(0, 1), self.output_weight(), targets_BT.flatten()), read


class TimedChiar(TimedModel):
    """A baseline or a CHIAR-Former.

    Forced routes replace the comparison H > τ but not H itself: the block computes it all the same and gives it back.
    A compiler of the whole model would drop it, because nobody reads it, so there (`whole`) the mean of H over the
    routed layers is an output. (The trace it comes from also has H of the other layers; those nobody reads, and there
    the compiler is right.)
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
        done = self.language.model(ids_BT, forced_routes=forced or None, output_routing=self.returns_entropy)
        read = None
        if self.returns_entropy:
            entropies = [done.routing.layers[layer].entropy_BT for layer in self.config.routed_layers]
            read = torch.stack([entropy_BT.mean() for entropy_BT in entropies]).mean()
        return done.last_hidden_state, read

    def output_weight(self) -> Tensor:
        return self.language.lm_head.weight

    def compile_parts(self) -> bool:
        model: Any = self.language.model
        for part in (*model.layers, model.norm):
            part.compile(dynamic=False)
        model._run_gated = torch.compile(model._run_gated, dynamic=False)  # the gate, its layer and their sum in one
        return True

    def work(self, setting: Setting) -> Work:
        """Of the routed model: what each token's own operator costs, however it is executed."""
        fraction = setting.attending / setting.length if self.routed_layers else None
        shares = operator_shares(self.config, fraction)
        # In spectral coordinates (the identity basis) the transform is part of the weights.
        transform = "free" if self.config.basis == "identity" else "gemm"
        count = count_flops(self.config, setting.length, shares, transform=transform)
        unread = count.part("router") if self.config.router == "entropy" else 0.0
        return Work(count.total - count.part("logits"), count.part("logits"), unread)


def compiled(model: TimedModel, call: Callable[..., Any], whole: bool) -> Callable[..., Any]:
    """`call`, a way to call the model, compiled: layer by layer, which takes layers that are alike once, or whole."""
    if whole or not model.compile_parts():
        return torch.compile(call, dynamic=False)
    return call


def prepare_decoding(model: TimedModel, bf16: bool, compiled: bool) -> None:
    """Weights in the precision of decoding, where reading them is the work, and steps that can be captured."""
    assert isinstance(model, TimedChiar)
    if bf16:
        model.to(torch.bfloat16)
    model.language.enable_fast_decoding(compile=compiled)
