"""RoutingTrace: what comes back of each layer and token, and its JSON form."""

import json

import pytest
import torch

from chiar import RoutingTrace
from chiar.errors import InputError
from chiar.kernels.hash import uniform_hash
from chiar.kernels.spectral_entropy import spectral_entropy
from chiar.layers.context import TokenContext
from chiar.model.trace import LayerTrace

ROWS, TOKENS, VOCABULARY = 3, 9, 257


@pytest.fixture
def ids():
    return torch.randint(0, VOCABULARY, (ROWS, TOKENS), generator=torch.Generator().manual_seed(19))


@pytest.fixture
def mask():
    return torch.tensor([[0] * 4 + [1] * 5, [1] * 9, [0] * 2 + [1] * 7])


def run(model, ids, **kwargs):
    with torch.no_grad():
        return model(ids, output_routing=True, **kwargs)


def assert_equal(first, second):
    """Same values of the same types; tensors of the same dtype."""
    assert type(first) is type(second)
    if isinstance(first, torch.Tensor):
        assert first.dtype == second.dtype
        assert torch.equal(first, second)
    elif isinstance(first, list):
        assert len(first) == len(second)
        for one, other in zip(first, second, strict=True):
            assert_equal(one, other)
    elif isinstance(first, RoutingTrace | LayerTrace):
        assert_equal(list(vars(first)), list(vars(second)))
        assert_equal(list(vars(first).values()), list(vars(second).values()))
    else:
        assert first == second


@torch.no_grad()
def entropy_of(decoder, layer, states):
    """H of what a layer's operators read, from the layer's input."""
    config, block = decoder.config, decoder.layers[layer]
    if config.temporal_everywhere:
        states = block.everywhere(states, TokenContext(decoder.basis.transform(), states, None, None, None), None)
    if config.signal == "temporal":
        return block.signal(states)
    return spectral_entropy(states, decoder.basis.transform(), config.entropy_eps, config.entropy_dc_weight)


