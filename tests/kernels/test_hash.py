"""The routing hash is uniform, depends on everything it is given, and never changes."""

import pytest
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from chiar.kernels.hash import uniform_hash

PROPERTY = settings(deadline=None, max_examples=40, derandomize=True)


def integers(keys, *salts, dtype=torch.int64):
    """The 24 bits behind the number."""
    number = uniform_hash(torch.tensor(keys, dtype=dtype), *salts)
    assert number.dtype == torch.float32 and (number >= 0).all() and (number < 1).all()
    return (number.double() * 2**24).long().tolist()


def test_known_values():
    # Recorded: another value would silently change every random-routing experiment.
    keys = [0, 1, 2, 50256, -1]
    assert integers(keys) == [0, 5328424, 3208387, 13906885, 8515951]
    assert integers(keys, 0, 1) == [8050660, 15856176, 11651229, 101529, 6373384]
    assert integers(keys, 1, 0) == [852637, 371468, 8707916, 12077948, 3543892]


def murmur_finaliser(h):
    h = ((h ^ (h >> 16)) * 0x85EBCA6B) % 2**32
    h = ((h ^ (h >> 13)) * 0xC2B2AE35) % 2**32
    return h ^ (h >> 16)


@PROPERTY
@given(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=20), st.lists(st.integers(-(2**31), 2**40)))
def test_equals_the_definition_in_python_integers(keys, salts):
    expected = []
    for key in keys:
        h = murmur_finaliser(key % 2**32)
        for salt in salts:
            h = murmur_finaliser((h + 0x9E3779B9 * (salt + 1)) % 2**32)
        expected.append(h >> 8)
    assert integers(keys, *salts) == integers(keys, *salts, dtype=torch.int32) == expected


@pytest.mark.parametrize(("seed", "layer"), [(0, 0), (7, 3), (999, 30)])
def test_uniform_over_token_ids_and_dependent_on_every_salt(seed, layer):
    number = uniform_hash(torch.arange(20_000), seed, layer)
    counts = torch.histc(number, bins=50, min=0, max=1)
    # Loose: one in a million for a fair hash, and the examples are fixed.
    assert scipy.stats.chisquare(counts.numpy()).pvalue > 1e-6
    for other in ((seed + 1, layer), (seed, layer + 1), (layer, seed + 31)):
        correlation = torch.corrcoef(torch.stack([number, uniform_hash(torch.arange(20_000), *other)]))[0, 1]
        # Independent numbers: standard error 1/√20000 = 0.007, and five of them.
        assert abs(float(correlation)) < 0.035
