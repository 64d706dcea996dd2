"""Each measure of the null test where the truth is known."""

import math

import numpy as np
import pytest
import scipy.stats
import torch

from chiar.kernels.transform import random_orthogonal
from chiar.kernels.white_noise import white_noise_entropy
from research.nulltest import contrast, measures, worth_of_all
from research.nulltest.report import Mean, Worth
from research.nulltest.sample import Flip

WIDTH, N = 64, 4000


def integers(high, seed, count=20_000):
    return np.random.default_rng(seed).integers(high, size=count)


def gaussian(seed=0, count=N):
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed))


def test_errors_count_clusters():
    x = np.random.default_rng(5).normal(size=50)
    mean, error = measures.mean_and_error(x, np.arange(50))
    assert (mean, error) == pytest.approx((x.mean(), scipy.stats.sem(x)))
    assert measures.mean_and_error(x.repeat(10), np.arange(50).repeat(10))[1] == pytest.approx(error)
    assert measures.clustered_error(x.repeat(10) / 500, np.arange(500)) < error / 2
    assert math.isnan(measures.mean_and_error(x, np.zeros(50))[1])
    assert np.bincount(measures.bins_of(x[:40], x[:40], 4)).tolist() == [10] * 4


def measure(states_ND, null, token_N=None):
    each = np.arange(len(states_ND)) if token_N is None else token_N
    bases = {basis.name: basis.entropy(states_ND) for basis in measures.model_bases("dct", WIDTH)}
    return {name: measures.whiteness(name, entropy, null, each, 0.0) for name, entropy in bases.items()}


def test_white_noise_looks_white_and_a_smooth_signal_does_not_in_the_dct_alone():
    null = measures.make_null(WIDTH, N, seed=0)
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


def test_the_null_and_repeated_tokens():
    exact, weighted = measures.make_null(WIDTH, N, 0), measures.make_null(WIDTH, N, 0, dc_weight=2.0)
    assert exact.exact and not weighted.exact
    assert weighted.mean == pytest.approx(float(weighted.sample_N.mean()))
    assert float(exact.sample_N.mean()) == pytest.approx(exact.mean, abs=4 * exact.deviation * N**-0.5)
    tokens = integers(50, 3, N)
    repeated = measure(gaussian(4, 50)[tokens], exact, tokens)["dct"]
    assert measures.repeated_distance(tokens, exact, 0) > 4 * repeated.distance_expected
    assert repeated.effect_error == pytest.approx(50**-0.5, rel=0.35)  # 50 samples, not 4,000
    assert [basis.name for basis in measures.model_bases("random", 8, seed=3)] == ["random", "dct", "identity"]
    own = measures.model_bases("dct", 8, eps=1e-8, dc_weight=2.0)
    assert [(basis.eps, basis.dc_weight) for basis in own] == [(1e-8, 2.0), (1e-8, 1.0), (1e-8, 1.0)]


def test_planted_independent_and_deciding_labels():
    """A binary channel that errs with probability 0.11 carries 1 − h(0.11) = 0.50 bits; the bias of counting is
    (R − 1)(L − 1) / (2 N ln 2) bits to first order."""
    labels = integers(2, 0)
    errs = np.random.default_rng(1).random(len(labels)) < 0.11
    truth = 1 + 0.11 * math.log2(0.11) + 0.89 * math.log2(0.89)
    found = measures.mutual_information(labels ^ errs, labels, 20, 0)
    assert found.bits == pytest.approx(truth, abs=0.02)  # four standard errors: 0.0022 · log2(0.89 / 0.11) each
    assert found.route_bits == pytest.approx(1, abs=0.001)
    found = measures.mutual_information(integers(2, 2), integers(40, 3), 50, 0)
    assert found.chance == pytest.approx(39 / (2 * 20_000 * math.log(2)), rel=0.15)
    assert abs(found.bits - found.chance) < 4 * found.chance_deviation and abs(found.adjusted) < 0.002
    labels = integers(3000, 4)
    found = measures.mutual_information(labels % 2, labels, 20, 0)
    assert found.adjusted == pytest.approx(1.0) and found.bits == pytest.approx(found.route_bits)
    assert found.chance > 0.05  # many labels: shuffled ones still seem to say something
    constant = measures.mutual_information(np.zeros_like(labels), labels, 5, 0)
    assert (constant.bits, constant.adjusted) == (0.0, 0.0)


def test_a_hash_of_the_token_knows_classes_made_of_few_tokens():
    """Class 0 is one frequent token, so a random route by token says something about classes and nothing about parity
    of the place."""
    tokens = np.where(integers(2, 7) == 0, 0, 1 + integers(500, 8))
    place = np.arange(len(tokens)) % 2
    dark, (by_token, by_class, by_place) = measures.hash_information(tokens, [tokens, tokens > 0, place], 0.5, 20, 0)
    assert 0.2 < dark < 0.8 and by_token.adjusted == pytest.approx(1.0)
    assert by_class.adjusted > 0.1 and by_class.deviation > 0 and abs(by_place.adjusted) < 0.002
    assert measures.position_bins(np.array([0, 1, 2, 3, 6, 7, 255])).tolist() == [0, 1, 1, 2, 2, 3, 8]


def stationary():
    """A first-order autoregression along the features: its covariance 0.95^|i − j| is Toeplitz."""
    i = torch.arange(WIDTH, dtype=torch.float64)
    return (gaussian(count=8000).double() @ torch.linalg.cholesky(0.95 ** (i[:, None] - i).abs()).T).float()


