"""The routing hash is uniform, depends on everything it is given, and never changes."""

import pytest
import scipy.stats
import torch

from chiar.kernels.hash import uniform_hash


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
def test_known_values(dtype):
    # Recorded: another value would silently change every random-routing experiment.
    keys = torch.tensor([0, 1, 2, 50256, -1], dtype=dtype)
    for salts, expected in {
        (): [0, 5328424, 3208387, 13906885, 8515951],
        (0, 1): [8050660, 15856176, 11651229, 101529, 6373384],
        (1, 0): [852637, 371468, 8707916, 12077948, 3543892],
    }.items():
        number = uniform_hash(keys, *salts)
        assert number.dtype == torch.float32 and (number.double() * 2**24).tolist() == expected


@pytest.mark.parametrize(("seed", "layer"), [(0, 0), (7, 3), (999, 30)])
def test_uniform_over_token_ids_and_dependent_on_every_salt(seed, layer):
    number = uniform_hash(torch.arange(20_000), seed, layer)
    counts = torch.histc(number, bins=50, min=0, max=1)
    # Loose: one in a million for a fair hash, and the examples are fixed.
    assert counts.sum() == 20_000 and scipy.stats.chisquare(counts.numpy()).pvalue > 1e-6
    for other in ((seed + 1, layer), (seed, layer + 1), (layer, seed + 31)):
        correlation = torch.corrcoef(torch.stack([number, uniform_hash(torch.arange(20_000), *other)]))[0, 1]
        # Independent numbers: standard error 1/√20000 = 0.007, and five of them.
        assert abs(float(correlation)) < 0.035
