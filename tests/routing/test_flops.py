"""Counted FLOPs: the arithmetic of the paper's claims, and agreement with torch's counter."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from chiar import ChiarForCausalLM, presets
from chiar.errors import InputError
from chiar.routing.flops import compare_flops, count_dense_execution, count_flops

LARGE = presets.get("v3-400m")


def squares(count, *parts, layers=None):
    """In units of D²."""
    return count.part(*parts, layers=layers) / LARGE.hidden_size**2


def test_one_attention_layer_costs_8_projections_16_ffn_and_2t_over_d_scores():
    count = count_flops(presets.get("baseline-400m"), 256)
    assert squares(count, "projections", layers=[0]) == 8
    assert squares(count, "ffn", layers=[0]) == 16
    assert squares(count, "scores", layers=[0]) == pytest.approx(2 * 257 / 1024)
    assert squares(count, "logits") == pytest.approx(2 * 50257 / 1024)
    assert count.part("projections", "scores") / count.total == pytest.approx(0.304, abs=1e-3)


@pytest.mark.parametrize(
    ("settings", "saved"),
    [
        pytest.param({"keys": "routed"}, 0.156, id="routed keys"),
        pytest.param({"keys": "all"}, 0.086, id="all keys"),
        pytest.param({"keys": "routed", "light_ffn": False}, 0.421, id="light tokens skip the FFN"),
    ],
)
def test_what_half_the_tokens_save_at_400m_with_a_free_transform(settings, saved):
    assert compare_flops(LARGE, 256, 0.5, transform="free", **settings).total == pytest.approx(saved, abs=1e-3)


def test_the_papers_62_5_percent_is_51_5_weighted_by_cost_and_holds_only_at_t_4d():
    assert compare_flops(LARGE, 256, 0.5, "routed").attention_in_routed_layers == pytest.approx(0.515, abs=1e-3)
    assert compare_flops(LARGE, 4096, 0.5, "routed").attention_in_routed_layers == pytest.approx(0.625, abs=1e-3)


def test_removing_all_attention_at_length_256_saves_less_than_the_paper_claims():
    assert compare_flops(LARGE, 256, 0.0, "routed", transform="free").total < 0.35


def test_light_and_dark_shares_add_up():
    full = count_flops(LARGE, 512, 1.0, "all", transform="free")
    baseline = count_flops(presets.get("baseline-400m"), 512)
    routed = LARGE.routed_layers
    assert full.part("projections", "scores", "ffn", layers=routed) == baseline.part(
        "projections", "scores", "ffn", layers=routed
    )
    nothing = count_flops(LARGE, 512, 0.0, "routed")
    assert nothing.part("projections", "scores", layers=routed) == 0
    # One product for the entropy of every token, two for the filter of light ones.
    assert squares(nothing, "router", layers=[1]) == 2
    assert squares(nothing, "spectral", layers=[1]) == 4


def test_fractions_may_differ_by_layer():
    fractions = [0.0] * 13 + [1.0] * 13
    count = count_flops(LARGE, 256, fractions, "routed")
    assert count.part("projections", layers=range(1, 14)) == 0
    assert squares(count, "projections", layers=[14]) == 8
    assert sum(count.layer(i) for i in range(28)) + count.part("logits") == pytest.approx(count.total)


def test_expected_pairs_match_a_count_over_random_routes():
    """f of the tokens query f of the tokens before them, and themselves."""
    length, fraction = 200, 0.3
    chosen = torch.rand(2000, length, generator=torch.Generator().manual_seed(0)) < fraction
    earlier = chosen.long().cumsum(1) - chosen.long()
    pairs = ((earlier + 1) * chosen).sum(1).double().mean() / length
    counted = count_flops(LARGE, length, fraction, "routed").part("scores", layers=[1]) / (4 * LARGE.hidden_size)
    # 2,000 rows: the Monte-Carlo error of the mean is below 0.5%.
    assert counted == pytest.approx(float(pairs), rel=0.01)


CASES = [("baseline-tiny", {}), ("v1-tiny", {}), ("v2-tiny", {}), ("v3-tiny", {"gate_pool": "causal"})]
CASES += [("v3-tiny", {"gate_pool": "causal", "routing": "soft"}), ("v1-tiny", {"light_ffn": False})]
CASES += [("v2-tiny", {"router": "random"}), ("v2-tiny", {"router": "static"}), ("v2-tiny", {"norm_position": "pre"})]


@pytest.mark.parametrize(("name", "changes"), CASES, ids=lambda value: str(value) or "as is")
def test_dense_execution_agrees_exactly_with_torchs_counter(name, changes):
    model = ChiarForCausalLM(presets.get(name, **changes)).eval()
    model.set_attn_implementation("eager")  # the counter does not see inside the CPU's fused attention
    ids = torch.randint(0, 257, (3, 24))
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(ids)
    assert counter.get_total_flops() == count_dense_execution(model.config, 24).total * ids.numel()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"length": 0}, "length must be at least 1"),
        ({"length": 8, "fraction": 1.5}, "between 0 and 1"),
        ({"length": 8, "fraction": [0.5]}, "1 fractions for 26 routed layers"),
        ({"length": 8, "keys": "al"}, "Did you mean 'all'"),
        ({"length": 8, "transform": "gem"}, "Did you mean 'gemm'"),
    ],
)
def test_bad_input(arguments, message):
    with pytest.raises(InputError, match=message):
        count_flops(LARGE, **arguments)
