"""Causal attention for packed queries: rows of any length lie end to end, and a query sees keys up to its own position.

Row b owns queries query_rows[b]…query_rows[b+1] and keys key_rows[b]…key_rows[b+1], both in order of position. So what
a query sees is a prefix of its row's keys, `limit_N` long, and who sees a key is a suffix of its row's queries, behind
the first `skip_M`. These two numbers replace positions everywhere below.

The split lives on the device: shapes, launches and compiled graphs are the same for every split.
"""

import importlib.util
import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.flop_counter import register_flop_formula

from chiar.kernels.attention_by_rows import by_rows_backward, by_rows_forward

IMPLEMENTATIONS = ("auto", "torch", "rows", "triton")
LARGEST_HEAD = 256
"""Features of a head that the Triton kernels take."""


def packed_attention(
    q_NHd: Tensor,
    k_MHd: Tensor,
    v_MHd: Tensor,
    query_rows: Tensor,
    key_rows: Tensor,
    query_position_N: Tensor,
    key_position_M: Tensor,
    max_keys: int,
    *,
    implementation: str = "auto",
) -> Tensor:
    """softmax(QKᵀ/√d) V, each query over the keys of its row whose position is not above its own; (N, H, d).

    `query_rows` and `key_rows` are B + 1 int32 offsets, the first 0; positions are int32 and rise strictly within a
    row. No row has more than `max_keys` keys, nor more queries. Queries and keys beyond the last offset are padding,
    NaN or not: they give zeros and get zero gradients. So does a query that sees no key.

    Products take the inputs' dtype (autocast's where it is on), sums and the softmax fp32. There is no dropout of
    weights: a caller that needs it runs dense attention. "auto" takes Triton on CUDA where it is installed and "rows",
    one row after another, on the CPU; "torch" is the definition and builds an N×M mask.
    """
    limit_N, skip_M = visible_counts(query_rows, key_rows, query_position_N, key_position_M)
    return prefix_attention(
        q_NHd, k_MHd, v_MHd, query_rows, key_rows, limit_N, skip_M, max_keys, implementation=implementation
    )


def prefix_attention(
    q_NHd: Tensor,
    k_MHd: Tensor,
    v_MHd: Tensor,
    query_rows: Tensor,
    key_rows: Tensor,
    limit_N: Tensor,
    skip_M: Tensor,
    max_keys: int,
    *,
    implementation: str = "auto",
) -> Tensor:
    """The same for callers that know the prefixes: `limit_N` keys a query sees, `skip_M` queries that do not see a key,
    both int32, `limit_N` 0 for padding."""
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation must be one of {', '.join(IMPLEMENTATIONS)}, got {implementation!r}.")
    if max_keys < 1:
        raise ValueError(f"max_keys must be at least 1, got {max_keys}.")
    if q_NHd.shape[1:] != k_MHd.shape[1:] or k_MHd.shape != v_MHd.shape:
        shapes = ", ".join(str(tuple(x.shape)) for x in (q_NHd, k_MHd, v_MHd))
        raise ValueError(f"q, k and v must be (N, H, d), (M, H, d) and (M, H, d), got {shapes}.")
    device = q_NHd.device.type
    if torch.is_autocast_enabled(device) and q_NHd.dtype != torch.float64:
        q_NHd, k_MHd, v_MHd = (x.to(torch.get_autocast_dtype(device)) for x in (q_NHd, k_MHd, v_MHd))
    if not q_NHd.dtype == k_MHd.dtype == v_MHd.dtype:
        raise ValueError(f"q, k and v must share a dtype, got {q_NHd.dtype}, {k_MHd.dtype} and {v_MHd.dtype}.")
    out_NHd, _ = packed_attention_forward(
        q_NHd, k_MHd, v_MHd, query_rows, key_rows, limit_N, skip_M, max_keys, implementation
    )
    return out_NHd


def row_of(rows: Tensor, length: int) -> Tensor:
    """The row of each of `length` places; B for padding."""
    places = torch.arange(length, dtype=torch.int32, device=rows.device)
    return torch.searchsorted(rows[1:], places, right=True, out_int32=True)


@torch.library.custom_op("chiar::visible_counts", mutates_args=())
def visible_counts(
    query_rows: Tensor, key_rows: Tensor, query_position_N: Tensor, key_position_M: Tensor
) -> tuple[Tensor, Tensor]:
    """limit_N: how many of its row's keys a query sees (0 for padding); skip_M: how many queries do not see a key."""
    query_row_N, key_row_M = row_of(query_rows, len(query_position_N)), row_of(key_rows, len(key_position_M))
    # In one number, so that rows and positions rise together: padding, in row B, lies above all.
    query_order_N = query_row_N.long() * 2**32 + query_position_N
    key_order_M = key_row_M.long() * 2**32 + key_position_M
    limit_N = torch.searchsorted(key_order_M, query_order_N, right=True, out_int32=True) - key_rows[query_row_N]
    skip_M = torch.searchsorted(query_order_N, key_order_M, out_int32=True) - query_rows[key_row_M]
    return torch.where(query_row_N < len(query_rows) - 1, limit_N, 0), skip_M


