"""Temporal spectral entropy: its definition, its null, and what it says of smooth and abrupt contexts."""

import pytest
import torch

from chiar.kernels.temporal_entropy import naive_temporal_entropy
from chiar.kernels.white_noise import white_noise_entropy
from chiar.layers.temporal import TemporalSignal


def signal(width=24, window=6, channels=5, seed=3):
    return TemporalSignal(width, window, channels, seed).double()


@pytest.mark.parametrize("length", [1, 4, 15])
def test_it_is_the_definition(length):
    module, x_BTD = signal(), torch.randn(2, length, 24, dtype=torch.float64)
    true = torch.stack([naive_temporal_entropy(x_TD, module.directions_DC, 6) for x_TD in x_BTD])
    torch.testing.assert_close(module(x_BTD), true, atol=1e-12, rtol=1e-12)


def test_directions_are_orthonormal_and_follow_the_seed():
    first, again, other = (signal(seed=seed).directions_DC for seed in (3, 3, 4))
    torch.testing.assert_close(first.T @ first, torch.eye(5, dtype=torch.float64))
    assert torch.equal(first, again) and not torch.allclose(first, other)


def test_white_noise_has_the_entropy_of_a_white_vector_of_as_many_terms():
    window, channels, samples = 8, 8, 4000
    module = TemporalSignal(512, window, channels, 0)
    entropy = module(torch.randn(samples, window, 512))[:, -1].double()
    mean, deviation = white_noise_entropy(window * channels)
    # Four standard errors, and what scaling each token takes from the spread of 8 of 512 directions.
    assert abs(float(entropy.mean()) - mean) < 4 * deviation / samples**0.5 + 2e-3
    assert abs(float(entropy.std()) / deviation - 1) < 0.06


def test_a_constant_context_is_low_and_a_new_token_raises_it():
    module = signal()
    x_BTD = torch.randn(1, 1, 24, dtype=torch.float64).expand(1, 14, 24).clone()
    x_BTD[:, 10:] = torch.randn(1, 1, 24)
    entropy_T = module(x_BTD)[0]
    constant = entropy_T[5:10]
    # All energy lies in five terms of thirty.
    assert (constant < torch.tensor(5.0).log() / torch.tensor(30.0).log()).all()
    assert entropy_T[10] > constant.max() + 0.1
    assert entropy_T[0] > constant.max() + 0.1, "the start of a text is abrupt"


def test_scale_of_a_token_does_not_matter_and_zeros_are_harmless():
    module, x = signal(), torch.randn(1, 9, 24, dtype=torch.float64)
    scale = torch.logspace(-120, 120, 9, dtype=torch.float64)[:, None]
    torch.testing.assert_close(module(x * scale), module(x), atol=1e-9, rtol=0)
    x[:, 3] = 0
    x.requires_grad_()
    entropy = module(x)
    entropy.sum().backward()
    assert entropy.isfinite().all() and x.grad.isfinite().all()
    assert module(torch.zeros(1, 3, 24, dtype=torch.float64)).tolist() == [[0.0] * 3]


def test_gradients():
    module = signal(width=6, window=3, channels=2)
    assert torch.autograd.gradcheck(module, torch.randn(2, 4, 6, dtype=torch.float64, requires_grad=True))


def test_terms_of_frequency_zero_can_be_weighted():
    module, x_BTD = signal(), torch.randn(1, 1, 24, dtype=torch.float64).expand(1, 6, 24)
    change_T = (module(x_BTD, dc_weight=0.5) - module(x_BTD))[0].abs()
    assert change_T[0] > 1e-3
    assert change_T[-1] < 1e-12, "a constant window has no other terms"
