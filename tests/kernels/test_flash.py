"""Attention of concatenated texts, and attention with a window, against masks over everything."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from chiar.kernels.flash import has_flash, text_attention, window_attention

# Sums run in another order, in float64.
ROUNDING = {"rtol": 1e-10, "atol": 1e-12}


def drawn(*shape):
    generator = torch.Generator().manual_seed(sum(shape))
    return [torch.randn(3, *shape, dtype=torch.float64, generator=generator)[i].requires_grad_() for i in range(3)]


def assert_same(found, expected, inputs):
    """Outputs, and gradients of a sum in which no two outputs weigh the same."""
    torch.testing.assert_close(found, expected, **ROUNDING)
    weights = torch.linspace(-1, 1, found.numel(), dtype=torch.float64).view(found.shape)
    pairs = zip(*(torch.autograd.grad((y * weights).sum(), inputs) for y in (found, expected)), strict=True)
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs, **ROUNDING)


@pytest.mark.parametrize("tokens", [1, 2, 7, 12])
def test_a_window(tokens):
    """From the token alone to more than there is."""
    q, k, v = inputs = drawn(2, 3, tokens, 4)
    place = torch.arange(tokens)
    for window in range(1, tokens + 2):
        back = place[:, None] - place
        expected = F.scaled_dot_product_attention(q, k, v, (back >= 0) & (back < window))
        assert_same(window_attention(q, k, v, window), expected, inputs)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=6).filter(any))
def test_texts(lengths):
    """Each by itself: some are empty, and several empty ones may follow the last."""
    q, k, v = inputs = drawn(2, sum(lengths), 4)
    rows = torch.tensor([0, *torch.tensor(lengths).cumsum(0), sum(lengths)], dtype=torch.int32)
    parts = [
        F.scaled_dot_product_attention(*each, is_causal=True) for each in zip(*split(inputs, lengths), strict=True)
    ]
    assert_same(text_attention(q, k, v, rows, max(lengths)), torch.cat(parts, 1), inputs)


def split(inputs, lengths):
    return [[part for part in x.split(lengths, 1) if part.shape[1]] for x in inputs]


def test_a_cpu_has_no_flash():
    assert not has_flash(torch.zeros(1, dtype=torch.bfloat16))
