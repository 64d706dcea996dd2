"""The fused loss is F.cross_entropy of a linear map: values, gradients, memory, FLOPs, compiled."""

import pytest
import torch
import torch.nn.functional as F
from implementations import INTERPRETED, agree, implementations, relative
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from chiar.kernels.linear_cross_entropy import fused_forward, linear_cross_entropy

# rows, width, vocabulary, chunk, size of the states; 4096 is the kernel's block
SHAPES = [
    *((1, 1, 1, 1, 1), (13, 5, 11, 4, 1), (16, 8, 16, 4096, 1), (33, 6, 257, 7, 1), (3, 4, 4096, 4, 1)),
    *((3, 4, 9001, 2, 1), (6, 4, 30, 4, 200)),
]
reductions = pytest.mark.parametrize("reduction", ["mean", "sum"])


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


@implementations("auto")
@reductions
@pytest.mark.parametrize("ignore_index", [-100, 3])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_value_and_gradients_are_cross_entropys(shape, ignore_index, reduction, implementation):
    *shape, chunk_rows, size = shape
    states, weight, targets = example(*shape)
    states = (size * states).detach().requires_grad_()
    targets[4:8] = ignore_index  # a whole chunk
    options = {"reduction": reduction, "ignore_index": ignore_index}
    how = {"chunk_rows": chunk_rows, "implementation": implementation}
    loss = linear_cross_entropy(states, weight, targets, **how, **options)
    (loss * -1.7).backward()
    found = loss, states.grad, weight.grad
    assert {x.dtype for x in found} == {torch.float32}
    # fp32 sums of thousands of terms in another order. Logits near 1000 carry fp32 errors of about 1e-4, and the
    # softmax's relative error is as large.
    agree(found, truth(states, weight, targets, upstream=-1.7, **options), 2e-5 if size == 1 else 1e-3)
    assert (states.grad[targets == ignore_index] == 0).all()


@reductions
@pytest.mark.parametrize("rows", [0, 5])
def test_without_targets_loss_and_gradients_are_zero(rows, reduction):
    states, weight, targets = example(rows, 4, 9, ignored=range(rows))
    loss = linear_cross_entropy(states, weight, targets, reduction=reduction)
    loss.backward()
    assert loss == 0 and (states.grad == 0).all() and (weight.grad == 0).all()


def test_rows_by_themselves_have_no_gradient():
    states, weight, targets = example(9, 5, 21, ignored=[2])
    with torch.no_grad():
        losses = linear_cross_entropy(states, weight, targets, reduction="none", chunk_rows=4)
    agree([losses], [F.cross_entropy(states @ weight.T, targets, reduction="none")], 5e-6)
    with pytest.raises(ValueError, match="no gradient"):
        linear_cross_entropy(states, weight, targets, reduction="none")


@implementations("auto")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_as_good_as_the_unfused_loss(dtype, implementation):
    states, weight, targets = example(64, 32, 257, dtype)
    loss = linear_cross_entropy(states, weight, targets, chunk_rows=16, implementation=implementation)
    found = loss, *torch.autograd.grad(loss, (states, weight))
    assert [t.dtype for t in found] == [torch.float32, dtype, dtype]
    unfused_loss = F.cross_entropy((states @ weight.T).float(), targets)
    unfused = unfused_loss, *torch.autograd.grad(unfused_loss, (states, weight))
    for ours, theirs, exact in zip(found, unfused, truth(states, weight, targets), strict=True):
        # Both round the same products to the same dtype; only the order of sums differs, and the interpreter cuts bits
        # off where it should round.
        assert relative(ours, exact) < (2.5 if INTERPRETED else 1.3) * relative(theirs, exact) + 1e-6


@pytest.mark.skipif(not INTERPRETED, reason="plain torch raises")
def test_an_unknown_target_of_triton_is_nan():
    *inputs, _ = example(2, 4, 11)
    with torch.no_grad():
        options = {"reduction": "none", "implementation": "triton"}
        assert linear_cross_entropy(*inputs, torch.tensor([11, 3]), **options).isnan().tolist() == [True, False]


