"""The projection's bias, RoPE and causal attention of packed tokens over themselves, in one operator.

Its gradient arrives where the next product reads it, in one (P, 3, H, d) tensor: left to autograd, three gradients
would be stacked and turned back in passes over all P rows, used or not.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from chiar.kernels.packed_attention import (
    accumulation_dtype,
    packed_attention_backward,
    packed_attention_forward,
    wants_triton,
)
from chiar.kernels.packing import Packing, row_sum


def fits(head: int) -> bool:
    """Whether the operator takes heads of this size: kernels read their vectors where they lie."""
    return 16 <= head <= 256 and head & (head - 1) == 0


def rotary_attention(
    qkv_P3Hd: Tensor,
    bias_3Hd: Tensor,
    rope: tuple[Tensor, Tensor],
    table_P: Tensor,
    packing: Packing,
    limit_P: Tensor,
    max_keys: int,
) -> Tensor:
    """Attention of the packed tokens over each other, (P, H, d), after `bias` was added to q, k and v.

    `rope` are cos and sin, (R, d); `table_P` is the row of each token in them. Rows that are not in use are undefined.
    """
    return rotary_attention_forward(
        qkv_P3Hd, bias_3Hd, rope[0], rope[1], table_P, packing.rows, packing.count, limit_P, max_keys, "auto"
    )[0]


@torch.library.custom_op("chiar::rotary_attention", mutates_args=())
def rotary_attention_forward(
    qkv_P3Hd: Tensor,
    bias_3Hd: Tensor,
    cos_Rd: Tensor,
    sin_Rd: Tensor,
    table_P: Tensor,
    rows: Tensor,
    count: Tensor,
    limit_P: Tensor,
    max_keys: int,
    implementation: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """The output, the log-sums of its softmax, and the rotated q, k and v."""
    rotated = torch.empty_like(qkv_P3Hd, memory_format=torch.contiguous_format)
    rotate_into(rotated, qkv_P3Hd.contiguous(), bias_3Hd, cos_Rd, sin_Rd, table_P, count, 1.0, implementation)
    q, k, v = rotated.unbind(1)
    if wants_triton(rotated, implementation):
        from chiar.kernels.triton.packed_attention import triton_forward

        return *triton_forward(q, k, v, rows, rows, limit_P, max_keys, clear=False), rotated
    skip_P = (limit_P - 1).clamp_min(0)
    return *packed_attention_forward(q, k, v, rows, rows, limit_P, skip_P, max_keys, implementation), rotated


def rotate_into(
    out: Tensor,
    x_P3Hd: Tensor,
    bias_3Hd: Tensor | None,
    cos_Rd: Tensor,
    sin_Rd: Tensor,
    table_P: Tensor,
    count: Tensor,
    sign: float,
    implementation: str,
) -> None:
    """x + bias, queries and keys turned by their angles, or back with a sign of -1; `out` may be x itself."""
    if wants_triton(x_P3Hd, implementation):
        from chiar.kernels.triton.rotary import rotate_rows

        rotate_rows(x_P3Hd, out, bias_3Hd, cos_Rd, sin_Rd, table_P, count, sign)
    else:
        turn(x_P3Hd if bias_3Hd is None else x_P3Hd + bias_3Hd, out, cos_Rd, sin_Rd, table_P, sign)


def turn(x_P3Hd: Tensor, out: Tensor, cos_Rd: Tensor, sin_Rd: Tensor, table_P: Tensor, sign: float) -> None:
    """The definition of the kernel's turn, over all rows."""
    cos, sin = cos_Rd[table_P][:, None, None], sign * sin_Rd[table_P][:, None, None]
    first, second = x_P3Hd[:, :2].chunk(2, dim=-1)
    turned = x_P3Hd[:, :2] * cos + torch.cat([-second, first], dim=-1) * sin
    out[:, 2] = x_P3Hd[:, 2]
    out[:, :2] = turned.to(out.dtype)  # computed whole before it is written: out may be x


