"""The few statistics the null test needs, each in its plainest form."""

import math

import torch
from torch import Tensor


def ks_distance(a_N: Tensor, b_M: Tensor) -> float:
    """Kolmogorov–Smirnov: the largest gap between the two empirical distribution functions."""
    a_N, b_M = a_N.sort().values, b_M.sort().values
    every = torch.cat([a_N, b_M])
    ours = torch.searchsorted(a_N, every, right=True) / len(a_N)
    theirs = torch.searchsorted(b_M, every, right=True) / len(b_M)
    return float((ours - theirs).abs().max())


def ks_under_null(n: int, m: int) -> tuple[float, float]:
    """Mean and 95th percentile of that distance for two independent samples of one distribution (large-sample law)."""
    scale = math.sqrt((n + m) / (n * m))
    return math.sqrt(math.pi / 2) * math.log(2) * scale, 1.3581 * scale


def clustered_error(influence_N: Tensor, clusters_N: Tensor) -> float:
    """Standard error of a statistic from what each sample moves it by, where those of one cluster are not independent.

    Equal tokens have almost equal states and flips in one row share its text, so neither are independent samples.
    """
    _, inverse_N = clusters_N.unique(return_inverse=True)
    count = int(inverse_N.max()) + 1
    if count < 2:
        return math.nan
    sums_C = torch.zeros(count, dtype=torch.float64).index_add_(0, inverse_N, influence_N.double())
    return float(sums_C.square().sum().sqrt()) * math.sqrt(count / (count - 1))


def mean_and_error(values_N: Tensor, clusters_N: Tensor) -> tuple[float, float]:
    values_N = values_N.double()
    mean = values_N.mean()
    return float(mean), clustered_error((values_N - mean) / len(values_N), clusters_N)


def ranks(values_N: Tensor) -> Tensor:
    """From 1; equal values share their mean rank."""
    _, inverse_N, counts_M = values_N.unique(return_inverse=True, return_counts=True)
    last_M = counts_M.cumsum(0).double()
    return (last_M - (counts_M - 1) / 2)[inverse_N]


def correlation(x_N: Tensor, y_N: Tensor) -> float | None:
    """Pearson's r; None where one side does not vary."""
    x_N, y_N = x_N.double() - x_N.double().mean(), y_N.double() - y_N.double().mean()
    scale = float(x_N.norm() * y_N.norm())
    return float(x_N @ y_N) / scale if scale > 0 else None


def separation(low_N: Tensor, high_M: Tensor) -> float:
    """P(low < high) + ½ P(equal) for one draw from each: ½ where the two are alike (the area under the ROC curve)."""
    rank = ranks(torch.cat([low_N, high_M]))[len(low_N) :].sum()
    m, n = len(high_M), len(low_N)
    return float((rank - m * (m + 1) / 2) / (m * n))


def bin_edges(values_N: Tensor, bins: int) -> Tensor:
    """Inner edges of bins that hold equally many values."""
    return torch.quantile(values_N.double(), torch.arange(1, bins, dtype=torch.float64) / bins)


def bits(counts: Tensor) -> float:
    """Entropy of the frequencies, in bits."""
    p = counts.double().flatten() / counts.sum()
    return float(torch.special.entr(p).sum()) / math.log(2)