def test_the_factor_is_not_rounded_to_half_precision():
    states, weight, targets = example(8, 4, 16, torch.bfloat16)
    plain, scaled = (
        torch.autograd.grad(factor * linear_cross_entropy(states, weight, targets, reduction="sum"), states)[0].double()
        for factor in (1.0, 1.00390625)  # 1 + 2⁻⁸, half a bf16 step above 1
    )
    step = 2.0 ** torch.floor(torch.log2(plain.abs().clamp(min=1e-30))) / 128
    assert ((scaled - 1.00390625 * plain).abs() <= step / 2 + 1e-12 * plain.abs().max()).all()
    assert not torch.equal(plain, scaled)


def test_autocast_casts_states_and_weight_and_keeps_an_fp32_gradient():
    states, weight, targets = example(40, 16, 77)
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(states, weight, targets, chunk_rows=16)
        exact = linear_cross_entropy(states.double(), weight.double(), targets)
    loss.backward()
    assert loss.dtype == states.grad.dtype == weight.grad.dtype == torch.float32
    expected = truth(states, weight, targets)
    # bf16 keeps 8 bits: 2⁻⁹ on each operand, logits and G; float64 is left alone.
    agree((loss, states.grad, weight.grad), expected, 1e-2)
    agree([exact], expected[:1], 1e-12)
    assert relative(loss, expected[0]) > 1e-7


@pytest.mark.parametrize(("needs", "products"), [((True, True), 3), ((True, False), 2), ((False, True), 2)], ids=str)
def test_what_needs_no_gradient_costs_no_product(needs, products):
    *inputs, targets = example(12, 8, 20)
    expected = truth(*inputs, targets)
    for x, need in zip(inputs, needs, strict=True):
        x.requires_grad_(need)
    with FlopCounterMode(display=False) as counter:
        linear_cross_entropy(*inputs, targets, chunk_rows=5).backward()
    assert counter.get_total_flops() == products * 2 * 12 * 8 * 20
    for x, need, true in zip(inputs, needs, expected[1:], strict=True):
        agree([x.grad] if need else [], [true] if need else [], 5e-6)
        assert need or x.grad is None
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        linear_cross_entropy(*inputs, targets)
    assert counter.get_total_flops() == 2 * 12 * 8 * 20


def test_what_it_is_registered_as():
    """The fake's shapes and its gradients; wrong options are named."""
    for options in ({"reduction": "max"}, {"implementation": "cuda"}, {"chunk_rows": 0}):
        with pytest.raises(ValueError, match=next(iter(options))):
            linear_cross_entropy(*example(2, 2, 2), **options)
    for needs in ((True, True), (True, False), (False, False)):
        states, weight, targets = example(6, 4, 10, ignored=[2])
        inputs = states.requires_grad_(needs[0]), weight.requires_grad_(needs[1]), targets, -100, 4, *needs, "auto"
        torch.library.opcheck(fused_forward, inputs)


def test_one_graph_for_every_number_of_rows():
    torch.compiler.reset()
    plain = lambda x, w, t: linear_cross_entropy(torch.tanh(x), w, t, chunk_rows=4) * 2  # noqa: E731
    compiled = torch.compile(plain, fullgraph=True, dynamic=True, backend="aot_eager")
    # The second number of rows must not compile again.
    for rows, stance in ((9, "default"), (14, "fail_on_recompile"), (3, "fail_on_recompile")):
        states, weight, targets = example(rows, 5, 19)
        with torch.autocast("cpu", torch.bfloat16):
            expected = torch.autograd.grad(plain(states, weight, targets), (states, weight))
            with torch.compiler.set_stance(stance):
                found = torch.autograd.grad(compiled(states, weight, targets), (states, weight))
        agree(found, expected, 4e-3)  # one bf16 rounding more or less


def test_nothing_is_larger_than_a_chunk_of_logits():
    inputs = example(910, 4, 610)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        linear_cross_entropy(*inputs, chunk_rows=8).backward()
    # A chunk of padded logits, or its softmax and what that is made of.
    assert max(event.cpu_memory_usage for event in seen.events()) < 4 * 8 * 624 * 4 < 910 * 610 * 4
