"""Routers, which choose the operator of each token of a routed layer, and thresholds that follow the scores in
training.

A router is called once per pass with x (under pre-norm as attention would read it, if its kind has `reads_state`) and
with H, if its kind has `reads_entropy`. A forced choice is used as given."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from chiar.config import ChiarConfig
from chiar.errors import InputError, require
from chiar.kernels.hash import uniform_hash
from chiar.kernels.white_noise import white_noise_entropy
from chiar.layers.context import DerivedBuffers, Maybe, TokenContext, stored_in

SAMPLE = 4096  # scores sorted in a pass (up to twice as many); their quantile errs by about 0.008 before averaging
RATE = 0.2  # weight of a new pass in the running mean, after the first 1 / RATE passes


@dataclass
class Route:
    """The decision of one layer for B×T tokens over K operators."""

    choice_BT: Tensor  # index of the chosen operator; under soft routing the one with the largest weight
    weights_BTK: Tensor  # what each operator's output is multiplied by: one-hot, or probabilities under soft routing
    probabilities_BTK: Tensor | None = None  # the learned router's softmax
    score_BT: Tensor | None = None  # what was compared with the threshold


def one_hot(choice_BT: Tensor, operators: int) -> Tensor:
    """By comparison: F.one_hot checks its input, which costs kernels in a compiled decoding step."""
    return (choice_BT[..., None] == torch.arange(operators, device=choice_BT.device)).float()


def check_choice(router: nn.Module, choice_BT: object, x_BTD: Tensor, operators: int, context: TokenContext) -> None:
    """Raise InputError unless a router gave an operator for every token."""
    name, expected = f"the router {type(router).__name__}", tuple(x_BTD.shape[:2])
    if not isinstance(choice_BT, Tensor):
        raise InputError(f"{name} chose {type(choice_BT).__name__}, expected an int64 tensor {expected}.")
    if tuple(choice_BT.shape) != expected or choice_BT.dtype != torch.int64:
        got = f"{str(choice_BT.dtype).removeprefix('torch.')} {tuple(choice_BT.shape)}"
        raise InputError(f"{name} chose {got}, expected int64 {expected}: the number of an operator for each token.")
    looked_at = x_BTD.device.type == "cpu" and not (torch.compiler.is_compiling() or context.room_is_made)
    for number in (int(choice_BT.min()), int(choice_BT.max())) if looked_at else ():
        there = f"a layer has 0..{operators - 1}: 0 is light, the last attention"
        require(0 <= number < operators, f"{name} chose operator {number}, but {there}.")


def check_route(router: nn.Module, route: object, x_BTD: Tensor, operators: int, context: TokenContext) -> None:
    """Raise InputError unless a router that builds its own `Route` built a valid one."""
    name, expected = f"the router {type(router).__name__}", (*x_BTD.shape[:2], operators)
    if not isinstance(route, Route):
        raise InputError(f"{name} returned {type(route).__name__}, expected a Route (chiar.layers.routers).")
    check_choice(router, route.choice_BT, x_BTD, operators, context)
    if tuple(route.weights_BTK.shape) != expected:
        raise InputError(
            f"{name} gave weights {tuple(route.weights_BTK.shape)}, expected {expected}: one per operator."
        )


class ChoiceRouter(nn.Module):
    """A router whose decision has no gradient. Subclasses define `choose`."""

    def __init__(self, operators: int) -> None:
        super().__init__()
        self.operators = operators

    def choose(self, x_BTD: Tensor, entropy_BT: Maybe, context: TokenContext) -> Tensor:
        """The index of each token's operator, (B, T) int64: 0 is light, the last is attention. `context.past` gives
        values of earlier tokens."""
        raise NotImplementedError

    def forward(self, x_BTD: Tensor, entropy_BT: Maybe, context: TokenContext, forced_BT: Maybe) -> Route:
        if forced_BT is None or context.memory is not None:  # later tokens may look back on this pass
            choice_BT = self.choose(x_BTD, entropy_BT, context)
            check_choice(self, choice_BT, x_BTD, self.operators, context)
        choice_BT = choice_BT if forced_BT is None else forced_BT
        return Route(choice_BT, one_hot(choice_BT, self.operators))


class EntropyRouter(DerivedBuffers):
    """The paper's rule: H(x) > τ goes to attention. With three operators, τ_low and τ_high cut twice."""

    thresholds: Tensor

    def __init__(self, config: ChiarConfig, layer: int) -> None:
        super().__init__()
        self.values: tuple[float, ...] = config.layer_thresholds()[config.routed_layers.index(layer)]
        self.follows = config.follows_quantile  # then τ is what training has followed
        self.register_derived()

    def derive(self) -> dict[str, Tensor]:
        return {"thresholds": torch.tensor(self.values, dtype=torch.float64)}

    def scores(self, x_BTD: Tensor, entropy_BT: Tensor, context: TokenContext) -> Tensor:
        """What τ cuts."""
        return entropy_BT

    def forward(self, x_BTD: Tensor, entropy_BT: Maybe, context: TokenContext, forced_BT: Maybe) -> Route:
        assert entropy_BT is not None
        score_BT = self.scores(x_BTD, entropy_BT, context)
        thresholds = self.thresholds  # a buffer: a compiled graph must not depend on the numbers
        if self.follows:
            thresholds = context.cut(score_BT)[None]
        choice_BT = (score_BT[..., None] > thresholds).sum(-1) if forced_BT is None else forced_BT
        return Route(choice_BT, one_hot(choice_BT, thresholds.shape[0] + 1), score_BT=score_BT)


