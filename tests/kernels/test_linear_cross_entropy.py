"""The fused loss is F.cross_entropy of a linear map: values, gradients, memory, FLOPs, compiled and as a kernel."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from chiar.kernels.linear_cross_entropy import (
    aligned,
    fused_forward,
    linear_cross_entropy,
    run_in_chunks,
    torch_softmax_gradient,
)

SHAPES = [(1, 1, 1), (1, 3, 2), (7, 5, 11), (16, 8, 16), (33, 6, 257), (50, 17, 130)]
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


def example(rows, width, vocabulary, dtype=torch.float32, ignored=()):
    states = torch.randn(rows, width).to(dtype).requires_grad_()
    weight = torch.randn(vocabulary, width).to(dtype).requires_grad_()
    targets = torch.randint(0, vocabulary, (rows,))
    targets[list(ignored)] = -100
    return states, weight, targets


def truth(states, weight, targets, upstream=1.0, **options):
    """Loss and gradients in float64."""
    states, weight = (t.detach().double().requires_grad_() for t in (states, weight))
    loss = F.cross_entropy(states @ weight.T, targets, **options)
    return loss.detach(), *torch.autograd.grad(loss * upstream, (states, weight))


def close(found, expected):
    """fp32 sums of a few hundred terms in another order: errors are relative to the largest entry, not to each."""
    return float((found.detach().double() - expected).abs().max()) <= 5e-6 * float(expected.abs().max()) + 1e-7


def relative(found, expected):
    return float((found.detach().double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("chunk_rows", [1, 4, 7, 4096])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_value_and_gradients_are_cross_entropys(shape, chunk_rows, reduction):
    states, weight, targets = example(*shape)
    expected = truth(states, weight, targets, upstream=-1.7, reduction=reduction)
    loss = linear_cross_entropy(states, weight, targets, reduction=reduction, chunk_rows=chunk_rows)
    (loss * -1.7).backward()
    for found, wanted in zip((loss, states.grad, weight.grad), expected, strict=True):
        assert found.dtype == torch.float32
        assert close(found, wanted)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("ignore_index", [-100, 3])
def test_ignored_rows_count_for_nothing(reduction, ignore_index):
    states, weight, targets = example(13, 5, 19)
    targets[[0, 4, 5, 6, 7, 12]] = ignore_index  # 4…7: a whole chunk
    expected = truth(states, weight, targets, reduction=reduction, ignore_index=ignore_index)
    loss = linear_cross_entropy(states, weight, targets, reduction=reduction, ignore_index=ignore_index, chunk_rows=4)
    loss.backward()
    for found, wanted in zip((loss, states.grad, weight.grad), expected, strict=True):
        assert close(found, wanted)
    assert (states.grad[targets == ignore_index] == 0).all()


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("rows", [0, 5])
def test_without_targets_loss_and_gradients_are_zero(rows, reduction):
    states, weight, targets = example(rows, 4, 9, ignored=range(rows))
    loss = linear_cross_entropy(states, weight, targets, reduction=reduction)
    loss.backward()
    assert loss == 0
    assert (states.grad == 0).all() and (weight.grad == 0).all()


def test_rows_by_themselves():
    states, weight, targets = example(9, 5, 21, ignored=[2])
    expected = F.cross_entropy(states @ weight.T, targets, reduction="none").detach()
    with torch.no_grad():
        losses = linear_cross_entropy(states, weight, targets, reduction="none", chunk_rows=4)
    assert close(losses, expected)
    with pytest.raises(ValueError, match="no gradient"):
        linear_cross_entropy(states, weight, targets, reduction="none")


def test_large_logits_neither_overflow_nor_vanish():
    states, weight, targets = example(6, 4, 30)
    scaled = (200 * states).detach().requires_grad_()
    expected = truth(scaled, weight, targets)
    loss = linear_cross_entropy(scaled, weight, targets)
    loss.backward()
    for found, wanted in zip((loss, scaled.grad, weight.grad), expected, strict=True):
        # Logits near 1000 carry fp32 errors of about 1e-4, and the softmax's relative error is as large.
        assert relative(found, wanted) < 1e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_as_good_as_the_unfused_loss(dtype):
    states, weight, targets = example(64, 32, 257, dtype)
    wanted = truth(states, weight, targets)
    loss = linear_cross_entropy(states, weight, targets, chunk_rows=16)
    found = loss, *torch.autograd.grad(loss, (states, weight))
    assert [t.dtype for t in found] == [torch.float32, dtype, dtype]
    unfused_loss = F.cross_entropy((states @ weight.T).float(), targets)
    unfused = unfused_loss, *torch.autograd.grad(unfused_loss, (states, weight))
    for ours, theirs, exact in zip(found, unfused, wanted, strict=True):
        # Both round the same products to the same dtype; only the order of sums differs.
        assert relative(ours, exact) < 1.3 * relative(theirs, exact) + 1e-6


def test_the_factor_is_not_rounded_to_half_precision():
    states, weight, targets = example(8, 4, 16, torch.bfloat16)
    plain, scaled = (
        torch.autograd.grad(factor * linear_cross_entropy(states, weight, targets, reduction="sum"), states)[0].double()
        for factor in (1.0, 1.00390625)  # 1 + 2⁻⁸, half a bf16 step above 1
    )
    largest = plain.abs().max()
    step = 2.0 ** torch.floor(torch.log2(plain.abs().clamp(min=1e-30))) / 128
    assert ((scaled - 1.00390625 * plain).abs() <= step / 2 + 1e-12 * largest).all()
    assert not torch.equal(plain, scaled)


def test_autocast_casts_states_and_weight_and_keeps_an_fp32_gradient():
    states, weight, targets = example(40, 16, 77)
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(states, weight, targets, chunk_rows=16)
    loss.backward()
    assert loss.dtype == states.grad.dtype == weight.grad.dtype == torch.float32
    as_bf16 = [t.detach().bfloat16() for t in (states, weight)]
    with torch.no_grad():
        assert torch.equal(loss, linear_cross_entropy(*as_bf16, targets, chunk_rows=16))
    expected = truth(states, weight, targets)
    for found, wanted in zip((loss, states.grad, weight.grad), expected, strict=True):
        # bf16 keeps 8 bits: 2⁻⁹ on each operand, logits and G.
        assert relative(found, wanted) < 1e-2


def test_fp32_products_stay_fp32_where_autocast_is_off_inside():
    states, weight, targets = example(12, 8, 20, torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(states, weight, targets)
    assert torch.allclose(loss, truth(states, weight, targets)[0], rtol=1e-12)


def test_a_tied_weight_gets_both_gradients():
    states, weight, targets = example(10, 6, 15)
    ids = torch.randint(0, 15, (10,))

    def gradient(loss_of):
        return torch.autograd.grad(loss_of(torch.tanh(F.embedding(ids, weight)) + states, weight), weight)[0]

    ours = gradient(lambda x, w: linear_cross_entropy(x, w, targets, chunk_rows=4))
    assert close(ours, gradient(lambda x, w: F.cross_entropy(x @ w.T, targets)))


@pytest.mark.parametrize("frozen", [0, 1], ids=["states", "weight"])
def test_what_needs_no_gradient_costs_no_product(frozen):
    inputs = example(12, 8, 20)
    targets = inputs[2]
    expected = truth(*inputs)
    inputs[frozen].requires_grad_(False)
    with FlopCounterMode(display=False) as counter:
        linear_cross_entropy(*inputs).backward()
    assert counter.get_total_flops() == 2 * 2 * 12 * 8 * 20
    assert inputs[frozen].grad is None
    assert close(inputs[1 - frozen].grad, expected[2 - frozen])
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        linear_cross_entropy(inputs[0], inputs[1], targets)
    assert counter.get_total_flops() == 2 * 12 * 8 * 20


def test_flop_counter_sees_three_products():
    states, weight, targets = example(12, 8, 20)
    with FlopCounterMode(display=False) as counter:
        linear_cross_entropy(states, weight, targets, chunk_rows=5).backward()
    with FlopCounterMode(display=False) as unfused:
        F.cross_entropy(states @ weight.T, targets).backward()
    assert counter.get_total_flops() == unfused.get_total_flops() == 3 * 2 * 12 * 8 * 20


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_gradcheck(reduction):
    states, weight, targets = example(5, 3, 7, torch.float64, ignored=[1])
    assert torch.autograd.gradcheck(
        lambda x, w: linear_cross_entropy(x, w, targets, reduction=reduction, chunk_rows=2), (states, weight)
    )


def test_a_second_derivative_is_refused():
    states, weight, targets = example(5, 3, 7)
    factor = torch.ones((), requires_grad=True)
    first = torch.autograd.grad(factor * linear_cross_entropy(states, weight, targets), states, create_graph=True)[0]
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


@pytest.mark.parametrize("needs", [(True, True), (True, False), (False, True), (False, False)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_opcheck(needs, dtype):
    states, weight, targets = example(6, 4, 10, dtype, ignored=[2])
    inputs = states.requires_grad_(needs[0]), weight.requires_grad_(needs[1]), targets, -100, 4, *needs, "auto"
    # Under tracing, bf16 gradients of a compiled and a plain run may round differently by one step.
    tolerance = {} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 1e-3}
    torch.library.opcheck(fused_forward, inputs, **tolerance)


def test_compiles_into_one_graph_for_every_number_of_rows():
    compiled = torch.compile(
        lambda x, w, t: linear_cross_entropy(torch.tanh(x), w, t, chunk_rows=4) * 2, fullgraph=True, dynamic=True
    )
    torch.compiler.reset()
    weight = torch.randn(19, 5, requires_grad=True)
    # The second number of rows must not compile again; the weight's gradient adds up.
    for rows, stance in ((9, "default"), (14, "fail_on_recompile"), (3, "fail_on_recompile")):
        states, _, targets = example(rows, 5, 19)
        weight.grad = None
        with torch.compiler.set_stance(stance):
            compiled(states, weight, targets).backward()
        found = states.grad.clone(), weight.grad.clone()
        states.grad = weight.grad = None
        (F.cross_entropy(torch.tanh(states) @ weight.T, targets) * 2).backward()
        assert close(found[0], states.grad)
        assert close(found[1], weight.grad)


def test_compiles_under_autocast():
    states, weight, targets = example(9, 5, 19)
    compiled = torch.compile(linear_cross_entropy, fullgraph=True)
    with torch.autocast("cpu", torch.bfloat16):
        expected = torch.autograd.grad(linear_cross_entropy(states, weight, targets), (states, weight))
        found = torch.autograd.grad(compiled(states, weight, targets), (states, weight))
    for ours, theirs in zip(found, expected, strict=True):
        # One bf16 rounding more or less.
        assert relative(ours, theirs.double()) < 4e-3


class Largest(TorchDispatchMode):
    """The most elements of any tensor an operation gives."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        sizes = [
            leaf.untyped_storage().nbytes() // leaf.itemsize for leaf in tree_leaves(result) if torch.is_tensor(leaf)
        ]
        self.elements = max([self.elements, *sizes])
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_nothing_is_larger_than_a_chunk_of_logits(dtype):
    rows, width, vocabulary, chunk_rows = 96, 4, 64, 8
    states, weight, targets = (t.detach() for t in example(rows, width, vocabulary, dtype))
    with Largest() as largest:
        run_in_chunks(states, weight, targets, -100, chunk_rows, True, True, "torch")
    assert largest.elements == chunk_rows * vocabulary < rows * vocabulary


