"""torch.compile sees each model as one graph, and as the same function."""

import copy

import pytest
import torch

from chiar import ChiarForCausalLM, presets
from chiar.layers import dark
from helpers import router_options, small_config, stack_config, stack_model, token_ids

CASES = {
    "baseline": {"preset": "baseline-tiny"},
    "v1 hard": {"preset": "v1-tiny", "keys": "routed"},
    "v2 equation": {"preset": "v2-tiny", "spectral_form": "equation"},
    "v4": {"preset": "v4-tiny"},
    "v3 causal gate, light FFN off": {"gate_pool": "causal", "light_ffn": False},
    "v3 hard gate": {"gate_skip_below": 0.95},
    "v3 soft, pre-norm": {"routing": "soft", "norm_position": "pre", "norm": "rmsnorm"},
    "v3 selected": {"routing": "hard", "hard_estimator": "selected", "collapse_regulariser": 0.1},
    "v3 random": {"router": "random"},
    "temporal": {"operators": ["temporal", "attention"], "temporal_everywhere": True},
    "v5": {"preset": "v5-tiny", "window": 5},
    "v5 boundary, smoothed": {"preset": "v5-tiny", "router": "boundary", "carry": "smoothed", "inner_size": 24},
}


@pytest.fixture
def compiled_once():
    """Compiles as one graph, by a backend that spares the time of a code generator, and counts the graphs."""
    torch.compiler.reset()
    graphs = []

    def count(graph, _):
        graphs.append(graph)
        return graph.forward

    yield lambda model: torch.compile(model, fullgraph=True, dynamic=False, backend=count)
    assert len(graphs) == 1


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_one_graph_and_the_same_logits(case, compiled_once):
    torch.manual_seed(0)
    model, ids = ChiarForCausalLM(small_config(num_hidden_layers=3, **case)).eval(), token_ids(2, 12)
    with torch.no_grad():
        expected, found = model(ids, labels=ids), compiled_once(model)(ids, labels=ids)
    torch.testing.assert_close(found.logits, expected.logits)
    torch.testing.assert_close(found.loss, expected.loss)


def test_other_thresholds_and_splits_do_not_recompile(compiled_once):
    model, ids = ChiarForCausalLM(presets.get("v3-tiny", dropout=0.0, num_hidden_layers=3)).eval(), token_ids(2, 12)
    compiled, fractions = compiled_once(model), set()
    with torch.no_grad():
        for tau in (0.0, 0.79, 1.0):
            model.model.set_thresholds(tau)
            compiled(ids)
            fractions.add(model(ids, output_routing=True).routing.attention_fraction(1))
    assert len(fractions) == 3


@pytest.mark.parametrize("light", ["spectral", "temporal"])
def test_one_graph_of_sparse_execution_serves_every_split(light, compiled_once):
    changes = {"execution": "sparse", "keys": "routed", "norm_position": "pre", "light_ffn": False}
    layers = {"layer_types": ["routed", "routed"], "operators": [light, "attention"], "meta_router": False}
    config = small_config(**changes, **layers)
    model, ids = ChiarForCausalLM(config).eval(), token_ids(2, 12)
    compiled, drawn = compiled_once(model), torch.rand(2, 12)
    for fraction in (0.0, 0.3, 1.0):
        forced = dict.fromkeys(config.routed_layers, (drawn < fraction).long())
        torch.testing.assert_close(compiled(ids, forced_routes=forced).logits, model(ids, forced_routes=forced).logits)


@pytest.mark.parametrize("option", ["quantile", "learned scaled", "routed keys"])
def test_one_graph_serves_all_training_steps(option, compiled_once):
    torch.manual_seed(0)
    changes = {**router_options(option), "layer_types": ["routed", "attention"], "target_fraction": 0.4}
    model = ChiarForCausalLM(small_config(**changes)).train()
    plain, compiled = copy.deepcopy(model), compiled_once(model)
    for step in range(3):
        ids = token_ids(4, 16, seed=step)
        losses = [each(ids, labels=ids).loss for each in (compiled, plain)]
        for loss in losses:
            loss.backward()
        torch.testing.assert_close(*losses)
    for name, value in plain.model.router_state.state_dict().items():
        torch.testing.assert_close(model.model.router_state.state_dict()[name], value, msg=name)


@pytest.fixture
def packed(monkeypatch):
    """Dark tokens one text behind the other, as on a GPU; attention of these is then its definition."""
    monkeypatch.setattr(dark, "has_flash", lambda x: True)


@pytest.mark.parametrize("router", ["rise", "learned", "boundary", "space"])
def test_one_graph_of_a_dark_stack_serves_all_training_steps(router, packed, compiled_once):
    torch.manual_seed(0)
    model = ChiarForCausalLM(stack_config(router=router)).train()
    plain, compiled = copy.deepcopy(model), compiled_once(model)
    plain.config.execution = "dense"
    for step in range(3):
        ids = token_ids(4, 16, seed=step, vocabulary=model.config.vocab_size)
        forced = {1: (torch.rand(4, 16) < 0.1 * step).long()}  # few enough to have room
        losses = [each(ids, labels=ids, forced_routes=forced).loss for each in (compiled, plain)]
        for loss in losses:
            loss.backward()
        torch.testing.assert_close(*losses)
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-5, rtol=1e-4, msg=name)


def test_a_compiled_evaluation_leaves_no_dark_token_out(packed, compiled_once):
    model, ids = stack_model(), token_ids(4, 16)
    model.config.execution = "sparse"
    forced = {1: torch.ones_like(ids)}
    with torch.no_grad():
        found = compiled_once(model)(ids, forced_routes=forced).logits
        torch.testing.assert_close(found, model(ids, forced_routes=forced).logits)


def test_a_compiled_backward_pass_reads_the_state_of_its_forward_pass():
    """Compilers may read a buffer again instead of keeping a copy, and by then it has moved."""
    torch.manual_seed(0)
    changes = {**router_options("learned scaled"), "layer_types": ["routed"]}
    model = ChiarForCausalLM(small_config(**changes)).train()
    plain, ids = copy.deepcopy(model), token_ids(4, 16)
    torch.compiler.reset()
    torch.compile(model, backend="aot_eager")(ids, labels=ids).loss.backward()
    plain(ids, labels=ids).loss.backward()
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        # Operators are taken apart, so sums run in another order, in fp32.
        torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-6, rtol=1e-4, msg=name)
