"""The statistics against scipy's, and against draws where the truth is known."""

import math

import pytest
import scipy.stats
import torch

from chiar.nulltest.statistics import (
    bin_edges,
    bits,
    clustered_error,
    correlation,
    ks_distance,
    ks_under_null,
    mean_and_error,
    ranks,
    separation,
)


def draws(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def with_ties(seed, count):
    return (draws(seed, count) * 2).round() / 2


def test_ks_distance_is_scipys():
    a, b = with_ties(0, 300), with_ties(1, 170) + 0.5
    assert ks_distance(a, b) == pytest.approx(scipy.stats.ks_2samp(a, b).statistic, abs=1e-6)
    assert ks_distance(a, a) == 0.0


def test_ks_of_equal_distributions_is_what_is_expected():
    n, m, repeats = 400, 600, 300
    found = sorted(ks_distance(draws(2 * i, n), draws(2 * i + 1, m)) for i in range(repeats))
    mean, critical = ks_under_null(n, m)
    # The standard deviation of the distance is about 0.26 of its scale, so a mean of 300 is good to 2%; the law is
    # that of large samples, a little above small ones.
    assert sum(found) / repeats == pytest.approx(mean, rel=0.06)
    assert 0.02 < sum(value > critical for value in found) / repeats < 0.09


def test_ranks_correlation_and_separation_are_scipys():
    x, y = with_ties(3, 200), with_ties(4, 200) + 0.4 * with_ties(3, 200)
    assert ranks(x).tolist() == scipy.stats.rankdata(x).tolist()
    assert correlation(x, y) == pytest.approx(scipy.stats.pearsonr(x, y).statistic)
    assert correlation(ranks(x), ranks(y)) == pytest.approx(scipy.stats.spearmanr(x, y).statistic)
    assert correlation(x, torch.ones(200)) is None
    low, high = x[:120], y + 0.3
    wins = scipy.stats.mannwhitneyu(high, low).statistic
    assert separation(low, high) == pytest.approx(wins / (len(low) * len(high)))


def test_error_without_clusters_is_the_usual_one():
    x = draws(5, 80)
    mean, error = mean_and_error(x, torch.arange(80))
    assert mean == pytest.approx(float(x.mean()))
    assert error == pytest.approx(scipy.stats.sem(x))
    assert math.isnan(mean_and_error(x, torch.zeros(80))[1])


def test_repeated_samples_add_no_certainty():
    x = draws(6, 50)
    _, once = mean_and_error(x, torch.arange(50))
    _, tenfold = mean_and_error(x.repeat_interleave(10), torch.arange(50).repeat_interleave(10))
    assert tenfold == pytest.approx(once)
    assert clustered_error(x.repeat(10) / 500, torch.arange(500)) < once / 2


def test_bins_hold_equally_many():
    x = draws(7, 1000)
    assert torch.bincount(torch.bucketize(x, bin_edges(x, 4))).tolist() == [250] * 4


def test_bits():
    assert bits(torch.tensor([1, 1, 1, 1])) == pytest.approx(2.0)
    assert bits(torch.tensor([5, 0])) == 0.0
