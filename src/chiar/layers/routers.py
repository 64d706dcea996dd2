"""Routers: which operator each token of a routed layer goes to."""

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from chiar import registry
from chiar.errors import InputError
from chiar.kernels.hash import uniform_hash
from chiar.layers.context import TokenContext
from chiar.layers.derived import DerivedBuffers, stored_in
from chiar.layers.groups import counted_tokens, leads, shares

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
    """The learned router's softmax, or the entropy router's p where it has gradients."""
    score_BT: Tensor | None = None
    """What was compared with the threshold, for whoever follows its quantiles."""
    counted_BT: Tensor | None = None
    """Tokens among which was chosen: not padding, nor those whose turn is over; None: all."""
    benefit_loss: Tensor | None = None
    """How far the score is from what attention did, in training where that is asked for."""


def one_hot(choice_BT: Tensor, operators: int) -> Tensor:
    """By comparison: torch's own checks its input, which costs kernels in a compiled decoding step."""
    return (choice_BT[..., None] == torch.arange(operators, device=choice_BT.device)).float()


class ChoiceRouter(nn.Module):
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
        choice_BT = in_turn(self.choose(x_BTD, entropy_BT, context), context) if forced_BT is None else forced_BT
        return Route(choice_BT, one_hot(choice_BT, self.operators))


def in_turn(choice_BT: Tensor, context: TokenContext) -> Tensor:
    return choice_BT if context.turn is None else context.turn.choice(choice_BT)


def only_in_turn(weights_BTK: Tensor, choice_BT: Tensor, context: TokenContext) -> Tensor:
    """A token that is light because its turn is over has nothing to teach a router."""
    waiting_BT = None if context.turn is None else context.turn.waiting_BT
    if waiting_BT is None:
        return weights_BTK
    chosen_BT1 = (waiting_BT | (choice_BT > 0))[..., None]
    return torch.where(chosen_BT1, weights_BTK, one_hot(choice_BT, weights_BTK.shape[-1]))


def without_common_shift(score_BT: Tensor, counted_BT: Tensor | None) -> Tensor:
    """The same scores, but no gradient moves all of them alike.

    Where a threshold follows them such a move changes no choice. Yet every layer wants more attention, so the scores
    would climb for ever, with the threshold behind them and the fraction too high.
    """
    if counted_BT is None:
        mean = score_BT.mean()
    else:
        mean = torch.where(counted_BT, score_BT, 0).sum() / counted_BT.sum().clamp_min(1)
    return score_BT - (mean - mean.detach())


@dataclass(frozen=True)
class Weighing:
    """From probabilities to what operators are multiplied by, where the weights have gradients.

    `both` is the paper's straight-through estimator: forward one-hot, backward the softmax, which needs every
    operator's output. `selected` multiplies the chosen output by p / stopgrad(p) = 1, which needs only that one. With
    the scale `probability` attention's is multiplied by 2p instead, the other's by 1.
    """

    estimator: str = "selected"
    scale: str = "one"
    anneal: float = 0.0
    """The share of training over which weights go from the probabilities to these."""

    def __call__(self, log_p_BTK: Tensor, choice_BT: Tensor, progress: Tensor | None) -> Tensor:
        """`progress` is None outside training."""
        p_BTK = log_p_BTK.exp()
        chosen_BTK = one_hot(choice_BT, p_BTK.shape[-1])
        if self.scale == "probability":
            weights_BTK = chosen_BTK * torch.cat([torch.ones_like(p_BTK[..., :1]), 2 * p_BTK[..., 1:]], dim=-1)
        elif self.estimator == "both":
            weights_BTK = chosen_BTK + (p_BTK - p_BTK.detach())
        else:
            # p / stopgrad(p) through logarithms: a probability may underflow to 0.
            weights_BTK = chosen_BTK * (log_p_BTK - log_p_BTK.detach()).exp()
        if not self.anneal or progress is None:
            return weights_BTK
        hardness = (progress / self.anneal).clamp(max=1.0)
        return (1 - hardness) * p_BTK + hardness * weights_BTK