class LearnedRouter(nn.Module):
    """A linear map of [x; H]. Soft: its softmax blends the operators. Hard: its argmax picks one, or with `follows`
    attention where its logit leads by more than a threshold, which is then taken off before the softmax.
    The gradient of hard routing is the paper's straight-through estimator, `both`: forward one-hot, backward the
    softmax, which needs every operator's output. `selected` multiplies the chosen output by p / stopgrad(p) = 1, which
    needs only that one. With the scale `probability` attention's is multiplied by 2p instead, the other's by 1."""

    def __init__(self, config: ChiarConfig, layer: int) -> None:
        super().__init__()
        self.routing, self.estimator = config.routing, config.hard_estimator
        self.scale = "probability" if config.stacks else config.router_scale
        self.follows = config.follows_quantile
        self.score = nn.Linear(config.hidden_size + 1, len(config.operators or []))

    def scores(self, x_BTD: Tensor, entropy_BT: Tensor, context: TokenContext) -> Tensor:
        # In fp32 at least: H varies by 0.004 at width 1024, which is one step of bf16.
        dtype, width = stored_in(x_BTD.dtype), x_BTD.shape[-1]
        with torch.autocast(x_BTD.device.type, enabled=False):
            seen_BTD, entropy_BT1 = x_BTD.to(dtype), entropy_BT[..., None].to(dtype)
            weight, bias_K = self.score.weight.to(dtype), self.score.bias.to(dtype)
            if joins_a_norm(seen_BTD):
                sums_BTK = torch.stack([(seen_BTD * weight_D).sum(-1) for weight_D in weight[:, :width]], dim=-1)
                return sums_BTK + bias_K + entropy_BT1 * weight[:, width]
            return F.linear(torch.cat([seen_BTD, entropy_BT1], -1), weight, bias_K)

    def forward(self, x_BTD: Tensor, entropy_BT: Maybe, context: TokenContext, forced_BT: Maybe) -> Route:
        assert entropy_BT is not None
        scores_BTK = self.scores(x_BTD, entropy_BT, context)
        lead_BT = scores_BTK[..., -1] - scores_BTK[..., 0]
        if self.follows:
            if self.training:
                lead_BT = without_common_shift(lead_BT, context.real_BT)
            scores_BTK = torch.stack([torch.zeros_like(lead_BT), lead_BT - context.cut(lead_BT)], dim=-1)
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


def without_common_shift(score_BT: Tensor, real_BT: Maybe) -> Tensor:
    """The same scores without the gradient that moves all of them alike. The threshold follows such a move, so it
    changes no choice; but every layer profits from more attention, so the scores would grow without end and the
    fraction stay too high."""
    mean = mean_over_tokens(score_BT[..., None], real_BT)
    return score_BT - (mean - mean.detach())


def joins_a_norm(x_BTD: Tensor) -> bool:
    """Whether a compiler can fuse sums over x into the norm before them, on a device where that pays."""
    return torch.compiler.is_compiling() and x_BTD.is_cuda


class RandomRouter(ChoiceRouter):
    """Control: a fixed hash of (seed, layer, token id), of (seed, layer, position) or of all four."""

    def __init__(self, config: ChiarConfig, layer: int) -> None:
        super().__init__(len(config.operators or []))
        self.key, self.fraction, self.seed, self.layer = (
            config.random_key,
            config.random_fraction,
            config.router_seed,
            layer,
        )

    def choose(self, x_BTD: Tensor, entropy_BT: Maybe, context: TokenContext) -> Tensor:
        ids_BT, places_BT = context.token_ids_BT, context.positions_BT
        if ids_BT is None and self.key != "position":
            hashed = f"random_key={self.key!r} hashes token ids"
            raise InputError(f"{hashed}: pass input_ids, or use random_key='position'.")
        keys_BT = places_BT if ids_BT is None or self.key == "position" else ids_BT
        if self.key == "both":
            keys_BT = keys_BT + 100_003 * places_BT
        number_BT = uniform_hash(keys_BT, self.seed, self.layer)
        share = (1.0 - self.fraction) / (self.operators - 1)
        edges = share * torch.arange(1, self.operators, device=number_BT.device)
        return (number_BT[..., None] >= edges).sum(-1)


