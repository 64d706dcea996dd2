"""Operations on packed rows between matrix products: gather, add and norm (u = x[token] + (a + b), h = norm(u)), and
GELU. The definitions process all P rows; Triton's kernels only the rows in use."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from chiar.kernels.packing import Packing, pack, product_dtype, unpack, used, wants_triton


def packed_norm(
    x_ND: Tensor, norm: nn.Module | None, packing: Packing, add_PD: Tensor | None = None,
    add_bias_D: Tensor | None = None, implementation: str = "auto",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """u and h, packed; rows that are not in use are undefined, and so is u without `add`. `norm` is an nn.RMSNorm, an
    nn.LayerNorm or None. h has autocast's dtype where that is on: a product reads it."""
    if not wants_triton(x_ND, implementation):
        u_PD = pack(x_ND, packing)
        if add_PD is not None:
            u_PD = u_PD + (add_PD if add_bias_D is None else add_PD + add_bias_D)
        u_PD = used(u_PD, packing)
        return u_PD, used(u_PD if norm is None else norm(u_PD), packing).to(product_dtype(x_ND))
    from chiar.kernels.triton_rows import norm_forward

    options: tuple[Any, ...] = "none", 0.0
    if isinstance(norm, nn.RMSNorm):
        options = "rms", torch.finfo(x_ND.dtype).eps if norm.eps is None else norm.eps
    elif norm is not None:
        assert isinstance(norm, nn.LayerNorm)
        options = "layer", norm.eps
    where = packing.token_P, packing.place_N, packing.chosen_N, packing.count
    affine = getattr(norm, "weight", None), getattr(norm, "bias", None)
    inputs = x_ND, *where, *affine, add_PD, add_bias_D
    return norm_forward(*inputs, *options, product_dtype(x_ND), add_PD is not None)[:2]


def unpack_sum(
    u_PD: Tensor, more_PD: Tensor, bias_D: Tensor, other_ND: Tensor, packing: Packing, implementation: str = "auto"
) -> Tensor:
    """u + more + bias at chosen tokens, `other` elsewhere: the end of a path that began with packed_norm."""
    if not wants_triton(u_PD, implementation):
        return unpack(used(u_PD + (more_PD + bias_D), packing), other_ND, packing)
    from chiar.kernels.triton_rows import UnpackSum

    where = packing.token_P, packing.place_N, packing.chosen_N, packing.count
    return UnpackSum.apply(u_PD, more_PD, bias_D, other_ND, *where)


def packed_gelu(x_PK: Tensor, bias_K: Tensor, packing: Packing, implementation: str = "auto") -> Tensor:
    """Exact gelu(x + b) of the first `count` rows; the rest is undefined."""
    bias_K = bias_K.to(x_PK.dtype)
    if not wants_triton(x_PK, implementation):
        return F.gelu(used(x_PK + bias_K, packing))
    from chiar.kernels.triton_rows import gelu_forward

    return gelu_forward(x_PK, bias_K, packing.count)
