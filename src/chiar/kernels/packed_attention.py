"""Causal attention for packed queries: rows of any length lie end to end, and a query sees keys up to its own position.

Row b owns queries query_rows[b]…query_rows[b+1] and keys key_rows[b]…key_rows[b+1], both in order of position. So what
a query sees is a prefix of its row's keys, `limit_N` long, and who sees a key is a suffix of its row's queries, behind
the first `skip_M`. The split lives on the device: shapes, launches and compiled graphs are the same for every split.

`torch_forward` and `torch_backward` are the definition; kernels are in triton_attention.py. `rotary_attention` is the
same of packed tokens over themselves, with the projection's bias and RoPE in one operator.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.flop_counter import register_flop_formula

from chiar.kernels.packing import Packing, accumulation_dtype, check_choice, chosen_attention, row_sum, wants_triton

IMPLEMENTATIONS = ("auto", "torch", "rows", "triton")
BLOCK = 64
"""Queries that share a mask in "rows". Of 32 to 512 the fastest, or nearly."""
flash_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def prefix_attention(
    q_NHd: Tensor, k_MHd: Tensor, v_MHd: Tensor, query_rows: Tensor, key_rows: Tensor, limit_N: Tensor,
    skip_M: Tensor, max_keys: int, *, implementation: str = "auto",
) -> Tensor:  # fmt: skip
    """softmax(QKᵀ/√d) V, each query over the first `limit_N` keys of its row; (N, H, d).

    `query_rows` and `key_rows` are B + 1 int32 offsets, the first 0; `limit_N` and `skip_M`, the queries that do not
    see a key, are int32. No row has more than `max_keys` keys, nor more queries. Queries and keys beyond the last
    offset are padding, NaN or not, with a limit of 0: they give zeros and get zero gradients. So does a query that sees
    no key. Products take the inputs' dtype (autocast's where it is on), sums and the softmax fp32. There is no dropout
    of weights: a caller that needs it runs dense attention. "auto" takes Triton on CUDA where it is installed and
    "rows", one row after another, on the CPU; "torch" is the definition and builds an N×M mask.
    """
    check_choice("implementation", implementation, IMPLEMENTATIONS)
    if max_keys < 1:
        raise ValueError(f"max_keys must be at least 1, got {max_keys}.")
    device = q_NHd.device.type
    if torch.is_autocast_enabled(device) and q_NHd.dtype != torch.float64:
        q_NHd, k_MHd, v_MHd = (x.to(torch.get_autocast_dtype(device)) for x in (q_NHd, k_MHd, v_MHd))
    same = q_NHd.shape[1:] == k_MHd.shape[1:] and k_MHd.shape == v_MHd.shape
    if not (same and q_NHd.dtype == k_MHd.dtype == v_MHd.dtype):
        found = ", ".join(f"{tuple(x.shape)} {x.dtype}" for x in (q_NHd, k_MHd, v_MHd))
        raise ValueError(f"q, k and v must be (N, H, d), (M, H, d) and (M, H, d) of one dtype, got {found}.")
    layout = query_rows, key_rows, limit_N, skip_M, max_keys
    return packed_attention_forward(q_NHd, k_MHd, v_MHd, *layout, implementation)[0]


@torch.library.custom_op("chiar::packed_attention", mutates_args=())
def packed_attention_forward(
    q_NHd: Tensor, k_MHd: Tensor, v_MHd: Tensor, query_rows: Tensor, key_rows: Tensor, limit_N: Tensor,
    skip_M: Tensor, max_keys: int, implementation: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The output, and log₂ Σ exp of each query's scores (+∞ where it sees no key, so that exp of the rest is 0)."""
    implementation = chosen_attention(q_NHd, implementation, "rows")
    if implementation == "triton":
        from chiar.kernels.triton_attention import triton_forward

        return triton_forward(q_NHd, k_MHd, v_MHd, query_rows, key_rows, limit_N, max_keys)
    forward = by_rows_forward if implementation == "rows" else torch_forward
    return forward(q_NHd, k_MHd, v_MHd, query_rows, key_rows, limit_N)


