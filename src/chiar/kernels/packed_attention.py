"""Causal attention for packed queries: rows of any length are concatenated, and a query sees keys up to its position.

Rows are in order of position, so a query sees a prefix of its row's keys, and a key is seen by a suffix of its row's
queries, after the first `skip_M`. Offsets stay on the device: shapes, launches and compiled graphs never change.
`torch_attention` is the definition; kernels are in triton_attention.py.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from chiar.kernels.packing import Packing, accumulation_dtype, chosen_attention, like, operator, product_dtype

BLOCK = 64  # queries that share a mask in "rows"; the fastest of 32 to 512, or nearly
Three = tuple[Tensor, Tensor, Tensor]
flash_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class Layout(NamedTuple):
    """Row b owns queries query_rows[b]…query_rows[b+1] and keys key_rows[b]…key_rows[b+1]; all int32."""

    query_rows: Tensor  # B + 1 offsets, the first 0
    key_rows: Tensor
    limit_N: Tensor  # how many of its row's keys a query sees
    max_keys: int  # no row has more, nor more queries
    skip_M: Tensor | None = None  # how many of its row's queries do not see a key; for gradients


def prefix_attention(
    q_NHd: Tensor, k_MHd: Tensor, v_MHd: Tensor, query_rows: Tensor, key_rows: Tensor, limit_N: Tensor,
    skip_M: Tensor, max_keys: int, *, implementation: str = "auto",
) -> Tensor:  # fmt: skip
    """softmax(QKᵀ/√d) V, each query over the first `limit_N` keys of its row; (N, H, d). A query that sees no
    key gives zeros and gets zero gradients. Padding beyond the last offset, NaN or not, has a limit of 0; what it gives
    is undefined. Sums are fp32. "auto" is Triton on CUDA and "rows", one row after another, on the CPU."""
    if max_keys < 1:
        raise ValueError(f"max_keys must be at least 1, got {max_keys}.")
    q_NHd, k_MHd, v_MHd = (x.to(product_dtype(x)) for x in (q_NHd, k_MHd, v_MHd))
    same = q_NHd.shape[1:] == k_MHd.shape[1:] and k_MHd.shape == v_MHd.shape
    if not (same and q_NHd.dtype == k_MHd.dtype == v_MHd.dtype):
        found = ", ".join(f"{tuple(x.shape)} {x.dtype}" for x in (q_NHd, k_MHd, v_MHd))
        raise ValueError(f"q, k and v must be (N, H, d), (M, H, d) and (M, H, d) of one dtype, got {found}.")
    implementation, layout = chosen_attention(q_NHd, implementation, "rows"), (query_rows, key_rows, limit_N)
    if implementation == "torch":
        return torch_attention(q_NHd, k_MHd, v_MHd, *layout)
    return packed_attention_forward(q_NHd, k_MHd, v_MHd, *layout, skip_M, max_keys, implementation)[0]


def torch_attention(
    q_NHd: Tensor, k_MHd: Tensor, v_MHd: Tensor, query_rows: Tensor, key_rows: Tensor, limit_N: Tensor
) -> Tensor:
    """The definition, with an explicit mask."""
    key_row_M = row_of(key_rows, len(k_MHd))
    index_M = torch.arange(len(k_MHd), device=key_rows.device) - key_rows[key_row_M]
    hidden_NM = (row_of(query_rows, len(q_NHd))[:, None] != key_row_M) | (index_M >= limit_N[:, None])
    with torch.autocast(q_NHd.device.type, enabled=False):
        q_HNd = heads_first(q_NHd, query_rows)
        k_HMd, v_HMd = (heads_first(x, key_rows) for x in (k_MHd, v_MHd))
        scores_HNM = q_HNd @ k_HMd.mT * q_NHd.shape[2] ** -0.5
        # Finite, so that a query without keys never meets ∞ − ∞.
        weights_HNM = scores_HNM.masked_fill(hidden_NM, torch.finfo(scores_HNM.dtype).min).softmax(2)
        out_NHd = (weights_HNM @ v_HMd).transpose(0, 1).to(q_NHd.dtype)
    return torch.where((limit_N > 0)[:, None, None], out_NHd, 0.0)


def heads_first(x_NHd: Tensor, rows: Tensor) -> Tensor:
    """(H, N, d) in fp32 (float64 stays), zeros for padding: 0 × NaN would be NaN."""
    padding_N = torch.arange(len(x_NHd), device=x_NHd.device) >= rows[-1]
    return x_NHd.to(accumulation_dtype(x_NHd)).masked_fill(padding_N[:, None, None], 0.0).transpose(0, 1)


def row_of(rows: Tensor, length: int) -> Tensor:
    """The row of each of `length` places; B for padding."""
    places = torch.arange(length, dtype=torch.int32, device=rows.device)
    return torch.searchsorted(rows[1:], places, right=True, out_int32=True)


def _flops(products: int, q_shape: Any, query_rows_shape: Any, max_keys: int) -> int:
    """At most, since the split is on the device: the most pairs come from N queries spread evenly over the rows, where
    every query is a key too. For N = B·max_keys this is dense causal attention."""
    N, H, d = q_shape
    pairs = max(0, N * max_keys - N * (N // max(1, query_rows_shape[0] - 1) - 1) // 2)
    return products * 2 * H * d * pairs


# Scores again, dP, dQ, dK and dV, as torch counts flash attention.
@operator("packed_attention_backward", like(1, 2, 3), flops=lambda grad, *a, **_: _flops(5, grad, a[5], a[9]))
def packed_attention_backward(
    grad_NHd: Tensor, q_NHd: Tensor, k_MHd: Tensor, v_MHd: Tensor, out_NHd: Tensor, log_sum_HN: Tensor,
    query_rows: Tensor, key_rows: Tensor, limit_N: Tensor, skip_M: Tensor, max_keys: int, implementation: str,
) -> Three:  # fmt: skip
    """The gradients of q, k and v."""
    layout = Layout(query_rows, key_rows, limit_N, max_keys, skip_M)
    if implementation == "triton":
        from chiar.kernels.triton_attention import triton_backward

        return triton_backward(grad_NHd, q_NHd, k_MHd, v_MHd, out_NHd, log_sum_HN, layout)
    dq, dk, dv = (torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q_NHd, k_MHd, v_MHd))
    for queries, keys, mask_nm in parts(q_NHd, layout):
        grad, q, out = (as_batch(x, queries) for x in (grad_NHd, q_NHd, out_NHd))
        log_sum = log_sum_HN[None, :, queries] * math.log(2)
        saved = q, as_batch(k_MHd, keys), as_batch(v_MHd, keys), out, log_sum
        found = flash_backward(grad, *saved, 0.0, mask_nm is None, attn_mask=mask_nm)
        for sums, places, more_1Hnd in zip((dq, dk, dv), (queries, keys, keys), found, strict=True):
            sums[places] += more_1Hnd[0].transpose(0, 1)
    return dq, dk, dv


@operator(
    "packed_attention", lambda q, *_: (q.new_empty(q.shape), log_sums(q)), gradient=packed_attention_backward,
    saved=lambda ins, outs: (*ins[:3], *outs, *ins[3:]), flops=lambda q, *a, **_: _flops(2, q, a[2], a[6]),
)  # fmt: skip
def packed_attention_forward(
    q_NHd: Tensor, k_MHd: Tensor, v_MHd: Tensor, query_rows: Tensor, key_rows: Tensor, limit_N: Tensor,
    skip_M: Tensor, max_keys: int, implementation: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The output, and log₂ Σ exp of each query's scores (+∞ where it sees no key, so that exp of the rest is 0)."""
    layout = Layout(query_rows, key_rows, limit_N, max_keys, skip_M)
    if implementation == "triton":
        from chiar.kernels.triton_attention import triton_forward

        return triton_forward(q_NHd, k_MHd, v_MHd, layout)
    out_NHd = torch.zeros_like(q_NHd, memory_format=torch.contiguous_format)
    log_sum_HN = log_sums(q_NHd).fill_(float("inf"))
    for queries, keys, mask_nm in parts(q_NHd, layout):
        qkv = as_batch(q_NHd, queries), as_batch(k_MHd, keys), as_batch(v_MHd, keys)
        out_1Hnd, log_sum_1Hn = flash_forward(*qkv, is_causal=mask_nm is None, attn_mask=mask_nm)
        out_NHd[queries] = out_1Hnd[0].transpose(0, 1)
        log_sum_HN[:, queries] = log_sum_1Hn.view(len(log_sum_HN), -1)
    return out_NHd, log_sum_HN / math.log(2)


