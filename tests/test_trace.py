"""Routing as data: what a trace says is what the layers did, and its JSON form loses nothing."""

import json

import pytest
import torch

from chiar import RoutingTrace
from chiar.errors import InputError
from chiar.kernels.hash import uniform_hash
from chiar.kernels.spectral_entropy import spectral_entropy

ROWS, TOKENS, VOCABULARY = 3, 9, 257
THREE = ["spectral", "rbf", "attention"]
# Each way of choosing an operator, and what else changes in a trace.
OPTIONS = {
    "baseline": {"preset": "baseline-tiny"},
    "v1": {"preset": "v1-tiny"},
    "v3": {},
    "v4": {"preset": "v4-tiny"},
    "pre-norm": {"norm": "rmsnorm", "norm_position": "pre"},
    "hard-both": {"router": "learned", "routing": "hard"},
    "soft": {"router": "learned", "routing": "soft"},
    "soft-3": {"preset": "v1-tiny", "routing": "soft"},
    "random-token-3": {"router": "random", "operators": THREE, "random_fraction": 0.3},
    "random-position": {"router": "random", "random_key": "position", "router_seed": 3},
    "static-3": {"router": "static", "operators": THREE, "static_operators": ["rbf", "attention"]},
    "entropy-3": {"operators": THREE, "thresholds": [[0.77, 0.82], [0.75, 0.81]]},
    "authors-entropy": {"entropy_eps": 1e-8, "entropy_dc_weight": 2.0},
}
MASK = torch.tensor([[0] * 4 + [1] * 5, [1] * 9, [0] * 2 + [1] * 7])


@pytest.fixture
def ids():
    return torch.randint(0, VOCABULARY, (ROWS, TOKENS), generator=torch.Generator().manual_seed(19))


@pytest.fixture(params=OPTIONS.values(), ids=OPTIONS)
def model(request, lively):
    return lively(request.param)


def run(model, ids, **kwargs):
    with torch.no_grad():
        return model(ids, output_routing=True, **kwargs)


def assert_equal(first, second):
    """The same values; tensors of the same dtype."""
    assert first.to_json() == second.to_json()
    for pair in zip([first, *first.layers], [second, *second.layers], strict=True):
        ours, theirs = ([getattr(v, "dtype", type(v)) for v in vars(one).values()] for one in pair)
        assert ours == theirs


def test_layers_are_described(model, ids):
    config, filtered = model.config, {}
    for index, block in enumerate(model.model.layers):
        if config.temporal_everywhere:  # operators and H then read what the filter along time makes of the states
            block.everywhere.register_forward_hook(lambda _, __, y, index=index: filtered.update({index: y}))
    output = run(model, ids, output_hidden_states=True)
    routing = output.routing
    assert [(layer.index, layer.kind) for layer in routing.layers] == list(enumerate(config.layer_types))
    assert routing.routed_layers == config.routed_layers
    assert routing.gate_pool == (config.gate_pool if config.meta_router else None)
    assert torch.equal(routing.token_ids_BT, ids)
    assert routing.real_BT.dtype == torch.bool and routing.real_BT.all()
    for layer, states in zip(routing.layers, output.hidden_states[:-1], strict=True):
        operators = config.operators if layer.kind == "routed" else [layer.kind]
        assert layer.operators == operators and layer.choice_BT.shape == (ROWS, TOKENS)
        assert ((layer.choice_BT >= 0) & (layer.choice_BT < len(operators))).all()
        assert (layer.gate_BT is not None) == (layer.index == 0 and config.meta_router)
        learned = layer.kind == "routed" and config.router == "learned"
        assert (layer.probabilities_BTK is not None) == learned
        read, transform = filtered.get(layer.index, states), model.model.basis.transform()
        entropy = spectral_entropy(read, transform, config.entropy_eps, config.entropy_dc_weight)
        # H of the states as they came out, computed once more: rounding in fp32.
        torch.testing.assert_close(layer.entropy_BT, entropy, atol=1e-6, rtol=0)
        if learned and config.routing == "soft":
            assert torch.equal(layer.weights_BTK, layer.probabilities_BTK)
            # A softmax over at most three fp32 numbers.
            torch.testing.assert_close(layer.weights_BTK.sum(-1), torch.ones(ROWS, TOKENS), atol=1e-6, rtol=0)
        else:
            expected = torch.nn.functional.one_hot(layer.choice_BT, len(operators)).float()
            if layer.kind == "routed" and config.router_scale == "probability":
                expected[..., 1] *= 2 * layer.probabilities_BTK[..., 1]
            torch.testing.assert_close(layer.weights_BTK, expected, atol=1e-6, rtol=0)