def test_chunks_write_every_place_they_leave_uninitialised(monkeypatch):
    empty = torch.Tensor.new_empty
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *a, **k: empty(*a, **k).fill_(torch.nan))
    states, weight, targets = (t.detach() for t in example(11, 5, 21, ignored=[3]))
    outputs = run_in_chunks(states, weight, targets, -100, 4, True, True, "torch")
    assert all(output.isfinite().all() for output in outputs)


def test_the_weight_is_cast_and_padded_once_and_only_if_it_must_be():
    weight = torch.randn(32, 3)
    assert aligned(weight, torch.float32) is weight
    padded = aligned(weight[:21], torch.bfloat16)
    assert padded.shape == (32, 3) and padded.dtype == torch.bfloat16
    assert torch.equal(padded[:21], weight[:21].bfloat16()) and (padded[21:] == 0).all()


def test_padding_is_left_at_zero():
    logits, losses = torch.zeros(3, 16), torch.empty(3)
    logits[:, :9] = torch.randn(3, 9)
    torch_softmax_gradient(logits, 9, torch.tensor([0, 8, -100]), -100, losses, True)
    assert (logits[:, 9:] == 0).all()
    assert torch.allclose(logits.sum(1), torch.zeros(3), atol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"reduction": "max"}, "reduction"), ({"implementation": "cuda"}, "implementation"), ({"chunk_rows": 0}, "chunk")],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        linear_cross_entropy(*example(2, 2, 2), **options)


