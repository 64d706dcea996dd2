"""Spectral entropy: range, fixed points, scale, extreme inputs, gradients, the paper's ε form; its white-noise null."""

import math

import numpy as np
import pytest
import scipy.special
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch._inductor.utils import run_and_get_code

from chiar.kernels.spectral_entropy import spectral_entropy
from chiar.kernels.transform import Transform, basis_matrix, make_transform
from chiar.kernels.white_noise import polygammas, white_noise_entropy

BASES = ("dct", "identity", "random")
PROPERTY = settings(deadline=None, max_examples=25, derandomize=True)
widths, bases = st.integers(min_value=2, max_value=40), st.sampled_from(BASES)
both_forms = pytest.mark.parametrize("eps", [0.0, 1e-8], ids=["exact", "eps"])


def rows(elements):
    """A few vectors of one width."""
    shapes = st.tuples(st.integers(1, 4), widths)
    return shapes.flatmap(lambda shape: hnp.arrays(np.float32, shape, elements=elements)).map(torch.from_numpy)


any_float = st.floats(-(2.0**100), 2.0**100, width=32, allow_subnormal=True)
ordinary = st.floats(-4, 4, width=32, allow_subnormal=False)


def noise(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def papers_formula(x, basis_DD, eps, dc_weight=1.0):
    """p_i = e_i / (Σ e_j + ε), H = −Σ p_i log(p_i + ε) / log D, in float64 and one number at a time."""
    values = []
    for row in x.double().numpy():
        energies = (basis_DD.double().numpy() @ row) ** 2
        energies[0] *= dc_weight
        p = energies / (energies.sum() + eps)
        values.append(-sum(q * math.log(q + eps) for q in p if q + eps > 0) / math.log(len(row)))
    return torch.tensor(values).clamp(0, 1)


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


@both_forms
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


# Subnormal, the smallest normal numbers, squares that underflow and overflow, and the largest numbers.
@pytest.mark.parametrize("scale", [1e-42, 1.2e-38, 1e-25, 1e30, 1e38])
def test_extreme_magnitudes_are_finite_and_in_range(scale):
    entropy = spectral_entropy(noise(4, 16).clamp(-3, 3) * scale, make_transform("dct", 16))
    assert torch.isfinite(entropy).all() and (entropy > 0).all() and (entropy <= 1).all()
    mixed = torch.tensor([[1e30, 1e-42, 1.0, 0.0], [scale, 0.0, 0.0, 0.0]])
    assert (spectral_entropy(mixed, Transform()) == 0).all(), "one coefficient dwarfs the others"


def gradient(x, transform):
    x = x.clone().requires_grad_()
    spectral_entropy(x, transform).backward()
    return x.grad


@pytest.mark.parametrize("scale", [1e-30, 1e-10, 1e10, 1e30])
def test_gradient_is_inverse_to_scale_and_zero_where_a_coefficient_is(scale):
    transform, x = make_transform("dct", 16), noise(16)
    # H(sx) = H(x), so the gradient at sx is 1/s times that at x; fp32 rounding of differences of O(1) terms.
    torch.testing.assert_close(gradient(x * scale, transform) * scale, gradient(x, transform), atol=2e-6, rtol=1e-4)
    x[:5] = 0.0
    found = gradient(x, Transform())
    assert torch.isfinite(found).all() and (found[:5] == 0).all(), "y² log y² has zero slope at 0"


@pytest.mark.parametrize(("eps", "dc_weight"), [(0.0, 1.0), (0.0, 2.0), (0.0, 0.0), (1e-2, 1.0), (1e-8, 2.0)])
@pytest.mark.parametrize(("basis", "width"), [("dct", 8), ("dct", 5), ("random", 5)])
def test_gradients_are_finite_differences(eps, dc_weight, basis, width):
    transform = make_transform(basis, width, dtype=torch.float64)

    def entropy(x):
        return spectral_entropy(x, transform, eps, dc_weight)

    x = noise(2, width, seed=1, dtype=torch.float64).requires_grad_()
    # gradcheck's own tolerances, made for float64 differences with step 1e-6.
    assert torch.autograd.gradcheck(entropy, (x,)) and torch.autograd.gradgradcheck(entropy, (x,))


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


def test_unnormalised_dct_of_the_released_code_is_dc_weight_two():
    # Its DC row is √2 too large relative to the others and everything is 2 too large: energies 8 and 4 against 1.
    x, released_DD = noise(4, 16), 2 * basis_matrix("dct", 16)
    released_DD[0] *= math.sqrt(2)
    found = spectral_entropy(x, make_transform("dct", 16), dc_weight=2.0)
    torch.testing.assert_close(found, spectral_entropy(x, Transform(released_DD)), atol=1e-6, rtol=0)  # fp32 rounding


def test_the_compiler_makes_one_kernel_of_a_row_reduction():
    """Why there is no hand-written kernel: nothing but H is written, and no row is read by a second kernel."""
    torch.compiler.reset()
    x = noise(8, 64).bfloat16()
    found, (code,) = run_and_get_code(torch.compile(lambda x: spectral_entropy(x, Transform()), fullgraph=True), x)
    assert code.count("async_compile.cpp_pybinding(") == 1
    assert "extern_kernels." not in code.split("def call")[1]
    # The compiler may sum in another order.
    torch.testing.assert_close(found, spectral_entropy(x, Transform()), atol=1e-6, rtol=0)


@pytest.mark.parametrize(("width", "rounded"), [(2, None), (7, None), (256, 0.869), (1024, 0.895)])
def test_null_has_the_moments_of_noise(width, rounded):
    mean, deviation = white_noise_entropy(width)
    assert 0 < mean < 1 and 0 < deviation < 0.5 and (rounded is None or round(mean, 3) == rounded)
    entropy = spectral_entropy(noise(10_000, width, seed=width), make_transform("random", width)).double()
    # Four standard errors of a mean; a standard deviation of 10,000 draws is good to about 1.5% (kurtosis below 10).
    assert abs(float(entropy.mean()) - mean) < 4 * deviation / 100
    assert abs(float(entropy.std()) / deviation - 1) < 0.06


@PROPERTY
@given(x=st.floats(min_value=1e-3, max_value=1e6, allow_nan=False))
def test_polygammas_are_scipys(x):
    # The series are cut below 1e-13; near its zero at 1.46 only the absolute error of ψ is small.
    digamma, trigamma = polygammas(x)
    assert digamma == pytest.approx(scipy.special.digamma(x), rel=1e-12, abs=1e-12)
    assert trigamma == pytest.approx(scipy.special.polygamma(1, x), rel=1e-12, abs=1e-13)
