"""Orthonormal bases of the feature axis: the DCT of the paper and two controls."""

import math

import torch
from torch import Tensor


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
