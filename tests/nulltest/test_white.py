"""White noise looks white, in every basis; a smooth signal does not, in the DCT alone."""

import pytest
import torch

from chiar.kernels.white_noise import white_noise_entropy
from chiar.nulltest.white import make_null, model_bases, repeated_distance, whiteness

WIDTH, N = 64, 4000


def gaussian(seed, count=N):
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed))


def measure(states_ND, null=None):
    null = null or make_null(WIDTH, N, seed=0)
    each = torch.arange(N)
    return {b.name: whiteness(b.name, b.entropy(states_ND), null, each, 0.0) for b in model_bases("dct", WIDTH)}


def test_white_noise_looks_white():
    for found in measure(gaussian(1) * 7).values():
        # Four standard errors each: 1/√N for the mean; about 1/√(2N) for the deviation, times 1.3 for its tails.
        assert abs(found.effect) < 4 * N**-0.5
        assert found.effect_error == pytest.approx(N**-0.5, rel=0.1)
        assert found.spread == pytest.approx(1, abs=0.06)
        assert found.distance < 1.3 * found.distance_critical
        assert found.mean == pytest.approx(white_noise_entropy(WIDTH)[0], abs=0.003)


def test_a_smooth_signal_is_far_from_noise_in_the_dct_alone():
    smooth = gaussian(2).cumsum(1)
    found = measure(smooth - smooth.mean(1, keepdim=True))
    assert found["dct"].effect < -10 and found["dct"].distance > 0.99
    assert abs(found["random"].effect) < 1


def test_the_models_basis_comes_first():
    assert [basis.name for basis in model_bases("random", 8, seed=3)] == ["random", "dct", "identity"]
    own = model_bases("dct", 8, eps=1e-8, dc_weight=2.0)
    assert [(basis.eps, basis.dc_weight) for basis in own] == [(1e-8, 2.0), (1e-8, 1.0), (1e-8, 1.0)]


def test_the_null_of_a_weighted_entropy_is_sampled():
    exact, weighted = make_null(WIDTH, N, 0), make_null(WIDTH, N, 0, dc_weight=2.0)
    assert exact.exact and not weighted.exact
    assert weighted.mean == pytest.approx(float(weighted.sample_N.mean()))
    assert float(exact.sample_N.mean()) == pytest.approx(exact.mean, abs=4 * exact.deviation * N**-0.5)


def test_repeated_tokens_move_the_distance():
    null = make_null(WIDTH, N, 0)
    tokens = torch.randint(50, (N,), generator=torch.Generator().manual_seed(3))
    distinct = measure(gaussian(50), null)["dct"]
    assert repeated_distance(tokens, null, 0) > 4 * distinct.distance_expected
    repeated = whiteness("dct", model_bases("dct", WIDTH)[0].entropy(gaussian(4, 50)[tokens]), null, tokens, 0.0)
    assert repeated.effect_error == pytest.approx(50**-0.5, rel=0.35)  # 50 samples, not 4,000
