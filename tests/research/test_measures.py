"""Each measure of the null test on data with a known answer."""

import math

import numpy as np
import pytest
import torch

from chiar.kernels.transform import random_orthogonal
from chiar.kernels.white_noise import white_noise_entropy
from research.nulltest import contrast, measures, worth_of_all
from research.nulltest.report import Worth
from research.nulltest.sample import Flip

WIDTH, N = 64, 4000


def integers(high, seed, count=20_000):
    return np.random.default_rng(seed).integers(high, size=count)


def gaussian(seed=0, count=N):
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed))


def measure(states_ND, null, token_N=None):
    each = np.arange(len(states_ND)) if token_N is None else token_N
    bases = {basis.name: basis.entropy(states_ND) for basis in measures.model_bases("dct", WIDTH)}
    return {name: measures.whiteness(name, entropy, null, each, 0.0) for name, entropy in bases.items()}


def test_white_noise_is_white_and_a_smooth_signal_is_not_in_the_dct():
    null, weighted = measures.make_null(WIDTH, N, 0), measures.make_null(WIDTH, N, 0, dc_weight=2.0)
    assert null.exact and not weighted.exact and weighted.mean == pytest.approx(float(weighted.sample_N.mean()))
    for found in measure(gaussian(1) * 7, null).values():
        # Four standard errors each: 1/√N for the mean; about 1/√(2N) for the deviation, times 1.3 for its tails.
        assert abs(found.effect) < 4 * N**-0.5
        assert found.effect_error == pytest.approx(N**-0.5, rel=0.1)
        assert found.spread == pytest.approx(1, abs=0.06)
        assert found.distance < 1.3 * found.distance_critical
        assert found.mean == pytest.approx(white_noise_entropy(WIDTH)[0], abs=0.003)
    smooth = gaussian(2).cumsum(1)
    found = measure(smooth - smooth.mean(1, keepdim=True), null)
    assert found["dct"].effect < -10 and found["dct"].distance > 0.99 and abs(found["random"].effect) < 1
    tokens = integers(50, 3, N)
    repeated = measure(gaussian(4, 50)[tokens], null, tokens)["dct"]
    assert measures.repeated_distance(tokens, null, 0) > 4 * repeated.distance_expected
    assert repeated.effect_error == pytest.approx(50**-0.5, rel=0.35)  # 50 samples, not 4,000


def test_planted_independent_and_determining_labels():
    """A binary channel that errs with probability 0.11 carries 1 − h(0.11) = 0.50 bits; the bias of counting is
    (R − 1)(L − 1) / (2 N ln 2) bits to first order."""
    labels = integers(2, 0)
    errs = np.random.default_rng(1).random(len(labels)) < 0.11
    truth = 1 + 0.11 * math.log2(0.11) + 0.89 * math.log2(0.89)
    found = measures.mutual_information(labels ^ errs, labels, 20, 0)
    assert found.bits == pytest.approx(truth, abs=0.02)  # four standard errors: 0.0022 · log2(0.89 / 0.11) each
    found = measures.mutual_information(integers(2, 2), integers(40, 3), 50, 0)
    assert found.chance == pytest.approx(39 / (2 * 20_000 * math.log(2)), rel=0.15)
    assert abs(found.bits - found.chance) < 4 * found.chance_deviation and abs(found.adjusted) < 0.002
    labels = integers(3000, 4)
    found = measures.mutual_information(labels % 2, labels, 20, 0)
    assert found.adjusted == pytest.approx(1.0) and found.bits == pytest.approx(found.route_bits)
    assert found.chance > 0.05  # with many labels even shuffled ones seem informative


def shares(states_ND):
    rows, noise = np.arange(8000) // 10, gaussian(9, 1000)
    found = measures.measure_compaction(states_ND, rows, np.zeros(8000), 1, measures.model_bases("dct", WIDTH), noise)
    return {(row.basis, row.k): row for row in found if not row.centred}


