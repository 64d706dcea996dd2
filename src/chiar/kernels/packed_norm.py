"""What happens to packed rows between products: gather, addition and norm, u = x[token] + (a + b) and h = norm(u), and
GELU. The definitions pass over all P rows; Triton's kernels read and write only the rows in use."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from chiar.kernels.packing import Packing, pack, product_dtype, register_gradient, row_sum, unpack, used, wants_triton

Four = tuple[Tensor, Tensor, Tensor, Tensor]


def packed_norm(
    x_ND: Tensor, norm: nn.Module | None, packing: Packing, add_PD: Tensor | None = None,
    add_bias_D: Tensor | None = None, implementation: str = "auto",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """u and h, packed; rows that are not in use are undefined, and so is u without `add`. `norm` is an nn.RMSNorm, an
    nn.LayerNorm or None. h has autocast's dtype where that is on: a product reads it."""
    if not wants_triton(x_ND, implementation):
        u_PD = pack(x_ND, packing)
        if add_PD is not None and add_bias_D is not None:
            u_PD = u_PD + (add_PD + add_bias_D)
        u_PD = used(u_PD, packing)
        return u_PD, used(u_PD if norm is None else norm(u_PD), packing).to(product_dtype(x_ND))
    options: tuple[Any, ...] = "none", 0.0
    if isinstance(norm, nn.RMSNorm):
        options = "rms", torch.finfo(x_ND.dtype).eps if norm.eps is None else norm.eps
    elif norm is not None:
        assert isinstance(norm, nn.LayerNorm)
        options = "layer", norm.eps
    where = packing.token_P, packing.place_N, packing.chosen_N, packing.count
    affine, keep = (getattr(norm, "weight", None), getattr(norm, "bias", None)), add_PD is not None
    inputs = x_ND, *where, *affine, add_PD, add_bias_D
    return packed_norm_forward(*inputs, *options, product_dtype(x_ND), keep)[:2]


@torch.library.custom_op("chiar::packed_norm", mutates_args=())
def packed_norm_forward(
    x_ND: Tensor, token_P: Tensor, place_N: Tensor, chosen_N: Tensor, count: Tensor, weight_D: Tensor | None,
    bias_D: Tensor | None, add_PD: Tensor | None, add_bias_D: Tensor | None, kind: str, eps: float, dtype: torch.dtype,
    keep: bool,
) -> Four:  # fmt: skip
    """u (empty if not to `keep`), h, and the mean and 1/scale of each row."""
    from chiar.kernels.triton_rows import norm_forward

    outputs = new_outputs(x_ND, token_P, add_PD, dtype, keep)
    inputs = count, weight_D, bias_D, None if add_PD is None else add_PD.contiguous(), add_bias_D
    norm_forward(x_ND.contiguous(), token_P, *inputs, kind=kind, eps=eps, outputs=outputs)
    return outputs


def new_outputs(x_ND: Tensor, token_P: Tensor, add_PD: Tensor | None, dtype: torch.dtype, keep: bool) -> Four:
    rows, width, sums = len(token_P), x_ND.shape[1], torch.float32
    kept = x_ND.dtype if add_PD is None else torch.promote_types(x_ND.dtype, add_PD.dtype)
    u_PD, h_PD = x_ND.new_empty((rows if keep else 0, width), dtype=kept), x_ND.new_empty((rows, width), dtype=dtype)
    return u_PD, h_PD, x_ND.new_empty(rows, dtype=sums), x_ND.new_empty(rows, dtype=sums)


@torch.library.custom_op("chiar::packed_norm_backward", mutates_args=())
def packed_norm_backward(
    dh_PD: Tensor, du_PD: Tensor | None, read: Tensor, token_P: Tensor | None, count: Tensor, weight_D: Tensor | None,
    mean_P: Tensor, scale_P: Tensor, kind: str, added: torch.dtype | None,
) -> Four:  # fmt: skip
    """Of the gathered x, of `add` (empty without) and of the norm's weight and bias. `read`: u, or x by `token_P`."""
    from chiar.kernels.triton_rows import norm_backward

    du_PD, outputs = None if du_PD is None else du_PD.contiguous(), new_gradients(dh_PD, read, mean_P, added)
    saved = read.contiguous(), token_P, count, weight_D, mean_P, scale_P
    return norm_backward(dh_PD.contiguous(), du_PD, *saved, kind=kind, outputs=outputs)


def new_gradients(dh_PD: Tensor, read: Tensor, mean_P: Tensor, added: torch.dtype | None) -> Four:
    rows, width = dh_PD.shape
    dadd_PD = read.new_empty((rows if added is not None else 0, width), dtype=added or read.dtype)
    return read.new_empty((rows, width)), dadd_PD, mean_P.new_empty(width), mean_P.new_empty(width)


def keep_for_gradients(inputs: tuple[Any, ...], outputs: Four) -> tuple[Any, ...]:
    x_ND, token_P, place_N, chosen_N, count, weight_D, bias_D, add_PD, add_bias_D, kind, *_ = inputs
    read, added = ((x_ND, token_P), None) if add_PD is None else ((outputs[0], None), add_PD.dtype)
    return *read, place_N, chosen_N, count, weight_D, bias_D, add_bias_D, *outputs[2:], kind, added


