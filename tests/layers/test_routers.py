"""Routers: exact thresholds, straight-through gradients, controls, forced routes, precision."""

import pytest
import torch

from chiar.errors import InputError
from chiar.kernels.transform import Transform
from chiar.layers import routers
from chiar.layers.context import TokenContext
from chiar.layers.routers import EntropyRouter, LearnedRouter, RandomRouter, StaticRouter
from helpers import random_model, small_config, token_ids

WIDTH = 6


def context(ids_BT=None, positions_BT=None):
    return TokenContext(transform=Transform(), positions_BT=positions_BT, real_BT=None, token_ids_BT=ids_BT, rope=None)


def states(*shape, seed=0):
    return torch.randn(*shape, WIDTH, generator=torch.Generator().manual_seed(seed))


def just_above(value):
    return torch.nextafter(torch.tensor(value), torch.tensor(2.0))


def just_below(value):
    return torch.nextafter(torch.tensor(value), torch.tensor(-1.0))


class TestEntropyRouter:
    @pytest.mark.parametrize("tau", [0.0, 0.5, 0.8954, 1.0])
    def test_entropy_equal_to_the_threshold_is_light(self, tau):
        entropy_BT = torch.stack([just_below(tau), torch.tensor(tau), just_above(tau)])[None].requires_grad_()
        route = EntropyRouter((tau,))(states(1, 3), entropy_BT, context(), None)
        assert route.choice_BT.tolist() == [[0, 0, 1]]
        assert route.weights_BTK.tolist() == [[[1, 0], [1, 0], [0, 1]]]
        assert route.probabilities_BTK is None
        assert not route.weights_BTK.requires_grad

    @pytest.mark.parametrize(("low", "high"), [(0.7, 0.9), (0.5, 0.5)])
    def test_two_thresholds_cut_three_operators(self, low, high):
        values = [just_below(low), torch.tensor(low), just_above(low), torch.tensor(high), just_above(high)]
        route = EntropyRouter((low, high))(states(1, 5), torch.stack(values)[None], context(), None)
        expected = [0, 0, 1, 1, 2] if low < high else [0, 0, 2, 0, 2]
        assert route.choice_BT.tolist() == [expected]
        assert torch.equal(route.weights_BTK[0], torch.eye(3)[expected])


def scored_router(routing, estimator="both", operators=2, seed=0):
    router = LearnedRouter(WIDTH, operators, routing, estimator)
    with torch.no_grad():
        for parameter in router.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed)))
    return router


def softmax_by_hand(router, x_BTD, entropy_BT):
    features = torch.cat([x_BTD, entropy_BT[..., None]], dim=-1)
    return (features @ router.score.weight.T + router.score.bias).softmax(-1)


def gradients(router, x_BTD, entropy_BT, weights_of, values_BTK):
    """Gradients of Σ w·v, the blend of operator outputs, on the router's weights and inputs."""
    inputs = [x_BTD.clone().requires_grad_(), entropy_BT.clone().requires_grad_()]
    loss = (weights_of(*inputs) * values_BTK).sum()
    return torch.autograd.grad(loss, [*inputs, *router.parameters()])


@pytest.mark.parametrize("operators", [2, 3], ids=["two", "three"])
class TestLearnedRouter:
    def data(self, operators):
        generator = torch.Generator().manual_seed(1)
        return states(2, 5), torch.rand(2, 5, generator=generator), torch.randn(2, 5, operators, generator=generator)

    def test_forced_soft_routes_change_the_choice_and_no_weight(self, operators):
        router, (x_BTD, entropy_BT, _) = scored_router("soft", operators=operators), self.data(operators)
        forced_BT = torch.arange(10).view(2, 5) % operators
        free, forced = (router(x_BTD, entropy_BT, context(), choice) for choice in (None, forced_BT))
        assert torch.equal(forced.choice_BT, forced_BT)
        torch.testing.assert_close(forced.weights_BTK, free.weights_BTK)

    @pytest.mark.parametrize("estimator", ["both", "selected"])
    def test_hard_weights_are_exactly_one_hot_at_the_argmax(self, operators, estimator):
        router, (x_BTD, entropy_BT, values_BTK) = scored_router("hard", estimator, operators), self.data(operators)
        route = router(x_BTD, entropy_BT, context(), None)
        assert route.choice_BT.unique().numel() > 1
        assert torch.equal(route.choice_BT, softmax_by_hand(router, x_BTD, entropy_BT).argmax(-1))
        assert torch.equal(route.weights_BTK, torch.eye(operators)[route.choice_BT])
        forced_BT = torch.arange(10).view(2, 5) % operators
        forced = router(x_BTD, entropy_BT, context(), forced_BT)
        assert torch.equal(forced.choice_BT, forced_BT)
        assert torch.equal(forced.weights_BTK, torch.eye(operators)[forced_BT])
        (forced.weights_BTK * values_BTK).sum().backward()
        assert router.score.weight.grad.abs().max() > 1e-3, "forced routes keep the router's gradient"

    @pytest.mark.parametrize("estimator", ["both", "selected"])
    def test_gradients(self, operators, estimator):
        """Of both: that of the soft blend. Of selected: d(p / stopgrad p) = d log p, of the chosen operator only."""
        router, (x_BTD, entropy_BT, values_BTK) = scored_router("hard", estimator, operators), self.data(operators)
        chosen_BTK = torch.eye(operators)[router(x_BTD, entropy_BT, context(), None).choice_BT]

        def weights_of(x, h):
            return router(x, h, context(), None).weights_BTK

        def by_hand(x, h):
            p_BTK = softmax_by_hand(router, x, h)
            return p_BTK if estimator == "both" else chosen_BTK * p_BTK.log()

        got = gradients(router, x_BTD, entropy_BT, weights_of, values_BTK)
        # fp32 sums over ten tokens.
        expected = gradients(router, x_BTD, entropy_BT, by_hand, values_BTK)
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
        with torch.no_grad():
            router.score.bias[0] = 300.0
        for gradient in gradients(router, x_BTD, entropy_BT, weights_of, values_BTK):
            assert torch.isfinite(gradient).all(), "where a probability underflows"
        assert (weights_of(x_BTD, entropy_BT)[..., 0] == 1).all()


