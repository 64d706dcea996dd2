"""Spectral entropy and what it is made of: the bases and their transforms, the paper's H, and its white-noise null."""

import math

import numpy as np
import pytest
import scipy.fft
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from chiar.kernels.spectral_entropy import spectral_entropy
from chiar.kernels.transform import Transform, basis_matrix, dct_matrix, make_transform, random_orthogonal
from chiar.kernels.white_noise import white_noise_entropy

BASES = ("dct", "identity", "random")
PROPERTY = settings(deadline=None, max_examples=25, derandomize=True)
widths, bases, seeds = st.integers(min_value=2, max_value=97), st.sampled_from(BASES), st.integers(0, 2**31)
any_float = st.floats(width=32, allow_nan=False, allow_infinity=False)
ordinary = st.floats(-4, 4, width=32, allow_subnormal=False)


def noise(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def rows(elements):
    """A few vectors of one width."""
    shapes = st.tuples(st.integers(1, 4), st.integers(2, 40))
    return shapes.flatmap(lambda shape: hnp.arrays(np.float32, shape, elements=elements)).map(torch.from_numpy)


@PROPERTY
@given(kind=bases, width=widths, seed=seeds)
def test_bases_are_orthonormal_and_the_dct_is_scipys(kind, width, seed):
    matrix_DD, unit_DD = basis_matrix(kind, width, seed).double(), torch.eye(width, dtype=torch.float64)
    # The entries are rounded to fp32 (6e-8 relative), and the errors of a row of unit norm add to about that.
    torch.testing.assert_close(matrix_DD @ matrix_DD.T, unit_DD, atol=5e-7, rtol=0)
    assert kind != "identity" or torch.equal(matrix_DD, unit_DD)
    true_DD = scipy.fft.dct(unit_DD.numpy(), type=2, norm="ortho", axis=0)
    torch.testing.assert_close(dct_matrix(width), torch.from_numpy(true_DD), atol=1e-12, rtol=0)


@PROPERTY
@given(width=widths, seed=seeds)
def test_random_basis_follows_its_seed_alone_and_has_the_signs_of_a_positive_r(width, seed):
    before = torch.random.get_rng_state()
    first_DD = random_orthogonal(width, seed)
    assert torch.equal(first_DD, random_orthogonal(width, seed))
    assert not torch.equal(first_DD, random_orthogonal(width, seed + 1))
    assert torch.equal(torch.random.get_rng_state(), before), "drawing a basis must not move the global generator"
    assert ((first_DD.T @ noise(width, width, seed=seed, dtype=torch.float64)).diagonal() > 0).all()


# Rounding of two sums of `width` products; the inputs and matrices themselves are rounded in bf16 (2⁻⁸ relative).
@pytest.mark.parametrize(
    ("dtype", "allowed"), [(torch.float64, 1e-13), (torch.float32, 1e-5), (torch.bfloat16, 5e-2)], ids=str
)
@pytest.mark.parametrize("width", [2, 17, 64])
@pytest.mark.parametrize("kind", BASES)
def test_both_directions_and_their_gradients(kind, width, dtype, allowed):
    matrix_DD = basis_matrix(kind, width, 3, torch.float64)
    transform = make_transform(kind, width, 3, torch.float64 if dtype == torch.float64 else torch.float32)
    x, direction = (noise(2, 3, width, seed=seed).to(dtype) for seed in (0, 1))
    for apply, matrix in ((transform.forward, matrix_DD), (transform.inverse, matrix_DD.T)):
        seen = x.clone().requires_grad_()
        found = apply(seen)
        assert found is seen or kind != "identity"
        found.backward(direction)
        for ours, true in ((found, x.double() @ matrix.T), (seen.grad, direction.double() @ matrix)):
            assert ours.dtype == dtype
            torch.testing.assert_close(ours.double(), true, atol=allowed, rtol=allowed)


def papers_formula(x, basis_DD, eps, dc_weight=1.0):
    """p_i = e_i / (Σ e_j + ε), H = −Σ p_i log(p_i + ε) / log D, in float64."""
    energies = (x.double() @ basis_DD.double().T).square()
    energies[:, 0] *= dc_weight
    p = energies / (energies.sum(1, keepdim=True) + eps)
    return (-torch.special.xlogy(p, p + eps).sum(1) / math.log(x.shape[1])).clamp(0, 1)


@PROPERTY
@given(x=rows(any_float), basis=bases, eps=st.sampled_from([0.0, 1e-8]))
def test_lies_between_zero_and_one_with_a_finite_gradient(x, basis, eps):
    x = x if eps == 0 else x.clamp(-1e15, 1e15)  # the ε form squares x itself, so it keeps fp32's range of energies
    transform = make_transform(basis, x.shape[-1])
    entropy = spectral_entropy(x, transform, eps)
    assert entropy.shape == x.shape[:-1] and (entropy >= 0).all() and (entropy <= 1).all()
    # The true gradient is of order 1/‖x‖: for subnormal x it has no fp32 value.
    x = (x * (x.abs().amax(-1, keepdim=True) > 1e-35)).requires_grad_()
    spectral_entropy(x, transform).sum().backward()
    assert torch.isfinite(x.grad).all()


@PROPERTY
@given(basis=bases, width=widths, seed=st.integers(0, 100))
def test_zero_on_every_basis_vector_and_one_on_a_flat_spectrum(basis, width, seed):
    basis_DD, transform = basis_matrix(basis, width), make_transform(basis, width)
    # fp32: a residue of 1e-7 in another coefficient has energy 1e-14.
    assert (spectral_entropy(-3.0 * basis_DD, transform) < 1e-6).all()
    # H is flat at its maximum, so what is left is the rounding of fp32 logarithms.
    flat_D = noise(width, seed=seed).sign() @ basis_DD
    assert float(spectral_entropy(flat_D, transform)) == pytest.approx(1.0, abs=1e-6)
    equal = 1 + seed % width
    some_D = (torch.arange(width) < equal).float()
    assert float(spectral_entropy(some_D, Transform())) == pytest.approx(math.log(equal) / math.log(width), abs=1e-6)


@PROPERTY
@given(basis=bases, width=widths, exponent=st.floats(-30, 30), power=st.integers(-100, 100))
def test_does_not_depend_on_scale(basis, width, exponent, power):
    transform, x = make_transform(basis, width), noise(3, width)
    entropy = spectral_entropy(x, transform)
    assert torch.equal(spectral_entropy(-x * 2.0**power, transform), entropy), "a power of two changes no bit"
    # Scaling rounds each entry of x once, 6e-8 relative.
    torch.testing.assert_close(spectral_entropy(x * 10.0**exponent, transform), entropy, atol=2e-6, rtol=0)


@pytest.mark.parametrize("eps", [0.0, 1e-8], ids=["exact", "eps"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_reduction_is_fp32_also_under_autocast_and_the_zero_vector_has_no_gradient(eps, dtype):
    x, transform = noise(4, 32).to(dtype), make_transform("dct", 32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        entropy = spectral_entropy(x, transform, eps)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert entropy.dtype == wide and torch.equal(entropy, spectral_entropy(x.to(wide), transform, eps))
    x = torch.zeros(2, 32, dtype=dtype, requires_grad=True)
    entropy = spectral_entropy(x, transform, eps)
    entropy.sum().backward()
    assert (entropy == 0).all() and (x.grad == 0).all()


@pytest.mark.parametrize(("eps", "dc_weight"), [(0.0, 1.0), (0.0, 2.0), (0.0, 0.0), (1e-2, 1.0), (1e-8, 2.0)])
@pytest.mark.parametrize(("basis", "width"), [("dct", 8), ("dct", 5), ("random", 5)])
def test_gradients_are_finite_differences(eps, dc_weight, basis, width):
    transform = make_transform(basis, width, dtype=torch.float64)
    inputs = noise(2, width, seed=1, dtype=torch.float64).requires_grad_(), transform, eps, dc_weight
    # gradcheck's own tolerances, made for float64 differences with step 1e-6.
    assert torch.autograd.gradcheck(spectral_entropy, inputs) and torch.autograd.gradgradcheck(spectral_entropy, inputs)


@PROPERTY
@given(
    x=rows(ordinary), basis=bases, scale=st.sampled_from([1e-5, 1e-3, 1.0]), eps=st.sampled_from([0.0, 1e-8, 1e-4]),
    dc_weight=st.sampled_from([0.0, 0.5, 1.0, 2.0]),
)  # fmt: skip
def test_equals_the_papers_formula_with_the_first_energy_counted_so_many_times(x, basis, scale, eps, dc_weight):
    x = (x + noise(*x.shape)) * scale
    found = spectral_entropy(x, make_transform(basis, x.shape[-1]), eps, dc_weight).double()
    expected = papers_formula(x, basis_matrix(basis, x.shape[-1]), eps, dc_weight)
    # fp32 sums of up to 40 terms p log p of size below 0.4.
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=0)


@pytest.mark.parametrize(("width", "rounded"), [(2, None), (7, None), (256, 0.869), (1024, 0.895)])
def test_null_has_the_moments_of_noise(width, rounded):
    mean, deviation = white_noise_entropy(width)
    assert 0 < mean < 1 and 0 < deviation < 0.5 and (rounded is None or round(mean, 3) == rounded)
    entropy = spectral_entropy(noise(10_000, width, seed=width), make_transform("random", width)).double()
    # Four standard errors of a mean; a standard deviation of 10,000 draws is good to about 1.5% (kurtosis below 10).
    assert abs(float(entropy.mean()) - mean) < 4 * deviation / 100
    assert abs(float(entropy.std()) / deviation - 1) < 0.06
