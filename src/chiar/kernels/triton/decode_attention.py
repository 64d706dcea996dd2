"""decode_attention in the manner of flash-decoding: a row's entries are split between programs, and a second kernel
puts their shares together.

With s = qk·log₂e/√d a program keeps, for each of KEYS lanes, the largest s, Σ 2^(s − largest) and Σ 2^(s − largest) v
of the entries that passed through it: lanes meet once, at the end, so the loop has no sum across entries. Traffic is
what bounds this: programs beyond their row's length, and all of rows that take no part, read nothing.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from chiar.kernels.packed_attention import LARGEST_HEAD
from chiar.kernels.triton.launch import current

MOST_SPLITS = 64
PROGRAMS = 4096
"""Enough to fill an H200 several times over, so that the last ones cost little; more splits cost the second kernel."""


@triton.jit
def _attend(
    q_ptr, k_ptr, v_ptr, key_ptr, value_ptr, length_ptr, takes_part_ptr, share_ptr, sums_ptr,
    q_row, q_head, k_row, k_head, v_row, v_head, key_row, key_head, value_row, value_head,
    span, splits, heads, size, scale, HEAD: tl.constexpr, KEYS: tl.constexpr,
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
        for first in range(start, end, KEYS):
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


def cut(rows: int, heads: int, capacity: int, keys: int) -> tuple[int, int]:
    """Entries of a split, a multiple of `keys`, and how many splits cover the capacity."""
    splits = max(1, min(MOST_SPLITS, PROGRAMS // (rows * heads)))
    span = triton.cdiv(triton.cdiv(capacity, splits), keys) * keys
    return span, triton.cdiv(capacity, span)


def triton_forward(
    q_BHd: Tensor,
    k_BHd: Tensor,
    v_BHd: Tensor,
    key_BHLd: Tensor,
    value_BHLd: Tensor,
    length_B: Tensor,
    takes_part_B: Tensor,
) -> Tensor:
    """As torch_forward, for fp32, fp16 and bf16."""
    (B, H, d), L = q_BHd.shape, key_BHLd.shape[2]
    if d > LARGEST_HEAD:
        raise ValueError(f"The Triton kernel takes heads of at most {LARGEST_HEAD} features, got {d}.")
    for part in (key_BHLd, value_BHLd):
        if part.stride()[2:] != (d, 1):
            raise ValueError("stored entries of a head must lie end to end.")
    q, k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (q_BHd, k_BHd, v_BHd))
    head = max(16, triton.next_power_of_2(d))
    keys = 64 if head <= 64 else 4096 // head
    span, splits = cut(B, H, L, keys)
    out = q.new_empty(B, H, d)
    share = q.new_empty(B, H, splits, head, dtype=torch.float32)
    sums = q.new_empty(B, H, splits, 2, dtype=torch.float32)
    with current(q):
        _attend[(splits, H, B)](
            q, k, v, key_BHLd, value_BHLd, length_B, takes_part_B, share, sums,
            *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *key_BHLd.stride()[:2], *value_BHLd.stride()[:2],
            span, splits, H, d, d**-0.5 / math.log(2), HEAD=head, KEYS=keys, num_warps=4,
        )  # fmt: skip
        _combine[(H, B)](
            share, sums, out, length_B, takes_part_B, splits, H, d,
            HEAD=head, SPLITS=triton.next_power_of_2(splits), num_warps=4 if splits > 8 else 1,
        )  # fmt: skip
    return out
