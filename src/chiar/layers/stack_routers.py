"""Routers that exist only for dark stacks. Of the others, `predictive` and `spectral` are the EntropyRouter of
routers.py with another H, and `learned` and `random` are the same as in routed layers."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init

from chiar.config import ChiarConfig
from chiar.errors import InputError
from chiar.layers.context import Maybe, TokenContext, stored_in
from chiar.layers.routers import ChoiceRouter, EntropyRouter, Route, mean_over_tokens, one_hot
from chiar.registry import FORECAST_WIDTH

LIGHT, DARK = 0, 1


class RiseRouter(EntropyRouter):
    """Dark where uncertainty begins: H_t − H_{t−1} > τ. Before the first token H is 0."""

    def scores(self, x_BTD: Tensor, entropy_BT: Tensor, context: TokenContext) -> Tensor:
        return entropy_BT - context.past("entropy", entropy_BT, 1)[..., 0]


class ForecastRouter(nn.Module):
    """A small regression of the final prediction's entropy on the detached state: H without a softmax. It is trained by
    DarkStack.loss."""

    def __init__(self, config: ChiarConfig, layer: int) -> None:
        super().__init__()
        self.follows = config.follows_quantile
        self.up, self.down = nn.Linear(config.hidden_size, FORECAST_WIDTH), nn.Linear(FORECAST_WIDTH, 1)

    def scores(self, x_BTD: Tensor, entropy_BT: Maybe, context: TokenContext) -> Tensor:
        # At least fp32: a bf16 score would be compared with a τ rounded to bf16.
        dtype = stored_in(x_BTD.dtype)
        with torch.autocast(x_BTD.device.type, enabled=False):
            hidden_BTh = F.gelu(linear(self.up, x_BTD.detach().to(dtype)))
            return linear(self.down, hidden_BTh)[..., 0]

    def forward(self, x_BTD: Tensor, entropy_BT: Maybe, context: TokenContext, forced_BT: Maybe) -> Route:
        score_BT = self.scores(x_BTD, entropy_BT, context)
        choice_BT = (score_BT > context.cut(score_BT)).long() if forced_BT is None else forced_BT
        return Route(choice_BT, one_hot(choice_BT, 2), score_BT=score_BT)


def linear(layer: nn.Linear, x: Tensor) -> Tensor:
    """`layer(x)` in the precision of x."""
    return F.linear(x, layer.weight.to(x.dtype), layer.bias.to(x.dtype))


class FirstIdentity(nn.Linear):
    """A linear map initialised to the identity."""

    sets_own_weights = True

    def reset_parameters(self) -> None:
        init.copy_(self.weight, torch.eye(len(self.weight), device=self.weight.device))


class BoundaryRouter(nn.Module):
    """H-Net's boundaries (arXiv 2507.07955): p_t = (1 − cos(W_q x_t, W_k x_{t−1})) / 2, dark above ½, the first token
    with p = 1. The weights are 1, with the gradient of p where dark and of 1 − p where light. `ratio_loss` holds f."""

    def __init__(self, config: ChiarConfig, layer: int) -> None:
        super().__init__()
        self.q, self.k = (FirstIdentity(config.hidden_size, config.hidden_size, bias=False) for _ in range(2))

    def forward(self, x_BTD: Tensor, entropy_BT: Maybe, context: TokenContext, forced_BT: Maybe) -> Route:
        dtype = stored_in(x_BTD.dtype)
        q_BTD, k_BTD = self.q(x_BTD).to(dtype), self.k(x_BTD).to(dtype)
        before_BTD = context.past("key", k_BTD, 1)[:, :, 0]
        p_BT = (1 - F.cosine_similarity(q_BTD, before_BTD, dim=-1)) / 2
        p_BT = torch.where(context.positions_BT == 0, 1.0, p_BT)
        choice_BT = (p_BT > 0.5).long() if forced_BT is None else forced_BT
        p_BTK = torch.stack([1 - p_BT, p_BT], -1)
        weights_BTK = one_hot(choice_BT, 2) * (1 + (p_BTK - p_BTK.detach()))
        return Route(choice_BT, weights_BTK, p_BTK)


class SpaceRouter(ChoiceRouter):
    """SpaceByte's rule (arXiv 2404.14408): dark are the first byte, and each space-like byte after one that is not.
    Space-like is ASCII that is neither letter nor digit; bytes of longer characters and ids beyond bytes are not."""

    def __init__(self, config: ChiarConfig, layer: int) -> None:
        super().__init__(2)

    def choose(self, x_BTD: Tensor, entropy_BT: Maybe, context: TokenContext) -> Tensor:
        if context.token_ids_BT is None:
            raise InputError("router='space' reads bytes: pass input_ids.")
        space_BT = is_space(context.token_ids_BT).long()
        before_BT = context.past("space", space_BT, 1, missing=0)[..., 0]
        return torch.where(context.positions_BT == 0, DARK, space_BT * (1 - before_BT))


def is_space(byte: Tensor) -> Tensor:
    inside = [(byte >= ord(first)) & (byte <= ord(last)) for first, last in ("09", "AZ", "az")]
    return (byte < 128) & ~(inside[0] | inside[1] | inside[2])


class StrideRouter(ChoiceRouter):
    """Every k-th token is dark, beginning with the first: MegaByte's patches (arXiv 2305.07185)."""

    def __init__(self, config: ChiarConfig, layer: int) -> None:
        super().__init__(2)
        fractions = config.layer_fractions() or [0.2]
        self.stride = round(1 / fractions[config.routed_layers.index(layer)])

    def choose(self, x_BTD: Tensor, entropy_BT: Maybe, context: TokenContext) -> Tensor:
        return (context.positions_BT % self.stride == 0).long()


def ratio_loss(route: Route, real_BT: Maybe, fraction: float) -> Tensor:
    """H-Net's ratio loss: smallest where a share f is dark and the mean of p is f."""
    assert route.probabilities_BTK is not None
    times = 1 / fraction
    dark = mean_over_tokens(route.choice_BT[..., None].float(), real_BT)[0]
    mean = mean_over_tokens(route.probabilities_BTK[..., DARK:], real_BT)[0]
    return times / (times - 1) * ((times - 1) * dark * mean + (1 - dark) * (1 - mean))


def predictive_entropy(logits_BTV: Tensor) -> Tensor:
    """H of softmax(logits) divided by log V, between 0 and 1, in at least fp32."""
    log_p_BTV = logits_BTV.to(stored_in(logits_BTV.dtype)).log_softmax(-1)
    return -(log_p_BTV.exp() * log_p_BTV).sum(-1) / math.log(logits_BTV.shape[-1])