def log_sums(q_NHd: Tensor) -> Tensor:
    return q_NHd.new_empty((q_NHd.shape[-2], q_NHd.shape[0]), dtype=accumulation_dtype(q_NHd))


def parts(q_NHd: Tensor, layout: Layout) -> Iterator[tuple[slice, slice, Tensor | None]]:
    """For "rows", each row for itself by torch's own flash attention: consecutive queries, the keys they see, and a
    mask, 0 where a query sees a key and −∞ elsewhere; without one the n-th query sees the first n keys. Row offsets may
    be read: the host is the device. Queries that see no key come first in their row, because limits rise: left out."""
    query_ends, key_ends, limit_N = layout.query_rows.tolist(), layout.key_rows.tolist(), layout.limit_N
    numbers = torch.arange(1, max(len(limit_N), key_ends[-1]) + 1, dtype=limit_N.dtype)
    for row, first_key in enumerate(key_ends[:-1]):
        start, stop = query_ends[row], query_ends[row + 1]
        start += int((limit_N[start:stop] == 0).sum())
        if torch.equal(limit_N[start:stop], numbers[: stop - start]):
            if start < stop:
                yield slice(start, stop), slice(first_key, first_key + stop - start), None
            continue
        for begin in range(start, stop, BLOCK):
            end = min(begin + BLOCK, stop)
            limit_n1 = limit_N[begin:end, None]
            seen = int(limit_n1[-1])
            mask_nm = q_NHd.new_zeros(end - begin, seen).masked_fill_(numbers[:seen] > limit_n1, float("-inf"))
            yield slice(begin, end), slice(first_key, first_key + seen), mask_nm


def as_batch(x_NHd: Tensor, places: slice) -> Tensor:
    """(1, H, n, d), a view where features lie side by side."""
    x_Hnd = x_NHd[places].transpose(0, 1)
    return (x_Hnd if x_Hnd.stride(2) == 1 else x_Hnd.contiguous())[None]


def rotary_attention(
    qkv_P3Hd: Tensor, bias_3Hd: Tensor, rope: tuple[Tensor, Tensor], table_P: Tensor, packing: Packing,
    limit_P: Tensor, max_keys: int,
) -> Tensor:  # fmt: skip
    """Attention of the packed tokens over each other, (P, H, d), after `bias` was added to q, k and v, and RoPE, whose
    cos and sin are `rope`, (R, d), a token's row in them `table_P`. Rows that are not in use are undefined. One
    operator: left to autograd, three gradients would be stacked and turned back in passes over all P rows."""
    from chiar.kernels.triton_attention import rotary_forward

    return rotary_forward(qkv_P3Hd, bias_3Hd, *rope, table_P, packing.rows, packing.count, limit_P, max_keys)[0]
