"""What happens to packed rows between products: gather, addition and norm, u = x[token] + (a + b) and h = norm(u), and
GELU. Only the rows in use are read and written; left to a compiler these would be kernels over all P rows."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from chiar.kernels.packing import Packing, accumulation_dtype, product_dtype, register_gradient, row_kernels, row_sum

Two = tuple[Tensor, Tensor]
Four = tuple[Tensor, Tensor, Tensor, Tensor]


def packed_norm(
    x_ND: Tensor, norm: nn.Module | None, packing: Packing, add_PD: Tensor | None = None,
    add_bias_D: Tensor | None = None, implementation: str = "auto",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """u and h, packed; rows that are not in use are undefined. Without `add` u is empty: nobody needs a copy of x.
    `norm` is an nn.RMSNorm, an nn.LayerNorm or None. h has autocast's dtype where that is on: a product reads it."""
    options: tuple[Any, ...] = "none", 0.0
    if isinstance(norm, nn.RMSNorm):
        options = "rms", torch.finfo(x_ND.dtype).eps if norm.eps is None else norm.eps
    elif norm is not None:
        assert isinstance(norm, nn.LayerNorm)
        options = "layer", norm.eps
    where = packing.token_P, packing.place_N, packing.chosen_N, packing.count
    affine = getattr(norm, "weight", None), getattr(norm, "bias", None)
    return PackedNorm.apply(x_ND, *where, *affine, add_PD, add_bias_D, *options, product_dtype(x_ND), implementation)


