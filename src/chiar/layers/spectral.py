"""The light operator."""

from typing import Any, Self

import torch
from torch import Tensor, nn

from chiar.kernels.transform import Transform, apply_filter, transform_matrices
from chiar.layers.derived import DerivedBuffers


class SpectralBasis(DerivedBuffers):
    """The orthonormal basis C of the feature axis, shared by all layers."""

    def __init__(self, kind: str, width: int, seed: int) -> None:
        super().__init__()
        self.kind, self.width, self.seed = kind, width, seed
        self.register_derived()

    def derive(self) -> dict[str, Tensor]:
        return transform_matrices(self.kind, self.width, self.seed)

    def transform(self) -> Transform:
        return Transform(**dict(self.named_buffers()))


class SpectralFilter(nn.Module):
    """x ↦ Cᵀ diag(w) C x: a learned weight per frequency (the paper's w). It mixes features, never tokens."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.folded: tuple[Tensor, ...] | None = None

    def forward(self, x_BTD: Tensor, transform: Transform) -> Tensor:
        if self.folded is not None and not torch.is_grad_enabled():
            return apply_filter(x_BTD, self.folded)
        return transform.inverse(transform.forward(x_BTD) * self.weight)

    def fold(self, transform: Transform) -> None:
        """Keep Cᵀ diag(w) C for passes without gradients: half the products. Undone by whatever may change w."""
        matrices = transform.filter_matrices(self.weight.detach())
        self.folded = tuple(matrix.to(self.weight) for matrix in matrices)

    def train(self, mode: bool = True) -> Self:
        self.folded = None if mode else self.folded
        return super().train(mode)

    def _apply(self, *args: Any, **kwargs: Any) -> Self:
        self.folded = None
        return super()._apply(*args, **kwargs)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self.folded = None
        super()._load_from_state_dict(*args, **kwargs)
