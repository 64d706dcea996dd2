"""Routers: which operator each token of a routed layer goes to."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from chiar.errors import InputError
from chiar.kernels.hash import uniform_hash
from chiar.layers.context import TokenContext
from chiar.layers.derived import DerivedBuffers, stored_in

if TYPE_CHECKING:
    from chiar.config import ChiarConfig

FEW = 3
"""Outputs up to which a compiled map is written as sums."""


@dataclass
class Route:
    """The decision of one layer for B×T tokens over K operators."""

    choice_BT: Tensor
    """Index of the chosen operator (under soft routing: the one with the largest weight)."""
    weights_BTK: Tensor
    """What each operator's output is multiplied by: one-hot, or probabilities under soft routing."""
    probabilities_BTK: Tensor | None = None
    """The learned router's softmax."""
    score_BT: Tensor | None = None
    """What was compared with the threshold, for whoever follows its quantiles."""


def one_hot(choice_BT: Tensor, operators: int) -> Tensor:
    """By comparison: torch's own checks its input, which costs kernels in a compiled decoding step."""
    return (choice_BT[..., None] == torch.arange(operators, device=choice_BT.device)).float()


class Router(nn.Module):
    """What every router is: built from the configuration, called once a pass."""

    @classmethod
    def build(cls, config: "ChiarConfig", layer: int) -> Self:
        raise NotImplementedError

    @staticmethod
    def flops(config: "ChiarConfig") -> float:
        """Of one token, without those of H."""
        return 0.0

    def forward(
        self, x_BTD: Tensor, entropy_BT: Tensor | None, context: TokenContext, forced_BT: Tensor | None
    ) -> Route:
        """`x` is what attention would read, `entropy` the layer's H, each if the router's kind says that it reads it;
        a forced choice is used as it is."""
        raise NotImplementedError


class ChoiceRouter(Router):
    """A router whose decision has no gradient: say how to choose, and it is done."""

    def __init__(self, operators: int) -> None:
        super().__init__()
        self.operators = operators

    def choose(self, x_BTD: Tensor, entropy_BT: Tensor | None, context: TokenContext) -> Tensor:
        """The index of each token's operator, (B, T) int64: 0 is light, the last attention."""
        raise NotImplementedError

    def forward(
        self, x_BTD: Tensor, entropy_BT: Tensor | None, context: TokenContext, forced_BT: Tensor | None
    ) -> Route:
        choice_BT = self.choose(x_BTD, entropy_BT, context) if forced_BT is None else forced_BT
        return Route(choice_BT, one_hot(choice_BT, self.operators))


class EntropyRouter(DerivedBuffers, Router):
    """The paper's rule: H(x) > τ goes to attention. With three operators, τ_low and τ_high cut twice."""

    thresholds: Tensor

    def __init__(self, thresholds: tuple[float, ...], follows: bool = False) -> None:
        """`follows`: τ is the one that training has followed, not these."""
        super().__init__()
        self.values, self.follows = thresholds, follows
        self.register_derived()

    @classmethod
    def build(cls, config: "ChiarConfig", layer: int) -> Self:
        return cls(config.layer_thresholds()[config.routed_layers.index(layer)], config.follows_quantile)

    def derive(self) -> dict[str, Tensor]:
        return {"thresholds": torch.tensor(self.values, dtype=torch.float64)}

    def forward(
        self, x_BTD: Tensor, entropy_BT: Tensor | None, context: TokenContext, forced_BT: Tensor | None
    ) -> Route:
        assert entropy_BT is not None
        # Only buffers are read: a compiled graph must not depend on the numbers.
        thresholds = self.thresholds
        if self.follows:
            assert context.threshold is not None
            thresholds = context.threshold[None]
        choice_BT = (entropy_BT[..., None] > thresholds).sum(-1) if forced_BT is None else forced_BT
        return Route(choice_BT, one_hot(choice_BT, thresholds.shape[0] + 1), score_BT=entropy_BT)


