"""Counted FLOPs: the arithmetic of the paper's claims, and agreement with torch's counter."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from chiar import ChiarForCausalLM, presets
from chiar.errors import InputError
from chiar.registry import ROUTERS, built_in
from chiar.routing.flops import (
    baseline_of,
    compare_flops,
    count_dense_execution,
    count_flops,
    operator_shares,
    route_costs,
)
from helpers import router_options

ATTENTION = ("projections", "scores")


def large(fraction=None, preset="v3-400m", **changes):
    """A configuration of 400M parameters, and the shares of one f."""
    config = presets.get(preset, **changes)
    return config, operator_shares(config, fraction)


def counted(fraction, length, transform="even_odd", **changes):
    config, shares = large(fraction, **changes)
    return count_flops(config, length, shares, transform)


def squares(count, *parts, layers=None):
    """In units of D²."""
    return count.part(*parts, layers=layers) / 1024**2


def test_the_papers_claims_at_400m():
    def saved(fraction, length=256, transform="even_odd", **changes):
        config, shares = large(fraction, **{"keys": "routed", **changes})
        return compare_flops(config, length, shares, transform)

    for keys, light_ffn, total in (("routed", True, 0.156), ("all", True, 0.086), ("routed", False, 0.421)):
        assert saved(0.5, transform="free", keys=keys, light_ffn=light_ffn).total == pytest.approx(total, abs=1e-3)
    # The paper's 62.5% is 51.5% weighted by cost, and holds only at T = 4D.
    for length, share in ((256, 0.515), (4096, 0.625)):
        assert saved(0.5, length).attention_in_routed_layers == pytest.approx(share, abs=1e-3)
    assert saved(0.0, transform="free").total < 0.35, "without any attention, still less than the paper claims"
    for fraction, speedups in ((0.5, (1.019, 1.108, 1.375)), (0.25, (1.058, 1.175, 1.557))):
        for length, expected in zip((256, 2048, 8192), speedups, strict=True):
            savings = saved(fraction, length, "gemm")
            assert savings.baseline.total / savings.chiar.total == pytest.approx(expected, abs=1e-3)


def test_all_dark_costs_the_baselines_attention_and_all_light_none():
    routed = presets.get("v3-400m").routed_layers
    full, baseline = counted(1.0, 512, "free"), count_flops(presets.get("baseline-400m"), 512)
    assert full.part(*ATTENTION, "ffn", layers=routed) == baseline.part(*ATTENTION, "ffn", layers=routed)
    nothing = counted(0.0, 512, "gemm", keys="routed")
    assert nothing.part(*ATTENTION, layers=routed) == 0
    # One product for the entropy of every token, two for the filter of light ones: to the spectrum and back.
    assert squares(nothing, "router", layers=[1]) == 2 and squares(nothing, "spectral", layers=[1]) == 4


@pytest.mark.parametrize("preset", ["v3-400m", "v4-400m"])  # the first layer of v4 is routed
@pytest.mark.parametrize("keys", ["all", "routed"])
@pytest.mark.parametrize("light_ffn", [True, False])
def test_routes_weighted_by_share_add_up_to_the_layer(preset, keys, light_ffn):
    config, shares = large(0.3, preset, keys=keys, light_ffn=light_ffn)
    routes = route_costs(config, 512, shares)
    costs, first = count_flops(config, 512, shares).costs, config.routed_layers[0]
    layer = sum(flops for (where, _), flops in costs.items() if where == first)
    assert 0.7 * routes["spectral"] + 0.3 * routes["attention"] == pytest.approx(layer)
    assert routes["spectral"] < routes["attention"]


def test_shares_set_by_routers():
    count = counted(None, 256, router="static", keys="routed")
    assert [squares(count, "projections", layers=[i]) for i in (1, 2)] == [8, 0]
    everywhere = presets.get("v3-400m", router="static", static_operators=["attention"] * 26)
    assert compare_flops(everywhere, 256).attention_in_routed_layers == 0
    assert [share["attention"] for share in large(target_fraction=0.25)[1]] == [0.25] * 26
    own = {"router": "random", "random_fraction": 0.25}
    assert counted(None, 256, **own).total == counted(0.25, 256, **own).total
    soft = {"preset": "v1-tiny", "routing": "soft", "light_ffn": False}  # runs every operator and every path
    ffn = counted(None, 24, **soft).part("ffn", layers=[1])
    assert ffn == count_dense_execution(large(**soft)[0], 24).part("ffn", layers=[1]) == 2 * 16 * 32**2
    assert counted(0.3, 24, **soft).total == counted(None, 24, **soft).total


def test_each_of_three_operators_is_counted_by_its_share():
    config = presets.get("v1-tiny", keys="routed")
    shares = [{"spectral": 0.5, "rbf": 0.25, "attention": 0.25}, {"spectral": 0.0, "rbf": 1.0, "attention": 0.0}]
    count = count_flops(config, 33, shares, "gemm")
    D, m = config.hidden_size, 64
    # A quarter of 33 tokens attend to a quarter of the 16 earlier tokens on average, and to themselves: 5 pairs.
    assert count.part("spectral", layers=[1]) == 0.5 * 4 * D * D
    assert count.part("projections", layers=[1]) == 0.25 * 8 * D * D
    assert count.part("scores", layers=[1]) == 0.25 * 5 * 4 * D
    assert count.part("rbf", layers=[1]) == 0.25 * (2 * D * m + 4 * m * D + 5 * 8 * m)
    assert count.part("rbf", layers=[2]) == 2 * D * m + 4 * m * D + 17 * 8 * m
    assert count.part("spectral", *ATTENTION, layers=[2]) == 0


def test_filters_along_time_cost_their_window():
    window = {"operators": ["temporal", "attention"], "temporal_window": 8, "light_ffn": False, "keys": "routed"}
    D, count = 1024, counted(0.25, 256, **window)
    assert count.part("temporal", layers=[1]) == 0.75 * 2 * 8 * D
    assert count.part("temporal", layers=[0, 27]) == count.part("spectral", layers=[1]) == 0
    assert count.part("ffn", layers=[1]) == 0.25 * 16 * D * D
    config, shares = large(0.25, **window)
    assert route_costs(config, 256, shares)["temporal"] == 2 * 8 * D + D * D  # and the router's transform
    everywhere = count_flops(presets.get("baseline-400m", temporal_everywhere=True), 256)
    assert everywhere.total - count_flops(presets.get("baseline-400m"), 256).total == 28 * 2 * 16 * D


CASES = [("baseline-tiny", {}), ("v1-tiny", {}), ("v2-tiny", {}), ("v3-tiny", {}), ("v3-tiny", {"routing": "soft"})]
CASES += [("v1-tiny", {"light_ffn": False}), *(("v3-tiny", {"basis": basis}) for basis in ("identity", "random"))]
CASES += [("v3-tiny", {"hidden_size": 33, "num_attention_heads": 1, "positions": "learned"})]
CASES += [("v2-tiny", {"router": "random"}), ("v2-tiny", {"router": "static"}), ("v2-tiny", {"norm_position": "pre"})]
CASES += [("v3-tiny", router_options("learned scaled"))]
STACK_ROUTERS = [name for name, kind in ROUTERS.items() if kind.of_stacks and built_in(kind)]
CASES += [("v5-tiny", {"router": name}) for name in STACK_ROUTERS]
CASES += [("v5-tiny", {"carry": carry}) for carry in ("smoothed", "none")]
CASES += [("v5-tiny", {"early_weight": 0.0, "router": "spectral", "basis": "random"}), ("v5-tiny", {"window": 5})]
CASES += [("v5-tiny", {"inner_size": 64, "intermediate_size": 96, "temporal_everywhere": False})]
CASES += [("v5-tiny", {"layer_types": ["dark", "attention", "dark", "dark", "attention"], "inner_size": 16})]


@pytest.mark.parametrize(("name", "changes"), CASES, ids=lambda value: str(value) or "as is")
def test_dense_execution_agrees_with_torchs_counter(name, changes):
    model = ChiarForCausalLM(presets.get(name, gate_pool="causal", execution="dense", **changes)).eval()
    model.set_attn_implementation("eager")  # the counter does not see into the CPU's fused attention
    ids = torch.randint(0, 257, (3, 24))
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(ids)
    measured = sum(flops for what, flops in counter.get_flop_counts()["Global"].items() if "conv" not in str(what))
    count = count_dense_execution(model.config, 24)
    assert measured == (count.total - count.part("temporal")) * ids.numel()


def test_dark_stack_counts_for_dark_tokens_only():
    config = presets.get("v5-16m", window=128)
    D, V, W, T, f = 256, 257, 4, 1024, 0.2
    count, dark, outer = count_flops(config, T), list(range(2, 14)), [0, 1, 14, 15]
    assert operator_shares(config) == [{"carry": 0.8, "attention": f}]
    # Outer layers attend to at most 128 tokens; dark ones to all earlier dark tokens and themselves.
    pairs = sum(min(t, 128) for t in range(1, T + 1)) / T
    assert count.part("scores", layers=outer) == pytest.approx(4 * pairs * 4 * D)
    assert count.part("scores", layers=dark) == pytest.approx(12 * f * (f * (T - 1) / 2 + 1) * 4 * D)
    for part, one in (("projections", 8 * D * D), ("ffn", 16 * D * D), ("temporal", 2 * W * D)):
        assert count.part(part, layers=outer) == pytest.approx(4 * one)
        assert count.part(part, layers=dark) == pytest.approx(12 * f * one)
    assert count.part("router") == count.part("router", layers=[2]) == count.part("logits") == 2 * D * V
    assert count.part("carry") == count.part("carry", layers=[2]) == pytest.approx(f * 2 * D * D)


def test_dark_stack_of_another_width_costs_two_maps():
    inner, D, f = 512, 256, 0.25
    count = count_flops(presets.get("v5-16m", inner_size=inner, carry="none", target_fraction=f), 64)
    assert count.part("carry") == f * 2 * 2 * D * inner
    assert count.part("ffn", layers=[2]) == f * 4 * inner * 4 * inner
    assert count.part("temporal", layers=[2]) == f * 2 * 4 * inner


def test_router_costs_of_dark_stacks():
    D, V = 256, 257
    costs = {"forecast": 128 * (D + 1), "boundary": 4 * D * D, "spectral": D * D}
    costs |= dict.fromkeys(("rise", "predictive"), 2 * D * V) | {"learned": D * D + 4 * (D + 1)}
    costs |= dict.fromkeys(("space", "stride", "random"), 0)
    assert sorted(costs) == sorted(STACK_ROUTERS)
    for router, cost in costs.items():
        count = count_flops(presets.get("v5-16m", router=router), 64)
        assert count.part("router") == cost, "an early head that the router does not read does not run"


@pytest.mark.parametrize("changes", [{}, {"carry": "smoothed", "inner_size": 512}])
def test_light_and_dark_routes_weighted_by_share_add_up_to_the_stack(changes):
    config, shares = large(0.3, "v5-16m", **changes)
    routes, costs = route_costs(config, 512, shares), count_flops(config, 512, shares).costs
    stack = sum(flops for (where, _), flops in costs.items() if where in range(2, 14))
    assert 0.7 * routes["carry"] + 0.3 * routes["attention"] == pytest.approx(stack)
    carry = 2 * 128 * 256 if changes else 0  # a running mean runs on all tokens
    assert routes["carry"] == costs[2, "router"] + carry


@pytest.mark.parametrize(("preset", "window"), [("baseline-tiny", 0), ("v2-tiny", 0), ("v4-tiny", 16), ("v5-tiny", 4)])
def test_attention_layers_alone_are_their_own_baseline(preset, window):
    """Also with a temporal filter, and with an odd head size, which needs learned positions."""
    changes = {"hidden_size": 33, "num_attention_heads": 1} if preset == "v2-tiny" else {}
    config = presets.get(preset, layer_types=["attention"] * 3, **changes)
    savings = compare_flops(config, 48)
    assert savings.total == 0 and savings.chiar.part("temporal") == 3 * 2 * window * config.hidden_size
    routed = compare_flops(presets.get(preset, **changes), 48).baseline
    assert routed.part("temporal", layers=[0, 1, 2]) == savings.chiar.part("temporal")


def test_baseline_of_a_dark_stack_has_its_depth_and_filters():
    config = presets.get("v5-16m")
    baseline = baseline_of(config)
    assert baseline.layer_types == ["attention"] * 16
    all_dark, dense = count_flops(config, 512, operator_shares(config, 1.0)), count_flops(baseline, 512)
    assert all_dark.total - all_dark.part("router", "carry") == pytest.approx(dense.total)
    savings = compare_flops(config, 512)
    assert savings.total == 1 - count_flops(config, 512).total / dense.total
    layers = list(range(2, 14))
    kept = savings.chiar.part(*ATTENTION, layers=layers) / dense.part(*ATTENTION, layers=layers)
    assert savings.attention_in_routed_layers == 1 - kept


def test_bad_input():
    thirds = [{"spectral": 0.5, "rbf": 0.25, "attention": 0.25}] * 2
    for message, changes, arguments in (
        ("length must be at least 1", {}, {"length": 0}),
        ("between 0 and 1", {}, {"shares": [{"spectral": 1.5, "attention": -0.5}] * 26}),
        ("must add up to 1 under threshold", {}, {"shares": [{"spectral": 0.5, "attention": 0.4}] * 26}),
        ("must add up to 3 under soft", {"preset": "v1-tiny", "routing": "soft"}, {"shares": thirds}),
        ("each of .*attention", {}, {"shares": [{"spectral": 0.5, "rbf": 0.5}] * 26}),
        ("got shares of 1 layers for 26 routed layers", {}, {"shares": [{"spectral": 0.5, "attention": 0.5}]}),
        ("Did you mean 'gemm'", {}, {"transform": "gem"}),
    ):
        with pytest.raises(InputError, match=message):
            count_flops(large(**changes)[0], **{"length": 8, **arguments})
    static = {"router": "static"}
    for fraction, changes, message in (
        (1.5, {}, "between 0 and 1"), ([0.5], {}, "1 fractions for 26 routed"), (0.5, static, "leave the fraction out"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=message):
            large(fraction, **changes)
