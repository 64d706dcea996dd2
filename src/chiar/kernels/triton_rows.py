"""The kernels that work row by row: packed norm, GELU, row sums and RoPE, which read and write only the rows in use;
softmax_gradient. Imported only where one runs."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from chiar.kernels.packing import launch, like, operator, row_sum

Four = tuple[Tensor, Tensor, Tensor, Tensor]
TILE = 2048  # numbers a program of the norm works on at once
CHUNK = 16  # rows whose sums one program of its backward pass makes, or a tile of narrow ones if that is more
GELU, SUM = {"ROWS": 32, "COLUMNS": 128}, {"ROWS": 128, "COLUMNS": 64}
SOFTMAX_BLOCK, SOFTMAX_WARPS = 4096, 16


@triton.jit
def _tile(pointer, rows, columns, width, inside):
    return tl.load(pointer + rows.to(tl.int64) * width + columns, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _norm_forward(
    x_ptr, token_ptr, count_ptr, weight_ptr, bias_ptr, add_ptr, add_bias_ptr, u_ptr, h_ptr, mean_ptr, scale_ptr,
    width, eps, KIND: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
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
def _norm_backward(
    dh_ptr, du_ptr, read_ptr, token_ptr, count_ptr, weight_ptr, mean_ptr, scale_ptr, dx_ptr, dadd_ptr,
    weight_sums_ptr, bias_sums_ptr, width, KIND: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
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
            source = rows if token_ptr is None else tl.load(token_ptr + rows, mask=used, other=0)
            u = _tile(read_ptr, source[:, None], columns, width, inside)
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


@operator("packed_norm_backward", lambda dh, du, read, *a: new_gradients(dh, read, mean_P=a[3], added=a[6]))
def norm_backward(
    dh_PD: Tensor, du_PD: Tensor | None, read: Tensor, token_P: Tensor | None, count: Tensor, weight_D: Tensor | None,
    mean_P: Tensor, scale_P: Tensor, kind: str, added: torch.dtype | None,
) -> Four:  # fmt: skip
    """Of the gathered x, of `add` (empty without) and of the norm's weight and bias. `read`: u, or x by `token_P`."""
    dx_PD, dadd_PD, dweight_D, dbias_D = new_gradients(dh_PD, read, mean_P, added)
    rows, width = dh_PD.shape
    cut = shape(width)
    chunk = max(CHUNK, cut["ROWS"])
    chunks = triton.cdiv(rows, chunk)
    weight_sums = dweight_D.new_empty(chunks, width) if kind != "none" else None
    bias_sums = dweight_D.new_empty(chunks, width) if kind == "layer" else None
    inputs = None if du_PD is None else du_PD.contiguous(), read.contiguous(), token_P, count, weight_D, mean_P, scale_P
    places = dx_PD, dadd_PD if len(dadd_PD) else None, weight_sums, bias_sums
    launch(_norm_backward, (chunks,), dh_PD.contiguous(), *inputs, *places, width, KIND=kind, CHUNK=chunk, **cut)
    dweight_D = dweight_D.zero_() if weight_sums is None else weight_sums.sum(0)
    return dx_PD, dadd_PD, dweight_D, dbias_D.zero_() if bias_sums is None else bias_sums.sum(0)


def new_gradients(dh_PD: Tensor, read: Tensor, mean_P: Tensor, added: torch.dtype | None) -> Four:
    rows, width = dh_PD.shape
    dadd_PD = read.new_empty((rows if added is not None else 0, width), dtype=added or read.dtype)
    return read.new_empty((rows, width)), dadd_PD, mean_P.new_empty(width), mean_P.new_empty(width)


