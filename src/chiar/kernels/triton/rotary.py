"""RoPE on packed rows: only the rows in use are read and written."""

import triton
import triton.language as tl
from torch import Tensor

from chiar.kernels.triton.launch import current


@triton.jit
def _rotate(
    x_ptr,
    y_ptr,
    bias_ptr,
    cos_ptr,
    sin_ptr,
    table_ptr,
    count_ptr,
    sign,
    WIDTH: tl.constexpr,
    HEAD: tl.constexpr,
    BLOCK: tl.constexpr,
    COPY: tl.constexpr,
):
    """One packed row of [q, k, v] + bias: q and k turned by their position's angles, v copied if asked for."""
    row = tl.program_id(0)
    if row >= tl.load(count_ptr):
        return
    HALF: tl.constexpr = HEAD // 2
    x_ptr += tl.cast(row, tl.int64) * 3 * WIDTH
    y_ptr += tl.cast(row, tl.int64) * 3 * WIDTH
    pair = tl.arange(0, BLOCK)
    inside = pair < WIDTH // 2
    first = pair // HALF * HEAD + pair % HALF
    table = tl.load(table_ptr + row) * HEAD + pair % HALF
    cos = tl.load(cos_ptr + table, mask=inside, other=0.0)
    sin = tl.load(sin_ptr + table, mask=inside, other=0.0) * sign
    for part in tl.static_range(2):
        a = tl.load(x_ptr + part * WIDTH + first, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(x_ptr + part * WIDTH + first + HALF, mask=inside, other=0.0).to(tl.float32)
        if bias_ptr is not None:
            a += tl.load(bias_ptr + part * WIDTH + first, mask=inside, other=0.0).to(tl.float32)
            b += tl.load(bias_ptr + part * WIDTH + first + HALF, mask=inside, other=0.0).to(tl.float32)
        tl.store(y_ptr + part * WIDTH + first, (a * cos - b * sin).to(y_ptr.dtype.element_ty), mask=inside)
        tl.store(y_ptr + part * WIDTH + first + HALF, (b * cos + a * sin).to(y_ptr.dtype.element_ty), mask=inside)
    if COPY:
        for half in tl.static_range(2):
            value = tl.load(x_ptr + 2 * WIDTH + first + half * HALF, mask=inside, other=0.0).to(tl.float32)
            if bias_ptr is not None:
                value += tl.load(bias_ptr + 2 * WIDTH + first + half * HALF, mask=inside, other=0.0).to(tl.float32)
            tl.store(y_ptr + 2 * WIDTH + first + half * HALF, value.to(y_ptr.dtype.element_ty), mask=inside)


def rotate_rows(
    x_P3Hd: Tensor,
    out: Tensor,
    bias_3Hd: Tensor | None,
    cos_Rd: Tensor,
    sin_Rd: Tensor,
    table_P: Tensor,
    count: Tensor,
    sign: float,
) -> None:
    """Write x + bias, its queries and keys rotated (back, with a sign of -1), to `out`, which may be x itself."""
    rows, _, heads, head = x_P3Hd.shape
    width = heads * head
    with current(x_P3Hd):
        _rotate[(rows,)](
            x_P3Hd, out, bias_3Hd, cos_Rd, sin_Rd, table_P, count, sign,
            WIDTH=width, HEAD=head, BLOCK=triton.next_power_of_2(width // 2), COPY=out is not x_P3Hd, num_warps=4,
        )  # fmt: skip
