"""packed_attention on a CPU: each row for itself by torch's own flash attention, so that no N×M mask is ever built.

Row offsets may be read here, since the host is the device. The definition is `torch_forward` of packed_attention.py.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

flash_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

BLOCK = 64
"""Queries that share a mask: keys beyond the last of them are not multiplied. Of 32 to 512 the fastest, or nearly."""


@dataclass
class Part:
    """Some consecutive queries of a row and the keys they see."""

    queries: slice
    keys: slice
    mask_nm: Tensor | None
    """0 where a query sees a key, else −∞; None: the n-th query sees the first n keys."""


def parts(q_NHd: Tensor, query_rows: Tensor, key_rows: Tensor, limit_N: Tensor) -> Iterator[Part]:
    """What there is to compute. Queries that see no key come first in their row, because limits rise: left out."""
    query_ends, key_ends = query_rows.tolist(), key_rows.tolist()
    numbers = torch.arange(1, max(len(limit_N), key_ends[-1]) + 1, dtype=limit_N.dtype)
    for row, first_key in enumerate(key_ends[:-1]):
        start, stop = query_ends[row], query_ends[row + 1]
        start += int((limit_N[start:stop] == 0).sum())
        if torch.equal(limit_N[start:stop], numbers[: stop - start]):
            if start < stop:
                yield Part(slice(start, stop), slice(first_key, first_key + stop - start), None)
            continue
        for begin in range(start, stop, BLOCK):
            end = min(begin + BLOCK, stop)
            limit_n1 = limit_N[begin:end, None]
            seen = int(limit_n1[-1])
            mask_nm = q_NHd.new_zeros(end - begin, seen).masked_fill_(numbers[:seen] > limit_n1, float("-inf"))
            yield Part(slice(begin, end), slice(first_key, first_key + seen), mask_nm)


def by_rows_forward(
    q_NHd: Tensor, k_MHd: Tensor, v_MHd: Tensor, query_rows: Tensor, key_rows: Tensor, limit_N: Tensor
) -> tuple[Tensor, Tensor]:
    out_NHd = torch.zeros_like(q_NHd, memory_format=torch.contiguous_format)
    N, H, _ = q_NHd.shape
    wide = torch.float64 if q_NHd.dtype == torch.float64 else torch.float32
    log_sum_HN = torch.full((H, N), float("inf"), dtype=wide)
    for part in parts(q_NHd, query_rows, key_rows, limit_N):
        out_1Hnd, log_sum_1Hn = flash_forward(
            as_batch(q_NHd, part.queries),
            as_batch(k_MHd, part.keys),
            as_batch(v_MHd, part.keys),
            is_causal=part.mask_nm is None,
            attn_mask=part.mask_nm,
        )
        out_NHd[part.queries] = out_1Hnd[0].transpose(0, 1)
        log_sum_HN[:, part.queries] = log_sum_1Hn.view(H, -1)
    return out_NHd, log_sum_HN / math.log(2)


def by_rows_backward(
    grad_NHd: Tensor,
    q_NHd: Tensor,
    k_MHd: Tensor,
    v_MHd: Tensor,
    out_NHd: Tensor,
    log_sum_HN: Tensor,
    query_rows: Tensor,
    key_rows: Tensor,
    limit_N: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    grads = tuple(torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q_NHd, k_MHd, v_MHd))
    for part in parts(q_NHd, query_rows, key_rows, limit_N):
        found = flash_backward(
            as_batch(grad_NHd, part.queries),
            as_batch(q_NHd, part.queries),
            as_batch(k_MHd, part.keys),
            as_batch(v_MHd, part.keys),
            as_batch(out_NHd, part.queries),
            log_sum_HN[None, :, part.queries] * math.log(2),
            0.0,
            part.mask_nm is None,
            attn_mask=part.mask_nm,
        )
        for grad, places, more_1Hnd in zip(grads, (part.queries, part.keys, part.keys), found, strict=True):
            grad[places] += more_1Hnd[0].transpose(0, 1)
    return grads[0], grads[1], grads[2]


def as_batch(x_NHd: Tensor, places: slice) -> Tensor:
    """(1, H, n, d), a view where features lie side by side."""
    x_Hnd = x_NHd[places].transpose(0, 1)
    return (x_Hnd if x_Hnd.stride(2) == 1 else x_Hnd.contiguous())[None]