def test_choices_follow_the_router(model, ids):
    config, routing = model.config, run(model, ids).routing
    for n, index in enumerate(config.routed_layers):
        layer = routing.layers[index]
        if config.router == "entropy" and config.target_fraction is None:
            assert layer.thresholds == list(config.layer_thresholds()[n])
            expected = sum((layer.entropy_BT > threshold).long() for threshold in layer.thresholds)
        elif config.router == "entropy":
            expected = (layer.entropy_BT > layer.thresholds[0]).long()
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
        assert (layer.thresholds is not None) == (config.router == "entropy")


def test_the_gate_mixes_the_first_layer(lively, ids):
    model = lively({})
    output = run(model, ids, output_hidden_states=True)
    gate = output.routing.layers[0].gate_BT
    assert gate.shape == (ROWS, TOKENS) and ((gate > 0) & (gate < 1)).all() and gate.std() > 0.01
    model.model.meta_router = None
    x, y = run(model, ids, output_hidden_states=True).hidden_states[:2]
    expected = gate[..., None] * y + (1 - gate[..., None]) * x
    # One blend of fp32 numbers near 1, possibly fused.
    torch.testing.assert_close(output.hidden_states[1], expected, atol=1e-5, rtol=0)


def test_forced_routes_are_what_was_routed(model, ids):
    forced = {layer: torch.randint(0, 2, (ROWS, TOKENS)) for layer in model.config.routed_layers}
    if model.config.routing == "soft":
        with pytest.raises(InputError, match="cannot be forced under soft routing"):
            run(model, ids, forced_routes=forced)
        return
    free, output = run(model, ids), run(model, ids, forced_routes=forced)
    for layer, choice in forced.items():
        assert torch.equal(output.routing.layers[layer].choice_BT, choice)
    assert not forced or (free.logits - output.logits).abs().max() > 0.01


def test_asking_changes_no_output_and_nothing_is_returned_unless_asked_or_attached(model, ids):
    with torch.no_grad():
        plain = model(ids)
        assert plain.routing is model.model(ids).routing is model(ids, output_routing=False).routing is None
    asked = model(ids, output_routing=True)
    # The same program, with H computed beside it.
    torch.testing.assert_close(plain.logits, asked.logits.detach(), atol=1e-5, rtol=0)
    tensors = [value for layer in asked.routing.layers for value in vars(layer).values()]
    assert not any(value.requires_grad for value in tensors if isinstance(value, torch.Tensor))


def test_fractions_leave_padding_out(model, ids):
    routing = run(model, ids, attention_mask=MASK).routing
    assert torch.equal(routing.real_BT, MASK.bool())
    for layer in routing.layers:
        choices = layer.choice_BT[MASK.bool()].tolist()
        use = routing.operator_use(layer.index)
        shares = [choices.count(k) / len(choices) for k in range(len(layer.operators))]
        # Fractions of 21 tokens in fp32.
        assert list(use) == layer.operators and list(use.values()) == pytest.approx(shares, abs=1e-6)
        assert routing.attention_fraction(layer.index) == use.get("attention", 0.0)


def test_json_is_plain_and_exact(model, ids):
    trace = run(model, ids, attention_mask=MASK).routing
    text = trace.to_json()
    assert_equal(RoutingTrace.from_json(text), trace)
    data = json.loads(text, parse_constant=lambda constant: pytest.fail(f"{constant} is not JSON"))
    assert data["format"] == "chiar-routing-trace/1"
    assert len(data["layers"]) == len(trace.layers) and data["real_BT"] == trace.real_BT.tolist()


def test_missing_parts_stay_missing_and_bfloat16_is_exact_too(lively, ids):
    model = lively({"preset": "baseline-tiny"})
    trace = run(model, None, inputs_embeds=model.get_input_embeddings()(ids)).routing
    loaded = RoutingTrace.from_json(trace.to_json())
    assert_equal(loaded, trace)
    assert loaded.token_ids_BT is None and loaded.gate_pool is None
    for layer in loaded.layers:
        assert layer.gate_BT is None and layer.probabilities_BTK is None and layer.thresholds is None
    trace = run(lively({"router": "learned", "routing": "soft"}).to(torch.bfloat16), ids).routing
    assert_equal(RoutingTrace.from_json(trace.to_json()), trace)
    trace.layers[1].entropy_BT[0, 0] = float("nan")
    with pytest.raises(ValueError, match="JSON"):
        trace.to_json()


@pytest.mark.parametrize(
    "text",
    [
        *("{}", '{"format": "chiar-routing-trace/9"}', '{"layers": []}', "[1, 2]", '"text"', "not json"),
        *(f'{{"format": "chiar-routing-trace/1"{rest}}}' for rest in ("", ', "layers": [{"index": 0}]')),
    ],
)
def test_something_else_is_refused(text):
    with pytest.raises(InputError, match="not a routing trace"):
        RoutingTrace.from_json(text)
