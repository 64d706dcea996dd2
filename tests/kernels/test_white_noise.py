"""The white-noise null has the moments the entropy op shows on noise."""

import pytest
import scipy.special
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from chiar.kernels.spectral_entropy import spectral_entropy
from chiar.kernels.transform import make_transform
from chiar.kernels.white_noise import digamma, trigamma, white_noise_entropy

PROPERTY = settings(deadline=None, max_examples=100, derandomize=True)
positive = st.floats(min_value=1e-3, max_value=1e6, allow_nan=False)


@pytest.mark.parametrize(("width", "mean"), [(256, 0.869), (1024, 0.895)])
def test_mean_is_the_specs(width, mean):
    assert round(white_noise_entropy(width)[0], 3) == mean


@pytest.mark.parametrize("width", [2, 7, 32, 256])
@pytest.mark.parametrize("basis", ["dct", "random"])
def test_moments_match_noise_through_the_op(width, basis):
    samples = 20_000
    noise = torch.randn(samples, width, generator=torch.Generator().manual_seed(width))
    entropy = spectral_entropy(noise, make_transform(basis, width)).double()
    mean, deviation = white_noise_entropy(width)
    # Four standard errors of a mean; a standard deviation of 20,000 draws is good to about 1% (kurtosis below 10).
    assert abs(float(entropy.mean()) - mean) < 4 * deviation / samples**0.5
    assert abs(float(entropy.std()) / deviation - 1) < 0.04


@PROPERTY
@given(x=positive)
def test_digamma_is_scipys(x):
    # The series is cut below 1e-13; near its zero at 1.46 only the absolute error is small.
    assert digamma(x) == pytest.approx(scipy.special.digamma(x), rel=1e-12, abs=1e-12)


@PROPERTY
@given(x=positive)
def test_trigamma_is_scipys(x):
    # The series is cut below 1e-13.
    assert trigamma(x) == pytest.approx(scipy.special.polygamma(1, x), rel=1e-12, abs=1e-13)


@PROPERTY
@given(width=st.integers(2, 10_000))
def test_null_lies_inside_the_range_of_h(width):
    mean, deviation = white_noise_entropy(width)
    assert 0 < mean < 1
    assert 0 < deviation < 0.5
