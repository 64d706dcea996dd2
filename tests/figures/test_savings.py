"""Counted savings against size: the numbers of `chiar flops`."""

import pytest
from recorded import elements, words

from chiar import presets
from chiar.errors import InputError
from chiar.figures.savings import draw_savings, panel, saved_in_layers
from chiar.routing.flops import compare_flops, operator_shares


def test_numbers_are_those_of_the_counter():
    config = presets.get("v3-400m")
    shares = operator_shares(config, 0.5)
    saved = {
        cost: compare_flops(config, 256, shares, "routed", transform=cost) for cost in ("free", "even_odd", "gemm")
    }
    drawn = panel("all", [8.6], [saved], lambda one: one.total, "35–40%")
    # As README says of 400M, T 256, f = ½, routed keys.
    assert [round(line.points[0][1], 1) for line in drawn.lines] == [15.6, 10.5, 5.4]
    assert drawn.level == (35.0, "the paper: 35–40%")
    one = panel("attention", [8.6], [saved], lambda one: one.attention_in_routed_layers, "62.5%")
    assert [line.points for line in one.lines] == [[(8.6, pytest.approx(51.5, abs=0.05))]]
    logits = 2 * 1024 * 50257
    total, base = saved["free"].chiar.total - logits, saved["free"].baseline.total - logits
    assert saved_in_layers(saved["free"]) == pytest.approx(1 - total / base)


def test_three_panels_and_the_setting():
    svg = draw_savings(["v3-tiny", "v3-16m"], 64, 0.25, "routed", False)
    assert "counted savings of v3-tiny, v3-16m: T 64, f = 0.25, keys routed, no light FFN" in words(svg)
    assert len(elements(svg, "polyline", "line")) == 7


def test_a_model_that_routes_nothing_is_refused():
    with pytest.raises(InputError, match="baseline-tiny routes nothing"):
        draw_savings(["baseline-tiny"], 64)
