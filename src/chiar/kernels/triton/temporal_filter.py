"""The filter along time and its gradients. A tile of tokens and channels stays in the first cache while it is read W
times, so that each kernel has it from memory once; the taps' gradients stay in registers while a program walks along
time."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from chiar.kernels.triton.launch import current

# The fastest of those tried at widths 384 and 1024 on an H200.
ROWS, COLUMNS, WARPS = 64, 64, 4
STEPS, TAP_COLUMNS, TAP_WARPS = 16, 64, 2
PRODUCTS = 128  # of one channel in a program of the taps' gradients: taps × tokens


@triton.jit
def _shifted_sum(
    x_ptr,
    taps_ptr,
    y_ptr,
    length,
    width,
    AHEAD: tl.constexpr,
    W: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
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
    grad_ptr,
    x_ptr,
    sums_ptr,
    length,
    width,
    W: tl.constexpr,
    TAPS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEPS: tl.constexpr,
):
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
    taps_2d = tl.arange(0, TAPS)[:, None]
    columns_2d = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    places_2d = (block * W + taps_2d) * width + columns_2d
    tl.store(sums_ptr + places_2d, tl.sum(products, 1), mask=(taps_2d < W) & (columns_2d < width))


def filtered(x_BTD: Tensor, taps_WD: Tensor, ahead: bool, dtype: torch.dtype) -> Tensor:
    y_BTD = x_BTD.new_empty(x_BTD.shape, dtype=dtype)
    B, T, D = x_BTD.shape
    grid = triton.cdiv(T, ROWS), triton.cdiv(D, COLUMNS), B
    with current(x_BTD):
        _shifted_sum[grid](
            x_BTD, taps_WD, y_BTD, T, D, ahead, W=len(taps_WD), ROWS=ROWS, COLUMNS=COLUMNS, num_warps=WARPS
        )
    return y_BTD


def triton_forward(x_BTD: Tensor, taps_WD: Tensor) -> Tensor:
    return filtered(x_BTD, taps_WD, ahead=False, dtype=x_BTD.dtype)


def triton_backward(grad_BTD: Tensor, x_BTD: Tensor, taps_WD: Tensor) -> tuple[Tensor, Tensor]:
    B, T, D = x_BTD.shape
    W = len(taps_WD)
    taps = triton.next_power_of_2(W)
    rows = max(1, PRODUCTS // taps)
    columns = max(16, TAP_COLUMNS * PRODUCTS // (rows * taps))
    blocks = triton.cdiv(T, rows * STEPS)
    sums_PWD = taps_WD.new_empty(B * blocks, W, D, dtype=torch.float32)
    with current(x_BTD):
        _tap_gradients[blocks, triton.cdiv(D, columns), B](
            grad_BTD, x_BTD, sums_PWD, T, D, W, taps, rows, columns, STEPS, num_warps=TAP_WARPS
        )
    dx_BTD = filtered(grad_BTD, taps_WD, ahead=True, dtype=x_BTD.dtype)
    return dx_BTD, sums_PWD.sum(0).to(taps_WD.dtype)
