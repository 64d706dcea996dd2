"""Thresholds that follow the scores in training, so that a layer holds its share of attention."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor

from chiar.kernels.white_noise import white_noise_entropy
from chiar.layers.derived import DerivedBuffers, stored_in

if TYPE_CHECKING:
    from chiar.config import ChiarConfig

SAMPLE = 4096
"""Scores a pass sorts, or up to twice as many: their quantile is off by some 0.008 in its share before averaging."""
RATE = 0.2
"""How far a pass moves the averages, once there were 1 / RATE of them."""


class RouterState(DerivedBuffers):
    """For L routed layers, saved with the weights and kept in fp32 or wider.

    In training every pass moves a threshold towards the (1 − f)-quantile of its scores, after the pass and without
    looking at a value: compiled and recorded passes do the same. Evaluation leaves it where it is, so a token's route
    depends on that token alone, whereas Mixture-of-Depths' top-k compares it with later ones.
    """

    threshold_L: Tensor
    updates_L: Tensor
    shares_L: Tensor
    """Which quantiles are followed."""

    def __init__(self, config: "ChiarConfig") -> None:
        super().__init__()
        self.fractions: list[float] = config.layer_fractions() or []
        self.first = white_noise_entropy(config.hidden_size)[0] if config.router == "entropy" else 0.0
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
        """The thresholds of the coming pass. In training copies: the originals move before a backward pass has used
        them."""
        return list((copied(self.threshold_L) if self.training else self.threshold_L).unbind())

    @torch.no_grad()
    def follow(self, scores: list[Tensor], real_BT: Tensor | None = None) -> None:
        """Take note of the (B, T) scores of each routed layer in one training pass, padding left out."""
        tokens = scores[0].numel()
        step = (tokens // SAMPLE) | 1  # odd: an even one could keep meeting the same positions of a row
        scores_LN = torch.stack([score_BT.detach().flatten()[::step] for score_BT in scores]).to(self.threshold_L.dtype)
        count = scores_LN.new_full((), scores_LN.shape[1])
        if real_BT is not None:
            real_N = real_BT.flatten()[::step]
            scores_LN, count = torch.where(real_N, scores_LN, torch.inf), real_N.sum().to(scores_LN.dtype)
        now_L = quantile(scores_LN.sort(1).values, count.expand(len(scores)), self.shares_L)
        rate_L = (1 / (self.updates_L + 1)).clamp_min(RATE)
        # Where nothing counts there is no quantile either.
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
