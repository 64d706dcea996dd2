"""The light operator."""

import torch
from torch import Tensor, nn

from chiar.layers.derived import DerivedBuffers
from chiar.ops.basis import basis_matrix


class SpectralBasis(DerivedBuffers):
    """The orthonormal basis C of the feature axis, shared by all layers."""

    matrix_DD: Tensor

    def __init__(self, kind: str, width: int, seed: int) -> None:
        super().__init__()
        self.kind, self.width, self.seed = kind, width, seed
        self.register_derived()

    def derive(self) -> dict[str, Tensor]:
        return {"matrix_DD": basis_matrix(self.kind, self.width, self.seed)}


class SpectralFilter(nn.Module):
    """x ↦ Cᵀ diag(w) C x: a learned weight per frequency (the paper's w). It mixes features, never tokens."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x_BTD: Tensor, basis_DD: Tensor) -> Tensor:
        basis_DD = basis_DD.to(x_BTD.dtype)
        return ((x_BTD @ basis_DD.T) * self.weight) @ basis_DD
