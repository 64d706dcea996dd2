"""The filter along time is its definition, forward and backward."""

import pytest
import torch
from implementations import DTYPE, agree, implementations

from chiar.kernels.temporal_filter import naive_temporal_filter, temporal_basis, temporal_filter


# One token, fewer tokens than taps, more than a kernel's tile, more taps than it multiplies at once.
@implementations("auto")
@pytest.mark.parametrize(
    "shape", [(2, 9, 3, 4), (2, 1, 4, 2), (3, 4, 2, 12), (2, 90, 70, 16), (1, 20, 3, 130)], ids=str
)
def test_outputs_and_gradients_are_the_definitions(shape, implementation):
    *shape, window = shape
    x = torch.randn(shape, dtype=DTYPE, requires_grad=True)
    taps = torch.randn(window, shape[-1], dtype=DTYPE, requires_grad=True)
    found, true = temporal_filter(x, taps, implementation), naive_temporal_filter(x, taps)
    gradients = [torch.autograd.grad(y, (x, taps), torch.ones_like(x) + x.detach()) for y in (found, true)]
    agree([found, *gradients[0]], [true, *gradients[1]])


def test_the_operator_is_described_to_the_compiler():
    x, taps = torch.randn(2, 5, 3, requires_grad=True), torch.randn(4, 3, requires_grad=True)
    for layout in (x, x.detach().transpose(0, 1)):
        torch.library.opcheck(temporal_filter, (layout, taps, "torch"))


def test_taps_of_all_coefficients_can_be_anything_and_few_are_smooth():
    basis = temporal_basis(6, 6)
    wanted = torch.randn(6, 3, dtype=torch.float64)
    torch.testing.assert_close(basis @ (basis.T @ wanted), wanted)
    few = temporal_basis(6, 2)
    torch.testing.assert_close(few.T @ few, torch.eye(2, dtype=torch.float64))
    assert torch.allclose(few[:, 0], few[0, 0]) and (few[:, 1].diff() < 0).all()


@implementations("auto")
def test_bf16_is_summed_in_fp32(implementation):
    """Twenty ones after 256: a sum in bf16, whose step is 2 there, would lose every one of them."""
    x, taps = torch.ones(1, 21, 1, dtype=torch.bfloat16), torch.ones(21, 1)
    taps[0] = 256
    assert float(temporal_filter(x, taps, implementation)[0, -1, 0]) == 276
