"""What routers learn without gradients: where a share of the scores lies, how far they spread, how far training is."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from chiar.kernels.white_noise import white_noise_entropy
from chiar.layers.derived import DerivedBuffers, stored_in
from chiar.layers.groups import shares

SAMPLE = 4096
"""Scores a pass sorts, or up to twice as many: their quantile is off by some 0.008 in its share before averaging."""
RATE = 0.2
"""How far a pass moves the averages, once there were 1 / RATE of them."""
LOW, HIGH = 0.1587, 0.8413
"""A normal distribution's quantiles at one standard deviation on either side of its mean."""


@dataclass
class LayerState:
    """One layer's part of the state: three scalars."""

    threshold: Tensor
    spread: Tensor
    """A running standard deviation of the scores, from quantiles: outliers do not move it."""
    progress: Tensor
    """The share of training that is done."""


class RouterState(DerivedBuffers):
    """For L routed layers, saved with the weights and kept in fp32 or wider.

    In training every pass moves a threshold towards the (1 − f)-quantile of its scores, after the pass and without
    looking at a value: compiled and recorded passes do the same. Evaluation leaves it where it is, so a token's route
    depends on that token alone, whereas Mixture-of-Depths' top-k compares it with later ones.
    """

    threshold_L: Tensor
    spread_L: Tensor
    updates_L: Tensor
    progress: Tensor
    shares_3L: Tensor
    """Which quantiles are followed: one deviation below the middle, the threshold's, one above."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        layers = len(config.routed_layers)
        own = config.layer_fractions() or [0.5] * layers
        self.fractions: list[float] = shares(config.turns, layers) if config.turns else own
        """Of the tokens a layer chooses among, at the end of training."""
        self.settle: float = config.settle
        self.first = white_noise_entropy(config.hidden_size) if config.router == "entropy" else (0.0, 1.0)
        """Threshold and spread before the first pass."""
        dtype = stored_in(torch.get_default_dtype())
        for name, value in self.initial().items():
            self.register_buffer(name, value.to(dtype))
        self.register_derived()

    def derive(self) -> dict[str, Tensor]:
        shares_L = 1 - torch.tensor(self.fractions, dtype=torch.float64)
        return {"shares_3L": torch.stack([torch.full_like(shares_L, LOW), shares_L, torch.full_like(shares_L, HIGH)])}

    def shares_now(self) -> list[Tensor]:
        low_L, share_L, high_L = self.shares_3L
        return [low_L, share_L * (self.progress / self.settle).clamp(max=1.0) if self.settle else share_L, high_L]

    def initial(self) -> dict[str, Tensor]:
        threshold, spread = self.first
        every = torch.ones(len(self.fractions))
        return {
            "threshold_L": threshold * every,
            "spread_L": spread * every,
            "updates_L": torch.zeros_like(every),
            "progress": torch.zeros(()),
        }

    def of_layers(self) -> list[LayerState]:
        """For the coming pass. In training copies: the originals move before a backward pass has used them."""
        layers = len(self.fractions)
        values = torch.cat([self.threshold_L, self.spread_L, self.progress[None]])
        if self.training:
            values = copied(values)
        return [LayerState(values[n], values[layers + n], values[-1]) for n in range(layers)]

    @torch.no_grad()
    def follow(self, scores: list[Tensor], counted: list[Tensor | None] | None = None) -> None:
        """Take note of the (B, T) scores of each routed layer in one training pass, of those that count."""
        tokens = scores[0].numel()
        step = (tokens // SAMPLE) | 1  # odd: an even one could keep meeting the same positions of a row
        scores_LN = torch.stack([score_BT.detach().flatten()[::step] for score_BT in scores]).to(self.threshold_L.dtype)
        count_L = scores_LN.new_full((len(scores),), scores_LN.shape[1])
        if counted is not None and any(counted_BT is not None for counted_BT in counted):
            masks = [
                torch.ones_like(s, dtype=torch.bool) if c is None else c for s, c in zip(scores, counted, strict=True)
            ]
            counts_LN = torch.stack([mask_BT.flatten()[::step] for mask_BT in masks])
            scores_LN, count_L = torch.where(counts_LN, scores_LN, torch.inf), counts_LN.sum(1).to(count_L.dtype)
        sorted_LN = scores_LN.sort(1).values
        low_L, threshold_L, high_L = (quantile(sorted_LN, count_L, share_L) for share_L in self.shares_now())
        spread_L = ((high_L - low_L) / 2).clamp_min(1e-6)
        rate_L = (1 / (self.updates_L + 1)).clamp_min(RATE)
        for average_L, now_L in ((self.threshold_L, threshold_L), (self.spread_L, spread_L)):
            # Where nothing counts there is no quantile either.
            average_L.copy_(torch.where(count_L > 0, average_L + rate_L * (now_L - average_L), average_L))
        self.updates_L.add_(count_L > 0)

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
    """A copy that a compiler keeps: left to itself it reads the original again in the backward pass."""
    return x.clone()


@copied.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def quantile(sorted_LN: Tensor, count_L: Tensor, share_L: Tensor) -> Tensor:
    """Of the first `count` of each row, linear between neighbours."""
    place_L = share_L * (count_L - 1).clamp_min(0)
    below_L1 = place_L.floor().long()[:, None]
    above_L1 = torch.minimum(below_L1 + 1, (count_L.long() - 1).clamp_min(0)[:, None])
    low_L, high_L = (sorted_LN.gather(1, index_L1)[:, 0] for index_L1 in (below_L1, above_L1))
    return low_L + (place_L - place_L.floor()) * (high_L - low_L)
