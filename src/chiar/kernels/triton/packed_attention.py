"""Launches the kernels of packed attention: tiles, grids and strides."""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from chiar.kernels.packed_attention import LARGEST_HEAD
from chiar.kernels.triton.attention_kernels import _backward_keys, _backward_queries, _forward
from chiar.kernels.triton.launch import current


class Tiles(NamedTuple):
    """Queries and keys a step, warps, and steps whose loads are under way at once."""

    queries: int
    keys: int
    warps: int
    stages: int


SHORT = 512


def tiles(kernel: str, head: int, max_keys: int, dtype: torch.dtype) -> Tiles:
    """For "forward", "queries" (dQ) or "keys" (dK and dV): sizes whose loops fit the registers of an H200."""
    if dtype == torch.float32:
        return Tiles(32, 32, 4, 2) if head <= 128 else Tiles(16, 16, 4, 1)
    if head > 128:
        return Tiles(64, 32, 4, 2)
    if max_keys <= SHORT:  # a routed row is shorter still: large blocks would be half empty
        return Tiles(64, 64, 4, 3) if head <= 64 else Tiles(64 if kernel != "keys" else 32, 64, 4, 2)
    stages = 3 if head <= 64 else 2
    if kernel == "forward":
        return Tiles(128, 128, 4, 3) if head <= 64 else Tiles(128, 64, 8, 3)
    return Tiles(128, 64, 8, stages) if kernel == "queries" else Tiles(64, 128, 8, stages)


def triton_forward(
    q_NHd: Tensor,
    k_MHd: Tensor,
    v_MHd: Tensor,
    query_rows: Tensor,
    key_rows: Tensor,
    limit_N: Tensor,
    max_keys: int,
    clear: bool = True,
) -> tuple[Tensor, Tensor]:
    """As torch_forward, for fp32, fp16 and bf16. Without `clear` padding gets no zeros: it stays undefined."""
    N, H, d = q_NHd.shape
    q, k, v = (whole_vectors(x) for x in (q_NHd, k_MHd, v_MHd))
    head = q.shape[2]
    out, log_sum_HN = q.new_empty(q.shape), q.new_empty(H, N, dtype=torch.float32)
    if out.numel():
        cut = tiles("forward", head, max_keys, q.dtype)
        with current(q):
            _forward[grid(max_keys, N, cut.queries, H, query_rows)](
                q,
                k,
                v,
                out,
                log_sum_HN,
                query_rows,
                key_rows,
                limit_N,
                *q.stride()[:2],
                *k.stride()[:2],
                *v.stride()[:2],
                N,
                base_two_scale(d),
                **options(cut, q, clear),
            )
    return out[..., :d].contiguous(), log_sum_HN


def triton_backward(
    grad_NHd: Tensor,
    q_NHd: Tensor,
    k_MHd: Tensor,
    v_MHd: Tensor,
    out_NHd: Tensor,
    log_sum_HN: Tensor,
    query_rows: Tensor,
    key_rows: Tensor,
    limit_N: Tensor,
    skip_M: Tensor,
    max_keys: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """As torch_backward, for fp32, fp16 and bf16."""
    d = q_NHd.shape[2]
    grad, q, k, v, out = (whole_vectors(x) for x in (grad_NHd, q_NHd, k_MHd, v_MHd, out_NHd))
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    launch_backward(grad, q, k, v, out, log_sum_HN, dq, dk, dv, query_rows, key_rows, limit_N, skip_M, max_keys, d)
    return dq[..., :d].contiguous(), dk[..., :d].contiguous(), dv[..., :d].contiguous()


def launch_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    log_sum_HN: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    query_rows: Tensor,
    key_rows: Tensor,
    limit_N: Tensor,
    skip_M: Tensor,
    max_keys: int,
    d: int,
    clear: bool = True,
) -> None:
    """Fill dq, dk and dv, whose vectors lie in one piece; dk and dv have the same strides. d: features of a head."""
    (N, H, head), M = q.shape, len(k)
    delta_HN = log_sum_HN.new_empty(log_sum_HN.shape)
    rows = query_rows, key_rows, limit_N
    strides = (*grad.stride()[:2], *q.stride()[:2], *k.stride()[:2], *v.stride()[:2])
    scale = base_two_scale(d)
    with current(q):
        if dq.numel():
            cut = tiles("queries", head, max_keys, q.dtype)
            _backward_queries[grid(max_keys, N, cut.queries, H, query_rows)](
                grad, q, k, v, out.contiguous(), log_sum_HN, delta_HN, dq,
                *rows, *strides, *dq.stride()[:2], N, scale, **options(cut, q, clear),
            )  # fmt: skip
        if dk.numel():
            cut = tiles("keys", head, max_keys, q.dtype)
            _backward_keys[grid(max_keys, M, cut.keys, H, key_rows)](
                grad, q, k, v, log_sum_HN, delta_HN, dk, dv,
                *rows, skip_M, *strides, *dk.stride()[:2], N, M, scale, **options(cut, q, clear),
            )  # fmt: skip


def whole_vectors(x_NHd: Tensor) -> Tensor:
    """Vectors that lie in one piece, 2ⁿ long (with zeros, if they must grow); other strides may be anything."""
    d = x_NHd.shape[2]
    if d > LARGEST_HEAD:
        raise ValueError(f"The Triton kernel takes heads of at most {LARGEST_HEAD} features, got {d}.")
    head = max(16, triton.next_power_of_2(d))
    if head != d:
        return F.pad(x_NHd, (0, head - d))
    return x_NHd if x_NHd.stride(2) == 1 else x_NHd.contiguous()


def grid(max_keys: int, capacity: int, block: int, heads: int, rows: Tensor) -> tuple[int, int, int]:
    """Enough blocks a row for the longest one, and in all for every place, padding included."""
    number = len(rows) - 1
    return max(triton.cdiv(max_keys, block), triton.cdiv(capacity, number * block)), heads, number


def options(cut: Tiles, q: Tensor, clear: bool) -> dict[str, int | str]:
    return {
        "HEAD": q.shape[2],
        "QUERIES": cut.queries,
        "KEYS": cut.keys,
        # tf32, Triton's default, would keep 10 bits of an fp32 factor; half precision does not ask.
        "PRECISION": "ieee",
        "CLEAR": clear,
        "num_warps": cut.warps,
        "num_stages": cut.stages,
    }


def base_two_scale(d: int) -> float:
    return d**-0.5 / math.log(2)
