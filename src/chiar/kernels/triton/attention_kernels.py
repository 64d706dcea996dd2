"""packed_attention in the manner of FlashAttention-2 (Dao, arXiv 2307.08691): scores live in registers only.

A program works on one block of one row and one head. The grid covers the longest rows there may be; programs behind
their row's end return at once. With s = qk·log₂e/√d and L = log₂ Σ 2^s: P = 2^(s − L), O = P V, and backward as in
torch_backward, with delta = rowsum(dO ∘ O).
"""

import triton
import triton.language as tl


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


@triton.jit
def _clear_padding(pointer, program, used, capacity, stride, LENGTH: tl.constexpr, HEAD: tl.constexpr):
    """Each program zeros the padding among LENGTH vectors of its own: cheaper than to begin with zeros."""
    start = program * LENGTH
    if start + LENGTH > used:
        places = start + tl.arange(0, LENGTH)
        padding = ((places >= used) & (places < capacity))[:, None]
        zeros = tl.zeros([LENGTH, HEAD], pointer.dtype.element_ty)
        tl.store(pointer + _offsets(start, stride, LENGTH, HEAD), zeros, mask=padding)


@triton.jit
def _attend(
    q,
    k_ptr,
    v_ptr,
    limit,
    out,
    total,
    largest,
    first,
    last,
    k_stride,
    v_stride,
    scale,
    HEAD: tl.constexpr,
    KEYS: tl.constexpr,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Adds keys first…last to the running softmax."""
    for start in tl.range(first, last, KEYS):
        k = _load(k_ptr, start, k_stride, last, KEYS, HEAD, MASKED)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if MASKED:
            s = tl.where((start + tl.arange(0, KEYS))[None, :] < limit[:, None], s, -float("inf"))
        larger = tl.maximum(largest, tl.max(s, 1) * scale)
        p = tl.exp2(s * scale - larger[:, None])
        decay = tl.exp2(largest - larger)
        total = total * decay + tl.sum(p, 1)
        v = _load(v_ptr, start, v_stride, last, KEYS, HEAD, MASKED)
        out = tl.dot(p.to(v.dtype), v, out * decay[:, None], input_precision=PRECISION)
        largest = larger
    return out, total, largest


@triton.jit(do_not_specialize=["capacity"])
def _forward(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    log_sum_ptr,
    query_rows_ptr,
    key_rows_ptr,
    limit_ptr,
    q_stride,
    q_head,
    k_stride,
    k_head,
    v_stride,
    v_head,
    capacity,
    scale,
    HEAD: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
    CLEAR: tl.constexpr,
):
    head, row = tl.cast(tl.program_id(1), tl.int64), tl.program_id(2)
    block = tl.num_programs(0) - 1 - tl.program_id(0)  # the last block has the most keys: begin with it
    out_stride = tl.num_programs(1) * HEAD
    out_ptr += head * HEAD
    used = tl.load(query_rows_ptr + tl.num_programs(2))
    if CLEAR:
        _clear_padding(out_ptr, row * tl.num_programs(0) + block, used, capacity, out_stride, QUERIES, HEAD)
    begin = tl.load(query_rows_ptr + row)
    end = tl.load(query_rows_ptr + row + 1)
    start = begin + block * QUERIES
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
    out, total, largest = _attend(
        q, k_ptr, v_ptr, limit, out, total, largest, 0, common,
        k_stride, v_stride, scale, HEAD, KEYS, False, PRECISION,
    )  # fmt: skip
    out, total, largest = _attend(
        q, k_ptr, v_ptr, limit, out, total, largest, common, most,
        k_stride, v_stride, scale, HEAD, KEYS, True, PRECISION,
    )  # fmt: skip
    seen = limit > 0
    out = out / tl.where(seen, total, 1.0)[:, None]
    _store(out_ptr, out, start, out_stride, end, QUERIES, HEAD)
    log_sum = tl.where(seen, largest + tl.log2(tl.where(seen, total, 1.0)), float("inf"))
    tl.store(log_sum_ptr + head * capacity + places, log_sum, mask=places < end)


@triton.jit
def _add_to_queries(
    dq,
    q,
    grad,
    log_sum,
    delta,
    k_ptr,
    v_ptr,
    limit,
    first,
    last,
    k_stride,
    v_stride,
    scale,
    HEAD: tl.constexpr,
    KEYS: tl.constexpr,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """dQ += dS K over keys first…last."""
    for start in tl.range(first, last, KEYS):
        k = _load(k_ptr, start, k_stride, last, KEYS, HEAD, MASKED)
        v = _load(v_ptr, start, v_stride, last, KEYS, HEAD, MASKED)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        p = tl.exp2(s * scale - log_sum[:, None])
        if MASKED:
            p = tl.where((start + tl.arange(0, KEYS))[None, :] < limit[:, None], p, 0.0)
        dp = tl.dot(grad, tl.trans(v), input_precision=PRECISION)
        ds = p * (dp - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    return dq


@triton.jit(do_not_specialize=["capacity"])
def _backward_queries(
    grad_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    log_sum_ptr,
    delta_ptr,
    dq_ptr,
    query_rows_ptr,
    key_rows_ptr,
    limit_ptr,
    grad_stride,
    grad_head,
    q_stride,
    q_head,
    k_stride,
    k_head,
    v_stride,
    v_head,
    dq_stride,
    dq_head,
    capacity,
    scale,
    HEAD: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
    CLEAR: tl.constexpr,
):
    """dQ, and delta for _backward_keys."""
    head, row = tl.cast(tl.program_id(1), tl.int64), tl.program_id(2)
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    out_stride = tl.num_programs(1) * HEAD
    dq_ptr += head * dq_head
    used = tl.load(query_rows_ptr + tl.num_programs(2))
    if CLEAR:
        _clear_padding(dq_ptr, row * tl.num_programs(0) + block, used, capacity, dq_stride, QUERIES, HEAD)
    begin = tl.load(query_rows_ptr + row)
    end = tl.load(query_rows_ptr + row + 1)
    start = begin + block * QUERIES
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
    dq = _add_to_queries(
        dq, q, grad, log_sum, delta, k_ptr, v_ptr, limit, 0, common,
        k_stride, v_stride, scale, HEAD, KEYS, False, PRECISION,
    )  # fmt: skip
    dq = _add_to_queries(
        dq, q, grad, log_sum, delta, k_ptr, v_ptr, limit, common, most,
        k_stride, v_stride, scale, HEAD, KEYS, True, PRECISION,
    )  # fmt: skip
    LN2: tl.constexpr = 0.6931471805599453
    _store(dq_ptr, dq * (scale * LN2), start, dq_stride, end, QUERIES, HEAD)


@triton.jit
def _add_to_keys(
    dk,
    dv,
    k,
    v,
    index,
    q_ptr,
    grad_ptr,
    log_sum_ptr,
    delta_ptr,
    limit_ptr,
    first,
    last,
    end,
    q_stride,
    grad_stride,
    scale,
    HEAD: tl.constexpr,
    QUERIES: tl.constexpr,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """dK += dSᵀ Q and dV += Pᵀ dO over queries first…last of a row that has `end`."""
    for start in tl.range(first, last, QUERIES):
        places = start + tl.arange(0, QUERIES)
        q = _load(q_ptr, start, q_stride, end, QUERIES, HEAD, True)
        log_sum = tl.load(log_sum_ptr + places, mask=places < end, other=float("inf"))
        s = tl.dot(k, tl.trans(q), input_precision=PRECISION)
        p = tl.exp2(s * scale - log_sum[None, :])
        if MASKED:
            limit = tl.load(limit_ptr + places, mask=places < end, other=0)
            p = tl.where(index[:, None] < limit[None, :], p, 0.0)
        grad = _load(grad_ptr, start, grad_stride, end, QUERIES, HEAD, True)
        dv = tl.dot(p.to(grad.dtype), grad, dv, input_precision=PRECISION)
        delta = tl.load(delta_ptr + places, mask=places < end, other=0.0)
        dp = tl.dot(v, tl.trans(grad), input_precision=PRECISION)
        ds = p * (dp - delta[None, :])
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=["queries", "capacity"])
def _backward_keys(
    grad_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    log_sum_ptr,
    delta_ptr,
    dk_ptr,
    dv_ptr,
    query_rows_ptr,
    key_rows_ptr,
    limit_ptr,
    skip_ptr,
    grad_stride,
    grad_head,
    q_stride,
    q_head,
    k_stride,
    k_head,
    v_stride,
    v_head,
    dk_stride,
    dk_head,
    queries,
    capacity,
    scale,
    HEAD: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
    CLEAR: tl.constexpr,
):
    """dK and dV, with the same strides. `queries` and `capacity` are the sizes of the packed queries and keys."""
    block, head, row = tl.program_id(0), tl.cast(tl.program_id(1), tl.int64), tl.program_id(2)
    dk_ptr += head * dk_head
    dv_ptr += head * dk_head
    used = tl.load(key_rows_ptr + tl.num_programs(2))
    program = row * tl.num_programs(0) + block
    if CLEAR:
        _clear_padding(dk_ptr, program, used, capacity, dk_stride, KEYS, HEAD)
        _clear_padding(dv_ptr, program, used, capacity, dk_stride, KEYS, HEAD)
    begin = tl.load(key_rows_ptr + row)
    end = tl.load(key_rows_ptr + row + 1)
    start = begin + block * KEYS
    if start >= end:
        return
    query_begin = tl.load(query_rows_ptr + row)
    count = tl.load(query_rows_ptr + row + 1) - query_begin
    k = _load(k_ptr + head * k_head, start, k_stride, end, KEYS, HEAD, True)
    v = _load(v_ptr + head * v_head, start, v_stride, end, KEYS, HEAD, True)
    index = block * KEYS + tl.arange(0, KEYS)
    first = tl.load(skip_ptr + start)
    everyone = tl.load(skip_ptr + tl.minimum(start + KEYS, end) - 1)  # from here on queries see the whole block
    middle = first + tl.cdiv(everyone - first, QUERIES) * QUERIES
    query_begin = tl.cast(query_begin, tl.int64)
    q_ptr += query_begin * q_stride + head * q_head
    grad_ptr += query_begin * grad_stride + head * grad_head
    per_query = head * queries + query_begin
    log_sum_ptr += per_query
    delta_ptr += per_query
    limit_ptr += query_begin

    dk = tl.zeros([KEYS, HEAD], tl.float32)
    dv = tl.zeros([KEYS, HEAD], tl.float32)
    dk, dv = _add_to_keys(
        dk, dv, k, v, index, q_ptr, grad_ptr, log_sum_ptr, delta_ptr, limit_ptr, first, middle, count,
        q_stride, grad_stride, scale, HEAD, QUERIES, True, PRECISION,
    )  # fmt: skip
    dk, dv = _add_to_keys(
        dk, dv, k, v, index, q_ptr, grad_ptr, log_sum_ptr, delta_ptr, limit_ptr, middle, count, count,
        q_stride, grad_stride, scale, HEAD, QUERIES, False, PRECISION,
    )  # fmt: skip
    LN2: tl.constexpr = 0.6931471805599453
    _store(dk_ptr, dk * (scale * LN2), start, dk_stride, end, KEYS, HEAD)
    _store(dv_ptr, dv, start, dk_stride, end, KEYS, HEAD)
