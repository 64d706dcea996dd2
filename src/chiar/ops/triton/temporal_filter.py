"""The filter along time and its gradients: a block of tokens and channels stays in the first cache while it is read W
times, so that memory sees each number once."""

import triton
import triton.language as tl
from torch import Tensor

from chiar.ops.triton.launch import current

ROWS, COLUMNS = 128, 32


@triton.jit
def _forward(x_ptr, taps_ptr, y_ptr, length, width, W: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    times = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = (times < length) & (columns < width)
    places = (tl.program_id(2).to(tl.int64) * length + times) * width + columns
    y = tl.zeros([ROWS, COLUMNS], tl.float32)
    for j in tl.static_range(W):
        x = tl.load(x_ptr + places - j * width, mask=inside & (times >= j), other=0.0).to(tl.float32)
        y += tl.load(taps_ptr + j * width + columns, mask=columns < width, other=0.0) * x
    tl.store(y_ptr + places, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _backward(
    grad_ptr,
    x_ptr,
    taps_ptr,
    dx_ptr,
    sums_ptr,
    length,
    width,
    W: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """dx, and this block's part of the gradients of the taps."""
    times = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = (times < length) & (columns < width)
    places = (tl.program_id(2).to(tl.int64) * length + times) * width + columns
    block = (tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)).to(tl.int64)
    grad = tl.load(grad_ptr + places, mask=inside, other=0.0).to(tl.float32)
    dx = tl.zeros([ROWS, COLUMNS], tl.float32)
    for j in tl.static_range(W):
        later = tl.load(grad_ptr + places + j * width, mask=inside & (times + j < length), other=0.0).to(tl.float32)
        dx += tl.load(taps_ptr + j * width + columns, mask=columns < width, other=0.0) * later
        x = tl.load(x_ptr + places - j * width, mask=inside & (times >= j), other=0.0).to(tl.float32)
        sums = tl.sum(grad * x, 0)[None, :]
        tl.store(sums_ptr + (block * W + j) * width + columns, sums, mask=columns < width)
    tl.store(dx_ptr + places, dx.to(dx_ptr.dtype.element_ty), mask=inside)


def triton_forward(x_BTD: Tensor, taps_WD: Tensor) -> Tensor:
    y_BTD = x_BTD.new_empty(x_BTD.shape)
    _, T, D = x_BTD.shape
    with current(x_BTD):
        _forward[grid(x_BTD)](x_BTD, taps_WD, y_BTD, T, D, W=len(taps_WD), ROWS=ROWS, COLUMNS=COLUMNS)
    return y_BTD


def triton_backward(grad_BTD: Tensor, x_BTD: Tensor, taps_WD: Tensor) -> tuple[Tensor, Tensor]:
    dx_BTD = x_BTD.new_empty(x_BTD.shape)
    B, T, D = x_BTD.shape
    sums_PWD = taps_WD.new_empty(B * triton.cdiv(T, ROWS), len(taps_WD), D)
    with current(x_BTD):
        _backward[grid(x_BTD)](
            grad_BTD, x_BTD, taps_WD, dx_BTD, sums_PWD, T, D, W=len(taps_WD), ROWS=ROWS, COLUMNS=COLUMNS
        )
    return dx_BTD, sums_PWD.sum(0)


def grid(x_BTD: Tensor) -> tuple[int, int, int]:
    B, T, D = x_BTD.shape
    return triton.cdiv(T, ROWS), triton.cdiv(D, COLUMNS), B