class TestContent:
    def test_entropy_is_of_the_hidden_states(self, lively, option, ids):
        model = lively(option)
        output = run(model, ids, output_hidden_states=True)
        config = model.config
        assert len(output.routing.layers) == config.num_hidden_layers
        for layer, states in zip(output.routing.layers, output.hidden_states[:-1], strict=True):
            assert torch.equal(layer.entropy_BT, entropy_of(model.model, layer.index, states))

    def test_layers_are_described(self, lively, option, ids):
        model = lively(option)
        routing = run(model, ids).routing
        config = model.config
        assert [layer.index for layer in routing.layers] == list(range(config.num_hidden_layers))
        assert [layer.kind for layer in routing.layers] == config.layer_types
        assert routing.routed_layers == config.routed_layers
        assert routing.gate_pool == (config.gate_pool if config.meta_router else None)
        assert torch.equal(routing.token_ids_BT, ids)
        assert routing.real_BT.dtype == torch.bool and routing.real_BT.all()
        for layer in routing.layers:
            operators = config.operators if layer.kind == "routed" else [layer.kind]
            assert layer.operators == operators
            assert layer.choice_BT.shape == layer.entropy_BT.shape == (ROWS, TOKENS)
            assert layer.weights_BTK.shape == (ROWS, TOKENS, len(operators))
            assert ((layer.choice_BT >= 0) & (layer.choice_BT < len(operators))).all()
            assert (layer.gate_BT is not None) == (layer.index == 0 and config.meta_router)
            learned = layer.kind == "routed" and config.router == "learned"
            assert (layer.probabilities_BTK is not None) == learned

    def test_choices_follow_the_router(self, lively, router_option, ids):
        model = lively(router_option)
        config = model.config
        routing = run(model, ids).routing
        for n, index in enumerate(config.routed_layers):
            layer = routing.layers[index]
            if config.router == "entropy":
                thresholds = config.layer_thresholds()[n]
                assert layer.thresholds == list(thresholds)
                expected = sum((layer.entropy_BT > threshold).long() for threshold in thresholds)
            elif config.router == "learned":
                expected = layer.probabilities_BTK.argmax(-1)
            elif config.router == "static":
                expected = torch.full((ROWS, TOKENS), config.operators.index(config.static_operators[n]))
            else:
                keys = ids if config.random_key == "token" else torch.arange(TOKENS).expand(ROWS, TOKENS)
                number, light = uniform_hash(keys, config.router_seed, index), 1 - config.random_fraction
                bounds = [light] if len(config.operators) == 2 else [light / 2, light]
                expected = sum((number >= bound).long() for bound in bounds)
            assert torch.equal(layer.choice_BT, expected)
            if config.router != "entropy":
                assert layer.thresholds is None

    def test_weights_are_one_hot_or_the_probabilities(self, lively, option, ids):
        model = lively(option)
        for layer in run(model, ids).routing.layers:
            if layer.kind == "routed" and model.config.routing == "soft":
                assert torch.equal(layer.weights_BTK, layer.probabilities_BTK)
                # A softmax over at most three fp32 numbers.
                assert torch.allclose(layer.weights_BTK.sum(-1), torch.ones(ROWS, TOKENS), atol=1e-6, rtol=0)
            else:
                expected = torch.nn.functional.one_hot(layer.choice_BT, len(layer.operators)).float()
                if layer.kind == "routed" and model.config.router_scale == "probability":
                    expected[..., 1] *= 2 * layer.probabilities_BTK[..., 1]
                assert torch.equal(layer.weights_BTK, expected)

    def test_the_gate_mixes_the_first_layer(self, lively, ids):
        model = lively({})
        output = run(model, ids, output_hidden_states=True)
        gate = output.routing.layers[0].gate_BT
        assert gate.shape == (ROWS, TOKENS)
        assert ((gate > 0) & (gate < 1)).all() and gate.std() > 0.01
        model.model.meta_router = None
        ungated = run(model, ids, output_hidden_states=True)
        x, y = ungated.hidden_states[:2]
        expected = gate[..., None] * y + (1 - gate[..., None]) * x
        assert torch.equal(output.hidden_states[1], expected)

    def test_random_choices_follow_their_key(self, lively):
        ids = torch.randint(0, 20, (ROWS, TOKENS))
        by_position = run(lively({"router": "random", "random_key": "position"}), ids).routing.layers[1].choice_BT
        assert (by_position == by_position[0]).all()
        by_token = run(lively({"router": "random", "random_key": "token"}), ids).routing.layers[1].choice_BT
        for token in ids.unique():
            assert len(by_token[ids == token].unique()) == 1

    def test_forced_routes_are_what_was_routed(self, lively, router_option, ids):
        model = lively(router_option)
        forced = {layer: torch.randint(0, 2, (ROWS, TOKENS)) for layer in model.config.routed_layers}
        if model.config.routing == "soft":
            with pytest.raises(InputError, match="cannot be forced under soft routing"):
                run(model, ids, forced_routes=forced)
            return
        free, output = run(model, ids), run(model, ids, forced_routes=forced)
        for layer, choice in forced.items():
            assert torch.equal(output.routing.layers[layer].choice_BT, choice)
        assert (free.logits - output.logits).abs().max() > 0.01

    def test_nothing_is_attached_to_the_graph(self, lively, ids):
        model = lively({"router": "learned", "routing": "soft"}).train()
        for layer in model(ids, output_routing=True).routing.layers:
            tensors = [value for value in vars(layer).values() if isinstance(value, torch.Tensor)]
            assert not any(tensor.requires_grad for tensor in tensors)

    def test_asking_changes_no_output(self, lively, option, ids):
        model = lively(option)
        with torch.no_grad():
            plain = model(ids)
        assert torch.equal(plain.logits, run(model, ids).logits)

    def test_not_returned_unless_asked(self, lively, option, ids):
        model = lively(option)
        with torch.no_grad():
            assert model(ids).routing is None
            assert model.model(ids).routing is None
            assert model(ids, output_routing=False).routing is None

    def test_embeddings_have_no_token_ids(self, lively, ids):
        model = lively({})
        routing = run(model, None, inputs_embeds=model.get_input_embeddings()(ids)).routing
        assert routing.token_ids_BT is None


