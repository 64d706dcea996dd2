"""Sums over the packed rows in use."""

import triton
import triton.language as tl
from torch import Tensor

from chiar.kernels.triton.launch import current

ROWS, COLUMNS = 128, 64


@triton.jit
def _sum(x_ptr, sums_ptr, count_ptr, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The sum of one block of rows, by column."""
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    sums = sums_ptr + tl.program_id(0) * width + columns
    count = tl.load(count_ptr)
    if tl.program_id(0) * ROWS >= count:
        tl.store(sums, tl.zeros([1, COLUMNS], tl.float32), mask=columns < width)
        return
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    inside = (rows < count) & (columns < width)
    x = tl.load(x_ptr + rows.to(tl.int64) * width + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(sums, tl.sum(x, 0)[None, :], mask=columns < width)


def triton_row_sum(x_PK: Tensor, count: Tensor) -> Tensor:
    blocks, width = triton.cdiv(x_PK.shape[0], ROWS), x_PK.shape[1]
    sums = x_PK.new_empty(blocks, width).float()
    with current(x_PK):
        _sum[(blocks, triton.cdiv(width, COLUMNS))](x_PK, sums, count, width, ROWS=ROWS, COLUMNS=COLUMNS)
    return sums.sum(0).to(x_PK.dtype)
