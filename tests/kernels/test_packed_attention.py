"""Packed attention is scaled_dot_product_attention of each row: values, gradients, padding."""

import pytest
import torch
import torch.nn.functional as F
from implementations import DTYPE, agree, implementations
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from chiar.kernels import packed_attention as module
from chiar.kernels.packed_attention import packed_attention_forward, prefix_attention

# Lengths of the rows, and how many of their tokens are queries; heads and their size. A kernel's block is 32 here.
SPLITS = {
    "one-token": ([1], [1], 1, 32),
    "all-tokens": ([70, 33, 64], [70, 33, 64], 1, 32),
    "ragged": ([100, 7, 40], [50, 7, 9], 1, 64),
    "empty-rows": ([0, 40, 0, 35, 20, 0], [0, 33, 0, 0, 20, 0], 1, 32),
    "no-query": ([40, 20], [0, 0], 1, 32),
    "no-token": ([0, 0], [0, 0], 1, 32),
    "odd-head": ([50, 20], [30, 20], 2, 24),
}
two_keys = pytest.mark.parametrize("keys", ["all", "routed"])


def offsets(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).int()


def poisoned(values, padding):
    """`values` and rows of NaN; rows are strided, as slices of a wider tensor are."""
    whole = values.new_full((len(values) + padding, 2, *values.shape[1:]), torch.nan)
    whole[: len(values), 1] = values
    return whole[:, 1]


def example(lengths, chosen, keys, heads=2, d=4, padding=0, dtype=DTYPE):
    """q, k and v, a gradient, and the layout: rows of `lengths` tokens, of which `chosen` are queries; keys are "all"
    tokens or the "routed" ones."""
    picked = [torch.randperm(n)[:m].sort().values for n, m in zip(lengths, chosen, strict=True)]
    places = picked if keys == "routed" else [torch.arange(n) for n in lengths]
    seen = [key <= query[:, None] for query, key in zip(picked, places, strict=True)]
    limit = torch.cat([pairs.sum(1) for pairs in seen])
    skip = torch.cat([(~pairs).sum(0) for pairs in seen])
    more = padding if keys == "routed" else 0
    q, grad = (poisoned(torch.randn(len(limit), heads, d, dtype=dtype), padding) for _ in range(2))
    k, v = (poisoned(torch.randn(len(skip), heads, d, dtype=dtype), more) for _ in range(2))
    counts = F.pad(limit, (0, padding)).int(), F.pad(skip, (0, more)).int()
    layout = offsets(chosen), offsets([len(x) for x in places]), *counts, max(1, *lengths, 1)
    return [x.requires_grad_() for x in (q, k, v)], grad, layout


def truth(inputs, grad, layout):
    """Output and gradients in float64 without padding: each row by scaled_dot_product_attention with a mask."""
    query_rows, key_rows, limit, _, _ = layout
    queries, keys = int(query_rows[-1]), int(key_rows[-1])
    sizes = queries, keys, keys
    q, k, v = exact = [x.detach()[:n].double().requires_grad_() for x, n in zip(inputs, sizes, strict=True)]
    rows = [q[:0]]
    for row in range(len(query_rows) - 1):
        mine, theirs = slice(*query_rows[row : row + 2]), slice(*key_rows[row : row + 2])
        visible = torch.arange(int(theirs.stop - theirs.start)) < limit[mine, None]
        parts = (x.transpose(0, 1) for x in (q[mine], k[theirs], v[theirs]))
        rows.append(F.scaled_dot_product_attention(*parts, attn_mask=visible).transpose(0, 1))
    out = torch.cat(rows)
    found = torch.autograd.grad(out, exact, grad[:queries].double(), allow_unused=True, materialize_grads=True)
    return out.detach(), *found


def with_gradients(inputs, grad, layout, **options):
    out = prefix_attention(*inputs, *layout, **options)
    return out.detach(), *torch.autograd.grad(out, inputs, grad)


