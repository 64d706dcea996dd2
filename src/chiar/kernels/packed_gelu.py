"""Exact GELU of packed rows and a bias, reading and writing only the rows in use."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from chiar.kernels.packed_attention import wants_triton


def packed_gelu(x_PK: Tensor, bias_K: Tensor, count: Tensor, implementation: str = "auto") -> Tensor:
    """gelu(x + b) of the first `count` rows; the rest is undefined."""
    return packed_gelu_forward(x_PK, bias_K.to(x_PK.dtype), count, implementation)


@torch.library.custom_op("chiar::packed_gelu", mutates_args=())
def packed_gelu_forward(x_PK: Tensor, bias_K: Tensor, count: Tensor, implementation: str) -> Tensor:
    if wants_triton(x_PK, implementation):
        from chiar.kernels.triton.gelu import triton_forward

        return triton_forward(x_PK.contiguous(), bias_K, count)
    y_PK, used = x_PK.new_empty(x_PK.shape), int(count)
    y_PK[:used] = F.gelu(x_PK[:used] + bias_K)
    return y_PK


@packed_gelu_forward.register_fake
def _(x_PK: Tensor, bias_K: Tensor, count: Tensor, implementation: str) -> Tensor:
    return x_PK.new_empty(x_PK.shape)


@torch.library.custom_op("chiar::packed_gelu_backward", mutates_args=())
def packed_gelu_backward(
    grad_PK: Tensor, x_PK: Tensor, bias_K: Tensor, count: Tensor, implementation: str
) -> tuple[Tensor, Tensor]:
    """The gradients of x, undefined beyond `count`, and of b."""
    if wants_triton(x_PK, implementation):
        from chiar.kernels.triton.gelu import triton_backward

        return triton_backward(grad_PK.contiguous(), x_PK.contiguous(), bias_K, count)
    dx_PK, used = x_PK.new_empty(x_PK.shape), int(count)
    dx_PK[:used] = torch.ops.aten.gelu_backward(grad_PK[:used], x_PK[:used] + bias_K)
    return dx_PK, dx_PK[:used].sum(0)


@packed_gelu_backward.register_fake
def _(grad_PK: Tensor, x_PK: Tensor, bias_K: Tensor, count: Tensor, implementation: str) -> tuple[Tensor, Tensor]:
    return x_PK.new_empty(x_PK.shape), bias_K.new_empty(bias_K.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.implementation = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, grad_PK: Tensor) -> tuple[Tensor | None, ...]:
    dx_PK, dbias_K = packed_gelu_backward(grad_PK, *ctx.saved_tensors, ctx.implementation)
    return dx_PK, dbias_K, None, None


packed_gelu_forward.register_autograd(_backward, setup_context=_setup_context)
