"""The attention kernels: packed_attention and decode_attention. Imported only where one runs.

Packed attention is FlashAttention-2 (Dao, arXiv 2307.08691). A program works on one block of one row and one head; the
grid covers the longest rows there may be, and programs behind their row's end return at once. With s = qk·log₂e/√d and
L = log₂ Σ 2^s: P = 2^(s − L), O = P V; dV = Pᵀ dO, dS = P ∘ (dO Vᵀ − delta), dQ = dS K / √d, dK = dSᵀ Q / √d, where
delta = rowsum(dO ∘ O). Loops take first what needs no mask. Products are "ieee": tf32, Triton's default, would keep 10
bits of an fp32 factor.

Decoding is flash-decoding: a row's entries are split between programs, and a second kernel puts their shares together.
Each of KEYS lanes keeps the largest s, Σ 2^(s − largest) and Σ 2^(s − largest) v. Programs beyond their row's length,
and all of rows that take no part, read nothing.
"""

import math

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from chiar.kernels.packed_attention import Layout, Three, log_sums
from chiar.kernels.packing import LARGEST_HEAD, launch, like, operator
from chiar.kernels.triton_rows import rotate_rows, triton_row_sum

LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _offsets(start, stride, LENGTH: tl.constexpr, HEAD: tl.constexpr):
    """Where LENGTH vectors from `start` on lie. int64: start × stride may pass 2³¹."""
    inside = tl.arange(0, LENGTH)[:, None] * stride + tl.arange(0, HEAD)[None, :]
    return tl.cast(start, tl.int64) * stride + inside


