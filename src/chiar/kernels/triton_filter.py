"""The kernels of temporal_filter. Imported only where one runs."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from chiar.kernels.packing import launch, like, operator

# The fastest of those tried at widths 384 and 1024 on an H200. A tile stays in the first cache
# while it is read W times; the taps' gradients stay in registers while a program walks along time.
FILTER = {"ROWS": 64, "COLUMNS": 64, "num_warps": 4}
STEPS, TAP_COLUMNS, TAP_WARPS = 16, 64, 2
PROGRAMS = 1024  # of the taps' gradients: a GPU's multiprocessors must have several each before one takes more steps
PRODUCTS = 128  # of one channel in a program of the taps' gradients: taps × tokens


@triton.jit
def _shifted_sum(
    x_ptr, taps_ptr, y_ptr, length, width, AHEAD: tl.constexpr, W: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """y_t = Σ_j taps_j · x_{t−j}, or of x_{t+j}: the same filter backwards in time."""
    times = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = (times < length) & (columns < width)
    places = (tl.program_id(2).to(tl.int64) * length + times) * width + columns
    y = tl.zeros([ROWS, COLUMNS], tl.float32)
    for j in tl.static_range(W):
        if AHEAD:
            x = tl.load(x_ptr + places + j * width, mask=inside & (times + j < length), other=0.0)
        else:
            x = tl.load(x_ptr + places - j * width, mask=inside & (times >= j), other=0.0)
        y += tl.load(taps_ptr + j * width + columns, mask=columns < width, other=0.0) * x.to(tl.float32)
    tl.store(y_ptr + places, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _tap_gradients(
    grad_ptr, x_ptr, sums_ptr, length, width, W: tl.constexpr, TAPS: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Σ_t grad_t · x_{t−j} over STEPS · ROWS tokens, for every j at once. TAPS is W, or the power of two above it."""
    taps = tl.arange(0, TAPS)[:, None, None]
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, None, :]
    first = tl.program_id(2).to(tl.int64) * length
    products = tl.zeros([TAPS, ROWS, COLUMNS], tl.float32)
    for step in range(STEPS):
        times = (tl.program_id(0) * STEPS + step) * ROWS + tl.arange(0, ROWS)[None, :, None]
        inside = (times < length) & (columns < width)
        places = (first + times) * width + columns
        grad = tl.load(grad_ptr + places, mask=inside, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + places - taps * width, mask=inside & (times >= taps) & (taps < W), other=0.0)
        products += grad * x.to(tl.float32)
    block = (tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)).to(tl.int64)
    taps = tl.arange(0, TAPS)[:, None]
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    places = (block * W + taps) * width + columns
    tl.store(sums_ptr + places, tl.sum(products, 1), mask=(taps < W) & (columns < width))


@operator("temporal_filter_backward", like(1, 2))
def filter_backward(grad_BTD: Tensor, x_BTD: Tensor, taps_WD: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of x, the same filter backwards in time, and of the taps."""
    (B, T, D), W = x_BTD.shape, len(taps_WD)
    taps, grad_BTD = triton.next_power_of_2(W), grad_BTD.contiguous()
    rows = max(1, PRODUCTS // taps)
    columns = max(16, TAP_COLUMNS * PRODUCTS // (rows * taps))
    across = triton.cdiv(D, columns)
    enough = B * triton.cdiv(T, rows) * across // PROGRAMS
    steps = min(STEPS, 1 << max(enough.bit_length() - 1, 0))
    blocks = triton.cdiv(T, rows * steps)
    sums_PWD = taps_WD.new_empty(B * blocks, W, D, dtype=torch.float32)
    grid, sizes = (blocks, across, B), (T, D, W, taps, rows, columns, steps)
    launch(_tap_gradients, grid, grad_BTD, x_BTD.contiguous(), sums_PWD, *sizes, num_warps=TAP_WARPS)
    return launch_filter(grad_BTD, taps_WD, ahead=True), sums_PWD.sum(0).to(taps_WD.dtype)


@operator("temporal_filter", like(0), gradient=filter_backward)
def filter_forward(x_BTD: Tensor, taps_WD: Tensor) -> Tensor:
    return launch_filter(x_BTD.contiguous(), taps_WD, ahead=False)


def launch_filter(x_BTD: Tensor, taps_WD: Tensor, ahead: bool) -> Tensor:
    y_BTD, (B, T, D) = x_BTD.new_empty(x_BTD.shape), x_BTD.shape
    grid = triton.cdiv(T, FILTER["ROWS"]), triton.cdiv(D, FILTER["COLUMNS"]), B
    launch(_shifted_sum, grid, x_BTD, taps_WD.contiguous(), y_BTD, T, D, ahead, W=len(taps_WD), **FILTER)
    return y_BTD
