"""The filter along time is its definition, forward and backward."""

import pytest
import torch
from implementations import DTYPE, agree, implementations

from chiar.kernels.temporal_filter import temporal_basis, temporal_filter


def definition(x, taps):
    """y_t = Σ_j taps_j · x_{t−j}; there is nothing before the first token."""
    reach = [range(min(t + 1, len(taps))) for t in range(x.shape[1])]
    return torch.stack([sum(taps[j] * x[:, t - j] for j in window) for t, window in enumerate(reach)], dim=1)


# One token, fewer tokens than taps, more than a kernel's tile, more taps than it multiplies at once.
@implementations("auto")
@pytest.mark.parametrize(
    "shape", [(2, 9, 3, 4), (2, 1, 4, 2), (3, 4, 2, 12), (2, 90, 70, 16), (1, 20, 3, 130)], ids=str
)
def test_outputs_and_gradients_are_the_definitions(shape, implementation):
    *shape, window = shape
    x = torch.randn(shape, dtype=DTYPE, requires_grad=True)
    taps = torch.randn(window, shape[-1], dtype=DTYPE, requires_grad=True)
    found, true = temporal_filter(x, taps, implementation), definition(x, taps)
    gradients = [torch.autograd.grad(y, (x, taps), torch.ones_like(x) + x.detach()) for y in (found, true)]
    agree([found, *gradients[0]], [true, *gradients[1]])


def test_taps_of_all_coefficients_can_be_anything_and_few_are_smooth():
    basis = temporal_basis(6, 6)
    torch.testing.assert_close(basis @ basis.T, torch.eye(6, dtype=torch.float64))
    few = temporal_basis(6, 2)
    assert torch.equal(few, basis[:, :2]) and torch.allclose(few[:, 0], few[0, 0]) and (few[:, 1].diff() < 0).all()


@implementations("auto")
def test_bf16_is_summed_in_fp32(implementation):
    """Twenty ones after 256: a sum in bf16, whose step is 2 there, would lose every one of them."""
    x, taps = torch.ones(1, 21, 1, dtype=torch.bfloat16), torch.ones(21, 1)
    taps[0] = 256
    with torch.autocast("cpu", torch.bfloat16):
        assert float(temporal_filter(x, taps, implementation)[0, -1, 0]) == 276