class EntropyRouter(DerivedBuffers):
    """The paper's rule: H(x) > τ goes to attention. With three operators, τ_low and τ_high cut twice.

    With `weighing` gradients reach H: p = sigmoid((H − τ) / (temperature · σ)), σ a running deviation of H.
    """

    thresholds: Tensor

    def __init__(
        self,
        thresholds: tuple[float, ...],
        weighing: Weighing | None = None,
        temperature: float = 1.0,
        follows: bool = False,
    ) -> None:
        super().__init__()
        self.values, self.weighing, self.temperature, self.follows = thresholds, weighing, temperature, follows
        self.register_derived()

    def derive(self) -> dict[str, Tensor]:
        return {"thresholds": torch.tensor(self.values, dtype=torch.float64)}

    def forward(
        self, x_BTD: Tensor, entropy_BT: Tensor | None, context: TokenContext, forced_BT: Tensor | None
    ) -> Route:
        assert entropy_BT is not None
        # Only buffers are read: a compiled graph must not depend on the numbers.
        state, thresholds = context.router_state, self.thresholds
        if self.follows:
            assert state is not None
            thresholds = state.threshold[None]
        above_BT, counted_BT = (
            (entropy_BT[..., None] > thresholds).sum(-1),
            counted_tokens(context.real_BT, context.turn),
        )
        choice_BT = in_turn(above_BT, context) if forced_BT is None else forced_BT
        if self.weighing is None:
            weights_BTK = one_hot(choice_BT, thresholds.shape[0] + 1)
            return Route(choice_BT, weights_BTK, score_BT=entropy_BT, counted_BT=counted_BT)
        assert state is not None
        if self.follows and self.training:
            entropy_BT = without_common_shift(entropy_BT, counted_BT)
        score_BT = (entropy_BT - thresholds[0]) / (self.temperature * state.spread)
        log_p_BTK = torch.stack([F.logsigmoid(-score_BT), F.logsigmoid(score_BT)], dim=-1)
        weights_BTK = self.weighing(log_p_BTK, choice_BT, state.progress if self.training else None)
        weights_BTK = only_in_turn(weights_BTK, choice_BT, context)
        return Route(choice_BT, weights_BTK, log_p_BTK.exp(), score_BT=entropy_BT, counted_BT=counted_BT)


def joins_a_norm(x_BTD: Tensor) -> bool:
    """Whether a compiler that joins sums over x to the norm before them is at work, on a device where it pays."""
    return torch.compiler.is_compiling() and x_BTD.is_cuda


def linear_as_sums(x_BTD: Tensor, weight_KD: Tensor, bias_K: Tensor) -> Tensor:
    """F.linear for few outputs, which a compiled layer takes along while it reads x for its norm."""
    return torch.stack([(x_BTD * weight_D).sum(-1) for weight_D in weight_KD], dim=-1) + bias_K


class LearnedRouter(nn.Module):
    """A map of [x; H], or of x alone: linear, or with a hidden layer. Soft: its softmax blends the operators. Hard: its
    argmax picks one, or with `follows` attention where its logit leads by more than a threshold, which is then taken
    off before the softmax.
    """

    def __init__(
        self,
        width: int,
        operators: int,
        routing: str,
        weighing: Weighing,
        hidden: int = 0,
        reads_entropy: bool = True,
        follows: bool = False,
    ) -> None:
        super().__init__()
        self.routing, self.weighing, self.reads_entropy, self.follows = routing, weighing, reads_entropy, follows
        inputs = width + 1 if reads_entropy else width
        self.hidden = nn.Linear(inputs, hidden) if hidden else None
        self.score = nn.Linear(hidden or inputs, operators)

    def scores(self, x_BTD: Tensor, entropy_BT: Tensor | None) -> Tensor:
        # In fp32 at least: H varies by 0.004 at width 1024, which is one step of bf16.
        dtype = stored_in(x_BTD.dtype)
        with torch.autocast(x_BTD.device.type, enabled=False):
            seen = x_BTD.to(dtype)
            if self.hidden is None:
                return self.read(self.score, seen, entropy_BT)
            hidden = F.gelu(self.read(self.hidden, seen, entropy_BT))
            return F.linear(hidden, self.score.weight.to(dtype), self.score.bias.to(dtype))

    def read(self, linear: nn.Linear, seen_BTD: Tensor, entropy_BT: Tensor | None) -> Tensor:
        """The map of [x; H]."""
        width, dtype = seen_BTD.shape[-1], seen_BTD.dtype
        weight, bias_K = linear.weight.to(dtype), linear.bias.to(dtype)
        entropy_BT1 = None
        if self.reads_entropy:
            assert entropy_BT is not None
            entropy_BT1 = entropy_BT[..., None].to(dtype)
        if len(weight) <= FEW and joins_a_norm(seen_BTD):
            scores_BTK = linear_as_sums(seen_BTD, weight[:, :width], bias_K)
            return scores_BTK if entropy_BT1 is None else scores_BTK + entropy_BT1 * weight[:, width]
        return F.linear(seen_BTD if entropy_BT1 is None else torch.cat([seen_BTD, entropy_BT1], -1), weight, bias_K)

    def forward(
        self, x_BTD: Tensor, entropy_BT: Tensor | None, context: TokenContext, forced_BT: Tensor | None
    ) -> Route:
        scores_BTK, state = self.scores(x_BTD, entropy_BT), context.router_state
        lead_BT, counted_BT = scores_BTK[..., -1] - scores_BTK[..., 0], counted_tokens(context.real_BT, context.turn)
        if self.follows:
            assert state is not None
            if self.training:
                lead_BT = without_common_shift(lead_BT, counted_BT)
            scores_BTK = torch.stack([torch.zeros_like(lead_BT), lead_BT - state.threshold], dim=-1)
        log_p_BTK = scores_BTK.log_softmax(-1)
        p_BTK = log_p_BTK.exp()
        choice_BT = in_turn(p_BTK.argmax(-1), context) if forced_BT is None else forced_BT
        if self.routing == "soft":
            return Route(choice_BT, p_BTK, p_BTK)
        progress = state.progress if state is not None and self.training else None
        weights_BTK = only_in_turn(self.weighing(log_p_BTK, choice_BT, progress), choice_BT, context)
        return Route(choice_BT, weights_BTK, p_BTK, score_BT=lead_BT, counted_BT=counted_BT)


