"""Values carried forward, and the running mean, against loops over tokens."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from chiar.kernels.carry import carry_packed, last_marked, smoothed

DOUBLE = torch.float64
marks = st.lists(st.lists(st.booleans(), min_size=7, max_size=7), min_size=1, max_size=3)


def drawn(*shape, seed=0):
    return torch.randn(*shape, dtype=DOUBLE, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=30, deadline=None)
@given(marks, st.booleans())
def test_the_last_marked_value(marked, has_past):
    marked_BT = torch.tensor(marked)
    values, before = drawn(*marked_BT.shape, 3), drawn(len(marked), 1, 3, seed=1) if has_past else None
    found = last_marked(values, marked_BT, before)
    for row, line in enumerate(marked):
        last = torch.zeros(3, dtype=DOUBLE) if before is None else before[row, 0]
        for t, mark in enumerate(line):
            last = values[row, t] if mark else last
            assert torch.equal(found[row, t], last)


def packed(marked_BT, gap, room):
    """Inputs of `carry_packed`: marked tokens concatenated, with a gap after each row and room after the last."""
    token, used, last, has_value = [], [], [], []
    for row, line in enumerate(marked_BT.tolist()):
        now = None
        for t, mark in enumerate(line):
            if mark:
                now = len(token)
                token.append(row * len(line) + t)
                used.append(True)
            has_value.append(now is not None)
            last.append(now or 0)
        token += [0] * gap
        used += [False] * gap
    token, used = token + [0] * room, used + [False] * room
    return torch.tensor(token), torch.tensor(used), torch.tensor(has_value), torch.tensor(last)


@settings(max_examples=30, deadline=None)
@given(marks, st.integers(0, 2), st.integers(1, 3))
def test_packed_values_are_carried_forward(marked, gap, room):
    """It is the definition of unpacked values, and so is its gradient, where places that hold no token get none."""
    marked_BT = torch.tensor(marked)
    token_P, used_P, has_value_N, last_N = packed(marked_BT, gap, room)
    values = drawn(len(token_P), 3).requires_grad_()
    everywhere = torch.zeros(marked_BT.numel(), 3, dtype=DOUBLE).index_put((token_P[used_P],), values[used_P])
    expected = last_marked(everywhere.view(*marked_BT.shape, 3), marked_BT).flatten(0, 1)
    found = carry_packed(values, token_P, used_P, has_value_N, last_N)
    assert torch.equal(found, expected)
    weights = drawn(*found.shape, seed=2)
    # Neighbours are summed in another order.
    gradients = [torch.autograd.grad((y * weights).sum(), values, allow_unused=True)[0] for y in (found, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)


def test_gradients_are_those_of_finite_differences():
    marked_BT = torch.tensor([[0, 1, 0, 0, 1, 1, 0], [0, 0, 0, 0, 0, 0, 0], [1, 0, 0, 1, 0, 0, 0]]).bool()
    places = packed(marked_BT, 1, 2)
    values = drawn(len(places[0]), 2).requires_grad_()
    assert torch.autograd.gradcheck(lambda v: carry_packed(v, *places), (values,))
    torch.library.opcheck(torch.ops.chiar.carry_packed.default, (values, *places))
    weight = torch.rand(2, 7, dtype=DOUBLE, generator=torch.Generator().manual_seed(1)).requires_grad_()
    inputs = drawn(2, 7, 3).requires_grad_(), weight, drawn(2, 1, 3, seed=4).requires_grad_()
    assert torch.autograd.gradcheck(lambda *given: smoothed(*given, block=3), inputs)


def mean_by_loop(values, weight, before):
    mean, found = torch.zeros_like(values[:, :1]) if before is None else before, []
    for t in range(values.shape[1]):
        w = weight[:, t, None, None]
        mean = w * values[:, t : t + 1] + (1 - w) * mean
        found.append(mean)
    return torch.cat(found, 1)


@pytest.mark.parametrize("has_past", [False, True])
@pytest.mark.parametrize("weights", ["any", "none", "0 or 1"])
@pytest.mark.parametrize("tokens", [1, 4, 11])
def test_the_running_mean(tokens, weights, has_past):
    """Whatever the blocks; weights of 1 are taken as 1 − 1e-6."""
    values, before = drawn(2, tokens, 3), drawn(2, 1, 3, seed=1) if has_past else None
    weight = drawn(2, tokens, seed=2).sigmoid()
    weight = {"any": weight, "none": 0 * weight, "0 or 1": weight.round()}[weights]
    for block in (1, 4, 128):
        found = smoothed(values, weight, before, block)
        torch.testing.assert_close(found, mean_by_loop(values, weight, before), rtol=1e-4, atol=1e-5)
        if weights != "0 or 1":
            torch.testing.assert_close(found, mean_by_loop(values, weight, before), rtol=1e-10, atol=1e-12)