@implementations("torch", "rows")
@two_keys
@pytest.mark.parametrize("padding", [0, 60])
@pytest.mark.parametrize("split", SPLITS)
def test_value_and_gradients_are_those_of_each_row(split, padding, keys, implementation, monkeypatch):
    """Also with more queries than share a mask, and gradients whose features do not lie side by side."""
    monkeypatch.setattr(module, "BLOCK", 8)
    lengths, chosen, heads, d = SPLITS[split]
    inputs, grad, layout = example(lengths, chosen, keys, heads, d, padding)
    grad = grad.transpose(1, 2).contiguous().transpose(1, 2)
    found = with_gradients(inputs, grad, layout, implementation=implementation)
    # One token attends to itself whatever its query and key: their gradients are differences of equal terms of size 1.
    agree(found, truth(inputs, grad, layout), least=1.0)


@two_keys
def test_rows_keep_no_mask_of_the_batch(keys):
    """64 rows of 128 tokens: a mask of all pairs would be 64 MiB of booleans; the whole of q is 128 KiB."""
    inputs, grad, layout = example([128] * 64, [64] * 64, keys, heads=1, d=8, dtype=torch.float32)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        prefix_attention(*inputs, *layout).backward(grad)
    assert max(event.cpu_memory_usage for event in seen.events()) < 2**21


@implementations("torch", "rows")
def test_a_query_before_every_key_gives_zeros(implementation):
    q, k, v = (torch.randn(3, 2, 4, dtype=DTYPE, requires_grad=True) for _ in range(3))
    rows, limit, skip = offsets([3]), torch.tensor([0, 1, 3]).int(), torch.tensor([1, 2, 2]).int()
    out = prefix_attention(q, k, v, rows, rows, limit, skip, 3, implementation=implementation)
    out.sum().backward()
    assert (out[0] == 0).all() and (q.grad[0] == 0).all()
    assert torch.allclose(out[1], v[0]) and q.grad.isfinite().all()


# Steps of the result. The definition: half a step; for gradients the rounded output counts too, through delta. torch's
# flash attention has an exponential of its own (2e-7) and multiplies by rounded weights. A kernel's blocks are 64 for
# rows up to 512 tokens and 128; no bf16 there: the interpreter would multiply its bits.
@implementations("torch", "rows")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("lengths", "chosen", "d"), [([200, 90], [130, 64], 64), ([600, 30], [150, 30], 128)])
def test_half_precision_is_rounded_once(lengths, chosen, d, dtype, implementation):
    if implementation == "triton" and dtype == torch.bfloat16:
        pytest.skip("interpreted")
    inputs, grad, layout = example(lengths, chosen, "routed", 1, d, 20, torch.float32)
    inputs, grad = [x.detach().to(dtype).requires_grad_() for x in inputs], grad.to(dtype)
    found = with_gradients(inputs, grad, layout, implementation=implementation)
    for ours, true in zip(found, truth(inputs, grad, layout), strict=True):
        assert ours.dtype == dtype
        assert (ours[: len(true)].double() - true).norm() <= 4 * torch.finfo(dtype).eps * true.norm()


def test_what_it_is_registered_as():
    """The fake's shapes, gradients that are taken once, FLOPs bounded by dense causal attention, what it refuses."""
    inputs, grad, layout = example([5, 0, 4], [2, 0, 3], "all")
    torch.library.opcheck(packed_attention_forward, (*inputs, *layout, "rows"))
    first = torch.autograd.grad(prefix_attention(*inputs, *layout), inputs, grad.requires_grad_(), create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first[0].sum().backward()
    for chosen, bound in (([6, 6, 6], 3 * 6 * 7 // 2), ([1, 0, 2], 3 * 6)):
        inputs, grad, layout = example([6, 6, 6], chosen, "all", heads=2, d=4)
        with FlopCounterMode(display=False) as counter:
            prefix_attention(*inputs, *layout).backward(grad)
        assert counter.get_total_flops() == (4 + 10) * 2 * 4 * bound and int(layout[2].sum()) <= bound
    x = torch.zeros(1, 2, 4)
    for k, v, max_keys, implementation, message in (
        (x, x, 0, "auto", "max_keys"), (x, x, 1, "cuda", "implementation must be"),
        (x[:, :1], x, 1, "auto", "got"), (x, x.bfloat16(), 1, "auto", "dtype"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            prefix_attention(x, k, v, *[offsets([1])] * 4, max_keys, implementation=implementation)