class RandomRouter(ChoiceRouter):
    """Control: a fixed hash of (seed, layer, token id) or of (seed, layer, position)."""

    def __init__(self, layer: int, operators: int, key: str, fraction: float, seed: int) -> None:
        super().__init__(operators)
        self.layer, self.key, self.fraction, self.seed = layer, key, fraction, seed

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

    def choose(self, x_BTD: Tensor, entropy_BT: Tensor | None, context: TokenContext) -> Tensor:
        return torch.full(x_BTD.shape[:2], self.operator, device=x_BTD.device)


class LedRouter(nn.Module):
    """Does what the first layer of its group did; a forced choice weighs what that layer's router would give it."""

    def __init__(self, weighing: Weighing) -> None:
        super().__init__()
        self.weighing = weighing

    def forward(
        self, x_BTD: Tensor, entropy_BT: Tensor | None, context: TokenContext, forced_BT: Tensor | None
    ) -> Route:
        if forced_BT is None:
            return context.led
        weights_BTK, p_BTK = one_hot(forced_BT, 2), context.led.probabilities_BTK
        if p_BTK is not None:
            progress = context.router_state.progress if context.router_state is not None and self.training else None
            weights_BTK = self.weighing(p_BTK.clamp_min(1e-30).log(), forced_BT, progress)
        return replace(context.led, choice_BT=forced_BT, weights_BTK=weights_BTK)


def make_router(config: Any, layer: int) -> nn.Module:
    if config.router in registry.ROUTERS and leads(config, layer):
        return registry.make_router(config, layer)
    operators, nth = len(config.operators), config.routed_layers.index(layer)
    estimator = config.hard_estimator if config.router == "learned" else "selected"
    weighing = Weighing(estimator, config.router_scale, config.anneal)
    if not leads(config, layer):
        return LedRouter(weighing)
    if config.router == "entropy":
        straight = config.entropy_gradient == "straight_through"
        return EntropyRouter(
            config.layer_thresholds()[nth],
            weighing if straight else None,
            config.router_temperature,
            config.follows_quantile,
        )
    if config.router == "learned":
        reads_entropy = config.router_reads == "state_and_entropy"
        return LearnedRouter(
            config.hidden_size,
            operators,
            config.routing,
            weighing,
            config.router_hidden,
            reads_entropy,
            config.follows_quantile,
        )
    if config.router == "random":
        turns = config.turns
        fraction = shares(turns, len(config.routed_layers))[nth] if turns else config.random_fraction
        return RandomRouter(layer, operators, config.random_key, fraction, config.router_seed)
    return StaticRouter(operators, config.operators.index(config.static_operators[nth]))
