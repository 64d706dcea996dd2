"""torch.compile sees each model as one graph, and as the same function."""

import pytest
import torch

from chiar import ChiarForCausalLM, presets

CASES = {
    "baseline": ("baseline-tiny", {}),
    "v1 hard": ("v1-tiny", {"keys": "routed"}),
    "v2 equation": ("v2-tiny", {"spectral_form": "equation"}),
    "v3": ("v3-tiny", {}),
    "v3 causal gate, light FFN off": ("v3-tiny", {"gate_pool": "causal", "light_ffn": False}),
    "v3 hard gate": ("v3-tiny", {"gate_skip_below": 0.95}),
    "v3 soft, pre-norm": ("v3-tiny", {"routing": "soft", "norm_position": "pre", "norm": "rmsnorm"}),
    "v3 selected": ("v3-tiny", {"routing": "hard", "hard_estimator": "selected", "collapse_regulariser": 0.1}),
    "v3 random": ("v3-tiny", {"router": "random"}),
    "temporal": (
        "v3-tiny",
        {"operators": ["temporal", "attention"], "temporal_everywhere": True},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_one_graph_and_the_same_logits(case):
    name, changes = CASES[case]
    torch.manual_seed(0)
    model = ChiarForCausalLM(presets.get(name, dropout=0.0, **changes)).eval()
    ids = torch.arange(24).view(2, 12)
    torch.compiler.reset()
    # The tracer is what could break; its eager backend spares the time of a code generator.
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with torch.no_grad():
        expected, found = model(ids, labels=ids), compiled(ids, labels=ids)
    torch.testing.assert_close(found.logits, expected.logits)
    torch.testing.assert_close(found.loss, expected.loss)


def test_other_thresholds_and_splits_do_not_recompile():
    model = ChiarForCausalLM(presets.get("v3-tiny", dropout=0.0)).eval()
    ids = torch.arange(24).view(2, 12)
    torch.compiler.reset()
    graphs = []

    def count(graph, _):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(model, fullgraph=True, backend=count)
    fractions = set()
    with torch.no_grad():
        for tau in (0.0, 0.79, 1.0):
            model.model.set_thresholds(tau)
            compiled(ids)
            fractions.add(model(ids, output_routing=True).routing.attention_fraction(1))
    assert len(fractions) == 3
    assert len(graphs) == 1