class TestRandomRouter:
    @pytest.mark.parametrize("operators", [2, 3], ids=["two", "three"])
    @pytest.mark.parametrize("fraction", [0.0, 0.25, 1.0])
    @pytest.mark.parametrize("key", ["token", "position"])
    def test_fraction_sent_to_attention(self, operators, fraction, key):
        keys_BT = torch.arange(20_000).view(2, -1)
        router = RandomRouter(1, operators, key, fraction, seed=0)
        given = context(keys_BT, torch.zeros_like(keys_BT)) if key == "token" else context(None, keys_BT)
        route = router(states(2, 10_000), None, given, None)
        shares = torch.bincount(route.choice_BT.flatten(), minlength=operators) / 20_000
        # Four standard errors of a fraction of 20,000 draws are at most 0.0142.
        assert float(shares[-1]) == pytest.approx(fraction, abs=0.0142 if 0 < fraction < 1 else 0)
        for light_share in shares[:-1]:
            assert float(light_share) == pytest.approx((1 - fraction) / (operators - 1), abs=0.0142)
        assert torch.equal(route.weights_BTK, torch.eye(operators)[route.choice_BT])

    def test_same_key_same_route(self):
        ids_BT, positions_BT = token_ids(4, 50), torch.arange(50).expand(4, 50)
        for key, keys_BT in (("token", ids_BT), ("position", positions_BT)):
            route = RandomRouter(1, 2, key, 0.5, seed=0)(states(4, 50), None, context(ids_BT, positions_BT), None)
            assert all(route.choice_BT[keys_BT == value].unique().numel() == 1 for value in keys_BT.unique())
            assert route.choice_BT.unique().numel() == 2

    @pytest.mark.parametrize("changed", [{"layer": 2}, {"seed": 1}], ids=["layer", "seed"])
    def test_depends_on_layer_and_seed(self, changed):
        ids_BT = torch.arange(1000)[None]
        first, second = (
            RandomRouter(operators=2, key="token", fraction=0.5, **{"layer": 1, "seed": 0, **fields})(
                states(1, 1000), None, context(ids_BT), None
            ).choice_BT
            for fields in ({}, changed)
        )
        # Independent halves agree on half of the tokens; four standard errors of 1000 draws are 0.063.
        assert float((first == second).float().mean()) == pytest.approx(0.5, abs=0.063)

    def test_token_key_without_token_ids_is_an_error(self):
        router = RandomRouter(1, 2, "token", 0.5, seed=0)
        with pytest.raises(InputError, match=r"input_ids.*random_key='position'"):
            router(states(1, 3), None, context(None, torch.arange(3)[None]), None)


@pytest.mark.parametrize(
    ("chosen", "fractions"), [(None, [1.0, 0.0, 1.0]), (["spectral", "attention", "attention"], [0.0, 1.0, 1.0])]
)
def test_static_layers(chosen, fractions):
    model = random_model(small_config(num_hidden_layers=5, router="static", static_operators=chosen))
    trace = model(token_ids(), output_routing=True).routing
    assert [trace.attention_fraction(layer) for layer in (1, 2, 3)] == fractions


MAKES = {
    "entropy": ({}, EntropyRouter),
    "hard": ({"routing": "hard"}, LearnedRouter),
    "random": ({"router": "random"}, RandomRouter),
    "static": ({"router": "static"}, StaticRouter),
}


@pytest.mark.parametrize(("fields", "kind"), MAKES.values(), ids=MAKES)
def test_configuration_names_the_router_and_forced_routes_reach_the_layer_named(fields, kind):
    model = random_model(small_config(num_hidden_layers=5, **fields))
    assert type(model.model.layers[1].router) is kind
    free = model(token_ids(), output_routing=True).routing
    forced_BT = 1 - free.layers[2].choice_BT
    trace = model(token_ids(), output_routing=True, forced_routes={2: forced_BT}).routing
    assert torch.equal(trace.layers[2].choice_BT, forced_BT)
    assert torch.equal(trace.layers[1].choice_BT, free.layers[1].choice_BT)


@pytest.mark.parametrize("operators", [2, 3, 4])
def test_scores_of_a_compiled_layer_are_those_of_a_plain_one(monkeypatch, operators):
    torch.manual_seed(0)
    router = LearnedRouter(WIDTH, operators, "soft").double()
    x, entropy = states(2, 5).double().requires_grad_(), torch.rand(2, 5, dtype=torch.float64, requires_grad=True)
    inputs = [x, entropy, *router.parameters()]
    true = router.score(torch.cat([x, entropy[..., None]], dim=-1))
    grad = torch.randn_like(true)
    for compiled in (False, True):
        monkeypatch.setattr(routers, "joins_a_norm", lambda _, compiled=compiled: compiled)
        found = router.scores(x, entropy)
        torch.testing.assert_close(found, true)
        ours, theirs = (torch.autograd.grad(y, inputs, grad, retain_graph=True) for y in (found, true))
        torch.testing.assert_close(ours, theirs)


def test_each_routed_layer_gets_its_own_thresholds():
    config = small_config(num_hidden_layers=5, thresholds=[0.1, 0.2, 0.3])
    assert [config.router_kind.make(config, layer).values for layer in config.routed_layers] == [(0.1,), (0.2,), (0.3,)]
