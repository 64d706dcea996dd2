"""Function words against content words, and flips of several layers together, where the truth is known."""

import pytest
import torch

from chiar.nulltest.flips import Flip
from chiar.nulltest.questions import contrast, worth_of_all, worth_of_layer

SCALE = 0.01


def words(seed, shift, repeats=40):
    """60 tokens of each sort, each with an H of its own and `repeats` times in the text; SCALE is σ of the noise."""
    generator = torch.Generator().manual_seed(seed)
    of_token = 0.87 + SCALE * torch.randn(120, generator=generator)
    of_token[:60] += shift * SCALE
    token_N = torch.arange(120).repeat_interleave(repeats)
    entropy_N = of_token[token_N]
    function_N = token_N < 60
    return contrast("all", entropy_N, function_N, ~function_N, token_N, SCALE)


def test_a_planted_difference_is_found():
    found = words(0, -2.0)
    assert found.difference == pytest.approx(-2, abs=4 * found.error)
    assert found.separation == pytest.approx(0.921, abs=0.07)  # Φ(2 / √2)
    assert (found.function_tokens, found.content_tokens) == (2400, 2400)


def test_the_error_is_that_of_distinct_tokens():
    """However often tokens are repeated, differences of nothing scatter by the error that is stated."""
    drawn = [words(seed, 0.0) for seed in range(60)]
    scatter = float(torch.tensor([found.difference for found in drawn]).std())
    stated = sum(found.error for found in drawn) / len(drawn)
    assert scatter == pytest.approx(stated, rel=0.3)  # a deviation of 60 draws is good to 9%
    assert stated == pytest.approx((2 / 60) ** 0.5, rel=0.1)


def test_unequal_groups():
    entropy_N = torch.tensor([0.1, 0.2, 0.3, 0.5, 0.9, 0.4, 0.6])
    function_N = torch.tensor([True] * 5 + [False] * 2)
    found = contrast("all", entropy_N, function_N, ~function_N, torch.arange(7), 1.0)
    low, high = entropy_N[:5].double(), entropy_N[5:].double()
    plain = (low.var(correction=0) / 5 + high.var(correction=0) / 2) ** 0.5 * (7 / 6) ** 0.5
    assert found.error == pytest.approx(float(plain))
    assert found.separation == pytest.approx(0.7)


def test_layers_are_joined_by_rank():
    """Two layers with entropies far apart: the benefit follows the rank in each, so it does in both together."""
    entropies = {1: torch.linspace(0.80, 0.84, 400), 2: torch.linspace(0.95, 0.99, 400)}
    flips = [
        Flip(layer, row, 0, float(entropies[layer][10 * row + 5]), True, row / 40, 0.0)
        for layer in (1, 2)
        for row in range(40)
    ]
    worth = worth_of_all(flips, entropies)
    assert worth.spearman == pytest.approx(1.0) and worth.pearson == pytest.approx(1.0, abs=1e-3)
    assert [found.flips for found in worth.benefit] == [20] * 4
    assert [found.mean for found in worth.benefit] == pytest.approx([4.5 / 40, 14.5 / 40, 24.5 / 40, 34.5 / 40])
    alone = worth_of_layer(flips[:40], entropies[1])
    assert [found.mean for found in alone.benefit] == pytest.approx([found.mean for found in worth.benefit])
    assert worth_of_layer([], entropies[1]) is None and worth_of_all([], entropies) is None
