"""Routing as data: what a trace says is what the layers did, and its JSON form loses nothing. That choices, weights, H
and the gate are the specification's, test_against_transcription.py says."""

import json

import pytest
import torch

from chiar import RoutingTrace
from chiar.errors import InputError
from chiar.kernels.hash import uniform_hash
from chiar.kernels.spectral_entropy import spectral_entropy
from helpers import ROWS, TOKENS

THREE = ["spectral", "rbf", "attention"]
SOFT = {"router": "learned", "routing": "soft"}
CONTROLS = {
    "random-token-3": {"router": "random", "operators": THREE, "random_fraction": 0.3},
    "random-position": {"router": "random", "random_key": "position", "router_seed": 3},
    "static-3": {"router": "static", "operators": THREE, "static_operators": ["rbf", "attention"]},
}
# Each way of choosing an operator, and what else changes in a trace.
OPTIONS = {
    "baseline": {"preset": "baseline-tiny"},
    "v1": {"preset": "v1-tiny"},
    "v3": {},
    "v4": {"preset": "v4-tiny"},
    "pre-norm": {"norm": "rmsnorm", "norm_position": "pre"},
    "soft": SOFT,
    "v5": {"preset": "v5-tiny"},
    "v5-learned": {"preset": "v5-tiny", "router": "learned"},
    "v5-forecast": {"preset": "v5-tiny", "router": "forecast"},
    "entropy-3": {"operators": THREE, "thresholds": [[0.77, 0.82], [0.75, 0.81]]},
    "authors-entropy": {"entropy_eps": 1e-8, "entropy_dc_weight": 2.0},
    **CONTROLS,
}


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
    config, output = model.config, run(model, ids, output_hidden_states=True)
    routing, thresholds = output.routing, dict(zip(config.routed_layers, config.layer_thresholds(), strict=True))
    assert [(layer.index, layer.kind) for layer in routing.layers] == list(enumerate(config.layer_types))
    assert routing.routed_layers == config.routed_layers
    assert routing.gate_pool == (config.gate_pool if config.meta_router else None)
    assert torch.equal(routing.token_ids_BT, ids)
    assert routing.real_BT.dtype == torch.bool and routing.real_BT.all()
    for layer, states in zip(routing.layers, output.hidden_states[:-1], strict=True):
        routed = layer.kind in ("routed", "dark")
        assert layer.operators == (config.operators if routed else [layer.kind])
        assert layer.choice_BT.shape == (ROWS, TOKENS)
        assert ((layer.choice_BT >= 0) & (layer.choice_BT < len(layer.operators))).all()
        assert (layer.gate_BT is not None) == (layer.index == 0 and config.meta_router)
        assert (layer.probabilities_BTK is not None) == (routed and config.router == "learned")
        assert (layer.thresholds is not None) == (routed and config.router_kind.score is not None)
        assert layer.entropy_name == (config.router_kind.score if layer.thresholds else "spectral entropy")
        if layer.thresholds and config.target_fraction is None:
            assert layer.thresholds == list(thresholds[layer.index])
        if not config.temporal_everywhere:  # operators and H then read what the temporal filter makes of the states
            eps, dc_weight = config.entropy_eps, config.entropy_dc_weight
            entropy = spectral_entropy(states, model.model.basis.transform(), eps, dc_weight)
            # H of the states as they came out, computed once more: rounding in fp32.
            torch.testing.assert_close(layer.entropy_BT, entropy, atol=1e-6, rtol=0)


@pytest.mark.parametrize("control", CONTROLS.values(), ids=CONTROLS)
def test_controls_choose_as_they_say(lively, control, ids):
    model = lively(control)
    config, routing = model.config, run(model, ids).routing
    for n, index in enumerate(config.routed_layers):
        if config.router == "static":
            expected = torch.full((ROWS, TOKENS), config.operators.index(config.static_operators[n]))
        else:
            keys = ids if config.random_key == "token" else torch.arange(TOKENS).expand(ROWS, TOKENS)
            number, light = uniform_hash(keys, config.router_seed, index), 1 - config.random_fraction
            bounds = [light] if len(config.operators) == 2 else [light / 2, light]
            expected = sum((number >= bound).long() for bound in bounds)
        assert torch.equal(routing.layers[index].choice_BT, expected)


def test_a_stack_is_one_part_and_says_which_entropy_it_cut(lively, ids):
    layers = ["attention", "dark", "dark", "attention", "dark"]
    names = {name: name for name in ("predictive", "forecast", "spectral")}
    names |= {"rise": "rise of the predictive", "learned": "spectral"}
    for router in (*names, "space", "stride", "random", "boundary"):
        model = lively({"preset": "v5-tiny", "router": router, "layer_types": layers, "vocab_size": 257})
        routing = run(model, ids).routing
        assert routing.parts == [[0], [1, 2], [3], [4]] and routing.routed_layers == [1, 4]
        first, second = routing.layers[1:3]
        assert torch.equal(first.choice_BT, second.choice_BT) and routing.coloured_by is first
        assert first.entropy_name == f"{names.get(router, 'predictive')} entropy"
        if first.thresholds:
            assert torch.equal(first.entropy_BT > first.thresholds[0], first.choice_BT == 1)
    assert run(lively({}), ids).routing.coloured_by is None


def test_soft_routes_cannot_be_forced(lively, ids):
    with pytest.raises(InputError, match="cannot be forced under soft routing"):
        run(lively(SOFT), ids, forced_routes={1: torch.zeros_like(ids)})


def test_asking_changes_no_output_and_nothing_is_returned_unless_asked_or_attached(model, ids):
    with torch.no_grad():
        plain = model(ids)
        assert plain.routing is model.model(ids).routing is model(ids, output_routing=False).routing is None
    asked = model(ids, output_routing=True)
    # The same program, with H computed beside it.
    torch.testing.assert_close(plain.logits, asked.logits.detach(), atol=1e-5, rtol=0)
    tensors = [value for layer in asked.routing.layers for value in vars(layer).values()]
    assert not any(value.requires_grad for value in tensors if isinstance(value, torch.Tensor))


def test_padded_rows_in_fractions_and_json(model, ids, left_mask):
    trace = run(model, ids, attention_mask=left_mask).routing
    assert torch.equal(trace.real_BT, left_mask.bool())
    for layer in trace.layers:
        choices = layer.choice_BT[left_mask.bool()].tolist()
        use = trace.operator_use(layer.index)
        shares = [choices.count(k) / len(choices) for k in range(len(layer.operators))]
        # Fractions of 21 tokens in fp32.
        assert list(use) == layer.operators and list(use.values()) == pytest.approx(shares, abs=1e-6)
        assert trace.attention_fraction(layer.index) == use.get("attention", 0.0)
    text = trace.to_json()
    assert_equal(RoutingTrace.from_json(text), trace)
    data = json.loads(text, parse_constant=lambda constant: pytest.fail(f"{constant} is not JSON"))
    assert data["format"] == "chiar-routing-trace/1"


def test_missing_parts_stay_missing_and_bfloat16_is_exact_too(lively, ids):
    model = lively({"preset": "baseline-tiny"})
    trace = run(model, None, inputs_embeds=model.get_input_embeddings()(ids)).routing
    loaded = RoutingTrace.from_json(trace.to_json())
    assert_equal(loaded, trace)
    assert loaded.token_ids_BT is None and loaded.gate_pool is None
    trace = run(lively(SOFT).to(torch.bfloat16), ids).routing
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