@rotary_attention_forward.register_fake
def _forward_fake(qkv_P3Hd: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    P, _three, H, d = qkv_P3Hd.shape
    log_sum_HP = qkv_P3Hd.new_empty((H, P), dtype=accumulation_dtype(qkv_P3Hd))
    return qkv_P3Hd.new_empty((P, H, d)), log_sum_HP, qkv_P3Hd.new_empty((P, 3, H, d))


@torch.library.custom_op("chiar::rotary_attention_backward", mutates_args=())
def rotary_attention_backward(
    grad_PHd: Tensor,
    out_PHd: Tensor,
    log_sum_HP: Tensor,
    rotated_P3Hd: Tensor,
    cos_Rd: Tensor,
    sin_Rd: Tensor,
    table_P: Tensor,
    rows: Tensor,
    count: Tensor,
    limit_P: Tensor,
    max_keys: int,
    implementation: str,
) -> Tensor:
    """The gradient of qkv."""
    q, k, v = rotated_P3Hd.unbind(1)
    skip_P = (limit_P - 1).clamp_min(0)
    if wants_triton(rotated_P3Hd, implementation):
        from chiar.kernels.triton.packed_attention import launch_backward

        dqkv = torch.empty_like(rotated_P3Hd)
        dq, dk, dv = dqkv.unbind(1)
        launch_backward(
            grad_PHd.contiguous(), q, k, v, out_PHd, log_sum_HP, dq, dk, dv, rows, rows, limit_P, skip_P, max_keys,
            q.shape[2], clear=False,
        )  # fmt: skip
    else:
        dqkv = torch.stack(
            packed_attention_backward(
                grad_PHd, q, k, v, out_PHd, log_sum_HP, rows, rows, limit_P, skip_P, max_keys, implementation
            ),
            1,
        )
    rotate_into(dqkv, dqkv, None, cos_Rd, sin_Rd, table_P, count, -1.0, implementation)
    return dqkv


@rotary_attention_backward.register_fake
def _backward_fake(grad_PHd: Tensor, out_PHd: Tensor, log_sum_HP: Tensor, rotated_P3Hd: Tensor, *_: Any) -> Tensor:
    return rotated_P3Hd.new_empty(rotated_P3Hd.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    _, bias_3Hd, cos_Rd, sin_Rd, table_P, rows, count, limit_P, ctx.max_keys, ctx.implementation = inputs
    ctx.bias = bias_3Hd.shape, bias_3Hd.dtype
    ctx.mark_non_differentiable(output[1], output[2])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output, cos_Rd, sin_Rd, table_P, rows, count, limit_P)


def _backward(ctx: Any, grad_PHd: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    none = (None,) * 8
    if grad_PHd is None:
        return None, None, *none
    saved = ctx.saved_tensors  # read once: a layer that is recomputed gives them once
    dqkv = rotary_attention_backward(grad_PHd, *saved, ctx.max_keys, ctx.implementation)
    shape, dtype = ctx.bias
    dbias = row_sum(dqkv.flatten(1), saved[-2], ctx.implementation)
    return dqkv, dbias.view(shape).to(dtype), *none


rotary_attention_forward.register_autograd(_backward, setup_context=_setup_context)


@register_flop_formula(torch.ops.chiar.rotary_attention)
def _forward_flops(qkv_shape: Any, *args: Any, **_: Any) -> int:
    """An upper bound: every token attends to half of `max_keys` tokens."""
    P, _, H, d = qkv_shape
    return 2 * P * H * d * args[7]


@register_flop_formula(torch.ops.chiar.rotary_attention_backward)
def _backward_flops(grad_shape: Any, *args: Any, **_: Any) -> int:
    """An upper bound, as above, with five products."""
    P, H, d = grad_shape
    return 5 * P * H * d * args[9]