class LearnedRouter(Router):
    """A linear map of [x; H]. Soft: its softmax blends the operators. Hard: its argmax picks one, or with `follows`
    attention where its logit leads by more than a threshold, which is then taken off before the softmax.

    The gradient of hard routing is the paper's straight-through estimator, `both`: forward one-hot, backward the
    softmax, which needs every operator's output. `selected` multiplies the chosen output by p / stopgrad(p) = 1, which
    needs only that one. With the scale `probability` attention's is multiplied by 2p instead, the other's by 1.
    """

    def __init__(
        self,
        width: int,
        operators: int,
        routing: str,
        estimator: str = "both",
        scale: str = "one",
        follows: bool = False,
    ) -> None:
        super().__init__()
        self.routing, self.estimator, self.scale, self.follows = routing, estimator, scale, follows
        self.score = nn.Linear(width + 1, operators)

    @classmethod
    def build(cls, config: "ChiarConfig", layer: int) -> Self:
        assert config.operators is not None and config.routing is not None
        how = config.routing, config.hard_estimator, config.router_scale, config.follows_quantile
        return cls(config.hidden_size, len(config.operators), *how)

    @staticmethod
    def flops(config: "ChiarConfig") -> float:
        return 2.0 * (config.hidden_size + 1) * len(config.operators or [])

    def scores(self, x_BTD: Tensor, entropy_BT: Tensor) -> Tensor:
        # In fp32 at least: H varies by 0.004 at width 1024, which is one step of bf16.
        dtype, width = stored_in(x_BTD.dtype), x_BTD.shape[-1]
        with torch.autocast(x_BTD.device.type, enabled=False):
            seen_BTD, entropy_BT1 = x_BTD.to(dtype), entropy_BT[..., None].to(dtype)
            weight, bias_K = self.score.weight.to(dtype), self.score.bias.to(dtype)
            if len(weight) <= FEW and joins_a_norm(seen_BTD):
                return linear_as_sums(seen_BTD, weight[:, :width], bias_K) + entropy_BT1 * weight[:, width]
            return F.linear(torch.cat([seen_BTD, entropy_BT1], -1), weight, bias_K)

    def forward(
        self, x_BTD: Tensor, entropy_BT: Tensor | None, context: TokenContext, forced_BT: Tensor | None
    ) -> Route:
        assert entropy_BT is not None
        scores_BTK = self.scores(x_BTD, entropy_BT)
        lead_BT = scores_BTK[..., -1] - scores_BTK[..., 0]
        if self.follows:
            assert context.threshold is not None
            if self.training:
                lead_BT = without_common_shift(lead_BT, context.real_BT)
            scores_BTK = torch.stack([torch.zeros_like(lead_BT), lead_BT - context.threshold], dim=-1)
        log_p_BTK = scores_BTK.log_softmax(-1)
        p_BTK = log_p_BTK.exp()
        choice_BT = p_BTK.argmax(-1) if forced_BT is None else forced_BT
        weights_BTK = p_BTK if self.routing == "soft" else self.weights(log_p_BTK, p_BTK, choice_BT)
        return Route(choice_BT, weights_BTK, p_BTK, score_BT=lead_BT)

    def weights(self, log_p_BTK: Tensor, p_BTK: Tensor, choice_BT: Tensor) -> Tensor:
        chosen_BTK = one_hot(choice_BT, p_BTK.shape[-1])
        if self.scale == "probability":
            return chosen_BTK * torch.cat([torch.ones_like(p_BTK[..., :1]), 2 * p_BTK[..., 1:]], dim=-1)
        if self.estimator == "both":
            return chosen_BTK + (p_BTK - p_BTK.detach())
        # p / stopgrad(p) through logarithms: a probability may underflow to 0.
        return chosen_BTK * (log_p_BTK - log_p_BTK.detach()).exp()


