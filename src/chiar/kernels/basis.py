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
    gaussian_DD = torch.randn(width, width, dtype=torch.float64, generator=generator)
    q_DD, r_DD = torch.linalg.qr(gaussian_DD)
    return q_DD * r_DD.diagonal().sign()


def basis_matrix(kind: str, width: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """The D×D matrix whose rows are the basis vectors, computed in float64."""
    if kind == "dct":
        matrix_DD = dct_matrix(width)
    elif kind == "random":
        matrix_DD = random_orthogonal(width, seed)
    else:
        assert kind == "identity", kind
        matrix_DD = torch.eye(width)
    return matrix_DD.to(dtype)