def rotated():
    """The same variances along axes without any order."""
    scales = torch.linspace(0, -4, WIDTH, dtype=torch.float64).exp()
    return ((gaussian(count=8000).double() * scales) @ random_orthogonal(WIDTH, 5)).float()


def shares(states_ND):
    rows, noise = np.arange(8000) // 10, gaussian(9, 1000)
    found = measures.measure_compaction(states_ND, rows, np.zeros(8000), 1, measures.model_bases("dct", WIDTH), noise)
    return {(row.basis, row.k): row for row in found if not row.centred}


def test_the_dct_is_nearly_the_klt_of_a_stationary_signal_and_nowhere_else():
    ordered, unordered, white = shares(stationary()), shares(rotated()), shares(gaussian(3, 8000))
    for k in (4, 8, 16):
        best, dct, random = (ordered[name, k].first[0] for name in (measures.KLT, "dct", "random"))
        assert best - 0.02 < dct < best + 0.001 and dct > 2 * random
        assert random == pytest.approx(k / WIDTH, abs=0.06)
        assert unordered[measures.KLT, k].first[0] > 2 * unordered["dct", k].first[0]
        assert unordered["dct", k].first[0] == pytest.approx(k / WIDTH, abs=0.1)
        for name in ("dct", "identity", "random", measures.KLT):
            assert white[name, k].first[0] == pytest.approx(k / WIDTH, abs=0.01)
            assert white[name, k].largest[0] == pytest.approx(white[measures.NOISE, k].largest[0], abs=0.01)


def test_shares_bins_and_the_fit_by_the_definition():
    states, basis = rotated() + 3.0, measures.model_bases("dct", WIDTH)[2]
    shares = measures.energy_shares(states[:6], basis.transform, [4])[4]
    for token, first, largest in zip(states[:6], *shares, strict=True):
        energy = [float(row @ token) ** 2 for row in basis.transform.whole_DD]
        # Sums of squares in fp32, in another order.
        assert float(first) == pytest.approx(sum(energy[:4]) / sum(energy), rel=1e-4)
        assert float(largest) == pytest.approx(sum(sorted(energy)[-4:]) / sum(energy), rel=1e-4)
    rows, bin_N = np.arange(8000) // 10, (np.arange(8000) % 20 == 13) * 2
    found = measures.measure_compaction(states, rows, bin_N, 3, measures.model_bases("dct", WIDTH), gaussian(1, 100))
    klt = {row.centred: row for row in found if (row.basis, row.k) == (measures.KLT, 4)}
    odd = rows % 2 == 1
    first = measures.energy_shares(measures.unit(states)[odd], measures.klt(measures.unit(states)[~odd]), [4])[4][0]
    kept = [first[bin_N[odd] == n].mean() for n in (0, 2)]
    assert klt[False].first == pytest.approx([first.mean(), kept[0], None, kept[1]])
    assert klt[True].first[0] < klt[False].first[0]  # the mean is most of the energy here


def words(seed, shift, repeats=40):
    """60 tokens of each sort, each with an H of its own and `repeats` times in the text; 0.01 is σ of the noise."""
    of_token = 0.87 + 0.01 * np.random.default_rng(seed).normal(size=120)
    of_token[:60] += shift * 0.01
    token_N = np.arange(120).repeat(repeats)
    return contrast("all", of_token[token_N], token_N < 60, token_N >= 60, token_N, 0.01)


def test_a_planted_difference_of_words_and_its_error():
    found = words(0, -2.0)
    assert found.difference == pytest.approx(-2, abs=4 * found.error)
    assert found.separation == pytest.approx(0.921, abs=0.07)  # Φ(2 / √2)
    assert (found.function_tokens, found.content_tokens) == (2400, 2400)
    drawn = [words(seed, 0.0) for seed in range(60)]
    stated = np.mean([one.error for one in drawn])
    # However often tokens are repeated, differences of nothing scatter by the error that is stated (good to 9%).
    assert np.std([one.difference for one in drawn]) == pytest.approx(stated, rel=0.3)
    assert stated == pytest.approx((2 / 60) ** 0.5, rel=0.1)


def test_a_planted_benefit_is_found_by_bin_and_layers_are_joined_by_rank():
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
    assert worth.own_to_filter.mean == pytest.approx(worth.to_filter.mean / 4)
    # r of a step of height 1 at the middle with noise 0.3: √3/2 · 0.5 / √(0.25 + 0.09).
    assert worth.pearson == pytest.approx(0.743, abs=0.06)
    assert worth.spearman > 0.6 and worth.correlation_error == pytest.approx(0.05, abs=0.001)
    assert Mean.of([], "own") == Mean(0, None, None)
    assert Mean.of([Flip(1, 7, 0, 0.5, True, own, 0) for own in (2.0, 4.0)], "own") == Mean(2, 3.0, None)
    # Two layers with entropies far apart: the benefit follows the rank in each, so it does in both together.
    entropies = {1: np.linspace(0.80, 0.84, 400), 2: np.linspace(0.95, 0.99, 400)}
    places = [(layer, row) for layer in (1, 2) for row in range(40)]
    flips = [Flip(n, row, 0, float(entropies[n][10 * row + 5]), True, row / 40, 0.0) for n, row in places]
    worth = worth_of_all(flips, entropies)
    assert worth.spearman == pytest.approx(1.0) and worth.pearson == pytest.approx(1.0, abs=1e-3)
    assert [found.flips for found in worth.benefit] == [20] * 4
    assert [found.mean for found in worth.benefit] == pytest.approx([4.5 / 40, 14.5 / 40, 24.5 / 40, 34.5 / 40])
    assert worth_of_all([], entropies) is None
