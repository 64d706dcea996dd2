"""The bases are orthonormal and the DCT is SciPy's; every form of the transform is the plain matrix, the definition."""

import pytest
import scipy.fft
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from chiar.kernels.transform import basis_matrix, dct_matrix, make_transform, random_orthogonal

PROPERTY = settings(deadline=None, max_examples=25, derandomize=True)
BASES = ("dct", "identity", "random")
widths = st.integers(min_value=2, max_value=97)
seeds = st.integers(0, 2**31)


def noise(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@PROPERTY
@given(width=widths)
def test_dct_is_scipys_orthonormal_type_two_and_its_transpose_the_inverse(width):
    x, dct_DD = noise(3, width, seed=width), dct_matrix(width)
    forward, back = (f(x.numpy(), type=2, norm="ortho", axis=-1) for f in (scipy.fft.dct, scipy.fft.idct))
    # float64 sums of up to 97 terms of size 1.
    torch.testing.assert_close(x @ dct_DD.T, torch.from_numpy(forward), atol=1e-12, rtol=0)
    torch.testing.assert_close(x @ dct_DD, torch.from_numpy(back), atol=1e-12, rtol=0)
    torch.testing.assert_close(dct_DD[0], torch.full((width,), width**-0.5, dtype=torch.float64))


@PROPERTY
@given(kind=st.sampled_from(BASES), width=widths, seed=seeds)
def test_bases_are_orthonormal_in_fp32(kind, width, seed):
    matrix_DD = basis_matrix(kind, width, seed)
    assert matrix_DD.dtype == torch.float32
    product_DD = matrix_DD.double() @ matrix_DD.double().T
    # The entries are rounded to fp32 (6e-8 relative), and the errors of a row of unit norm add to about that.
    torch.testing.assert_close(product_DD, torch.eye(width, dtype=torch.float64), atol=5e-7, rtol=0)
    assert kind != "identity" or torch.equal(matrix_DD, torch.eye(width))


@PROPERTY
@given(width=widths, seed=seeds)
def test_random_basis_follows_its_seed_alone_and_has_the_signs_of_a_positive_r(width, seed):
    before = torch.random.get_rng_state()
    first_DD = random_orthogonal(width, seed)
    assert torch.equal(first_DD, random_orthogonal(width, seed))
    assert not torch.equal(first_DD, random_orthogonal(width, seed + 1))
    assert torch.equal(torch.random.get_rng_state(), before), "drawing a basis must not move the global generator"
    assert ((first_DD.T @ noise(width, width, seed=seed)).diagonal() > 0).all()


# Rounding of two sums of `width` products; the inputs and matrices themselves are rounded in bf16 (2⁻⁸ relative).
@pytest.mark.parametrize(
    ("dtype", "allowed"), [(torch.float64, 1e-13), (torch.float32, 1e-5), (torch.bfloat16, 5e-2)], ids=str
)
@pytest.mark.parametrize("width", [2, 17, 64])
@pytest.mark.parametrize("kind", BASES)
def test_both_directions_and_their_gradients(kind, width, dtype, allowed):
    matrix_DD = basis_matrix(kind, width, 3, torch.float64)
    transform = make_transform(kind, width, 3, torch.float64 if dtype == torch.float64 else torch.float32)
    x, direction = noise(2, 3, width, dtype=dtype), noise(2, 3, width, seed=1, dtype=dtype)
    for apply, matrix in ((transform.forward, matrix_DD), (transform.inverse, matrix_DD.T)):
        seen = x.clone().requires_grad_()
        found = apply(seen)
        assert found is seen or kind != "identity"
        found.backward(direction)
        for ours, true in ((found, x.double() @ matrix.T), (seen.grad, direction.double() @ matrix)):
            assert ours.dtype == dtype
            torch.testing.assert_close(ours.double(), true, atol=allowed, rtol=allowed)