@torch.library.custom_op("chiar::packed_attention_backward", mutates_args=())
def packed_attention_backward(
    grad_NHd: Tensor, q_NHd: Tensor, k_MHd: Tensor, v_MHd: Tensor, out_NHd: Tensor, log_sum_HN: Tensor,
    query_rows: Tensor, key_rows: Tensor, limit_N: Tensor, skip_M: Tensor, max_keys: int, implementation: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of q, k and v."""
    tensors = grad_NHd, q_NHd, k_MHd, v_MHd, out_NHd, log_sum_HN, query_rows, key_rows, limit_N
    implementation = chosen_attention(q_NHd, implementation, "rows")
    if implementation == "triton":
        from chiar.kernels.triton_attention import triton_backward

        return triton_backward(*tensors, skip_M, max_keys)
    return by_rows_backward(*tensors) if implementation == "rows" else torch_backward(*tensors)


def torch_forward(
    q_NHd: Tensor, k_MHd: Tensor, v_MHd: Tensor, query_rows: Tensor, key_rows: Tensor, limit_N: Tensor
) -> tuple[Tensor, Tensor]:
    """The definition, with the mask in the open."""
    with torch.autocast(q_NHd.device.type, enabled=False):
        q_HNd, k_HMd, v_HMd = heads_first(query_rows, q_NHd), heads_first(key_rows, k_MHd), heads_first(key_rows, v_MHd)
        scores_HNM = masked_scores(q_HNd, k_HMd, query_rows, key_rows, limit_N)
        log_sum_HN = scores_HNM.logsumexp(2).masked_fill(limit_N == 0, float("inf"))
        out_HNd = (scores_HNM - log_sum_HN.unsqueeze(2)).exp() @ v_HMd
    return as_rows(out_HNd, q_NHd), log_sum_HN / math.log(2)


def torch_backward(
    grad_NHd: Tensor, q_NHd: Tensor, k_MHd: Tensor, v_MHd: Tensor, out_NHd: Tensor, log_sum_HN: Tensor,
    query_rows: Tensor, key_rows: Tensor, limit_N: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
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


def row_of(rows: Tensor, length: int) -> Tensor:
    """The row of each of `length` places; B for padding."""
    places = torch.arange(length, dtype=torch.int32, device=rows.device)
    return torch.searchsorted(rows[1:], places, right=True, out_int32=True)


def masked_scores(q_HNd: Tensor, k_HMd: Tensor, query_rows: Tensor, key_rows: Tensor, limit_N: Tensor) -> Tensor:
    key_row_M = row_of(key_rows, k_HMd.shape[1])
    index_M = torch.arange(k_HMd.shape[1], device=key_rows.device) - key_rows[key_row_M]
    same_row_NM = row_of(query_rows, q_HNd.shape[1])[:, None] == key_row_M
    visible_NM = same_row_NM & (index_M < limit_N[:, None])
    return (q_HNd @ k_HMd.mT * q_HNd.shape[2] ** -0.5).masked_fill(~visible_NM, float("-inf"))


class Part(NamedTuple):
    """Some consecutive queries of a row and the keys they see, for "rows": each row for itself by torch's own flash
    attention, so that no N×M mask is ever built. Row offsets may be read: the host is the device."""

    queries: slice
    keys: slice
    mask_nm: Tensor | None  # 0 where a query sees a key, else −∞; None: the n-th query sees the first n keys


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
    log_sum_HN = torch.full((H, N), float("inf"), dtype=accumulation_dtype(q_NHd))
    for part in parts(q_NHd, query_rows, key_rows, limit_N):
        qkv = as_batch(q_NHd, part.queries), as_batch(k_MHd, part.keys), as_batch(v_MHd, part.keys)
        out_1Hnd, log_sum_1Hn = flash_forward(*qkv, is_causal=part.mask_nm is None, attn_mask=part.mask_nm)
        out_NHd[part.queries] = out_1Hnd[0].transpose(0, 1)
        log_sum_HN[:, part.queries] = log_sum_1Hn.view(H, -1)
    return out_NHd, log_sum_HN / math.log(2)


def by_rows_backward(
    grad_NHd: Tensor, q_NHd: Tensor, k_MHd: Tensor, v_MHd: Tensor, out_NHd: Tensor, log_sum_HN: Tensor,
    query_rows: Tensor, key_rows: Tensor, limit_N: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    grads = tuple(torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q_NHd, k_MHd, v_MHd))
    for part in parts(q_NHd, query_rows, key_rows, limit_N):
        grad, q, out = (as_batch(x, part.queries) for x in (grad_NHd, q_NHd, out_NHd))
        k, v = as_batch(k_MHd, part.keys), as_batch(v_MHd, part.keys)
        log_sum = log_sum_HN[None, :, part.queries] * math.log(2)
        found = flash_backward(grad, q, k, v, out, log_sum, 0.0, part.mask_nm is None, attn_mask=part.mask_nm)
        for sums, places, more_1Hnd in zip(grads, (part.queries, part.keys, part.keys), found, strict=True):
            sums[places] += more_1Hnd[0].transpose(0, 1)
    return grads[0], grads[1], grads[2]


def as_batch(x_NHd: Tensor, places: slice) -> Tensor:
    """(1, H, n, d), a view where features lie side by side."""
    x_Hnd = x_NHd[places].transpose(0, 1)
    return (x_Hnd if x_Hnd.stride(2) == 1 else x_Hnd.contiguous())[None]


@packed_attention_forward.register_fake
def _forward_fake(q_NHd: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    N, H, _d = q_NHd.shape
    return q_NHd.new_empty(q_NHd.shape), q_NHd.new_empty((H, N), dtype=accumulation_dtype(q_NHd))


packed_attention_backward.register_fake(
    lambda grad, q, k, v, *_: (q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape))
)


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


def _flops(products: int, q_shape: Any, query_rows_shape: Any, max_keys: int) -> int:
    """At most, since the split is on the device: the most pairs come from N queries spread evenly over the rows, where
    every query is a key too. For N = B·max_keys this is dense causal attention."""
    N, H, d = q_shape
    pairs = max(0, N * max_keys - N * (N // max(1, query_rows_shape[0] - 1) - 1) // 2)
    return products * 2 * H * d * pairs


# Backward: scores again, dP, dQ, dK and dV, as torch counts flash attention.
register_flop_formula(torch.ops.chiar.packed_attention)(lambda q, *a, **_: _flops(2, q, a[2], a[6]))
register_flop_formula(torch.ops.chiar.packed_attention_backward)(lambda grad, *a, **_: _flops(5, grad, a[5], a[9]))


def fits(head: int) -> bool:
    """Whether the operator takes heads of this size: kernels read their vectors where they lie."""
    return 16 <= head <= 256 and head & (head - 1) == 0


def rotary_attention(
    qkv_P3Hd: Tensor, bias_3Hd: Tensor, rope: tuple[Tensor, Tensor], table_P: Tensor, packing: Packing,
    limit_P: Tensor, max_keys: int,
) -> Tensor:  # fmt: skip
    """Attention of the packed tokens over each other, (P, H, d), after `bias` was added to q, k and v.

    `rope` are cos and sin, (R, d); `table_P` is the row of each token in them. Rows that are not in use are undefined.
    The gradient arrives where the next product reads it, in one (P, 3, H, d) tensor: left to autograd, three gradients
    would be stacked and turned back in passes over all P rows, used or not.
    """
    layout = table_P, packing.rows, packing.count, limit_P, max_keys
    return rotary_attention_forward(qkv_P3Hd, bias_3Hd, *rope, *layout, "auto")[0]


@torch.library.custom_op("chiar::rotary_attention", mutates_args=())
def rotary_attention_forward(
    qkv_P3Hd: Tensor, bias_3Hd: Tensor, cos_Rd: Tensor, sin_Rd: Tensor, table_P: Tensor, rows: Tensor, count: Tensor,
    limit_P: Tensor, max_keys: int, implementation: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The output, the log-sums of its softmax, and the rotated q, k and v."""
    rotated = torch.empty_like(qkv_P3Hd, memory_format=torch.contiguous_format)
    rotate_into(rotated, qkv_P3Hd.contiguous(), bias_3Hd, cos_Rd, sin_Rd, table_P, count, 1.0, implementation)
    q, k, v = rotated.unbind(1)
    if wants_triton(rotated, implementation):
        from chiar.kernels.triton_attention import triton_forward

        return *triton_forward(q, k, v, rows, rows, limit_P, max_keys, clear=False), rotated
    skip_P = (limit_P - 1).clamp_min(0)
    return *packed_attention_forward(q, k, v, rows, rows, limit_P, skip_P, max_keys, implementation), rotated


def rotate_into(
    out: Tensor, x_P3Hd: Tensor, bias_3Hd: Tensor | None, cos_Rd: Tensor, sin_Rd: Tensor, table_P: Tensor,
    count: Tensor, sign: float, implementation: str,
) -> None:  # fmt: skip
    """x + bias, queries and keys turned by their angles, or back with a sign of -1; `out` may be x itself."""
    if wants_triton(x_P3Hd, implementation):
        from chiar.kernels.triton_rows import rotate_rows

        return rotate_rows(x_P3Hd, out, bias_3Hd, cos_Rd, sin_Rd, table_P, count, sign)
    x_P3Hd = x_P3Hd if bias_3Hd is None else x_P3Hd + bias_3Hd
    cos, sin = cos_Rd[table_P][:, None, None], sign * sin_Rd[table_P][:, None, None]
    first, second = x_P3Hd[:, :2].chunk(2, dim=-1)
    turned = x_P3Hd[:, :2] * cos + torch.cat([-second, first], dim=-1) * sin
    out[:, 2] = x_P3Hd[:, 2]
    out[:, :2] = turned.to(out.dtype)  # computed whole before it is written: out may be x


@rotary_attention_forward.register_fake
def _rotary_forward_fake(qkv_P3Hd: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    P, _three, H, d = qkv_P3Hd.shape
    log_sum_HP = qkv_P3Hd.new_empty((H, P), dtype=accumulation_dtype(qkv_P3Hd))
    return qkv_P3Hd.new_empty((P, H, d)), log_sum_HP, qkv_P3Hd.new_empty((P, 3, H, d))


@torch.library.custom_op("chiar::rotary_attention_backward", mutates_args=())
def rotary_attention_backward(
    grad_PHd: Tensor, out_PHd: Tensor, log_sum_HP: Tensor, rotated_P3Hd: Tensor, cos_Rd: Tensor, sin_Rd: Tensor,
    table_P: Tensor, rows: Tensor, count: Tensor, limit_P: Tensor, max_keys: int, implementation: str,
) -> Tensor:  # fmt: skip
    """The gradient of qkv."""
    skip_P = (limit_P - 1).clamp_min(0)
    q, k, v = rotated_P3Hd.unbind(1)
    saved = q, k, v, out_PHd, log_sum_HP, rows, rows, limit_P, skip_P
    if wants_triton(rotated_P3Hd, implementation):
        from chiar.kernels.triton_attention import triton_backward

        dqkv = torch.empty_like(rotated_P3Hd)
        dq, dk, dv = dqkv.unbind(1)
        triton_backward(grad_PHd.contiguous(), *saved, max_keys, (dq, dk, dv))
    else:
        dqkv = torch.stack(packed_attention_backward(grad_PHd, *saved, max_keys, implementation), 1)
    rotate_into(dqkv, dqkv, None, cos_Rd, sin_Rd, table_P, count, -1.0, implementation)
    return dqkv


rotary_attention_backward.register_fake(lambda grad, out, log_sum, rotated, *_: rotated.new_empty(rotated.shape))


def _rotary_setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    _, bias_3Hd, cos_Rd, sin_Rd, table_P, rows, count, limit_P, ctx.max_keys, ctx.implementation = inputs
    ctx.bias = bias_3Hd.shape, bias_3Hd.dtype
    ctx.mark_non_differentiable(output[1], output[2])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output, cos_Rd, sin_Rd, table_P, rows, count, limit_P)


def _rotary_backward(ctx: Any, grad_PHd: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    none = (None,) * 8
    if grad_PHd is None:
        return None, None, *none
    saved = ctx.saved_tensors  # read once: a layer that is recomputed gives them once
    dqkv = rotary_attention_backward(grad_PHd, *saved, ctx.max_keys, ctx.implementation)
    shape, dtype = ctx.bias
    dbias = row_sum(dqkv.flatten(1), saved[-2], ctx.implementation)
    return dqkv, dbias.view(shape).to(dtype), *none


rotary_attention_forward.register_autograd(_rotary_backward, setup_context=_rotary_setup_context)


def _rotary_flops(products: int, shape: Any, max_keys: int) -> int:
    """An upper bound: every token attends to half of `max_keys` tokens."""
    return products * shape[0] * shape[-2] * shape[-1] * max_keys


register_flop_formula(torch.ops.chiar.rotary_attention)(lambda qkv, *a, **_: _rotary_flops(2, qkv, a[7]))
register_flop_formula(torch.ops.chiar.rotary_attention_backward)(lambda grad, *a, **_: _rotary_flops(5, grad, a[9]))