# rows, vocabulary, dtype, gradient, spread of the logits; 4096 is the kernel's block.
KERNEL_CASES = [
    (3, 2, "float32", True, 1.0),
    (5, 257, "float32", True, 3.0),
    (4, 1000, "float32", False, 3.0),
    (3, 4096, "float32", True, 3.0),
    (4, 4097, "float32", True, 30.0),
    (3, 9001, "bfloat16", True, 3.0),
    (3, 5000, "float16", True, 3.0),
    (4, 257, "bfloat16", False, 3.0),
]


@pytest.fixture(scope="module")
def interpreted():
    """The kernel's errors, from one process with Triton's interpreter."""
    result = subprocess.run(
        [sys.executable, Path(__file__).with_name("interpreted_softmax_gradient.py"), json.dumps(KERNEL_CASES)],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@needs_triton
@pytest.mark.parametrize("number", range(len(KERNEL_CASES)), ids=lambda n: "-".join(map(str, KERNEL_CASES[n][:4])))
def test_kernel_is_the_reference(interpreted, number):
    errors, (_, _, dtype, gradient, _) = interpreted["cases"][number], KERNEL_CASES[number]
    # Losses are fp32 from the same logits; 1e-5 is the rounding of log Σ exp over thousands of terms.
    assert errors["loss"] < 1e-5
    assert errors["ignored"] == 0
    # Entries of G lie in [−1, 1]; the interpreter cuts bits off (one step) where a GPU rounds.
    step = {"float32": 1e-5, "float16": 2.0**-10, "bfloat16": 2.0**-7}[dtype]
    assert errors["logits"] <= (step if gradient else 0)


@needs_triton
def test_kernel_makes_an_unknown_target_nan(interpreted):
    assert interpreted["unknown_target"]


@needs_triton
def test_kernel_compiles_for_a_gpu_with_wide_loads(monkeypatch, tmp_path):
    """Up to machine code for compute capability 9.0 (no GPU is needed); 16 bytes at a time."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from chiar.kernels.triton.softmax_gradient import WARPS, _softmax_gradient

    constants = {"VOCABULARY": 50257, "PADDED": 50272, "GRADIENT": True, "BLOCK": 4096}
    pointers = {"logits_ptr": "*bf16", "targets_ptr": "*i64", "losses_ptr": "*fp32"}
    numbers = dict.fromkeys(("row_stride", "target_stride", "ignore_index"), "i32")
    signature = {**pointers, **numbers, **dict.fromkeys(constants, "constexpr")}
    sixteen = [["tt.divisibility", 16]]
    source = ASTSource(_softmax_gradient, signature, constants, {(0,): sixteen, (3,): sixteen})
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": WARPS})
    assert "ld.global.v4.b32" in compiled.asm["ptx"] and "st.global.v4.b32" in compiled.asm["ptx"]