@visible_counts.register_fake
def _(query_rows: Tensor, key_rows: Tensor, query_position_N: Tensor, key_position_M: Tensor) -> tuple[Tensor, Tensor]:
    # An operator of its own: with these searches in inductor's graph (torch 2.11, CUDA) attention came out wrong.
    return torch.empty_like(query_position_N), torch.empty_like(key_position_M)


@torch.library.custom_op("chiar::packed_attention", mutates_args=())
def packed_attention_forward(
    q_NHd: Tensor,
    k_MHd: Tensor,
    v_MHd: Tensor,
    query_rows: Tensor,
    key_rows: Tensor,
    limit_N: Tensor,
    skip_M: Tensor,
    max_keys: int,
    implementation: str,
) -> tuple[Tensor, Tensor]:
    """The output, and log₂ Σ exp of each query's scores (+∞ where it sees no key, so that exp of the rest is 0)."""
    implementation = chosen_implementation(q_NHd, implementation)
    if implementation == "triton":
        from chiar.kernels.triton.packed_attention import triton_forward

        return triton_forward(q_NHd, k_MHd, v_MHd, query_rows, key_rows, limit_N, max_keys)
    forward = by_rows_forward if implementation == "rows" else torch_forward
    return forward(q_NHd, k_MHd, v_MHd, query_rows, key_rows, limit_N)