@triton.jit
def _load(pointer, start, stride, end, LENGTH: tl.constexpr, HEAD: tl.constexpr, MASKED: tl.constexpr):
    """LENGTH vectors from `start` on; if MASKED, zeros from `end` on."""
    pointers = pointer + _offsets(start, stride, LENGTH, HEAD)
    if MASKED:
        return tl.load(pointers, mask=(start + tl.arange(0, LENGTH) < end)[:, None], other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def _store(pointer, values, start, stride, end, LENGTH: tl.constexpr, HEAD: tl.constexpr):
    inside = (start + tl.arange(0, LENGTH) < end)[:, None]
    tl.store(pointer + _offsets(start, stride, LENGTH, HEAD), values.to(pointer.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["capacity"])
def _forward(
    q_ptr, k_ptr, v_ptr, out_ptr, log_sum_ptr, query_rows_ptr, key_rows_ptr, limit_ptr, q_stride, q_head, k_stride,
    k_head, v_stride, v_head, capacity, scale, HEAD: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    head, row = tl.cast(tl.program_id(1), tl.int64), tl.program_id(2)
    block = tl.num_programs(0) - 1 - tl.program_id(0)  # the last block has the most keys: begin with it
    out_stride = tl.num_programs(1) * HEAD
    out_ptr += head * HEAD
    start, end = tl.load(query_rows_ptr + row) + block * QUERIES, tl.load(query_rows_ptr + row + 1)
    if start >= end:
        return
    places = start + tl.arange(0, QUERIES)
    limit = tl.load(limit_ptr + places, mask=places < end, other=0)
    fewest = tl.load(limit_ptr + start)
    most = tl.load(limit_ptr + tl.minimum(start + QUERIES, end) - 1)
    q = _load(q_ptr + head * q_head, start, q_stride, end, QUERIES, HEAD, True)
    key_begin = tl.cast(tl.load(key_rows_ptr + row), tl.int64)
    k_ptr += key_begin * k_stride + head * k_head
    v_ptr += key_begin * v_stride + head * v_head
    out = tl.zeros([QUERIES, HEAD], tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    # Finite, so that a query without keys never meets ∞ − ∞.
    largest = tl.full([QUERIES], -3.0e38, tl.float32)
    common = fewest // KEYS * KEYS  # every query of the block sees these
    for masked in tl.static_range(2):
        for first in tl.range(common if masked else 0, most if masked else common, KEYS):
            k = _load(k_ptr, first, k_stride, most, KEYS, HEAD, masked)
            s = tl.dot(q, tl.trans(k), input_precision="ieee")
            if masked:
                s = tl.where((first + tl.arange(0, KEYS))[None, :] < limit[:, None], s, -float("inf"))
            larger = tl.maximum(largest, tl.max(s, 1) * scale)
            p = tl.exp2(s * scale - larger[:, None])
            decay = tl.exp2(largest - larger)
            total = total * decay + tl.sum(p, 1)
            v = _load(v_ptr, first, v_stride, most, KEYS, HEAD, masked)
            out = tl.dot(p.to(v.dtype), v, out * decay[:, None], input_precision="ieee")
            largest = larger
    seen = limit > 0
    out = out / tl.where(seen, total, 1.0)[:, None]
    _store(out_ptr, out, start, out_stride, end, QUERIES, HEAD)
    log_sum = tl.where(seen, largest + tl.log2(tl.where(seen, total, 1.0)), float("inf"))
    tl.store(log_sum_ptr + head * capacity + places, log_sum, mask=places < end)


@triton.jit(do_not_specialize=["capacity"])
def _backward_queries(
    grad_ptr, q_ptr, k_ptr, v_ptr, out_ptr, log_sum_ptr, delta_ptr, dq_ptr, query_rows_ptr, key_rows_ptr, limit_ptr,
    grad_stride, grad_head, q_stride, q_head, k_stride, k_head, v_stride, v_head, dq_stride, dq_head, capacity, scale,
    HEAD: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """dQ = dS K, and delta for _backward_keys."""
    head, row = tl.cast(tl.program_id(1), tl.int64), tl.program_id(2)
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    out_stride = tl.num_programs(1) * HEAD
    dq_ptr += head * dq_head
    start, end = tl.load(query_rows_ptr + row) + block * QUERIES, tl.load(query_rows_ptr + row + 1)
    if start >= end:
        return
    places = start + tl.arange(0, QUERIES)
    limit = tl.load(limit_ptr + places, mask=places < end, other=0)
    fewest = tl.load(limit_ptr + start)
    most = tl.load(limit_ptr + tl.minimum(start + QUERIES, end) - 1)
    q = _load(q_ptr + head * q_head, start, q_stride, end, QUERIES, HEAD, True)
    grad = _load(grad_ptr + head * grad_head, start, grad_stride, end, QUERIES, HEAD, True)
    out = _load(out_ptr + head * HEAD, start, out_stride, end, QUERIES, HEAD, True)
    delta = tl.sum(grad.to(tl.float32) * out.to(tl.float32), 1)
    per_query = head * capacity + places
    tl.store(delta_ptr + per_query, delta, mask=places < end)
    log_sum = tl.load(log_sum_ptr + per_query, mask=places < end, other=float("inf"))
    key_begin = tl.cast(tl.load(key_rows_ptr + row), tl.int64)
    k_ptr += key_begin * k_stride + head * k_head
    v_ptr += key_begin * v_stride + head * v_head
    dq = tl.zeros([QUERIES, HEAD], tl.float32)
    common = fewest // KEYS * KEYS
    for masked in tl.static_range(2):
        for first in tl.range(common if masked else 0, most if masked else common, KEYS):
            k = _load(k_ptr, first, k_stride, most, KEYS, HEAD, masked)
            v = _load(v_ptr, first, v_stride, most, KEYS, HEAD, masked)
            s = tl.dot(q, tl.trans(k), input_precision="ieee")
            p = tl.exp2(s * scale - log_sum[:, None])
            if masked:
                p = tl.where((first + tl.arange(0, KEYS))[None, :] < limit[:, None], p, 0.0)
            dp = tl.dot(grad, tl.trans(v), input_precision="ieee")
            ds = p * (dp - delta[:, None])
            dq = tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")
    _store(dq_ptr, dq * (scale * LN2), start, dq_stride, end, QUERIES, HEAD)


@triton.jit(do_not_specialize=["queries"])
def _backward_keys(
    grad_ptr, q_ptr, k_ptr, v_ptr, log_sum_ptr, delta_ptr, dk_ptr, dv_ptr, query_rows_ptr, key_rows_ptr, limit_ptr,
    skip_ptr, grad_stride, grad_head, q_stride, q_head, k_stride, k_head, v_stride, v_head, dk_stride, dk_head,
    queries, scale, HEAD: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """dK = dSᵀ Q and dV = Pᵀ dO, with the same strides; `queries` is the size of q."""
    block, head, row = tl.program_id(0), tl.cast(tl.program_id(1), tl.int64), tl.program_id(2)
    dk_ptr += head * dk_head
    dv_ptr += head * dk_head
    start, end = tl.load(key_rows_ptr + row) + block * KEYS, tl.load(key_rows_ptr + row + 1)
    if start >= end:
        return
    query_begin = tl.load(query_rows_ptr + row)
    count = tl.load(query_rows_ptr + row + 1) - query_begin
    k = _load(k_ptr + head * k_head, start, k_stride, end, KEYS, HEAD, True)
    v = _load(v_ptr + head * v_head, start, v_stride, end, KEYS, HEAD, True)
    index = block * KEYS + tl.arange(0, KEYS)
    earliest = tl.load(skip_ptr + start)
    everyone = tl.load(skip_ptr + tl.minimum(start + KEYS, end) - 1)  # from here on queries see the whole block
    middle = earliest + tl.cdiv(everyone - earliest, QUERIES) * QUERIES
    query_begin = tl.cast(query_begin, tl.int64)
    q_ptr += query_begin * q_stride + head * q_head
    grad_ptr += query_begin * grad_stride + head * grad_head
    per_query = head * queries + query_begin
    log_sum_ptr += per_query
    delta_ptr += per_query
    limit_ptr += query_begin
    dk = tl.zeros([KEYS, HEAD], tl.float32)
    dv = tl.zeros([KEYS, HEAD], tl.float32)
    for whole in tl.static_range(2):
        for first in tl.range(middle if whole else earliest, count if whole else middle, QUERIES):
            places = first + tl.arange(0, QUERIES)
            q = _load(q_ptr, first, q_stride, count, QUERIES, HEAD, True)
            log_sum = tl.load(log_sum_ptr + places, mask=places < count, other=float("inf"))
            s = tl.dot(k, tl.trans(q), input_precision="ieee")
            p = tl.exp2(s * scale - log_sum[None, :])
            if not whole:
                limit = tl.load(limit_ptr + places, mask=places < count, other=0)
                p = tl.where(index[:, None] < limit[None, :], p, 0.0)
            grad = _load(grad_ptr, first, grad_stride, count, QUERIES, HEAD, True)
            dv = tl.dot(p.to(grad.dtype), grad, dv, input_precision="ieee")
            delta = tl.load(delta_ptr + places, mask=places < count, other=0.0)
            dp = tl.dot(v, tl.trans(grad), input_precision="ieee")
            ds = p * (dp - delta[None, :])
            dk = tl.dot(ds.to(q.dtype), q, dk, input_precision="ieee")
    _store(dk_ptr, dk * (scale * LN2), start, dk_stride, end, KEYS, HEAD)
    _store(dv_ptr, dv, start, dk_stride, end, KEYS, HEAD)


def options(kernel: str, q_NHd: Tensor, max_keys: int) -> dict[str, int]:
    """Of "forward", "queries" (dQ) or "keys" (dK, dV), for the registers of an H200: block sizes, warps, and stages."""
    head = q_NHd.shape[2]
    stages = 3 if head <= 64 else 2
    if q_NHd.dtype == torch.float32:
        cut = (32, 32, 4, 2) if head <= 128 else (16, 16, 4, 1)
    elif head > 128:
        cut = (64, 32, 4, 2)
    elif max_keys <= 512:  # a routed row is shorter still: large blocks would be half empty
        cut = (32 if kernel == "keys" and head > 64 else 64, 64, 4, stages)
    elif kernel == "forward":
        cut = (128, 128, 4, 3) if head <= 64 else (128, 64, 8, 3)
    else:
        cut = (128, 64, 8, stages) if kernel == "queries" else (64, 128, 8, stages)
    return dict(zip(("HEAD", "QUERIES", "KEYS", "num_warps", "num_stages"), (head, *cut), strict=True))


def triton_forward(q_NHd: Tensor, k_MHd: Tensor, v_MHd: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """As packed_attention_forward, for fp32, fp16 and bf16."""
    N, H, d = q_NHd.shape
    q, k, v = (whole_vectors(x) for x in (q_NHd, k_MHd, v_MHd))
    out, log_sum_HN = q.new_empty(q.shape), q.new_empty(H, N, dtype=torch.float32)
    if out.numel():
        cut, scale = options("forward", q, layout.max_keys), d**-0.5 / math.log(2)
        places, where = (out, log_sum_HN, *layout[:3]), grid(layout, cut["QUERIES"], H)
        launch(_forward, where, q, k, v, *places, *strides(q, k, v), N, scale, **cut)
    return out[..., :d].contiguous(), log_sum_HN


def triton_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sum_HN: Tensor, layout: Layout,
    into: Three | None = None,
) -> Three:  # fmt: skip
    """The gradients of q, k and v; `into`: where to, dk and dv with the same strides."""
    d = q.shape[2]
    grad, q, k, v, out = (whole_vectors(x) for x in (grad, q, k, v, out))
    N, H, _ = q.shape
    dq, dk, dv = into or (x.new_empty(x.shape) for x in (q, k, v))
    delta_HN, scale = log_sum_HN.new_empty(log_sum_HN.shape), d**-0.5 / math.log(2)
    inputs, steps, sums = (q, k, v), strides(grad, q, k, v), (log_sum_HN, delta_HN)
    if dq.numel():
        cut, places = options("queries", q, layout.max_keys), (out.contiguous(), *sums, dq)
        where, numbers = grid(layout, cut["QUERIES"], H), (*steps, *strides(dq), N, scale)
        launch(_backward_queries, where, grad, *inputs, *places, *layout[:3], *numbers, **cut)
    if dk.numel():
        cut, places = options("keys", q, layout.max_keys), (*sums, dk, dv)
        where, numbers = grid(layout, cut["KEYS"], H), (*steps, *strides(dk), N, scale)
        launch(_backward_keys, where, grad, *inputs, *places, *layout[:3], layout.skip_M, *numbers, **cut)
    return into or (dq[..., :d].contiguous(), dk[..., :d].contiguous(), dv[..., :d].contiguous())


def strides(*tensors: Tensor) -> list[int]:
    """Of the first two axes."""
    return [stride for x in tensors for stride in x.stride()[:2]]


def whole_vectors(x_NHd: Tensor) -> Tensor:
    """Vectors that lie in one piece, 2ⁿ long (with zeros, if they must grow); other strides may be anything."""
    missing = padded_head(x_NHd.shape[2]) - x_NHd.shape[2]
    return F.pad(x_NHd, (0, missing)) if missing else x_NHd if x_NHd.stride(2) == 1 else x_NHd.contiguous()


def padded_head(d: int) -> int:
    if d > LARGEST_HEAD:
        raise ValueError(f"The Triton kernel takes heads of at most {LARGEST_HEAD} features, got {d}.")
    return max(16, triton.next_power_of_2(d))


def grid(layout: Layout, block: int, heads: int) -> tuple[int, int, int]:
    """Enough blocks a row for the longest one."""
    return triton.cdiv(layout.max_keys, block), heads, len(layout.key_rows) - 1


# At most: every token attends to half of `max_keys` tokens.
@operator("rotary_attention_backward", like(3, 4), flops=lambda grad, *a, **_: 5 * math.prod(grad) * a[10])
def rotary_backward(
    grad_PHd: Tensor, out_PHd: Tensor, log_sum_HP: Tensor, rotated_P3Hd: Tensor, bias_3Hd: Tensor, cos_Rd: Tensor,
    sin_Rd: Tensor, table_P: Tensor, rows: Tensor, count: Tensor, limit_P: Tensor, max_keys: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The gradients of qkv and of the bias."""
    layout = Layout(rows, rows, limit_P, max_keys, (limit_P - 1).clamp_min(0))
    dqkv, (q, k, v) = torch.empty_like(rotated_P3Hd), rotated_P3Hd.unbind(1)
    dq, dk, dv = dqkv.unbind(1)
    triton_backward(grad_PHd.contiguous(), q, k, v, out_PHd, log_sum_HP, layout, into=(dq, dk, dv))
    rotate_rows(dqkv, dqkv, None, cos_Rd, sin_Rd, table_P, count, sign=-1.0)
    dbias = triton_row_sum(dqkv.flatten(1), count)
    return dqkv, dbias.view(bias_3Hd.shape).to(bias_3Hd.dtype)


@operator(
    "rotary_attention", lambda x, *_: (x.new_empty(x[:, 0].shape), log_sums(x), x.new_empty(x.shape)),
    gradient=rotary_backward, saved=lambda ins, outs: (*outs, *ins[1:]),
    flops=lambda qkv, *a, **_: 2 * math.prod(qkv) // 3 * a[7],
)  # fmt: skip
def rotary_forward(
    qkv_P3Hd: Tensor, bias_3Hd: Tensor, cos_Rd: Tensor, sin_Rd: Tensor, table_P: Tensor, rows: Tensor, count: Tensor,
    limit_P: Tensor, max_keys: int,
) -> Three:  # fmt: skip
    """The output, the log-sums of its softmax, and the rotated q, k and v."""
    rotated = torch.empty_like(qkv_P3Hd, memory_format=torch.contiguous_format)
    rotate_rows(qkv_P3Hd.contiguous(), rotated, bias_3Hd, cos_Rd, sin_Rd, table_P, count, sign=1.0)
    q, k, v = rotated.unbind(1)
    return *triton_forward(q, k, v, Layout(rows, rows, limit_P, max_keys)), rotated


# Enough programs to fill an H200 several times over, so that the last cost little; more splits cost the second kernel.
MOST_SPLITS, PROGRAMS = 64, 4096


@triton.jit
def _attend_split(
    q_ptr, k_ptr, v_ptr, key_ptr, value_ptr, length_ptr, takes_part_ptr, share_ptr, sums_ptr,
    q_row, q_head, k_row, k_head, v_row, v_head, key_row, key_head, value_row, value_head,
    span, splits, heads, size, scale, window, HEAD: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """One split of one row and head: its largest score, the sum of its weights, and their sum over values."""
    split, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(length_ptr + row).to(tl.int32)
    takes_part = tl.load(takes_part_ptr + row).to(tl.int1)
    start = split * span
    place = (row * heads + head) * splits + split
    features = tl.arange(0, HEAD)
    inside = features < size
    if takes_part & (start <= length):
        q = tl.load(q_ptr + row * q_row + head * q_head + features, mask=inside, other=0.0).to(tl.float32) * scale
        key_ptr += row.to(tl.int64) * key_row + head.to(tl.int64) * key_head
        value_ptr += row.to(tl.int64) * value_row + head.to(tl.int64) * value_head
        largest = tl.full([KEYS], -3.0e38, tl.float32)
        total = tl.zeros([KEYS], tl.float32)
        share = tl.zeros([KEYS, HEAD], tl.float32)
        end = tl.minimum(start + span, length)
        begin = tl.where(window > 0, tl.maximum(start, length + 1 - window), start)
        for first in range(begin, end, KEYS):
            entries = first + tl.arange(0, KEYS)
            there = entries < end
            places = entries[:, None] * size + features[None, :]
            both = there[:, None] & inside[None, :]
            key = tl.load(key_ptr + places, mask=both, other=0.0).to(tl.float32)
            value = tl.load(value_ptr + places, mask=both, other=0.0).to(tl.float32)
            score = tl.where(there, tl.sum(key * q[None, :], 1), -3.0e38)
            larger = tl.maximum(largest, score)
            fade = tl.exp2(largest - larger)
            weight = tl.where(there, tl.exp2(score - larger), 0.0)
            total = total * fade + weight
            share = share * fade[:, None] + weight[:, None] * value
            largest = larger
        # The new entry belongs to the split it is stored in; it goes from registers into memory.
        new = (length < start + span).to(tl.int1)
        k = tl.load(k_ptr + row * k_row + head * k_head + features, mask=inside, other=0.0)
        v = tl.load(v_ptr + row * v_row + head * v_head + features, mask=inside, other=0.0)
        tl.store(key_ptr + length * size + features, k, mask=inside & new)
        tl.store(value_ptr + length * size + features, v, mask=inside & new)
        score = tl.where(new, tl.sum(k.to(tl.float32) * q, 0), -3.0e38)
        top = tl.maximum(tl.max(largest, 0), score)
        fade = tl.exp2(largest - top)
        weight = tl.where(new, tl.exp2(score - top), 0.0)
        tl.store(sums_ptr + 2 * place, top)
        tl.store(sums_ptr + 2 * place + 1, tl.sum(total * fade, 0) + weight)
        out = tl.sum(share * fade[:, None], 0) + weight * v.to(tl.float32)
        tl.store(share_ptr + place.to(tl.int64) * HEAD + features, out)
    else:
        tl.store(sums_ptr + 2 * place, -3.0e38)
        tl.store(sums_ptr + 2 * place + 1, 0.0)


@triton.jit
def _combine(
    share_ptr, sums_ptr, out_ptr, length_ptr, takes_part_ptr, splits, heads, size,
    HEAD: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Shares of one row and head, put together. It reads no length, so one program a row may move it on."""
    head, row = tl.program_id(0), tl.program_id(1)
    features = tl.arange(0, HEAD)
    out_ptr += (row * heads + head) * size
    takes_part = tl.load(takes_part_ptr + row).to(tl.int1)
    if takes_part:
        numbers = tl.arange(0, SPLITS)
        places = (row * heads + head) * splits + numbers
        largest = tl.load(sums_ptr + 2 * places, mask=numbers < splits, other=-3.0e38)
        total = tl.load(sums_ptr + 2 * places + 1, mask=numbers < splits, other=0.0)
        used = total > 0.0  # the others left their share unwritten
        factor = tl.where(used, tl.exp2(largest - tl.max(largest, 0)), 0.0)
        shares = share_ptr + places[:, None].to(tl.int64) * HEAD + features[None, :]
        share = tl.load(shares, mask=used[:, None], other=0.0)
        out = tl.sum(share * factor[:, None], 0) / tl.sum(total * factor, 0)
        tl.store(out_ptr + features, out.to(out_ptr.dtype.element_ty), mask=features < size)
        if head == 0:
            tl.store(length_ptr + row, tl.load(length_ptr + row) + 1)
    else:
        tl.store(out_ptr + features, tl.zeros([HEAD], out_ptr.dtype.element_ty), mask=features < size)


def triton_decode(*tensors: Tensor, window: int = 0) -> Tensor:
    """As decode_attention's torch_forward, for fp32, fp16 and bf16."""
    q_BHd, k_BHd, v_BHd, key_BHLd, value_BHLd, length_B, takes_part_B = tensors
    (B, H, d), L = q_BHd.shape, key_BHLd.shape[2]
    head = padded_head(d)
    if any(part.stride()[2:] != (d, 1) for part in (key_BHLd, value_BHLd)):
        raise ValueError("stored entries of a head must lie end to end.")
    q, k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (q_BHd, k_BHd, v_BHd))
    keys = 64 if head <= 64 else 4096 // head
    # Entries of a split, a multiple of `keys`, and how many splits cover the capacity.
    span = triton.cdiv(triton.cdiv(L, max(1, min(MOST_SPLITS, PROGRAMS // (B * H)))), keys) * keys
    splits = triton.cdiv(L, span)
    share, sums = (q.new_empty(B, H, splits, size, dtype=torch.float32) for size in (head, 2))
    out = q.new_empty(B, H, d)
    stored, rows = (key_BHLd, value_BHLd), (length_B, takes_part_B)
    sizes = *strides(q, k, v, *stored), span, splits, H, d, d**-0.5 / math.log(2), window
    launch(_attend_split, (splits, H, B), q, k, v, *stored, *rows, share, sums, *sizes, HEAD=head, KEYS=keys)
    cut = {"HEAD": head, "SPLITS": triton.next_power_of_2(splits), "num_warps": 4 if splits > 8 else 1}
    launch(_combine, (H, B), share, sums, out, *rows, splits, H, d, **cut)
    return out
