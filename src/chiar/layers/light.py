"""Light paths of published rivals, which have no weights of their own."""

import torch
from torch import Tensor, nn


class Skip(nn.Module):
    """Adds nothing. With light_ffn=False a light token passes the layer unchanged, as in Mixture-of-Depths."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x)


class Bypass(nn.Module):
    """A token alone in attention: the layer's own value and output projections, and its norm, as in DTRNet."""


class SpectralWeights(nn.Module):
    """A learned non-negative weight for each frequency's energy inside H, 1 at first. Weights of 0 and 1 are a band."""

    FIRST = 0.5413248546129181
    """softplus⁻¹(1) = log(e − 1)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.raw_D = nn.Parameter(torch.full((width,), self.FIRST))

    def forward(self) -> Tensor:
        return nn.functional.softplus(self.raw_D)
