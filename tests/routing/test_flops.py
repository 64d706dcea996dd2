"""Counted FLOPs: the arithmetic of the paper's claims, and agreement with torch's counter."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from chiar import ChiarForCausalLM, presets
from chiar.errors import InputError
from chiar.routing.flops import compare_flops, count_dense_execution, count_flops, operator_shares, route_costs
from helpers import router_options

LARGE = presets.get("v3-400m")


def at(fraction, config=LARGE):
    """Shares of one f."""
    return operator_shares(config, fraction)


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


def test_the_papers_claims_at_400m():
    def saved(fraction, length=256, **settings):
        return compare_flops(LARGE, length, at(fraction), **settings)

    for keys, light_ffn, total in (("routed", True, 0.156), ("all", True, 0.086), ("routed", False, 0.421)):
        assert saved(0.5, transform="free", keys=keys, light_ffn=light_ffn).total == pytest.approx(total, abs=1e-3)
    # The paper's 62.5% is 51.5% weighted by cost, and holds only at T = 4D.
    for length, share in ((256, 0.515), (4096, 0.625)):
        assert saved(0.5, length, keys="routed").attention_in_routed_layers == pytest.approx(share, abs=1e-3)
    assert saved(0.0, keys="routed", transform="free").total < 0.35, "of all attention: less than the paper claims"
    for fraction, speedups in ((0.5, (1.019, 1.108, 1.375)), (0.25, (1.058, 1.175, 1.557))):
        for length, expected in zip((256, 2048, 8192), speedups, strict=True):
            savings = saved(fraction, length, keys="routed", transform="gemm")
            assert savings.baseline.total / savings.chiar.total == pytest.approx(expected, abs=1e-3)


def test_light_and_dark_shares_add_up():
    attention, routed = ("projections", "scores"), LARGE.routed_layers
    full = count_flops(LARGE, 512, at(1.0), "all", transform="free")
    baseline = count_flops(presets.get("baseline-400m"), 512)
    assert full.part(*attention, "ffn", layers=routed) == baseline.part(*attention, "ffn", layers=routed)
    nothing = count_flops(LARGE, 512, at(0.0), "routed", transform="gemm")
    assert nothing.part(*attention, layers=routed) == 0
    # One product for the entropy of every token, two for the filter of light ones: to the spectrum and back.
    assert squares(nothing, "router", layers=[1]) == 2
    assert squares(nothing, "spectral", layers=[1]) == 4
    by_layer = count_flops(LARGE, 256, at([0.0] * 13 + [1.0] * 13), "routed")
    assert by_layer.part("projections", layers=range(1, 14)) == 0
    assert squares(by_layer, "projections", layers=[14]) == 8
    assert sum(by_layer.layer(i) for i in range(28)) + by_layer.part("logits") == pytest.approx(by_layer.total)


def test_a_transform_costs_what_its_form_and_basis_say():
    plain = [("gemm", "dct", 2), ("even_odd", "dct", 1), ("free", "dct", 0)]
    for transform, basis, cost in (
        *plain,
        ("even_odd", "random", 2),
        ("even_odd", "identity", 0),
        ("gemm", "identity", 0),
    ):
        count = count_flops(presets.get("v3-400m", basis=basis), 256, at(0.5), transform=transform)
        assert squares(count, "router", layers=[1]) == squares(count, "spectral", layers=[1]) == cost


@pytest.mark.parametrize("config", [LARGE, presets.get("v4-400m")], ids=["v3", "v4, whose first layer is routed"])
@pytest.mark.parametrize("keys", ["all", "routed"])
@pytest.mark.parametrize("light_ffn", [True, False])
def test_routes_weighted_by_their_shares_make_the_layer(config, keys, light_ffn):
    fraction, shares = 0.3, at(0.3, config)
    routes = route_costs(config, 512, shares, keys, light_ffn)
    layer = count_flops(config, 512, shares, keys, light_ffn).layer(config.routed_layers[0])
    assert (1 - fraction) * routes["spectral"] + fraction * routes["attention"] == pytest.approx(layer)
    assert routes["spectral"] < routes["attention"]


def test_shares_that_routers_know_themselves():
    config = presets.get("v3-400m", router="static")
    count = count_flops(config, 256, keys="routed")
    assert [squares(count, "projections", layers=[i]) for i in (1, 2)] == [8, 0]
    with pytest.raises(InputError, match="leave the fraction out"):
        operator_shares(config, 0.5)
    everywhere = presets.get("v3-400m", router="static", static_operators=["attention"] * 26)
    assert compare_flops(everywhere, 256).attention_in_routed_layers == 0
    shares = operator_shares(presets.get("v3-400m", target_fraction=[0.25] * 13 + [0.75] * 13))
    assert (shares[0]["attention"], shares[25]["attention"]) == (0.25, 0.75)
    config = presets.get("v3-400m", router="random", random_fraction=0.25)
    assert count_flops(config, 256).total == count_flops(config, 256, at(0.25, config)).total


def test_soft_routing_runs_every_operator_and_every_path():
    soft = presets.get("v1-tiny", routing="soft", light_ffn=False)
    ffn = count_flops(soft, 24).part("ffn", layers=[1])
    assert ffn == count_dense_execution(soft, 24).part("ffn", layers=[1]) == 2 * 16 * 32**2
    assert count_flops(soft, 24, at(0.3, soft)).total == count_flops(soft, 24).total
    with pytest.raises(InputError, match="add up to 3 under soft"):
        count_flops(soft, 24, [{"spectral": 0.5, "rbf": 0.25, "attention": 0.25}] * 2)


def test_each_operator_of_three_is_counted_by_its_own_share():
    config = presets.get("v1-tiny", keys="routed")
    shares = [{"spectral": 0.5, "rbf": 0.25, "attention": 0.25}, {"spectral": 0.0, "rbf": 1.0, "attention": 0.0}]
    count = count_flops(config, 33, shares, transform="gemm")
    D, m = config.hidden_size, config.rbf_features
    # A quarter of 33 tokens see a quarter of the 16 tokens before them on average, and themselves: 5 pairs.
    assert count.part("spectral", layers=[1]) == 0.5 * 4 * D * D
    assert count.part("projections", layers=[1]) == 0.25 * 8 * D * D
    assert count.part("scores", layers=[1]) == 0.25 * 5 * 4 * D
    assert count.part("rbf", layers=[1]) == 0.25 * (2 * D * m + 4 * m * D + 5 * 8 * m)
    assert count.part("rbf", layers=[2]) == 2 * D * m + 4 * m * D + 17 * 8 * m
    assert count.part("spectral", "projections", "scores", layers=[2]) == 0


def test_expected_pairs_match_a_count_over_random_routes():
    """f of the tokens query f of the tokens before them, and themselves."""
    length, fraction = 200, 0.3
    chosen = torch.rand(2000, length, generator=torch.Generator().manual_seed(0)) < fraction
    earlier = chosen.long().cumsum(1) - chosen.long()
    pairs = ((earlier + 1) * chosen).sum(1).double().mean() / length
    counted = count_flops(LARGE, length, at(fraction), "routed").part("scores", layers=[1]) / (4 * LARGE.hidden_size)
    # 2,000 rows: the Monte-Carlo error of the mean is below 0.5%.
    assert counted == pytest.approx(float(pairs), rel=0.01)


def test_filters_along_time_cost_their_window():
    config = presets.get("v3-400m", operators=["temporal", "attention"], temporal_window=8, light_ffn=False)
    D, count = config.hidden_size, count_flops(config, 256, at(0.25, config), "routed")
    assert count.part("temporal", layers=[1]) == 0.75 * 2 * 8 * D
    assert count.part("temporal", layers=[0, 27]) == count.part("spectral", layers=[1]) == 0
    assert count.part("ffn", layers=[1]) == 0.25 * 16 * D * D
    costs = route_costs(config, 256, at(0.25, config), "routed")
    assert costs["temporal"] == 2 * 8 * D + D * D  # and the router's transform
    everywhere = presets.get("baseline-400m", temporal_everywhere=True)
    more = count_flops(everywhere, 256).total - count_flops(presets.get("baseline-400m"), 256).total
    assert more == 28 * 2 * 16 * D
    assert compare_flops(everywhere, 256).total == pytest.approx(-more / count_flops(everywhere, 256).total, rel=0.01)


CASES = [("baseline-tiny", {}), ("v1-tiny", {}), ("v2-tiny", {}), ("v3-tiny", {"gate_pool": "causal"})]
CASES += [("v3-tiny", {"gate_pool": "causal", "routing": "soft"}), ("v1-tiny", {"light_ffn": False})]
CASES += [("v3-tiny", {"gate_pool": "causal", "basis": basis}) for basis in ("identity", "random")]
CASES += [("v3-tiny", {"gate_pool": "causal", "hidden_size": 33, "num_attention_heads": 1, "positions": "learned"})]
CASES += [("v2-tiny", {"router": "random"}), ("v2-tiny", {"router": "static"}), ("v2-tiny", {"norm_position": "pre"})]
CASES += [("v3-tiny", {"gate_pool": "causal", **router_options("learned scaled")})]


@pytest.mark.parametrize(("name", "changes"), CASES, ids=lambda value: str(value) or "as is")
def test_dense_execution_agrees_exactly_with_torchs_counter(name, changes):
    model = ChiarForCausalLM(presets.get(name, **changes)).eval()
    model.set_attn_implementation("eager")  # the counter does not see inside the CPU's fused attention
    ids = torch.randint(0, 257, (3, 24))
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(ids)
    assert counter.get_total_flops() == count_dense_execution(model.config, 24).total * ids.numel()


def test_bad_input():
    halves = {"spectral": 0.5, "attention": 0.5}
    for message, arguments in {
        "length must be at least 1": {"length": 0},
        "between 0 and 1": {"shares": [{"spectral": 1.5, "attention": -0.5}] * 26},
        "must add up to 1 under threshold": {"shares": [{"spectral": 0.5, "attention": 0.4}] * 26},
        "each of .*attention": {"shares": [{"spectral": 0.5, "rbf": 0.5}] * 26},
        "shares of 1 layers for 26 routed layers": {"shares": [halves]},
        "Did you mean 'all'": {"keys": "al"},
        "Did you mean 'gemm'": {"transform": "gem"},
    }.items():
        with pytest.raises(InputError, match=message):
            count_flops(LARGE, **{"length": 8, **arguments})
    for fraction, message in ((1.5, "between 0 and 1"), ([0.5], "1 fractions for 26 routed")):
        with pytest.raises(InputError, match=message):
            operator_shares(LARGE, fraction)