class PackedNorm(torch.autograd.Function):
    """Its gradient for x is a gather: tokens that were not chosen get zeros."""

    @staticmethod
    def forward(
        context: Any, x_ND: Tensor, token_P: Tensor, place_N: Tensor, chosen_N: Tensor, count: Tensor,
        weight_D: Tensor | None, bias_D: Tensor | None, add_PD: Tensor | None, add_bias_D: Tensor | None, kind: str,
        eps: float, dtype: torch.dtype, implementation: str,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        inputs, keep = (x_ND, token_P, count, weight_D, bias_D, add_PD, add_bias_D), add_PD is not None
        u_PD, h_PD, *scales = packed_norm_forward(*inputs, kind, eps, dtype, keep, implementation)
        context.added = None if add_PD is None else add_PD.dtype
        context.kind, context.implementation = kind, implementation
        where, affine = (token_P, place_N, chosen_N, count), (weight_D, bias_D, add_bias_D)
        context.save_for_backward(u_PD if keep else x_ND, *where, *affine, *scales)
        if not keep:
            context.mark_non_differentiable(u_PD)
        return u_PD, h_PD

    @staticmethod
    def backward(context: Any, *grads: Tensor) -> Any:
        read, token_P, place_N, chosen_N, count, weight_D, bias_D, add_bias_D, *scales = context.saved_tensors
        added, (du_PD, dh_PD) = context.added is not None, grads
        saved = du_PD if added else None, read, None if added else token_P, count, weight_D, *scales
        options = context.kind, context.added, context.implementation
        dx_PD, dadd_PD, dweight_D, dbias_D = packed_norm_backward(dh_PD, *saved, *options)
        dx_ND = torch.where(chosen_N[:, None], dx_PD[place_N], 0.0)
        dweight_D = None if weight_D is None else dweight_D.to(weight_D.dtype)
        dbias_D = None if bias_D is None else dbias_D.to(bias_D.dtype)
        sums = None if add_bias_D is None else row_sum(dadd_PD, count, context.implementation).to(add_bias_D.dtype)
        return dx_ND, *(None,) * 4, dweight_D, dbias_D, dadd_PD if added else None, sums, *(None,) * 4


@torch.library.custom_op("chiar::packed_norm", mutates_args=())
def packed_norm_forward(
    x_ND: Tensor, token_P: Tensor, count: Tensor, weight_D: Tensor | None, bias_D: Tensor | None,
    add_PD: Tensor | None, add_bias_D: Tensor | None, kind: str, eps: float, dtype: torch.dtype, keep: bool,
    implementation: str,
) -> Four:  # fmt: skip
    """u (empty if not to `keep`), h, and the mean and 1/scale of each row."""
    outputs = new_outputs(x_ND, token_P, add_PD, dtype, keep)
    if kernels := row_kernels(x_ND, implementation):
        inputs = count, weight_D, bias_D, None if add_PD is None else add_PD.contiguous(), add_bias_D
        kernels.norm_forward(x_ND.contiguous(), token_P, *inputs, kind=kind, eps=eps, outputs=outputs)
        return outputs
    u_PD, h_PD, mean_P, scale_P = outputs
    used, sums = int(count), mean_P.dtype
    u = x_ND[token_P[:used]]
    if add_PD is not None:
        u = u + (add_PD[:used] if add_bias_D is None else add_PD[:used] + add_bias_D)
    if keep:
        u_PD[:used] = u
    h = u.to(sums)
    if kind != "none":
        if kind == "layer":
            mean_P[:used] = h.mean(1)
            h = h - mean_P[:used, None]
        scale_P[:used] = (h.square().mean(1) + eps).rsqrt()
        h = h * scale_P[:used, None]
        h = h if weight_D is None else h * weight_D
        h = h if bias_D is None else h + bias_D
    h_PD[:used] = h
    return outputs


def new_outputs(x_ND: Tensor, token_P: Tensor, add_PD: Tensor | None, dtype: torch.dtype, keep: bool) -> Four:
    rows, width, sums = len(token_P), x_ND.shape[1], accumulation_dtype(x_ND)
    kept = x_ND.dtype if add_PD is None else torch.promote_types(x_ND.dtype, add_PD.dtype)
    u_PD, h_PD = x_ND.new_empty((rows if keep else 0, width), dtype=kept), x_ND.new_empty((rows, width), dtype=dtype)
    return u_PD, h_PD, x_ND.new_empty(rows, dtype=sums), x_ND.new_empty(rows, dtype=sums)


packed_norm_forward.register_fake(lambda x, token, *a: new_outputs(x, token, add_PD=a[3], dtype=a[7], keep=a[8]))


@torch.library.custom_op("chiar::packed_norm_backward", mutates_args=())
def packed_norm_backward(
    dh_PD: Tensor, du_PD: Tensor | None, read: Tensor, token_P: Tensor | None, count: Tensor, weight_D: Tensor | None,
    mean_P: Tensor, scale_P: Tensor, kind: str, added: torch.dtype | None, implementation: str,
) -> Four:  # fmt: skip
    """Of the gathered x, of `add` (empty without) and of the norm's weight and bias. `read`: u, or x by `token_P`."""
    outputs = new_gradients(dh_PD, read, mean_P, added)
    if kernels := row_kernels(dh_PD, implementation):
        du_PD = None if du_PD is None else du_PD.contiguous()
        saved = read.contiguous(), token_P, count, weight_D, mean_P, scale_P
        return kernels.norm_backward(dh_PD.contiguous(), du_PD, *saved, kind=kind, outputs=outputs)
    dx_PD, dadd_PD, dweight_D, dbias_D = outputs
    used, sums = int(count), mean_P.dtype
    u = (read[:used] if token_P is None else read[token_P[:used]]).to(sums)
    dh = dh_PD[:used].to(sums)
    dweight_D.zero_()
    dbias_D.copy_(dh.sum(0))
    if kind != "none":
        u = u - mean_P[:used, None] if kind == "layer" else u
        normed = u * scale_P[:used, None]
        dweight_D.copy_((dh * normed).sum(0))
        dh = dh if weight_D is None else dh * weight_D
        inner = dh - normed * (dh * normed).mean(1, keepdim=True)
        inner = inner - dh.mean(1, keepdim=True) if kind == "layer" else inner
        dh = inner * scale_P[:used, None]
    dx = dh if du_PD is None else dh + du_PD[:used]
    dx_PD[:used] = dx
    if added is not None:
        dadd_PD[:used] = dx
    return outputs


def new_gradients(dh_PD: Tensor, read: Tensor, mean_P: Tensor, added: torch.dtype | None) -> Four:
    rows, width = dh_PD.shape
    dadd_PD = read.new_empty((rows if added is not None else 0, width), dtype=added or read.dtype)
    return read.new_empty((rows, width)), dadd_PD, mean_P.new_empty(width), mean_P.new_empty(width)


packed_norm_backward.register_fake(lambda dh, du, read, *a: new_gradients(dh, read, mean_P=a[3], added=a[6]))


def unpack_sum(
    u_PD: Tensor, more_PD: Tensor, bias_D: Tensor, other_ND: Tensor, packing: Packing, implementation: str = "auto"
) -> Tensor:
    """u + more + bias where a token was chosen, `other` elsewhere: the end of a path that began with packed_norm."""
    where = packing.token_P, packing.place_N, packing.chosen_N, packing.count
    return UnpackSum.apply(u_PD, more_PD, bias_D, other_ND, *where, implementation)


class UnpackSum(torch.autograd.Function):
    """Its gradient reads the chosen rows once, for u and, in the dtype of products, for `more`."""

    @staticmethod
    def forward(
        context: Any, u_PD: Tensor, more_PD: Tensor, bias_D: Tensor, other_ND: Tensor, token_P: Tensor,
        place_N: Tensor, chosen_N: Tensor, count: Tensor, implementation: str,
    ) -> Tensor:  # fmt: skip
        context.save_for_backward(token_P, chosen_N, count)
        context.dtypes, context.implementation = (u_PD.dtype, more_PD.dtype, bias_D.dtype), implementation
        return torch.where(chosen_N[:, None], u_PD[place_N] + (more_PD[place_N] + bias_D), other_ND)

    @staticmethod
    def backward(context: Any, *grads: Tensor) -> Any:
        token_P, chosen_N, count = context.saved_tensors
        (grad_ND,), (u_dtype, more_dtype, bias_dtype) = grads, context.dtypes
        options = "none", 0.0, more_dtype, True, context.implementation
        du_PD, dmore_PD, _, _ = packed_norm_forward(grad_ND, token_P, count, None, None, None, None, *options)
        dbias_D = row_sum(dmore_PD, count, context.implementation)
        dother_ND = torch.where(chosen_N[:, None], 0.0, grad_ND)
        return du_PD.to(u_dtype), dmore_PD, dbias_D.to(bias_dtype), dother_ND, *(None,) * 5


def packed_gelu(x_PK: Tensor, bias_K: Tensor, count: Tensor, implementation: str = "auto") -> Tensor:
    """Exact gelu(x + b) of the first `count` rows; the rest is undefined."""
    return packed_gelu_forward(x_PK, bias_K.to(x_PK.dtype), count, implementation)


@torch.library.custom_op("chiar::packed_gelu", mutates_args=())
def packed_gelu_forward(x_PK: Tensor, bias_K: Tensor, count: Tensor, implementation: str) -> Tensor:
    if kernels := row_kernels(x_PK, implementation):
        return kernels.launch_gelu(None, x_PK.contiguous(), bias_K, count)[0]
    y_PK, used = x_PK.new_empty(x_PK.shape), int(count)
    y_PK[:used] = F.gelu(x_PK[:used] + bias_K)
    return y_PK


@torch.library.custom_op("chiar::packed_gelu_backward", mutates_args=())
def packed_gelu_backward(grad_PK: Tensor, x_PK: Tensor, bias_K: Tensor, count: Tensor, implementation: str) -> Two:
    """The gradients of x, undefined beyond `count`, and of b."""
    if kernels := row_kernels(x_PK, implementation):
        return kernels.launch_gelu(grad_PK.contiguous(), x_PK.contiguous(), bias_K, count)
    dx_PK, used = x_PK.new_empty(x_PK.shape), int(count)
    dx_PK[:used] = torch.ops.aten.gelu_backward(grad_PK[:used], x_PK[:used] + bias_K)
    return dx_PK, dx_PK[:used].sum(0)


packed_gelu_forward.register_fake(lambda x, *_: x.new_empty(x.shape))
packed_gelu_backward.register_fake(lambda grad, x, bias, *_: (x.new_empty(x.shape), bias.new_empty(bias.shape)))
register_gradient(packed_gelu_forward, packed_gelu_backward, lambda inputs, outputs: inputs)