def norm_gradients(
    du_PD: Tensor | None, dh_PD: Tensor, read: Tensor, token_P: Tensor | None, place_N: Tensor, chosen_N: Tensor,
    count: Tensor, weight_D: Tensor | None, bias_D: Tensor | None, add_bias_D: Tensor | None, mean_P: Tensor,
    scale_P: Tensor, kind: str, added: torch.dtype | None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """That of x is a gather: tokens that were not chosen get zeros."""
    saved = read, token_P, count, weight_D, mean_P, scale_P
    dx_PD, dadd_PD, dweight_D, dbias_D = packed_norm_backward(dh_PD, du_PD, *saved, kind, added)
    dx_ND = torch.where(chosen_N[:, None], dx_PD[place_N], 0.0)
    by_weight = None if weight_D is None else dweight_D.to(weight_D.dtype)
    by_bias = None if bias_D is None else dbias_D.to(bias_D.dtype)
    sums = None if add_bias_D is None else row_sum(dadd_PD, count, "triton").to(add_bias_D.dtype)
    return dx_ND, *(None,) * 4, by_weight, by_bias, None if added is None else dadd_PD, sums


packed_norm_forward.register_fake(lambda x, token, *a: new_outputs(x, token, add_PD=a[5], dtype=a[9], keep=a[10]))
packed_norm_backward.register_fake(lambda dh, du, read, *a: new_gradients(dh, read, mean_P=a[3], added=a[6]))
register_gradient(packed_norm_forward, norm_gradients, keep_for_gradients, differentiable=2)


def unpack_sum(
    u_PD: Tensor, more_PD: Tensor, bias_D: Tensor, other_ND: Tensor, packing: Packing, implementation: str = "auto"
) -> Tensor:
    """u + more + bias where a token was chosen, `other` elsewhere: the end of a path that began with packed_norm."""
    if not wants_triton(u_PD, implementation):
        return unpack(used(u_PD + (more_PD + bias_D), packing), other_ND, packing)
    where = packing.token_P, packing.place_N, packing.chosen_N, packing.count
    return UnpackSum.apply(u_PD, more_PD, bias_D, other_ND, *where)


class UnpackSum(torch.autograd.Function):
    """Its gradient reads the chosen rows once, for u and, in the dtype of products, for `more`."""

    @staticmethod
    def forward(
        context: Any, u_PD: Tensor, more_PD: Tensor, bias_D: Tensor, other_ND: Tensor, token_P: Tensor,
        place_N: Tensor, chosen_N: Tensor, count: Tensor,
    ) -> Tensor:  # fmt: skip
        context.save_for_backward(token_P, place_N, chosen_N, count)
        context.dtypes = u_PD.dtype, more_PD.dtype, bias_D.dtype
        return torch.where(chosen_N[:, None], u_PD[place_N] + (more_PD[place_N] + bias_D), other_ND)

    @staticmethod
    def backward(context: Any, *grads: Tensor) -> Any:
        (_, _, chosen_N, count), (grad_ND,) = context.saved_tensors, grads
        u_dtype, more_dtype, bias_dtype = context.dtypes
        inputs = grad_ND, *context.saved_tensors, *(None,) * 4
        du_PD, dmore_PD, _, _ = packed_norm_forward(*inputs, "none", 0.0, more_dtype, True)
        dbias_D = row_sum(dmore_PD, count, "triton")
        dother_ND = torch.where(chosen_N[:, None], 0.0, grad_ND)
        return du_PD.to(u_dtype), dmore_PD, dbias_D.to(bias_dtype), dother_ND, *(None,) * 4


def packed_gelu(x_PK: Tensor, bias_K: Tensor, packing: Packing, implementation: str = "auto") -> Tensor:
    """Exact gelu(x + b) of the first `count` rows; the rest is undefined."""
    bias_K = bias_K.to(x_PK.dtype)
    if wants_triton(x_PK, implementation):
        return packed_gelu_forward(x_PK, bias_K, packing.count)
    return F.gelu(used(x_PK + bias_K, packing))


@torch.library.custom_op("chiar::packed_gelu", mutates_args=())
def packed_gelu_forward(x_PK: Tensor, bias_K: Tensor, count: Tensor) -> Tensor:
    from chiar.kernels.triton_rows import launch_gelu

    return launch_gelu(None, x_PK.contiguous(), bias_K, count)[0]


@torch.library.custom_op("chiar::packed_gelu_backward", mutates_args=())
def packed_gelu_backward(grad_PK: Tensor, x_PK: Tensor, bias_K: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of x, undefined beyond `count`, and of b."""
    from chiar.kernels.triton_rows import launch_gelu

    dx_PK, dbias_K = launch_gelu(grad_PK.contiguous(), x_PK.contiguous(), bias_K, count)
    assert dbias_K is not None
    return dx_PK, dbias_K


packed_gelu_forward.register_fake(lambda x, *_: x.new_empty(x.shape))
packed_gelu_backward.register_fake(lambda grad, x, bias, *_: (x.new_empty(x.shape), bias.new_empty(bias.shape)))
register_gradient(packed_gelu_forward, packed_gelu_backward, lambda inputs, outputs: inputs)