def test_the_dct_is_close_to_the_klt_for_stationary_signals_only():
    """A first-order autoregression along the features, with the Toeplitz covariance 0.95^|i − j|, and a signal with
    different variances along randomly rotated axes."""
    i, drawn = torch.arange(WIDTH, dtype=torch.float64), gaussian(count=8000)
    stationary = drawn.double() @ torch.linalg.cholesky(0.95 ** (i[:, None] - i).abs()).T
    rotated = (drawn.double() * (-4 * i / (WIDTH - 1)).exp()) @ random_orthogonal(WIDTH, 5)
    ordered, unordered, white = shares(stationary.float()), shares(rotated.float()), shares(gaussian(3, 8000))
    for k in (4, 8, 16):
        best, dct, random = (ordered[name, k].first[0] for name in (measures.KLT, "dct", "random"))
        assert best - 0.02 < dct < best + 0.001 and dct > 2 * random
        assert random == pytest.approx(k / WIDTH, abs=0.06)
        assert unordered[measures.KLT, k].first[0] > 2 * unordered["dct", k].first[0]
        assert unordered["dct", k].first[0] == pytest.approx(k / WIDTH, abs=0.1)
        for name in ("dct", "identity", "random", measures.KLT):
            assert white[name, k].first[0] == pytest.approx(k / WIDTH, abs=0.01)
            assert white[name, k].largest[0] == pytest.approx(white[measures.NOISE, k].largest[0], abs=0.01)


def test_a_planted_difference_between_words_and_its_error():
    """60 tokens of each kind, each with its own H and 40 times in the text; the σ of the noise is 0.01."""
    of_token = 0.87 + 0.01 * np.random.default_rng(0).normal(size=120)
    of_token[:60] -= 0.02
    token_N = np.arange(120).repeat(40)
    found = contrast("all", of_token[token_N], token_N < 60, token_N >= 60, token_N, 0.01)
    assert found.difference == pytest.approx(-2, abs=4 * found.error)
    assert found.error == pytest.approx((2 / 60) ** 0.5, rel=0.3)  # counts distinct tokens
    assert found.separation == pytest.approx(0.921, abs=0.07)  # Φ(2 / √2)


def test_a_planted_benefit_is_found_in_its_bins_and_layers_are_joined_by_rank():
    """Attention's benefit is 0 below H = 0.5 and 1 above, with noise."""
    generator, flips = np.random.default_rng(0), []
    for number in range(400):
        h, dark = float(generator.random()), number % 2 == 0
        change = (float(h > 0.5) + 0.3 * float(generator.normal())) * (1 if dark else -1)
        flips.append(Flip(1, number // 4, 0, h, dark, change / 4, change * 3 / 4))
    worth = Worth.of(flips, [int(flip.entropy * 4) for flip in flips], [flip.entropy for flip in flips])
    for found, truth in zip(worth.benefit, (0, 0, 1, 1), strict=True):
        assert abs(found.mean - truth) < 4 * found.error
        assert found.error == pytest.approx(0.3 * found.flips**-0.5, rel=0.25)
    assert worth.to_filter.mean > 0.4 and worth.to_attention.mean < -0.4
    # r of a step of height 1 at the middle with noise 0.3: √3/2 · 0.5 / √(0.25 + 0.09).
    assert worth.pearson == pytest.approx(0.743, abs=0.06) and worth.spearman > 0.6
    # Two layers with entropies far apart: the benefit follows the rank in each, so it does in both together.
    entropies = {1: np.linspace(0.80, 0.84, 400), 2: np.linspace(0.95, 0.99, 400)}
    places = [(layer, row) for layer in (1, 2) for row in range(40)]
    flips = [Flip(n, row, 0, float(entropies[n][10 * row + 5]), True, row / 40, 0.0) for n, row in places]
    worth = worth_of_all(flips, entropies)
    assert worth.spearman == pytest.approx(1.0) and worth.pearson == pytest.approx(1.0, abs=1e-3)
    assert [found.mean for found in worth.benefit] == pytest.approx([4.5 / 40, 14.5 / 40, 24.5 / 40, 34.5 / 40])
