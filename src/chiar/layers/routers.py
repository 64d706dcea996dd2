"""Routers: which operator each token of a routed layer goes to."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from chiar.errors import InputError
from chiar.layers.context import TokenContext
from chiar.layers.derived import DerivedBuffers
from chiar.ops.hash import uniform_hash


@dataclass
class Route:
    """The decision of one layer for B×T tokens over K operators."""

    choice_BT: Tensor
    """Index of the chosen operator (under soft routing: the one with the largest weight)."""
    weights_BTK: Tensor
    """What each operator's output is multiplied by: one-hot, or probabilities under soft routing."""
    probabilities_BTK: Tensor | None = None
    """The learned router's softmax."""


def one_hot(choice_BT: Tensor, operators: int) -> Tensor:
    """By comparison: torch's own checks its input, which costs kernels in a compiled decoding step."""
    return (choice_BT[..., None] == torch.arange(operators, device=choice_BT.device)).float()


class EntropyRouter(DerivedBuffers):
    """The paper's rule: H(x) > τ goes to attention. With three operators, τ_low and τ_high cut twice."""

    thresholds: Tensor

    def __init__(self, thresholds: tuple[float, ...]) -> None:
        super().__init__()
        self.values = thresholds
        self.register_derived()

    def derive(self) -> dict[str, Tensor]:
        return {"thresholds": torch.tensor(self.values, dtype=torch.float64)}

    def forward(
        self, x_BTD: Tensor, entropy_BT: Tensor | None, context: TokenContext, forced_BT: Tensor | None
    ) -> Route:
        assert entropy_BT is not None
        choice_BT = (entropy_BT[..., None] > self.thresholds).sum(-1) if forced_BT is None else forced_BT
        # Only the buffer is read: a compiled graph must not depend on the numbers.
        return Route(choice_BT, one_hot(choice_BT, self.thresholds.shape[0] + 1))


class LearnedRouter(nn.Module):
    """A linear map of [x; H]. Soft: its softmax blends the operators. Hard: its argmax picks one.

    Hard routing is straight-through. `both` is the paper's: forward one-hot, backward the softmax, which needs every
    operator's output. `selected` multiplies the chosen output by p / stopgrad(p) = 1, which needs only that one.
    """

    def __init__(self, width: int, operators: int, routing: str, hard_estimator: str) -> None:
        super().__init__()
        self.routing, self.hard_estimator = routing, hard_estimator
        self.score = nn.Linear(width + 1, operators)

    def forward(
        self, x_BTD: Tensor, entropy_BT: Tensor | None, context: TokenContext, forced_BT: Tensor | None
    ) -> Route:
        assert entropy_BT is not None
        # In fp32: H varies by 0.004 at width 1024, which is one step of bf16.
        with torch.autocast(x_BTD.device.type, enabled=False):
            seen = torch.cat([x_BTD.float(), entropy_BT[..., None].float()], dim=-1)
            scores_BTK = F.linear(seen, self.score.weight.float(), self.score.bias.float())
        log_p_BTK = scores_BTK.log_softmax(-1)
        p_BTK = log_p_BTK.exp()
        choice_BT = p_BTK.argmax(-1) if forced_BT is None else forced_BT
        if self.routing == "soft":
            return Route(choice_BT, p_BTK, p_BTK)
        chosen_BTK = one_hot(choice_BT, p_BTK.shape[-1])
        if self.hard_estimator == "both":
            weights_BTK = chosen_BTK + (p_BTK - p_BTK.detach())
        else:
            # p / stopgrad(p) through logarithms: a probability may underflow to 0.
            weights_BTK = chosen_BTK * (log_p_BTK - log_p_BTK.detach()).exp()
        return Route(choice_BT, weights_BTK, p_BTK)


class RandomRouter(nn.Module):
    """Control: a fixed hash of (seed, layer, token id) or of (seed, layer, position)."""

    def __init__(self, layer: int, operators: int, key: str, fraction: float, seed: int) -> None:
        super().__init__()
        self.layer, self.operators, self.key, self.fraction, self.seed = layer, operators, key, fraction, seed

    def forward(
        self, x_BTD: Tensor, entropy_BT: Tensor | None, context: TokenContext, forced_BT: Tensor | None
    ) -> Route:
        if forced_BT is not None:
            return Route(forced_BT, one_hot(forced_BT, self.operators))
        keys_BT = context.positions_BT if self.key == "position" else context.token_ids_BT
        if keys_BT is None:
            raise InputError(
                "random_key='token' hashes token ids, but only inputs_embeds were given: pass input_ids, "
                "or use random_key='position'."
            )
        number_BT = uniform_hash(keys_BT, self.seed, self.layer)
        share = (1.0 - self.fraction) / (self.operators - 1)
        edges = share * torch.arange(1, self.operators, device=number_BT.device)
        choice_BT = (number_BT[..., None] >= edges).sum(-1)
        return Route(choice_BT, one_hot(choice_BT, self.operators))


class StaticRouter(nn.Module):
    """Control: the whole layer uses one operator, whatever the token."""

    def __init__(self, operators: int, operator: int) -> None:
        super().__init__()
        self.operators, self.operator = operators, operator

    def forward(
        self, x_BTD: Tensor, entropy_BT: Tensor | None, context: TokenContext, forced_BT: Tensor | None
    ) -> Route:
        choice_BT = torch.full(x_BTD.shape[:2], self.operator, device=x_BTD.device)
        choice_BT = choice_BT if forced_BT is None else forced_BT
        return Route(choice_BT, one_hot(choice_BT, self.operators))


def make_router(config: Any, layer: int) -> nn.Module:
    operators, nth = len(config.operators), config.routed_layers.index(layer)
    if config.router == "entropy":
        return EntropyRouter(config.layer_thresholds()[nth])
    if config.router == "learned":
        return LearnedRouter(config.hidden_size, operators, config.routing, config.hard_estimator)
    if config.router == "random":
        return RandomRouter(layer, operators, config.random_key, config.random_fraction, config.router_seed)
    return StaticRouter(operators, config.operators.index(config.static_operators[nth]))
