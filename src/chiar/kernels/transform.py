"""Orthonormal bases of the feature axis, the DCT of the paper and two controls: C x and Cᵀ x by `basis_matrix`, the
definition, and by `Transform` without products that a basis does not need.
FLOPs of a row of width D: identity none; the DCT of an even width D² (two matrices of half the size); any other 2D²."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

Product = Callable[[Tensor, Tensor], Tensor]


def dct_matrix(width: int) -> Tensor:
    """The orthonormal type-II DCT as a matrix C: C[k, n] = s_k cos(π (n + ½) k / D); its inverse is Cᵀ."""
    n = torch.arange(width, dtype=torch.float64)
    matrix_DD = torch.cos(math.pi * (n[None, :] + 0.5) * n[:, None] / width) * math.sqrt(2.0 / width)
    matrix_DD[0] /= math.sqrt(2.0)
    return matrix_DD


def random_orthogonal(width: int, seed: int) -> Tensor:
    """A Haar-random rotation. The signs of R are fixed, which makes the QR factors unique on any machine."""
    generator = torch.Generator().manual_seed(seed)
    q_DD, r_DD = torch.linalg.qr(torch.randn(width, width, dtype=torch.float64, generator=generator))
    return q_DD * r_DD.diagonal().sign()


def basis_matrix(kind: str, width: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """The D×D matrix whose rows are the basis vectors, computed in float64."""
    assert kind in ("dct", "random", "identity"), kind
    if kind == "random":
        return random_orthogonal(width, seed).to(dtype)
    return (dct_matrix(width) if kind == "dct" else torch.eye(width)).to(dtype)


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
