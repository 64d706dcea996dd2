"""C x and Cᵀ x along the feature axis, without products that a basis does not need; `basis_matrix` is the definition.
FLOPs of a row of width D: identity none; the DCT of an even width D² (two matrices of half the size); any other 2D²."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from chiar.kernels.basis import basis_matrix

Product = Callable[[Tensor, Tensor], Tensor]


def transform_matrices(kind: str, width: int, seed: int = 0) -> dict[str, Tensor]:
    """The matrices a transform multiplies by, in float64: none, the whole C, or the DCT's two halves. Its row k is even
    about the middle for even k and odd for odd k: the left half of even rows meets x_left + x̃, that of odd rows
    x_left − x̃, where x̃ is the right half read backwards."""
    if kind == "identity":
        return {}
    matrix_DD = basis_matrix(kind, width, seed, torch.float64)
    if kind != "dct" or width % 2:
        return {"whole_DD": matrix_DD}
    half = width // 2
    return {"even_hh": matrix_DD[0::2, :half].contiguous(), "odd_hh": matrix_DD[1::2, :half].contiguous()}


@dataclass(frozen=True)
class Transform:
    """An orthonormal change of coordinates. With no matrix it is the identity."""

    whole_DD: Tensor | None = None
    even_hh: Tensor | None = None
    odd_hh: Tensor | None = None

    def forward(self, x: Tensor, product: Product = F.linear) -> Tensor:
        """C x. `product(x, W)` is x Wᵀ, computed in another way where only some rows count."""
        if self.even_hh is not None and self.odd_hh is not None:
            left, right = x.chunk(2, dim=-1)
            right = right.flip(-1)
            even, odd = product(left + right, self.even_hh.to(x.dtype)), product(left - right, self.odd_hh.to(x.dtype))
            return torch.stack([even, odd], dim=-1).flatten(-2)
        return x if self.whole_DD is None else product(x, self.whole_DD.to(x.dtype))

    def inverse(self, y: Tensor, product: Product = F.linear) -> Tensor:
        """Cᵀ y."""
        if self.even_hh is not None and self.odd_hh is not None:
            even, odd = y.unflatten(-1, (-1, 2)).unbind(-1)
            even, odd = product(even, self.even_hh.to(y.dtype).T), product(odd, self.odd_hh.to(y.dtype).T)
            return torch.cat([even + odd, (even - odd).flip(-1)], dim=-1)
        return y if self.whole_DD is None else product(y, self.whole_DD.to(y.dtype).T)

    @property
    def is_identity(self) -> bool:
        return self.whole_DD is None and self.even_hh is None


def make_transform(kind: str, width: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Transform:
    matrices = transform_matrices(kind, width, seed)
    return Transform(**{name: matrix.to(dtype) for name, matrix in matrices.items()})
