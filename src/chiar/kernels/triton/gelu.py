"""GELU of packed rows: only the rows in use are read and written."""

import triton
import triton.language as tl
from torch import Tensor

from chiar.kernels.triton.launch import current

ROWS, COLUMNS = 32, 128


@triton.jit
def _forward(x_ptr, bias_ptr, y_ptr, count_ptr, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    count = tl.load(count_ptr)
    if tl.program_id(0) * ROWS >= count:
        return
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = (rows < count) & (columns < width)
    places = rows.to(tl.int64) * width + columns
    x = tl.load(x_ptr + places, mask=inside, other=0.0).to(tl.float32)
    x += tl.load(bias_ptr + columns, mask=columns < width, other=0.0).to(tl.float32)
    y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    tl.store(y_ptr + places, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _backward(grad_ptr, x_ptr, bias_ptr, dx_ptr, sums_ptr, count_ptr, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """dx, and its sum over this block's rows."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    count = tl.load(count_ptr)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    sums = sums_ptr + tl.program_id(0) * width + columns
    if tl.program_id(0) * ROWS >= count:
        tl.store(sums, tl.zeros([1, COLUMNS], tl.float32), mask=columns < width)
        return
    inside = (rows < count) & (columns < width)
    places = rows.to(tl.int64) * width + columns
    x = tl.load(x_ptr + places, mask=inside, other=0.0).to(tl.float32)
    x += tl.load(bias_ptr + columns, mask=columns < width, other=0.0).to(tl.float32)
    grad = tl.load(grad_ptr + places, mask=inside, other=0.0).to(tl.float32)
    density = 0.3989422804014327 * tl.exp(-0.5 * x * x)
    dx = grad * (0.5 * (1.0 + tl.erf(x * 0.7071067811865476)) + x * density)
    tl.store(dx_ptr + places, dx.to(dx_ptr.dtype.element_ty), mask=inside)
    tl.store(sums, tl.sum(tl.where(inside, dx, 0.0), 0)[None, :], mask=columns < width)


def triton_forward(x_PK: Tensor, bias_K: Tensor, count: Tensor) -> Tensor:
    y_PK = x_PK.new_empty(x_PK.shape)
    with current(x_PK):
        _forward[grid(x_PK)](x_PK, bias_K, y_PK, count, x_PK.shape[1], ROWS=ROWS, COLUMNS=COLUMNS)
    return y_PK


def triton_backward(grad_PK: Tensor, x_PK: Tensor, bias_K: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    dx_PK = x_PK.new_empty(x_PK.shape)
    sums = bias_K.new_empty(grid(x_PK)[0], x_PK.shape[1]).float()
    with current(x_PK):
        _backward[grid(x_PK)](grad_PK, x_PK, bias_K, dx_PK, sums, count, x_PK.shape[1], ROWS=ROWS, COLUMNS=COLUMNS)
    return dx_PK, sums.sum(0).to(bias_K.dtype)


def grid(x_PK: Tensor) -> tuple[int, int]:
    return triton.cdiv(x_PK.shape[0], ROWS), triton.cdiv(x_PK.shape[1], COLUMNS)