def without_common_shift(score_BT: Tensor, real_BT: Tensor | None) -> Tensor:
    """The same scores, but no gradient moves all of them alike.

    Where a threshold follows them such a move changes no choice. Yet every layer wants more attention, so the scores
    would climb for ever, with the threshold behind them and the fraction too high.
    """
    if real_BT is None:
        mean = score_BT.mean()
    else:
        mean = torch.where(real_BT, score_BT, 0).sum() / real_BT.sum().clamp_min(1)
    return score_BT - (mean - mean.detach())


def joins_a_norm(x_BTD: Tensor) -> bool:
    """Whether a compiler that joins sums over x to the norm before them is at work, on a device where it pays."""
    return torch.compiler.is_compiling() and x_BTD.is_cuda


def linear_as_sums(x_BTD: Tensor, weight_KD: Tensor, bias_K: Tensor) -> Tensor:
    """F.linear for few outputs, which a compiled layer takes along while it reads x for its norm."""
    return torch.stack([(x_BTD * weight_D).sum(-1) for weight_D in weight_KD], dim=-1) + bias_K


class RandomRouter(ChoiceRouter):
    """Control: a fixed hash of (seed, layer, token id) or of (seed, layer, position)."""

    def __init__(self, layer: int, operators: int, key: str, fraction: float, seed: int) -> None:
        super().__init__(operators)
        self.layer, self.key, self.fraction, self.seed = layer, key, fraction, seed

    @classmethod
    def build(cls, config: "ChiarConfig", layer: int) -> Self:
        assert config.operators is not None
        return cls(layer, len(config.operators), config.random_key, config.random_fraction, config.router_seed)

    def choose(self, x_BTD: Tensor, entropy_BT: Tensor | None, context: TokenContext) -> Tensor:
        keys_BT = context.positions_BT if self.key == "position" else context.token_ids_BT
        if keys_BT is None:
            raise InputError(
                "random_key='token' hashes token ids, but only inputs_embeds were given: pass input_ids, "
                "or use random_key='position'."
            )
        number_BT = uniform_hash(keys_BT, self.seed, self.layer)
        share = (1.0 - self.fraction) / (self.operators - 1)
        edges = share * torch.arange(1, self.operators, device=number_BT.device)
        return (number_BT[..., None] >= edges).sum(-1)


class StaticRouter(ChoiceRouter):
    """Control: the whole layer uses one operator, whatever the token."""

    def __init__(self, operators: int, operator: int) -> None:
        super().__init__(operators)
        self.operator = operator

    @classmethod
    def build(cls, config: "ChiarConfig", layer: int) -> Self:
        assert config.operators is not None and config.static_operators is not None
        chosen = config.static_operators[config.routed_layers.index(layer)]
        return cls(len(config.operators), config.operators.index(chosen))

    def choose(self, x_BTD: Tensor, entropy_BT: Tensor | None, context: TokenContext) -> Tensor:
        return torch.full(x_BTD.shape[:2], self.operator, device=x_BTD.device)


def mean_over_tokens(values_BTK: Tensor, real_BT: Tensor | None) -> Tensor:
    """The mean over real tokens."""
    if real_BT is None:
        return values_BTK.mean((0, 1))
    real_BT1 = real_BT[..., None].to(values_BTK.dtype)
    return (values_BTK * real_BT1).sum((0, 1)) / real_BT1.sum().clamp_min(1)


def collapse_loss(routes: list[Route], real_BT: Tensor | None, strength: float) -> Tensor | None:
    """−λ · (entropy of mean operator use), averaged over routed layers; it has a gradient where routers do."""
    if strength == 0.0 or not routes:
        return None
    terms = []
    for route in routes:
        use_BTK = route.weights_BTK.detach() if route.probabilities_BTK is None else route.probabilities_BTK
        terms.append(torch.special.entr(mean_over_tokens(use_BTK, real_BT).clamp_min(1e-12)).sum())
    return -strength * torch.stack(terms).mean()