class TestFractions:
    def trace(self):
        choice = torch.tensor([[2, 0, 1, 2], [1, 1, 2, 2]])
        routed = LayerTrace(
            index=1,
            kind="routed",
            operators=["spectral", "rbf", "attention"],
            choice_BT=choice,
            weights_BTK=torch.nn.functional.one_hot(choice, 3).float(),
        )
        ones, zeros = torch.ones(2, 4, 1), torch.zeros(2, 4).long()
        spectral = LayerTrace(index=0, kind="spectral", operators=["spectral"], choice_BT=zeros, weights_BTK=ones)
        attention = LayerTrace(index=2, kind="attention", operators=["attention"], choice_BT=zeros, weights_BTK=ones)
        real = torch.tensor([[0, 1, 1, 1], [0, 0, 1, 1]]).bool()
        return RoutingTrace([spectral, routed, attention], real)

    def test_padding_is_not_counted(self):
        trace = self.trace()
        # Fractions of five tokens in fp32.
        assert trace.attention_fraction(1) == pytest.approx(3 / 5, abs=1e-7)
        assert trace.operator_use(1) == pytest.approx({"spectral": 1 / 5, "rbf": 1 / 5, "attention": 3 / 5}, abs=1e-7)

    def test_layers_with_one_operator(self):
        trace = self.trace()
        assert trace.attention_fraction(0) == 0.0
        assert trace.attention_fraction(2) == 1.0
        assert trace.operator_use(0) == {"spectral": 1.0}
        assert trace.operator_use(2) == {"attention": 1.0}

    def test_of_a_model(self, lively, router_option, ids, mask):
        routing = run(lively(router_option), ids, attention_mask=mask).routing
        assert torch.equal(routing.real_BT, mask.bool())
        for index in routing.routed_layers:
            choices = [
                int(routing.layers[index].choice_BT[b, t]) for b in range(ROWS) for t in range(TOKENS) if mask[b, t]
            ]
            # Fractions of 21 tokens in fp32.
            use = routing.operator_use(index)
            for k, name in enumerate(routing.layers[index].operators):
                assert use[name] == pytest.approx(choices.count(k) / len(choices), abs=1e-6)
            assert routing.attention_fraction(index) == use["attention"]


class TestJSON:
    @pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
    def test_round_trip_is_exact(self, lively, option, ids, mask, padded):
        trace = run(lively(option), ids, attention_mask=mask if padded else None).routing
        assert_equal(RoutingTrace.from_json(trace.to_json()), trace)

    def test_missing_parts_stay_missing(self, lively, ids):
        model = lively({"preset": "baseline-tiny"})
        trace = run(model, None, inputs_embeds=model.get_input_embeddings()(ids)).routing
        loaded = RoutingTrace.from_json(trace.to_json())
        assert_equal(loaded, trace)
        assert loaded.token_ids_BT is None and loaded.gate_pool is None
        for layer in loaded.layers:
            assert layer.gate_BT is None and layer.probabilities_BTK is None and layer.thresholds is None

    def test_round_trip_of_a_bfloat16_model(self, lively, ids):
        trace = run(lively({"router": "learned", "routing": "soft"}).to(torch.bfloat16), ids).routing
        assert_equal(RoutingTrace.from_json(trace.to_json()), trace)

    def test_it_is_plain_json(self, lively, option, ids, mask):
        def refuse(constant):
            raise AssertionError(f"{constant} is not JSON")

        data = json.loads(run(lively(option), ids, attention_mask=mask).routing.to_json(), parse_constant=refuse)
        assert data["format"] == "chiar-routing-trace/1"
        assert len(data["layers"]) == 4
        assert data["real_BT"] == mask.bool().tolist()

    def test_a_value_that_is_not_a_number_is_refused(self, lively, ids):
        trace = run(lively({}), ids).routing
        trace.layers[1].entropy_BT[0, 0] = float("nan")
        with pytest.raises(ValueError, match="JSON"):
            trace.to_json()

    @pytest.mark.parametrize(
        "text",
        ["{}", '{"format": "chiar-routing-trace/9"}', '{"layers": []}', "[1, 2]", '"text"', "not json"],
        ids=["empty", "other-version", "no-format", "list", "string", "not-json"],
    )
    def test_something_else_is_refused(self, text):
        with pytest.raises(InputError, match="not a routing trace"):
            RoutingTrace.from_json(text)

    def test_a_trace_without_layers_is_refused(self):
        with pytest.raises(InputError, match="layers"):
            RoutingTrace.from_json('{"format": "chiar-routing-trace/1"}')
