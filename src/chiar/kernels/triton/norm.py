"""Gather, addition and norm of packed rows: only the rows in use are read and written."""

import triton
import triton.language as tl
from torch import Tensor

from chiar.kernels.triton.launch import current

TILE = 2048
"""Numbers a program works on at once."""
CHUNK = 16
"""Rows whose sums one program of the backward pass makes, or a tile of narrow ones if that is more."""


@triton.jit
def _tile(pointer, rows, columns, width, inside):
    return tl.load(pointer + rows.to(tl.int64) * width + columns, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _forward(
    x_ptr,
    token_ptr,
    count_ptr,
    weight_ptr,
    bias_ptr,
    add_ptr,
    add_bias_ptr,
    u_ptr,
    h_ptr,
    mean_ptr,
    scale_ptr,
    width,
    eps,
    KIND: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    count = tl.load(count_ptr)
    if tl.program_id(0) * ROWS >= count:
        return
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)[None, :]
    used = rows < count
    inside = used[:, None] & (columns < width)
    tokens = tl.load(token_ptr + rows, mask=used, other=0)
    u = _tile(x_ptr, tokens[:, None], columns, width, inside)
    places = rows[:, None].to(tl.int64) * width + columns
    if add_ptr is not None:
        u += _tile(add_ptr, rows[:, None], columns, width, inside)
        if add_bias_ptr is not None:
            u += tl.load(add_bias_ptr + columns, mask=columns < width, other=0.0).to(tl.float32)
    if u_ptr is not None:
        u = u.to(u_ptr.dtype.element_ty)
        tl.store(u_ptr + places, u, mask=inside)
        u = u.to(tl.float32)
    if KIND != "none":
        if KIND == "layer":
            mean = tl.sum(u, 1) / width
            tl.store(mean_ptr + rows, mean, mask=used)
            u = tl.where(inside, u - mean[:, None], 0.0)
        scale = tl.rsqrt(tl.sum(u * u, 1) / width + eps)
        tl.store(scale_ptr + rows, scale, mask=used)
        u *= scale[:, None]
        if weight_ptr is not None:
            u *= tl.load(weight_ptr + columns, mask=columns < width, other=0.0).to(tl.float32)
        if bias_ptr is not None:
            u += tl.load(bias_ptr + columns, mask=columns < width, other=0.0).to(tl.float32)
    tl.store(h_ptr + places, u.to(h_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _backward(
    dh_ptr,
    du_ptr,
    read_ptr,
    token_ptr,
    count_ptr,
    weight_ptr,
    mean_ptr,
    scale_ptr,
    dx_ptr,
    dadd_ptr,
    weight_sums_ptr,
    bias_sums_ptr,
    width,
    KIND: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """dx and dadd of CHUNK rows, and this chunk's part of the norm's gradients."""
    count = tl.load(count_ptr)
    columns = tl.arange(0, COLUMNS)[None, :]
    weight_sums = tl.zeros([1, COLUMNS], tl.float32)
    bias_sums = tl.zeros([1, COLUMNS], tl.float32)
    first = tl.program_id(0) * CHUNK
    for start in range(first, tl.minimum(first + CHUNK, count), ROWS):
        rows = start + tl.arange(0, ROWS)
        used = rows < count
        inside = used[:, None] & (columns < width)
        dh = _tile(dh_ptr, rows[:, None], columns, width, inside)
        if KIND != "none":
            if token_ptr is not None:
                tokens = tl.load(token_ptr + rows, mask=used, other=0)
                u = _tile(read_ptr, tokens[:, None], columns, width, inside)
            else:
                u = _tile(read_ptr, rows[:, None], columns, width, inside)
            if KIND == "layer":
                mean = tl.load(mean_ptr + rows, mask=used, other=0.0)
                u = tl.where(inside, u - mean[:, None], 0.0)
                bias_sums += tl.sum(dh, 0)[None, :]
            scale = tl.load(scale_ptr + rows, mask=used, other=0.0)
            u *= scale[:, None]
            weight_sums += tl.sum(dh * u, 0)[None, :]
            if weight_ptr is not None:
                dh *= tl.load(weight_ptr + columns, mask=columns < width, other=0.0).to(tl.float32)
            inner = dh - u * (tl.sum(dh * u, 1) / width)[:, None]
            if KIND == "layer":
                inner -= (tl.sum(dh, 1) / width)[:, None]
            dh = inner * scale[:, None]
        if du_ptr is not None:
            dh += _tile(du_ptr, rows[:, None], columns, width, inside)
        places = rows[:, None].to(tl.int64) * width + columns
        tl.store(dx_ptr + places, dh.to(dx_ptr.dtype.element_ty), mask=inside)
        if dadd_ptr is not None:
            tl.store(dadd_ptr + places, dh.to(dadd_ptr.dtype.element_ty), mask=inside)
    if weight_sums_ptr is not None:
        tl.store(weight_sums_ptr + tl.program_id(0) * width + columns, weight_sums, mask=columns < width)
    if bias_sums_ptr is not None:
        tl.store(bias_sums_ptr + tl.program_id(0) * width + columns, bias_sums, mask=columns < width)


def shape(width: int) -> dict[str, int]:
    columns = triton.next_power_of_2(width)
    return {"ROWS": max(1, TILE // columns), "COLUMNS": columns, "num_warps": 4 if columns <= TILE else 8}


def triton_forward(
    x_ND: Tensor,
    token_P: Tensor,
    count: Tensor,
    weight_D: Tensor | None,
    bias_D: Tensor | None,
    add_PD: Tensor | None,
    add_bias_D: Tensor | None,
    kind: str,
    eps: float,
    outputs: tuple[Tensor, Tensor, Tensor, Tensor],
) -> None:
    width = x_ND.shape[1]
    cut = shape(width)
    u_PD, *others = outputs
    add_PD = None if add_PD is None else add_PD.contiguous()
    with current(x_ND):
        _forward[(triton.cdiv(len(token_P), cut["ROWS"]),)](
            x_ND, token_P, count, weight_D, bias_D, add_PD, add_bias_D, u_PD if len(u_PD) else None, *others,
            width, eps, KIND=kind, **cut,
        )  # fmt: skip


def triton_backward(
    dh_PD: Tensor,
    du_PD: Tensor | None,
    read: Tensor,
    token_P: Tensor | None,
    count: Tensor,
    weight_D: Tensor | None,
    mean_P: Tensor,
    scale_P: Tensor,
    kind: str,
    dx_PD: Tensor,
    dadd_PD: Tensor,
) -> tuple[Tensor, Tensor]:
    """Fills dx and dadd; returns the gradients of the norm's weight and bias."""
    rows, width = dh_PD.shape
    cut = shape(width)
    chunk = max(CHUNK, cut["ROWS"])
    chunks = triton.cdiv(rows, chunk)
    weight_sums = mean_P.new_empty(chunks, width) if kind != "none" else None
    bias_sums = mean_P.new_empty(chunks, width) if kind == "layer" else None
    du_PD = None if du_PD is None else du_PD.contiguous()
    with current(dh_PD):
        _backward[(chunks,)](
            dh_PD, du_PD, read, token_P, count, weight_D, mean_P, scale_P, dx_PD, dadd_PD if len(dadd_PD) else None,
            weight_sums, bias_sums, width, KIND=kind, CHUNK=chunk, **cut,
        )  # fmt: skip
    zeros = mean_P.new_zeros(width)
    return (
        zeros if weight_sums is None else weight_sums.sum(0),
        zeros.clone() if bias_sums is None else bias_sums.sum(0),
    )