def norm_gradients(
    du_PD: Tensor | None, dh_PD: Tensor, read: Tensor, token_P: Tensor | None, place_N: Tensor, chosen_N: Tensor,
    count: Tensor, weight_D: Tensor | None, bias_D: Tensor | None, add_bias_D: Tensor | None, mean_P: Tensor,
    scale_P: Tensor, kind: str, added: torch.dtype | None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """That of x is a gather: tokens that were not chosen get zeros."""
    saved = read, token_P, count, weight_D, mean_P, scale_P
    dx_PD, dadd_PD, dweight_D, dbias_D = norm_backward(dh_PD, du_PD, *saved, kind, added)
    dx_ND = torch.where(chosen_N[:, None], dx_PD[place_N], 0.0)
    by_weight = None if weight_D is None else dweight_D.to(weight_D.dtype)
    by_bias = None if bias_D is None else dbias_D.to(bias_D.dtype)
    sums = None if add_bias_D is None else row_sum(dadd_PD, count, "triton").to(add_bias_D.dtype)
    return dx_ND, *(None,) * 4, by_weight, by_bias, None if added is None else dadd_PD, sums


def keep_for_gradients(inputs: tuple[Any, ...], outputs: Four) -> tuple[Any, ...]:
    x_ND, token_P, place_N, chosen_N, count, weight_D, bias_D, add_PD, add_bias_D, kind, *_ = inputs
    read, added = ((x_ND, token_P), None) if add_PD is None else ((outputs[0], None), add_PD.dtype)
    return *read, place_N, chosen_N, count, weight_D, bias_D, add_bias_D, *outputs[2:], kind, added


@operator(
    "packed_norm", lambda x, token, *a: new_outputs(x, token, add_PD=a[5], dtype=a[9], keep=a[10]),
    gradient=norm_gradients, saved=keep_for_gradients, differentiable=2,
)  # fmt: skip
def norm_forward(
    x_ND: Tensor, token_P: Tensor, place_N: Tensor, chosen_N: Tensor, count: Tensor, weight_D: Tensor | None,
    bias_D: Tensor | None, add_PD: Tensor | None, add_bias_D: Tensor | None, kind: str, eps: float, dtype: torch.dtype,
    keep: bool,
) -> Four:  # fmt: skip
    """u (empty if not to `keep`), h, and the mean and 1/scale of each row."""
    outputs, cut = new_outputs(x_ND, token_P, add_PD, dtype, keep), shape(x_ND.shape[1])
    inputs = count, weight_D, bias_D, None if add_PD is None else add_PD.contiguous(), add_bias_D
    places, grid = (outputs[0] if keep else None, *outputs[1:]), (triton.cdiv(len(token_P), cut["ROWS"]),)
    launch(_norm_forward, grid, x_ND.contiguous(), token_P, *inputs, *places, x_ND.shape[1], eps, KIND=kind, **cut)
    return outputs


def new_outputs(x_ND: Tensor, token_P: Tensor, add_PD: Tensor | None, dtype: torch.dtype, keep: bool) -> Four:
    rows, width, sums = len(token_P), x_ND.shape[1], torch.float32
    kept = x_ND.dtype if add_PD is None else torch.promote_types(x_ND.dtype, add_PD.dtype)
    u_PD, h_PD = x_ND.new_empty((rows if keep else 0, width), dtype=kept), x_ND.new_empty((rows, width), dtype=dtype)
    return u_PD, h_PD, x_ND.new_empty(rows, dtype=sums), x_ND.new_empty(rows, dtype=sums)


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
        (token_P, place_N, chosen_N, count), (grad_ND,) = context.saved_tensors, grads
        u_dtype, more_dtype, bias_dtype = context.dtypes
        inputs = grad_ND, token_P, place_N, chosen_N, count, None, None, None, None
        du_PD, dmore_PD, _, _ = norm_forward(*inputs, "none", 0.0, more_dtype, True)
        dbias_D = row_sum(dmore_PD, count, "triton")
        dother_ND = torch.where(chosen_N[:, None], 0.0, grad_ND)
        return du_PD.to(u_dtype), dmore_PD, dbias_D.to(bias_dtype), dother_ND, *(None,) * 4


@triton.jit
def _gelu(x_ptr, grad_ptr, bias_ptr, y_ptr, sums_ptr, count_ptr, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """y = gelu(x + b); with a gradient dx instead, and its sum over this block's rows."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    count = tl.load(count_ptr)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    if sums_ptr is not None:
        sums = sums_ptr + tl.program_id(0) * width + columns
    if tl.program_id(0) * ROWS >= count:
        if sums_ptr is not None:
            tl.store(sums, tl.zeros([1, COLUMNS], tl.float32), mask=columns < width)
        return
    inside = (rows < count) & (columns < width)
    places = rows.to(tl.int64) * width + columns
    x = tl.load(x_ptr + places, mask=inside, other=0.0).to(tl.float32)
    x += tl.load(bias_ptr + columns, mask=columns < width, other=0.0).to(tl.float32)
    if grad_ptr is None:
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        grad = tl.load(grad_ptr + places, mask=inside, other=0.0).to(tl.float32)
        density = 0.3989422804014327 * tl.exp(-0.5 * x * x)
        y = grad * (0.5 * (1.0 + tl.erf(x * 0.7071067811865476)) + x * density)
    tl.store(y_ptr + places, y.to(y_ptr.dtype.element_ty), mask=inside)
    if sums_ptr is not None:
        tl.store(sums, tl.sum(tl.where(inside, y, 0.0), 0)[None, :], mask=columns < width)


@operator("packed_gelu_backward", like(1, 2))
def gelu_backward(grad_PK: Tensor, x_PK: Tensor, bias_K: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of x, undefined beyond `count`, and of b."""
    sums = bias_K.new_empty(triton.cdiv(len(x_PK), GELU["ROWS"]), len(bias_K)).float()
    return launch_gelu(x_PK, grad_PK.contiguous(), bias_K, count, sums), sums.sum(0).to(bias_K.dtype)


@operator("packed_gelu", like(0), gradient=gelu_backward)
def gelu_forward(x_PK: Tensor, bias_K: Tensor, count: Tensor) -> Tensor:
    return launch_gelu(x_PK, None, bias_K, count, None)


def launch_gelu(x_PK: Tensor, grad_PK: Tensor | None, bias_K: Tensor, count: Tensor, sums: Tensor | None) -> Tensor:
    y_PK, (rows, width) = x_PK.new_empty(x_PK.shape), x_PK.shape
    grid = triton.cdiv(rows, GELU["ROWS"]), triton.cdiv(width, GELU["COLUMNS"])
    launch(_gelu, grid, x_PK.contiguous(), grad_PK, bias_K, y_PK, sums, count, width, **GELU)
    return y_PK


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
    tl.store(sums, tl.sum(_tile(x_ptr, rows, columns, width, inside), 0)[None, :], mask=columns < width)


def triton_row_sum(x_PK: Tensor, count: Tensor) -> Tensor:
    blocks, width = triton.cdiv(x_PK.shape[0], SUM["ROWS"]), x_PK.shape[1]
    sums = x_PK.new_empty(blocks, width).float()
    launch(_sum, (blocks, triton.cdiv(width, SUM["COLUMNS"])), x_PK, sums, count, width, **SUM)
    return sums.sum(0).to(x_PK.dtype)


@triton.jit
def _rotate(
    x_ptr, y_ptr, bias_ptr, cos_ptr, sin_ptr, table_ptr, count_ptr, sign, WIDTH: tl.constexpr, HEAD: tl.constexpr,
    BLOCK: tl.constexpr, COPY: tl.constexpr,
):  # fmt: skip
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
    for part in tl.static_range(3 if COPY else 2):
        a = tl.load(x_ptr + part * WIDTH + first, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(x_ptr + part * WIDTH + first + HALF, mask=inside, other=0.0).to(tl.float32)
        if bias_ptr is not None:
            a += tl.load(bias_ptr + part * WIDTH + first, mask=inside, other=0.0).to(tl.float32)
            b += tl.load(bias_ptr + part * WIDTH + first + HALF, mask=inside, other=0.0).to(tl.float32)
        if part < 2:
            a, b = a * cos - b * sin, b * cos + a * sin
        tl.store(y_ptr + part * WIDTH + first, a.to(y_ptr.dtype.element_ty), mask=inside)
        tl.store(y_ptr + part * WIDTH + first + HALF, b.to(y_ptr.dtype.element_ty), mask=inside)


def rotate_rows(x_P3Hd: Tensor, out: Tensor, *inputs: Tensor | None, sign: float) -> None:
    """As rotate_into. `inputs`: the kernel's, from `bias` to `count`."""
    rows, _, heads, head = x_P3Hd.shape
    sizes = {"WIDTH": heads * head, "HEAD": head, "BLOCK": triton.next_power_of_2(heads * head // 2)}
    launch(_rotate, (rows,), x_P3Hd, out, *inputs, sign, **sizes, COPY=out is not x_P3Hd, num_warps=4)


@triton.jit
def _softmax_gradient(
    logits_ptr, targets_ptr, losses_ptr, row_stride, target_stride, ignore_index, VOCABULARY: tl.constexpr,
    PADDED: tl.constexpr, GRADIENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program a row, read twice: for log Σ exp, then (from the L2 cache) to become its gradient. Memory is masked
    at PADDED, a multiple of 16, so that loads and stores are 16 bytes wide; numbers at VOCABULARY."""
    row = tl.program_id(0).to(tl.int64)  # row × row_stride may pass 2³¹
    row_ptr = logits_ptr + row * row_stride
    columns = tl.arange(0, BLOCK)
    # Every lane keeps the maximum m of what it saw and s = Σ exp(x − m). Of exp(m − m') and exp(x − m') with
    # m' = max(m, x) one is 1 and the other exp(−|m − x|), so an element costs one exponential.
    # m starts finite so that lanes beyond the row never meet ∞ − ∞.
    m = tl.full([BLOCK], -3.0e38, tl.float32)
    s = tl.zeros([BLOCK], tl.float32)
    for start in range(0, PADDED, BLOCK):
        x = tl.load(row_ptr + start + columns, mask=start + columns < PADDED, other=0.0).to(tl.float32)
        x = tl.where(start + columns < VOCABULARY, x, -float("inf"))
        e = tl.exp(-tl.abs(m - x))
        s = tl.where(x > m, s * e + 1.0, s + e)
        m = tl.maximum(m, x)
    largest = tl.max(m, 0)
    log_sum = largest + tl.log(tl.sum(s * tl.exp(m - largest), 0))
    target = tl.load(targets_ptr + row * target_stride)
    kept = target != ignore_index
    # A target outside the vocabulary reads nothing and makes the loss nan.
    known = (target >= 0) & (target < VOCABULARY)
    chosen = tl.load(row_ptr + target, mask=known, other=float("nan")).to(tl.float32)
    tl.store(losses_ptr + row, tl.where(kept, log_sum - chosen, 0.0))
    if GRADIENT:
        tl.debug_barrier()  # every warp has read the target's logit before one overwrites it
        for start in range(0, PADDED, BLOCK):
            inside = start + columns < PADDED
            x = tl.load(row_ptr + start + columns, mask=inside, other=0.0).to(tl.float32)
            g = tl.exp(x - log_sum) - tl.where(start + columns == target, 1.0, 0.0)
            g = tl.where(kept & (start + columns < VOCABULARY), g, 0.0)
            tl.store(row_ptr + start + columns, g.to(logits_ptr.dtype.element_ty), mask=inside)


def triton_softmax_gradient(
    logits_nP: Tensor, vocabulary: int, targets_n: Tensor, ignore_index: int, losses_n: Tensor, gradient: bool
) -> None:
    """As torch_softmax_gradient, for fp32, fp16 and bf16."""
    rows, padded = logits_nP.shape
    assert logits_nP.is_contiguous() and losses_n.is_contiguous() and losses_n.dtype == torch.float32
    cut = {"BLOCK": min(SOFTMAX_BLOCK, triton.next_power_of_2(padded)), "num_warps": SOFTMAX_WARPS}
    numbers = logits_nP.stride(0), targets_n.stride(0), ignore_index, vocabulary, padded, gradient
    if rows:
        launch(_softmax_gradient, (rows,), logits_nP, targets_n, losses_n, *numbers, **cut)
