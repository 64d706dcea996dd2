"""Where a tie goes, gradients by hand, the controls. What routers decide otherwise tests/transcription.py says."""

import pytest
import torch

from chiar.errors import InputError
from chiar.kernels.transform import Transform
from chiar.layers import routers
from chiar.layers.context import TokenContext
from chiar.layers.routers import EntropyRouter, LearnedRouter
from helpers import random_model, small_config, token_ids

WIDTH = 6
OPERATORS = {2: ["spectral", "attention"], 3: ["spectral", "rbf", "attention"]}


def context(ids_BT=None, positions_BT=None):
    return TokenContext(transform=Transform(), positions_BT=positions_BT, real_BT=None, token_ids_BT=ids_BT, rope=None)


def states(*shape, seed=0):
    return torch.randn(*shape, WIDTH, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("cuts", [(0.0,), (0.8954,), (1.0,), (0.7, 0.9), (0.5, 0.5)], ids=str)
def test_entropy_equal_to_a_threshold_is_on_its_light_side(cuts):
    taus = torch.tensor(cuts)
    below, above = taus.nextafter(torch.tensor(-1.0)), taus.nextafter(torch.tensor(2.0))
    entropy_BT = torch.cat([below, taus, above])[None].requires_grad_()
    config = small_config(thresholds=[cuts] * 2, operators=OPERATORS[len(cuts) + 1])
    route = EntropyRouter(config, 1)(states(*entropy_BT.shape), entropy_BT, context(), None)
    lower = torch.tensor([sum(cut < tau for cut in cuts) for tau in cuts])  # cuts that lie truly below
    upper = torch.tensor([sum(cut <= tau for cut in cuts) for tau in cuts])
    assert torch.equal(route.choice_BT[0], torch.cat([lower, lower, upper]))
    assert torch.equal(route.weights_BTK, torch.eye(len(cuts) + 1)[route.choice_BT])
    assert route.probabilities_BTK is None and not route.weights_BTK.requires_grad


def learned_router(operators, **fields):
    config = small_config(hidden_size=WIDTH, num_attention_heads=1, operators=OPERATORS[operators], **fields)
    return LearnedRouter(config, 1)


@pytest.mark.parametrize("operators", [2, 3], ids=["two", "three"])
@pytest.mark.parametrize("estimator", ["both", "selected"])
def test_gradients_of_hard_routing(operators, estimator):
    """Of both: that of the soft blend. Of selected: d(p / stopgrad p) = d log p, of the chosen operator only."""
    generator = torch.Generator().manual_seed(1)
    router = learned_router(operators, routing="hard", hard_estimator=estimator)
    for parameter in router.parameters():
        torch.nn.init.normal_(parameter, generator=generator)
    x_BTD, entropy_BT = states(2, 5), torch.rand(2, 5, generator=generator)
    values_BTK = torch.randn(2, 5, operators, generator=generator)
    route = router(x_BTD, entropy_BT, context(), None)
    chosen_BTK = torch.eye(operators)[route.choice_BT]
    assert route.choice_BT.unique().numel() > 1
    assert torch.equal(route.weights_BTK, chosen_BTK), "exactly one-hot"

    def weights_of(x, h):
        return router(x, h, context(), None).weights_BTK

    def by_hand(x, h):
        p_BTK = router.score(torch.cat([x, h[..., None]], dim=-1)).softmax(-1)
        return p_BTK if estimator == "both" else chosen_BTK * p_BTK.log()

    def gradients(weigh):
        """Of Σ w·v, the blend of operator outputs, on the router's weights and inputs."""
        inputs = [x_BTD.clone().requires_grad_(), entropy_BT.clone().requires_grad_()]
        return torch.autograd.grad((weigh(*inputs) * values_BTK).sum(), [*inputs, *router.parameters()])

    # fp32 sums over ten tokens.
    torch.testing.assert_close(gradients(weights_of), gradients(by_hand), atol=1e-5, rtol=1e-5)
    with torch.no_grad():
        router.score.bias[0] = 300.0
    assert all(gradient.isfinite().all() for gradient in gradients(weights_of)), "where a probability underflows"
    assert (weights_of(x_BTD, entropy_BT)[..., 0] == 1).all()


@pytest.mark.parametrize("operators", OPERATORS.values(), ids=len)
@pytest.mark.parametrize("fraction", [0.0, 0.25, 1.0])
@pytest.mark.parametrize("key", ["token", "position"])
def test_a_random_router_sends_its_fraction_to_attention_by_its_key_alone(operators, fraction, key):
    fields = {"router": "random", "random_key": key, "random_fraction": fraction, "operators": operators}
    config, other_seed = small_config(**fields), small_config(**fields, router_seed=1)
    keys_BT = torch.arange(20_000).view(2, -1)
    given = context(keys_BT, torch.zeros_like(keys_BT)) if key == "token" else context(None, keys_BT)

    def choice(config, layer):
        return config.router_kind.make(config, layer)(states(2, 10_000), None, given, None).choice_BT

    shares = torch.bincount(choice(config, 1).flatten(), minlength=len(operators)) / 20_000
    # Four standard errors of a fraction of 20,000 draws are at most 0.0142.
    assert float(shares[-1]) == pytest.approx(fraction, abs=0.0142 if 0 < fraction < 1 else 0)
    for light_share in shares[:-1]:
        assert float(light_share) == pytest.approx((1 - fraction) / (len(operators) - 1), abs=0.0142)
    if fraction == 0.25:
        assert not torch.equal(choice(config, 1), choice(config, 2)), "each layer has its own"
        assert not torch.equal(choice(config, 1), choice(other_seed, 1))


def test_hashing_tokens_without_token_ids_is_an_error():
    config = small_config(router="random")
    with pytest.raises(InputError, match=r"input_ids.*random_key='position'"):
        config.router_kind.make(config, 1)(states(1, 3), None, context(None, torch.arange(3)[None]), None)


def test_static_layers():
    chosen = ["spectral", "attention", "attention"]
    model = random_model(small_config(num_hidden_layers=5, router="static", static_operators=chosen))
    trace = model(token_ids(), output_routing=True).routing
    assert [trace.attention_fraction(layer) for layer in (1, 2, 3)] == [0.0, 1.0, 1.0]


@pytest.mark.parametrize("operators", [2, 3])
def test_scores_of_a_compiled_layer_are_those_of_a_plain_one(monkeypatch, operators):
    torch.manual_seed(0)
    router = learned_router(operators, routing="soft").double()
    x, entropy = states(2, 5).double().requires_grad_(), torch.rand(2, 5, dtype=torch.float64, requires_grad=True)
    inputs = [x, entropy, *router.parameters()]
    true = router.score(torch.cat([x, entropy[..., None]], dim=-1))
    grad = torch.randn_like(true)
    for compiled in (False, True):
        monkeypatch.setattr(routers, "joins_a_norm", lambda _, compiled=compiled: compiled)
        found = router.scores(x, entropy, None)
        torch.testing.assert_close(found, true)
        ours, theirs = (torch.autograd.grad(y, inputs, grad, retain_graph=True) for y in (found, true))
        torch.testing.assert_close(ours, theirs)
