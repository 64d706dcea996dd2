"""Spectral entropy: range, fixed points, scale, extreme inputs, gradients, and the paper's ε form."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch._inductor.utils import run_and_get_code

from chiar.kernels.basis import basis_matrix
from chiar.kernels.spectral_entropy import spectral_entropy
from chiar.kernels.transform import Transform, make_transform

BASES = ("dct", "identity", "random")

PROPERTY = settings(deadline=None, max_examples=40, derandomize=True)
widths = st.integers(min_value=2, max_value=40)
bases = st.sampled_from(BASES)


def rows(elements, dtype=np.float32):
    """A few vectors of one width."""
    shapes = st.tuples(st.integers(1, 4), widths)
    return shapes.flatmap(lambda shape: hnp.arrays(dtype, shape, elements=elements)).map(torch.from_numpy)


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
    return torch.tensor(values)


@PROPERTY
@given(x=rows(any_float), basis=bases, eps=st.sampled_from([0.0, 1e-8]))
def test_lies_between_zero_and_one(x, basis, eps):
    x = x if eps == 0 else x.clamp(-1e15, 1e15)  # the ε form squares x itself, so it keeps fp32's range of energies
    entropy = spectral_entropy(x, make_transform(basis, x.shape[-1]), eps)
    assert entropy.shape == x.shape[:-1]
    assert (entropy >= 0).all() and (entropy <= 1).all()


@pytest.mark.parametrize("basis", BASES)
@pytest.mark.parametrize("width", [2, 9, 32])
def test_zero_on_every_basis_vector(basis, width):
    basis_DD = basis_matrix(basis, width)
    # fp32: a residue of 1e-7 in another coefficient has energy 1e-14.
    assert (spectral_entropy(basis_DD, make_transform(basis, width)) < 1e-6).all()
    assert (spectral_entropy(-3.0 * basis_DD, make_transform(basis, width)) < 1e-6).all()


@PROPERTY
@given(basis=bases, width=widths, seed=st.integers(0, 100))
def test_one_on_a_flat_spectrum(basis, width, seed):
    basis_DD = basis_matrix(basis, width)
    signs_D = noise(width, seed=seed).sign()
    # H is flat at its maximum, so what is left is the rounding of fp32 logarithms.
    assert float(spectral_entropy(signs_D @ basis_DD, make_transform(basis, width))) == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize(("equal", "width"), [(2, 8), (4, 8), (3, 27)])
def test_log_of_the_number_of_equal_coefficients(equal, width):
    x = torch.zeros(width)
    x[:equal] = 1.0
    # fp32 logarithms.
    assert float(spectral_entropy(x, Transform())) == pytest.approx(math.log(equal) / math.log(width), abs=1e-6)


@PROPERTY
@given(basis=bases, width=widths, exponent=st.integers(-100, 100), sign=st.sampled_from([-1, 1]))
def test_a_power_of_two_changes_no_bit(basis, width, exponent, sign):
    transform, x = make_transform(basis, width), noise(3, width)
    assert torch.equal(spectral_entropy(sign * x * 2.0**exponent, transform), spectral_entropy(x, transform))


@PROPERTY
@given(basis=bases, width=widths, exponent=st.floats(-30, 30))
def test_does_not_depend_on_scale(basis, width, exponent):
    transform, x = make_transform(basis, width), noise(3, width)
    # Scaling rounds each entry of x once, 6e-8 relative.
    torch.testing.assert_close(
        spectral_entropy(x * 10.0**exponent, transform), spectral_entropy(x, transform), atol=2e-6, rtol=0
    )


@pytest.mark.parametrize("eps", [0.0, 1e-8], ids=["exact", "eps"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_zero_vector_has_zero_entropy_and_zero_gradient(eps, dtype):
    x = torch.zeros(2, 8, dtype=dtype, requires_grad=True)
    entropy = spectral_entropy(x, make_transform("dct", 8), eps)
    entropy.sum().backward()
    assert torch.equal(entropy, torch.zeros_like(entropy))
    assert torch.equal(x.grad, torch.zeros_like(x))


EXTREMES = {
    "denormal": 1e-42,
    "smallest-normal": 1.2e-38,
    "underflowing-square": 1e-25,
    "overflowing-square": 1e30,
    "largest": 1e38,
}


@pytest.mark.parametrize("scale", EXTREMES.values(), ids=EXTREMES)
@pytest.mark.parametrize("basis", BASES)
def test_extreme_magnitudes_are_finite_and_in_range(scale, basis):
    x = noise(4, 16).clamp(-3, 3) * scale
    entropy = spectral_entropy(x, make_transform(basis, 16))
    assert torch.isfinite(entropy).all()
    assert (entropy > 0).all() and (entropy <= 1).all()


def test_mixed_magnitudes_in_one_vector():
    x = torch.tensor([[1e30, 1e-42, 1.0, 0.0], [1e-42, 0.0, 0.0, 0.0]])
    # One coefficient dwarfs the others, whose relative energies underflow.
    assert torch.equal(spectral_entropy(x, Transform()), torch.zeros(2))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_reduction_of_low_precision_inputs_is_fp32(dtype):
    x, transform = noise(4, 32).to(dtype), make_transform("dct", 32)
    entropy = spectral_entropy(x, transform)
    assert entropy.dtype == torch.float32
    assert torch.equal(entropy, spectral_entropy(x.float(), transform))


def test_float64_stays_float64():
    assert spectral_entropy(noise(2, 8, dtype=torch.float64), make_transform("dct", 8)).dtype == torch.float64


@pytest.mark.parametrize("eps", [0.0, 1e-8], ids=["exact", "eps"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_changes_nothing(eps, dtype):
    x, transform = noise(4, 32).to(dtype), make_transform("dct", 32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        entropy = spectral_entropy(x, transform, eps)
    assert entropy.dtype == torch.float32
    assert torch.equal(entropy, spectral_entropy(x, transform, eps))


@pytest.mark.parametrize("leading", [(), (5,), (2, 3), (2, 3, 4)], ids=str)
def test_rows_are_independent(leading):
    x, transform = noise(*leading, 16), make_transform("dct", 16)
    each = torch.stack([spectral_entropy(row, transform) for row in x.reshape(-1, 16)]).reshape(leading)
    # Another order of summation in the matrix product.
    torch.testing.assert_close(spectral_entropy(x, transform), each, atol=1e-6, rtol=0)


@pytest.mark.parametrize("zeros", [1, 5, 7], ids=lambda n: f"{n}-zero-coefficients")
def test_gradient_is_finite_where_a_coefficient_is_exactly_zero(zeros):
    x = noise(8)
    x[:zeros] = 0.0
    x.requires_grad_()
    spectral_entropy(x, Transform()).backward()
    assert torch.isfinite(x.grad).all()
    assert torch.equal(x.grad[:zeros], torch.zeros(zeros)), "y² log y² has zero slope at 0"


@pytest.mark.parametrize("scale", [1e-30, 1e-10, 1e10, 1e30])
def test_gradient_is_inverse_to_scale(scale):
    transform, x = make_transform("dct", 16), noise(16)

    def gradient(at):
        at = at.clone().requires_grad_()
        spectral_entropy(at, transform).backward()
        return at.grad

    # H(sx) = H(x), so the gradient at sx is 1/s times that at x; fp32 rounding of differences of O(1) terms.
    torch.testing.assert_close(gradient(x * scale) * scale, gradient(x), atol=2e-6, rtol=1e-4)


@PROPERTY
@given(x=rows(any_float), basis=bases)
def test_gradient_of_any_vector_with_a_normal_scale_is_finite(x, basis):
    # The true gradient is of order 1/‖x‖: for subnormal x it has no fp32 value.
    x = x * (x.abs().amax(-1, keepdim=True) > 1e-35)
    x.requires_grad_()
    spectral_entropy(x, make_transform(basis, x.shape[-1])).sum().backward()
    assert torch.isfinite(x.grad).all()


GRADCHECK_CASES = {
    "exact": (0.0, 1.0),
    "dc-double": (0.0, 2.0),
    "dc-off": (0.0, 0.0),
    "eps": (1e-2, 1.0),
    "papers-eps-dc-double": (1e-8, 2.0),
}


@pytest.mark.parametrize(("eps", "dc_weight"), GRADCHECK_CASES.values(), ids=GRADCHECK_CASES)
@pytest.mark.parametrize("basis", BASES)
@pytest.mark.parametrize("width", [5, 8])
def test_gradients_are_finite_differences(eps, dc_weight, basis, width):
    transform = make_transform(basis, width, dtype=torch.float64)

    def entropy(x):
        return spectral_entropy(x, transform, eps, dc_weight)

    x = noise(3, width, seed=1, dtype=torch.float64).requires_grad_()
    # gradcheck's own tolerances, made for float64 differences with step 1e-6.
    assert torch.autograd.gradcheck(entropy, (x,))
    assert torch.autograd.gradgradcheck(entropy, (x,))


@PROPERTY
@given(x=rows(ordinary), basis=bases, scale=st.sampled_from([1e-5, 1e-4, 1e-3, 1.0]), eps=st.sampled_from([1e-8, 1e-4]))
def test_eps_form_is_the_papers(x, basis, scale, eps):
    x, basis_DD = x * scale, basis_matrix(basis, x.shape[-1])
    expected = papers_formula(x, basis_DD, eps).clamp(0, 1)
    # fp32 sums of up to 40 terms p log p of size below 0.4.
    torch.testing.assert_close(
        spectral_entropy(x, make_transform(basis, x.shape[-1]), eps).double(), expected, atol=2e-6, rtol=0
    )


def test_eps_matters_on_vectors_as_small_as_fresh_embeddings():
    x, transform = 1e-4 * noise(4, 16), make_transform("dct", 16)
    with_eps, without = spectral_entropy(x, transform, 1e-8), spectral_entropy(x, transform)
    assert (with_eps < without - 0.01).all(), "ε takes mass away, so the test above compares more than the exact form"


@PROPERTY
@given(x=rows(ordinary), basis=bases, dc_weight=st.sampled_from([0.0, 0.5, 2.0]), eps=st.sampled_from([0.0, 1e-8]))
def test_dc_weight_counts_the_first_energy_so_many_times(x, basis, dc_weight, eps):
    x = x + noise(*x.shape)
    basis_DD = basis_matrix(basis, x.shape[-1])
    expected = papers_formula(x, basis_DD, eps, dc_weight).clamp(0, 1)
    # fp32 sums of up to 40 terms p log p of size below 0.4.
    torch.testing.assert_close(
        spectral_entropy(x, make_transform(basis, x.shape[-1]), eps, dc_weight).double(), expected, atol=2e-6, rtol=0
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_compiler_makes_one_kernel_of_a_row_reduction(dtype):
    """Why there is no hand-written kernel: nothing but H is written, and no row is read by a second kernel."""
    torch.compiler.reset()
    x = noise(8, 64).to(dtype)
    found, (code,) = run_and_get_code(torch.compile(lambda x: spectral_entropy(x, Transform()), fullgraph=True), x)
    assert code.count("async_compile.cpp_pybinding(") == 1
    assert "extern_kernels." not in code.split("def call")[1]
    # The compiler may sum in another order.
    torch.testing.assert_close(found, spectral_entropy(x, Transform()), atol=1e-6, rtol=0)


def test_unnormalised_dct_of_the_released_code_is_dc_weight_two():
    # Its DC row is √2 too large relative to the others and everything is 2 too large: energies 8 and 4 against 1.
    x, basis_DD = noise(4, 16), basis_matrix("dct", 16)
    released_DD = 2 * basis_DD
    released_DD[0] *= math.sqrt(2)
    # fp32 rounding.
    torch.testing.assert_close(
        spectral_entropy(x, make_transform("dct", 16), dc_weight=2.0),
        spectral_entropy(x, Transform(released_DD)),
        atol=1e-6,
        rtol=0,
    )