class StaticRouter(ChoiceRouter):
    """Control: the whole layer uses one operator, whatever the token."""

    def __init__(self, config: ChiarConfig, layer: int) -> None:
        assert config.operators is not None and config.static_operators is not None
        super().__init__(len(config.operators))
        self.operator = config.operators.index(config.static_operators[config.routed_layers.index(layer)])

    def choose(self, x_BTD: Tensor, entropy_BT: Maybe, context: TokenContext) -> Tensor:
        return torch.full(x_BTD.shape[:2], self.operator, device=x_BTD.device)


def mean_over_tokens(values_BTK: Tensor, real_BT: Maybe) -> Tensor:
    if real_BT is None:
        return values_BTK.mean((0, 1))
    return torch.where(real_BT[..., None], values_BTK, 0).sum((0, 1)) / real_BT.sum().clamp_min(1)


def collapse_loss(routes: list[Route], real_BT: Maybe, strength: float) -> Tensor | None:
    """−λ · (entropy of mean operator use), averaged over routed layers; it has a gradient where routers do."""
    if strength == 0.0 or not routes:
        return None
    terms = []
    for route in routes:
        use_BTK = route.weights_BTK.detach() if route.probabilities_BTK is None else route.probabilities_BTK
        terms.append(torch.special.entr(mean_over_tokens(use_BTK, real_BT).clamp_min(1e-12)).sum())
    return -strength * torch.stack(terms).mean()


class RouterState(DerivedBuffers):
    """The thresholds of L routed layers, saved with the weights and kept in fp32 or wider. Every training pass moves
    them towards the (1 − f)-quantile of its scores, after the pass and without reading a value on the host, so that
    compiled and captured passes do the same. Evaluation leaves them alone: a token's route depends on no later token,
    unlike Mixture-of-Depths' top-k."""

    threshold_L: Tensor
    updates_L: Tensor
    shares_L: Tensor  # which quantiles are followed

    def __init__(self, config: ChiarConfig) -> None:
        super().__init__()
        self.fractions: list[float] = config.layer_fractions() or []
        self.first = white_noise_entropy(config.hidden_size)[0] if config.router_kind.has_thresholds else 0.0
        """Threshold before the first pass."""
        dtype = stored_in(torch.get_default_dtype())
        for name, value in self.initial().items():
            self.register_buffer(name, value.to(dtype))
        self.register_derived()

    def derive(self) -> dict[str, Tensor]:
        return {"shares_L": 1 - torch.tensor(self.fractions, dtype=torch.float64)}

    def initial(self) -> dict[str, Tensor]:
        every = torch.ones(len(self.fractions))
        return {"threshold_L": self.first * every, "updates_L": torch.zeros_like(every)}

    def of_layers(self) -> list[Tensor]:
        """Thresholds for the next pass; copies in training, since the originals change before the backward pass."""
        return list((copied(self.threshold_L) if self.training else self.threshold_L).unbind())

    @torch.no_grad()
    def follow(self, scores: list[Tensor], real_BT: Maybe = None) -> None:
        """Update the thresholds with the (B, T) scores of each routed layer in one training pass, without padding."""
        tokens = scores[0].numel()
        step = (tokens // SAMPLE) | 1  # odd: an even one could keep meeting the same positions of a row
        scores_LN = torch.stack([score_BT.detach().flatten()[::step] for score_BT in scores]).to(self.threshold_L.dtype)
        count = scores_LN.new_full((), scores_LN.shape[1])
        if real_BT is not None:
            real_N = real_BT.flatten()[::step]
            scores_LN, count = torch.where(real_N, scores_LN, torch.inf), real_N.sum().to(scores_LN.dtype)
        now_L = quantile(scores_LN.sort(1).values, count.expand(len(scores)), self.shares_L)
        rate_L = (1 / (self.updates_L + 1)).clamp_min(RATE)
        # Without a real token there is no quantile.
        moved_L = self.threshold_L + rate_L * (now_L - self.threshold_L)
        self.threshold_L.copy_(torch.where(count > 0, moved_L, self.threshold_L))
        self.updates_L.add_(count > 0)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        before = {name: getattr(self, name) for name in self.initial()}
        super()._apply(fn, recurse)
        for name, value in before.items():
            after = getattr(self, name)
            if after.dtype != stored_in(after.dtype):
                setattr(self, name, value.to(after.device))
        return self


@torch.library.custom_op("chiar::copied", mutates_args=())
def copied(x: Tensor) -> Tensor:
    """A copy that compilers keep; otherwise they read the original again in the backward pass."""
    return x.clone()


@copied.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def quantile(sorted_LN: Tensor, count_L: Tensor, share_L: Tensor) -> Tensor:
    """Quantile of the first `count` entries of each row, with linear interpolation."""
    place_L = share_L * (count_L - 1).clamp_min(0)
    below_L1 = place_L.floor().long()[:, None]
    above_L1 = torch.minimum(below_L1 + 1, (count_L.long() - 1).clamp_min(0)[:, None])
    low_L, high_L = (sorted_LN.gather(1, index_L1)[:, 0] for index_L1 in (below_L1, above_L1))
    return low_L + (place_L - place_L.floor()) * (high_L - low_L)
