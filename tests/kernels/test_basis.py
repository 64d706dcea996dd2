"""The bases are orthonormal, and the DCT is SciPy's."""

import pytest
import scipy.fft
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from chiar.kernels.basis import basis_matrix, dct_matrix, random_orthogonal

BASES = ("dct", "identity", "random")

PROPERTY = settings(deadline=None, max_examples=25, derandomize=True)
widths = st.integers(min_value=2, max_value=97)


@PROPERTY
@given(width=widths)
def test_dct_is_scipys_orthonormal_type_two(width):
    x = torch.randn(3, width, dtype=torch.float64, generator=torch.Generator().manual_seed(width))
    expected = torch.from_numpy(scipy.fft.dct(x.numpy(), type=2, norm="ortho", axis=-1))
    # float64 sums of up to 97 terms of size 1.
    torch.testing.assert_close(x @ dct_matrix(width).T, expected, atol=1e-12, rtol=0)


@PROPERTY
@given(width=widths)
def test_transpose_is_scipys_inverse(width):
    x = torch.randn(3, width, dtype=torch.float64, generator=torch.Generator().manual_seed(width))
    expected = torch.from_numpy(scipy.fft.idct(x.numpy(), type=2, norm="ortho", axis=-1))
    # float64 sums of up to 97 terms of size 1.
    torch.testing.assert_close(x @ dct_matrix(width), expected, atol=1e-12, rtol=0)


@PROPERTY
@given(kind=st.sampled_from(BASES), width=widths, seed=st.integers(0, 2**31))
def test_bases_are_orthonormal_in_fp32(kind, width, seed):
    matrix_DD = basis_matrix(kind, width, seed)
    assert matrix_DD.dtype == torch.float32
    assert matrix_DD.shape == (width, width)
    product_DD = matrix_DD.double() @ matrix_DD.double().T
    # The entries are rounded to fp32 (6e-8 relative), and the errors of a row of unit norm add to about that.
    torch.testing.assert_close(product_DD, torch.eye(width, dtype=torch.float64), atol=5e-7, rtol=0)


@pytest.mark.parametrize("width", [2, 16, 33, 256])
def test_first_dct_vector_is_constant(width):
    # One fp32 rounding.
    torch.testing.assert_close(basis_matrix("dct", width)[0], torch.full((width,), width**-0.5), atol=0, rtol=1e-7)


def test_identity_is_exact():
    assert torch.equal(basis_matrix("identity", 7), torch.eye(7))


@PROPERTY
@given(width=widths, seed=st.integers(0, 2**31))
def test_random_basis_is_reproducible_and_depends_on_the_seed(width, seed):
    before = torch.random.get_rng_state()
    first_DD, second_DD = basis_matrix("random", width, seed), basis_matrix("random", width, seed)
    assert torch.equal(first_DD, second_DD)
    assert not torch.equal(first_DD, basis_matrix("random", width, seed + 1))
    assert torch.equal(torch.random.get_rng_state(), before), "drawing a basis must not move the global generator"


@PROPERTY
@given(width=widths, seed=st.integers(0, 2**31))
def test_random_basis_has_the_signs_of_a_positive_r(width, seed):
    gaussian_DD = torch.randn(width, width, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    r_DD = random_orthogonal(width, seed).T @ gaussian_DD
    assert (r_DD.diagonal() > 0).all()
    # float64 QR of a well-scaled matrix.
    torch.testing.assert_close(r_DD.tril(-1), torch.zeros_like(r_DD), atol=1e-10, rtol=0)