@torch.library.custom_op("chiar::packed_attention_backward", mutates_args=())
def packed_attention_backward(
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
    implementation: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v."""
    tensors = grad_NHd, q_NHd, k_MHd, v_MHd, out_NHd, log_sum_HN, query_rows, key_rows, limit_N
    implementation = chosen_implementation(q_NHd, implementation)
    if implementation == "triton":
        from chiar.kernels.triton.packed_attention import triton_backward

        return triton_backward(*tensors, skip_M, max_keys)
    return by_rows_backward(*tensors) if implementation == "rows" else torch_backward(*tensors)


def chosen_implementation(q_NHd: Tensor, implementation: str) -> str:
    if implementation != "auto":
        return implementation
    if q_NHd.device.type == "cpu":
        return "rows"
    return "triton" if triton_takes(q_NHd) and q_NHd.shape[-1] <= LARGEST_HEAD else "torch"


def triton_takes(x: Tensor) -> bool:
    """Whether Triton's kernels can work on a tensor: on a GPU, but not in float64."""
    return x.is_cuda and x.dtype != torch.float64 and importlib.util.find_spec("triton") is not None


def wants_triton(x: Tensor, implementation: str) -> bool:
    return implementation == "triton" or (implementation == "auto" and triton_takes(x))


def torch_forward(
    q_NHd: Tensor, k_MHd: Tensor, v_MHd: Tensor, query_rows: Tensor, key_rows: Tensor, limit_N: Tensor
) -> tuple[Tensor, Tensor]:
    """The definition, with the mask in the open."""
    with torch.autocast(q_NHd.device.type, enabled=False):
        q_HNd, k_HMd, v_HMd = heads_first(query_rows, q_NHd), heads_first(key_rows, k_MHd), heads_first(key_rows, v_MHd)
        scores_HNM = masked_scores(q_HNd, k_HMd, query_rows, key_rows, limit_N)
        log_sum_HN = scores_HNM.logsumexp(2)
        log_sum_HN = log_sum_HN.masked_fill(limit_N == 0, float("inf"))
        out_HNd = (scores_HNM - log_sum_HN.unsqueeze(2)).exp() @ v_HMd
    return as_rows(out_HNd, q_NHd), log_sum_HN / math.log(2)


def torch_backward(
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
    """With P the weights: dV = Pᵀ dO, dS = P ∘ (dO Vᵀ − rowsum(dO ∘ O)), dQ = dS K / √d, dK = dSᵀ Q / √d."""
    with torch.autocast(q_NHd.device.type, enabled=False):
        q_HNd, k_HMd, v_HMd = heads_first(query_rows, q_NHd), heads_first(key_rows, k_MHd), heads_first(key_rows, v_MHd)
        grad_HNd, out_HNd = heads_first(query_rows, grad_NHd), heads_first(query_rows, out_NHd)
        scores_HNM = masked_scores(q_HNd, k_HMd, query_rows, key_rows, limit_N)
        weights_HNM = (scores_HNM - log_sum_HN.unsqueeze(2) * math.log(2)).exp()
        delta_HN1 = (grad_HNd * out_HNd).sum(2, keepdim=True)
        grad_scores_HNM = weights_HNM * (grad_HNd @ v_HMd.mT - delta_HN1) * q_NHd.shape[2] ** -0.5
        return (
            as_rows(grad_scores_HNM @ k_HMd, q_NHd),
            as_rows(grad_scores_HNM.mT @ q_HNd, k_MHd),
            as_rows(weights_HNM.mT @ grad_HNd, v_MHd),
        )


def heads_first(rows: Tensor, x_NHd: Tensor) -> Tensor:
    """(H, N, d) in fp32 (float64 stays), zeros for padding: 0 × NaN would be NaN."""
    padding_N = torch.arange(len(x_NHd), device=x_NHd.device) >= rows[-1]
    return x_NHd.to(accumulation_dtype(x_NHd)).masked_fill(padding_N[:, None, None], 0.0).transpose(0, 1)


def as_rows(x_HNd: Tensor, like: Tensor) -> Tensor:
    return x_HNd.transpose(0, 1).to(like.dtype).contiguous()


def masked_scores(q_HNd: Tensor, k_HMd: Tensor, query_rows: Tensor, key_rows: Tensor, limit_N: Tensor) -> Tensor:
    key_row_M = row_of(key_rows, k_HMd.shape[1])
    index_M = torch.arange(k_HMd.shape[1], device=key_rows.device) - key_rows[key_row_M]
    same_row_NM = row_of(query_rows, q_HNd.shape[1])[:, None] == key_row_M
    visible_NM = same_row_NM & (index_M < limit_N[:, None])
    return (q_HNd @ k_HMd.mT * q_HNd.shape[2] ** -0.5).masked_fill(~visible_NM, float("-inf"))


def accumulation_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


@packed_attention_forward.register_fake
def _forward_fake(q_NHd: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    N, H, _d = q_NHd.shape
    return q_NHd.new_empty(q_NHd.shape), q_NHd.new_empty((H, N), dtype=accumulation_dtype(q_NHd))


@packed_attention_backward.register_fake
def _backward_fake(
    grad_NHd: Tensor, q_NHd: Tensor, k_MHd: Tensor, v_MHd: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return q_NHd.new_empty(q_NHd.shape), k_MHd.new_empty(k_MHd.shape), v_MHd.new_empty(v_MHd.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q_NHd, k_MHd, v_MHd, query_rows, key_rows, limit_N, skip_M, ctx.max_keys, ctx.implementation = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q_NHd, k_MHd, v_MHd, *output, query_rows, key_rows, limit_N, skip_M)


@once_differentiable
def _backward(ctx: Any, grad_NHd: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
    if grad_NHd is None:
        return (None,) * 9
    gradients = packed_attention_backward(grad_NHd, *ctx.saved_tensors, ctx.max_keys, ctx.implementation)
    return *gradients, *[None] * 6


packed_attention_forward.register_autograd(_backward, setup_context=_setup_context)


def most_pairs(queries: int, rows: int, max_keys: int) -> int:
    """An upper bound of the (query, key) pairs, since the split is on the device.

    Where every query is a key too, limits in a row differ and end at max_keys; the most pairs come from N queries
    spread evenly over the rows. For N = B·max_keys this is dense causal attention.
    """
    return max(0, queries * max_keys - queries * (queries // max(1, rows) - 1) // 2)


@register_flop_formula(torch.ops.chiar.packed_attention)
def forward_flops(
    q_shape: tuple[int, int, int],
    k_shape: tuple[int, int, int],
    v_shape: tuple[int, int, int],
    query_rows_shape: tuple[int],
    key_rows_shape: tuple[int],
    limit_shape: tuple[int],
    skip_shape: tuple[int],
    max_keys: int,
    *_: Any,
    **__: Any,
) -> int:
    """At most: two products over the visible pairs; a multiply-add is 2 FLOPs."""
    N, H, d = q_shape
    return 2 * 2 * H * d * most_pairs(N, query_rows_shape[0] - 1, max_keys)


@register_flop_formula(torch.ops.chiar.packed_attention_backward)
def backward_flops(
    grad_shape: tuple[int, int, int],
    q_shape: tuple[int, int, int],
    k_shape: tuple[int, int, int],
    v_shape: tuple[int, int, int],
    output_shape: tuple[int, int, int],
    log_sum_shape: tuple[int, int],
    query_rows_shape: tuple[int],
    key_rows_shape: tuple[int],
    limit_shape: tuple[int],
    skip_shape: tuple[int],
    max_keys: int,
    *_: Any,
    **__: Any,
) -> int:
    """At most: five products (scores again, dP, dQ, dK, dV), as torch counts flash attention."""
    N, H, d = q_shape
    return 5 * 2 * H * d * most_pairs(N, query_rows_shape[0] - 1, max_keys)
