"""Packed attention is scaled_dot_product_attention of each row: values, gradients, padding, compiled, as kernels."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from chiar.kernels import attention_by_rows
from chiar.kernels.packed_attention import packed_attention, packed_attention_forward, visible_counts

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")

# Lengths of the rows, and how many of their tokens are queries.
SPLITS = {
    "one-token": ([1], [1]),
    "all-tokens": ([5, 3], [5, 3]),
    "ragged": ([9, 4, 7], [3, 4, 1]),
    "row-without-query": ([6, 5, 4], [2, 0, 3]),
    "empty-rows": ([0, 5, 0, 0, 3, 0], [0, 2, 0, 0, 3, 0]),
    "no-query": ([4, 3], [0, 0]),
    "no-token": ([0, 0], [0, 0]),
}


def offsets(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).int()


def poisoned(values, padding):
    """`values` and rows of NaN (integers: a number far below any position)."""
    fill = torch.nan if values.is_floating_point() else -(2**31)
    return torch.cat([values, values.new_full((padding, *values.shape[1:]), fill)])


def example(lengths, chosen, keys, heads=2, d=4, padding=0, dtype=torch.float64):
    """q, k, v, grad, both offsets, both positions. Positions have gaps, as under left padding or caches."""
    token_position = [torch.randperm(3 * n + 1)[:n].sort().values.int() for n in lengths]
    picked = [torch.randperm(n)[:m].sort().values for n, m in zip(lengths, chosen, strict=True)]
    query_position = torch.cat([p[i] for p, i in zip(token_position, picked, strict=True)])
    query_rows = offsets(chosen)
    key_rows, key_position = (
        (offsets(lengths), torch.cat(token_position)) if keys == "all" else (query_rows, query_position)
    )
    q, grad = (poisoned(torch.randn(len(query_position), heads, d, dtype=dtype), padding) for _ in range(2))
    more = padding if keys == "routed" else 0
    k, v = (poisoned(torch.randn(len(key_position), heads, d, dtype=dtype), more) for _ in range(2))
    positions = poisoned(query_position, padding), poisoned(key_position, more)
    return [x.requires_grad_() for x in (q, k, v)], grad, (query_rows, key_rows, *positions, max(1, *lengths, 1))


def row_by_row(q, k, v, query_rows, key_rows, query_position, key_position, _):
    """Each row by scaled_dot_product_attention with a mask straight from the positions."""
    out = torch.zeros_like(q)
    for row in range(len(query_rows) - 1):
        mine, theirs = slice(*query_rows[row : row + 2]), slice(*key_rows[row : row + 2])
        if mine.start == mine.stop:
            continue
        visible = key_position[theirs] <= query_position[mine, None]
        parts = (x.transpose(0, 1) for x in (q[mine], k[theirs], v[theirs]))
        out = out.index_copy(
            0,
            torch.arange(int(mine.start), int(mine.stop)),
            F.scaled_dot_product_attention(*parts, attn_mask=visible).transpose(0, 1),
        )
    return out


def with_gradients(attention, inputs, grad, layout, **options):
    out = attention(*inputs, *layout, **options)
    return out.detach(), *torch.autograd.grad(out, inputs, grad)


both = pytest.mark.parametrize("implementation", ["torch", "rows"])


@both
@pytest.mark.parametrize("keys", ["all", "routed"])
@pytest.mark.parametrize("padding", [0, 11])
@pytest.mark.parametrize("split", SPLITS)
def test_value_and_gradients_are_those_of_each_row(split, padding, keys, implementation):
    inputs, grad, layout = example(*SPLITS[split], keys, padding=padding)
    found = with_gradients(packed_attention, inputs, grad, layout, implementation=implementation)
    used = int(layout[0][-1]), int(layout[1][-1])
    plain = [x.detach()[:n].requires_grad_() for x, n in zip(inputs, (used[0], used[1], used[1]), strict=True)]
    if used[0]:
        expected = with_gradients(row_by_row, plain, grad[: used[0]], layout)
    else:
        expected = [torch.zeros_like(x) for x in (plain[0], *plain)]
    for ours, true in zip(found, expected, strict=True):
        assert torch.allclose(ours[: len(true)], true, rtol=1e-10, atol=1e-12)
        assert (ours[len(true) :] == 0).all()


@pytest.mark.parametrize("block", [1, 3, 8])
@pytest.mark.parametrize("keys", ["all", "routed"])
def test_rows_in_blocks_are_the_definition(keys, block, monkeypatch):
    """More queries than share a mask; and gradients whose features do not lie side by side."""
    monkeypatch.setattr(attention_by_rows, "BLOCK", block)
    inputs, grad, layout = example([30, 9, 0, 17], [12, 9, 0, 8], keys, padding=5)
    grad = grad.transpose(1, 2).contiguous().transpose(1, 2)
    found = with_gradients(packed_attention, inputs, grad, layout, implementation="rows")
    expected = with_gradients(packed_attention, inputs, grad, layout, implementation="torch")
    for ours, true in zip(found, expected, strict=True):
        assert torch.allclose(ours, true, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("keys", ["all", "routed"])
def test_rows_keep_no_mask_of_the_batch(keys):
    """64 rows of 128 tokens: a mask of all pairs would be 64 MiB of booleans; the whole of q is 128 KiB."""
    inputs, grad, layout = example([128] * 64, [64] * 64, keys, heads=1, d=8, dtype=torch.float32)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        packed_attention(*inputs, *layout).backward(grad)
    assert max(event.cpu_memory_usage for event in seen.events()) < 2**21


def test_auto_on_a_cpu_is_rows():
    inputs, _, layout = example([9, 4, 7], [3, 4, 1], "all", dtype=torch.float32)
    assert torch.equal(packed_attention(*inputs, *layout), packed_attention(*inputs, *layout, implementation="rows"))


@both
def test_a_query_before_every_key_gives_zeros(implementation):
    torch.manual_seed(0)
    q, k, v = (torch.randn(3, 2, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    rows, query_position, key_position = offsets([3]), torch.tensor([0, 4, 9]).int(), torch.tensor([3, 5, 7]).int()
    out = packed_attention(q, k, v, rows, rows, query_position, key_position, 3, implementation=implementation)
    out.sum().backward()
    assert (out[0] == 0).all() and (q.grad[0] == 0).all()
    assert torch.allclose(out[1], v[0]) and q.grad.isfinite().all()


def test_counts_say_who_sees_whom():
    """Row 0 has queries at 2, 5 and keys at 0, 2, 4, 6; row 1 none and 1; row 2 a query at 1 and keys at 0, 1."""
    query_rows, key_rows = offsets([2, 0, 1]), offsets([4, 1, 2])
    limit, skip = visible_counts(
        query_rows, key_rows, torch.tensor([2, 5, 1, -9, 99]).int(), torch.tensor([0, 2, 4, 6, 3, 0, 1, 7]).int()
    )
    assert limit.tolist() == [2, 3, 2, 0, 0]
    assert skip[:7].tolist() == [0, 0, 1, 2, 0, 0, 0]
    assert limit.dtype == skip.dtype == torch.int32


@both
@pytest.mark.parametrize("keys", ["all", "routed"])
def test_gradcheck(keys, implementation):
    inputs, _, layout = example([4, 0, 3], [2, 0, 3], keys, heads=1, d=3)
    options = {"implementation": implementation}
    assert torch.autograd.gradcheck(lambda *x: packed_attention(*x, *layout, **options), inputs)


# Steps of the result. The definition: half a step; for gradients the rounded output counts too, through delta. torch's
# flash attention has an exponential of its own (2e-7) and multiplies by rounded weights.
@pytest.mark.parametrize(("implementation", "steps"), [("torch", 2), ("rows", 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_rounded_once(dtype, implementation, steps):
    inputs, grad, layout = example([40, 25], [20, 25], "all", d=8, dtype=torch.float32)
    inputs, grad = [x.detach().to(dtype).requires_grad_() for x in inputs], grad.to(dtype)
    found = with_gradients(packed_attention, inputs, grad, layout, implementation=implementation)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    expected = with_gradients(packed_attention, exact, grad.double(), layout, implementation="torch")
    for ours, true in zip(found, expected, strict=True):
        assert ours.dtype == dtype
        assert (ours.double() - true).norm() <= steps * torch.finfo(dtype).eps * true.norm()


def test_autocast_gives_its_dtype_and_fp32_gradients():
    inputs, grad, layout = example([9, 4], [5, 4], "all", dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out = packed_attention(*inputs, *layout)
    gradients = torch.autograd.grad(out, inputs, grad.bfloat16())
    assert out.dtype == torch.bfloat16 and all(g.dtype == torch.float32 for g in gradients)
    assert torch.equal(out, packed_attention(*(x.bfloat16() for x in inputs), *layout))


def test_a_second_derivative_is_refused():
    inputs, grad, layout = example([4], [3], "all")
    first = torch.autograd.grad(packed_attention(*inputs, *layout), inputs, grad.requires_grad_(), create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first[0].sum().backward()


def test_flops_are_bounded_by_dense_causal_attention():
    lengths, heads, d = [6, 6, 6], 2, 4
    pairs = 3 * 6 * 7 // 2
    for chosen, bound in (([6, 6, 6], pairs), ([1, 0, 2], 3 * 6)):
        inputs, grad, layout = example(lengths, chosen, "all", heads, d)
        with FlopCounterMode(display=False) as counter:
            packed_attention(*inputs, *layout).backward(grad)
        assert counter.get_total_flops() == (4 + 10) * heads * d * bound
        assert int(visible_counts(*layout[:4])[0].sum()) <= bound


@both
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("keys", ["all", "routed"])
def test_opcheck(keys, dtype, implementation):
    inputs, _, layout = example([5, 0, 4], [2, 0, 3], keys, dtype=dtype)
    query_rows, key_rows, *positions, max_keys = layout
    counts = visible_counts(query_rows, key_rows, *positions)
    torch.library.opcheck(packed_attention_forward, (*inputs, query_rows, key_rows, *counts, max_keys, implementation))


@pytest.mark.parametrize("keys", ["all", "routed"])
def test_compiles_into_one_graph_for_every_split(keys):
    torch.compiler.reset()
    compiled = torch.compile(lambda *x: packed_attention(*x) * 2, fullgraph=True)
    # Same capacity, other splits: nothing may compile again.
    for chosen, stance in (([3, 4, 1], "default"), ([0, 4, 7], "fail_on_recompile"), ([9, 0, 0], "fail_on_recompile")):
        inputs, grad, layout = example([9, 4, 7], chosen, keys, padding=20 - sum(chosen))
        with torch.compiler.set_stance(stance):
            found = with_gradients(compiled, inputs, grad, layout)
        expected = with_gradients(packed_attention, inputs, 2 * grad, layout, implementation="torch")
        assert torch.allclose(found[0], 2 * expected[0])
        for ours, plain in zip(found[1:], expected[1:], strict=True):
            assert torch.allclose(ours, plain)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q, k, v, r: ((q, k, v, r, r, r, r, 0), {}), "max_keys"),
        (lambda q, k, v, r: ((q, k, v, r, r, r, r, 1), {"implementation": "cuda"}), "implementation"),
        (lambda q, k, v, r: ((q, k[:, :1], v, r, r, r, r, 1), {}), "got"),
        (lambda q, k, v, r: ((q, k, v.bfloat16(), r, r, r, r, 1), {}), "dtype"),
    ],
    ids=["max_keys", "implementation", "shape", "dtype"],
)
def test_wrong_arguments_are_named(change, message):
    arguments, options = change(*(torch.zeros(1, 2, 4) for _ in range(3)), offsets([1]))
    with pytest.raises(ValueError, match=message):
        packed_attention(*arguments, **options)


# Lengths, queries in each, keys, heads, d, dtype, padding. Blocks are 32 (fp32), 64 (fp16, rows up to 512) and 128.
# No bf16: the interpreter would multiply its bits as integers.
KERNEL_CASES = {
    "one-token": ([1], [1], "routed", 1, 32, "float32", 0),
    "all-tokens": ([70, 33, 64], [70, 33, 64], "routed", 2, 32, "float32", 0),
    "ragged": ([100, 7, 40], [50, 7, 9], "all", 2, 64, "float32", 0),
    "ragged-routed": ([100, 7, 40], [50, 7, 33], "routed", 2, 64, "float32", 40),
    "empty-rows": ([0, 40, 0, 0, 35, 0], [0, 33, 0, 0, 35, 0], "all", 1, 32, "float32", 5),
    "row-without-query": ([40, 70, 20], [30, 0, 20], "all", 1, 32, "float32", 60),
    "no-query": ([40, 20], [0, 0], "all", 1, 32, "float32", 50),
    "no-token": ([0, 0], [0, 0], "all", 1, 32, "float32", 5),
    "only-padding": ([40, 20], [0, 0], "routed", 1, 32, "float32", 70),
    "mostly-padding": ([60, 30], [3, 1], "routed", 2, 32, "float32", 400),
    "odd-head": ([50, 20], [30, 20], "all", 2, 24, "float32", 3),
    "half": ([200, 90], [130, 64], "all", 1, 64, "float16", 20),
    "half-routed": ([200, 90], [130, 90], "routed", 1, 32, "float16", 70),
    "long": ([700, 300], [300, 300], "all", 1, 64, "float16", 10),
    "long-routed": ([700, 300], [260, 129], "routed", 1, 128, "float16", 300),
}


@pytest.fixture(scope="module")
def interpreted():
    """The kernels' errors, from one process with Triton's interpreter."""
    script, cases = Path(__file__).with_name("interpreted_packed_attention.py"), json.dumps([*KERNEL_CASES.values()])
    result = subprocess.run(
        [sys.executable, script, cases],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    return dict(zip(KERNEL_CASES, json.loads(result.stdout), strict=True))


@needs_triton
@pytest.mark.parametrize("name", KERNEL_CASES)
def test_kernels_are_the_reference(interpreted, name):
    errors = interpreted[name]
    # Relative to the largest entry. fp32 sums in another order; fp16 weights are cut to 11 bits before each product.
    allowed = 2e-6 if KERNEL_CASES[name][5] == "float32" else 4e-3
    for part in ("out", "dq", "dk", "dv"):
        assert errors[part] <= allowed, errors
        assert errors[f"{part} padding"] == 0, errors


@needs_triton
@pytest.mark.parametrize("max_keys", [256, 2048])
@pytest.mark.parametrize("head", [32, 64, 128])
@pytest.mark.parametrize("kernel", ["forward", "queries", "keys"])
def test_kernels_compile_for_a_gpu_with_asynchronous_products(kernel, head, max_keys, monkeypatch, tmp_path):
    """Up to machine code for compute capability 9.0 (no GPU is needed), within its shared memory."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from chiar.kernels.triton import packed_attention as module

    names = {"forward": "_forward", "queries": "_backward_queries", "keys": "_backward_keys"}
    function = getattr(module, names[kernel])
    cut = module.tiles(kernel, head, max_keys, torch.bfloat16)
    options = module.options(cut, torch.empty(0, 1, head).bfloat16(), clear=True)
    constants = {name: options.pop(name) for name in ("HEAD", "QUERIES", "KEYS", "PRECISION", "CLEAR")}
    others = {"scale": "fp32", "log_sum_ptr": "*fp32", "delta_ptr": "*fp32"}
    others |= dict.fromkeys(("query_rows_ptr", "key_rows_ptr", "limit_ptr", "skip_ptr"), "*i32")
    signature = {
        name: "constexpr" if name in constants else others.get(name, "*bf16" if name.endswith("_ptr") else "i32")
        for name in function.arg_names
    }
    sixteen = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(signature)
        if signature[name] not in ("constexpr", "fp32")
    }
    source = ASTSource(function, signature, constants, sixteen)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert "wgmma.mma_async" in compiled.asm["ptx"] and "cp.async.cg.shared.global" in compiled.asm["ptx"]
    assert compiled.metadata.shared <= 227 * 1024
