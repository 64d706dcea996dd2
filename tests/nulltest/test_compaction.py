"""The KLT is the best basis; the DCT comes near it where neighbours are alike, and nowhere else."""

import pytest
import torch

from chiar.kernels.basis import random_orthogonal
from chiar.nulltest.compaction import KLT, NOISE, energy_shares, klt, measure_compaction, unit
from chiar.nulltest.white import model_bases

WIDTH, N = 64, 8000


def gaussian(seed=0):
    return torch.randn(N, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def stationary(rho=0.95):
    """A first-order autoregression along the features: its covariance rho^|i − j| is Toeplitz."""
    i = torch.arange(WIDTH, dtype=torch.float64)
    covariance = rho ** (i[:, None] - i[None, :]).abs()
    return (gaussian() @ torch.linalg.cholesky(covariance).T).float()


def rotated():
    """The same variances along axes without any order."""
    scales = torch.linspace(0, -4, WIDTH, dtype=torch.float64).exp()
    return ((gaussian() * scales) @ random_orthogonal(WIDTH, 5)).float()


def shares(states_ND, bins=1):
    noise = torch.randn(1000, WIDTH, generator=torch.Generator().manual_seed(9))
    rows, bin_N = torch.arange(N) // 10, torch.arange(N) % bins
    found = measure_compaction(states_ND, rows, bin_N, bins, model_bases("dct", WIDTH), noise)
    return {(row.basis, row.k): row for row in found if not row.centred}


def test_the_dct_is_nearly_the_klt_of_a_stationary_signal():
    found = shares(stationary())
    for k in (4, 8, 16):
        best, dct, random = (found[name, k].first[0] for name in (KLT, "dct", "random"))
        assert best - 0.02 < dct < best + 0.001
        assert random == pytest.approx(k / WIDTH, abs=0.06)
        assert dct > 2 * random


def test_the_klt_beats_the_dct_where_features_have_no_order():
    found = shares(rotated())
    for k in (4, 8, 16):
        assert found[KLT, k].first[0] > 2 * found["dct", k].first[0]
        assert found["dct", k].first[0] == pytest.approx(k / WIDTH, abs=0.1)
    assert found[KLT, 8].first[0] > found[KLT, 4].first[0]


def test_noise_has_no_first_coefficients():
    found = shares(gaussian().float())
    for k in (4, 8, 16):
        noise = found[NOISE, k]
        for name in ("dct", "identity", "random", KLT):
            assert found[name, k].first[0] == pytest.approx(k / WIDTH, abs=0.01)
            assert found[name, k].largest[0] == pytest.approx(noise.largest[0], abs=0.01)


def test_shares_by_the_definition():
    states = rotated()[:6]
    basis = model_bases("dct", WIDTH)[2]
    found = energy_shares(states, basis.transform, [4])[4]
    for token, first, largest in zip(states, *found, strict=True):
        energy = [float(row @ token) ** 2 for row in basis.transform.whole_DD]
        assert float(first) == pytest.approx(sum(energy[:4]) / sum(energy), rel=1e-4)
        assert float(largest) == pytest.approx(sum(sorted(energy)[-4:]) / sum(energy), rel=1e-4)


def test_bins_centring_and_fit():
    states = rotated() + 3.0
    noise = torch.randn(100, WIDTH)
    rows, bin_N = torch.arange(N) // 10, (torch.arange(N) % 20 == 13).long() * 2
    found = measure_compaction(states, rows, bin_N, 3, model_bases("dct", WIDTH), noise)
    plain, centred = (next(r for r in found if (r.basis, r.k, r.centred) == (KLT, 4, c)) for c in (False, True))
    fitted, measured = unit(states)[rows % 2 == 0], unit(states)[rows % 2 == 1]
    first = energy_shares(measured, klt(fitted), [4])[4][0]
    kept = bin_N[rows % 2 == 1]
    assert plain.first == pytest.approx(
        [float(first.mean()), float(first[kept == 0].mean()), None, float(first[kept == 2].mean())]
    )
    assert centred.first[0] < plain.first[0]  # the mean is most of the energy here
