"""Every form of the transform against the plain matrix, the definition."""

import pytest
import torch

from chiar.kernels.basis import basis_matrix
from chiar.kernels.transform import Transform, apply_filter, make_transform, transform_matrices
from chiar.layers.spectral import SpectralFilter

WIDTHS = (2, 3, 6, 17, 64)
# Rounding of two sums of `width` products; the inputs and matrices themselves are rounded in bf16 (2⁻⁸ relative).
TOLERANCE = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 5e-2}

kinds = pytest.mark.parametrize("kind", ["dct", "identity", "random"])
widths = pytest.mark.parametrize("width", WIDTHS)
dtypes = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)


def noise(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def close(found, expected, dtype):
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@kinds
@widths
@dtypes
def test_both_directions_and_their_gradients(kind, width, dtype):
    matrix_DD = basis_matrix(kind, width, 3, torch.float64)
    transform = make_transform(kind, width, 3, torch.float64 if dtype == torch.float64 else torch.float32)
    x, direction = noise(2, 3, width, dtype=dtype), noise(2, 3, width, seed=1, dtype=dtype)
    for apply, matrix in ((transform.forward, matrix_DD), (transform.inverse, matrix_DD.T)):
        seen = x.clone().requires_grad_()
        found = apply(seen)
        close(found, x.double() @ matrix.T, dtype)
        if kind == "identity":
            assert found is seen
        found.backward(direction)
        close(seen.grad, direction.double() @ matrix, dtype)


@kinds
@widths
@dtypes
def test_the_filter_and_its_gradients(kind, width, dtype):
    matrix_DD = basis_matrix(kind, width, 3, torch.float64)
    transform = make_transform(kind, width, 3, torch.float64 if dtype == torch.float64 else torch.float32)
    light = SpectralFilter(width)
    light.weight.data += noise(width, seed=2)
    light = light.to(dtype)
    weight = light.weight.detach().double().requires_grad_()
    x, direction = noise(4, width, dtype=dtype), noise(4, width, seed=1, dtype=dtype)
    seen, exact = x.clone().requires_grad_(), x.double().requires_grad_()
    expected = (exact @ matrix_DD.T * weight) @ matrix_DD
    found = light(seen, transform)
    close(found, expected.detach(), dtype)
    found.backward(direction)
    expected.backward(direction.double())
    close(seen.grad, exact.grad, dtype)
    close(light.weight.grad, weight.grad, dtype)
    folded = apply_filter(x, transform.filter_matrices(light.weight.detach()))
    close(folded, expected.detach(), dtype)


def test_shapes_of_the_matrices():
    shapes = {kind: [tuple(m.shape) for m in transform_matrices(kind, 6).values()] for kind in ("dct", "random")}
    assert shapes == {"dct": [(3, 3), (3, 3)], "random": [(6, 6)]}
    assert [tuple(m.shape) for m in transform_matrices("dct", 7).values()] == [(7, 7)]
    assert transform_matrices("identity", 6) == {}


class TestFolding:
    def make(self, width=8):
        light, transform = SpectralFilter(width).eval(), make_transform("dct", width)
        with torch.no_grad():
            light.weight.copy_(noise(width))
        light.fold(transform)
        return light, transform

    def test_folded_where_no_gradient_is_kept(self):
        light, transform = self.make()
        x = noise(3, 8, dtype=torch.float32)
        with torch.no_grad():
            # A folded filter has no use for the transform: a wrong one shows which path ran.
            assert torch.equal(light(x, Transform()), light(x, transform))
        assert light(x, transform).requires_grad

    @pytest.mark.parametrize(
        "change",
        [
            lambda light: light.train(),
            lambda light: light.double(),
            lambda light: light.load_state_dict({"weight": torch.zeros(8)}),
        ],
        ids=["train", "cast", "load"],
    )
    def test_forgotten_when_weights_may_change(self, change):
        light, _ = self.make()
        light.eval()
        assert light.folded is not None
        change(light)
        assert light.folded is None
