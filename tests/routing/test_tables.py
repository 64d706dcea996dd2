"""The commands show a dark stack once, with the entropy its router reads, and without the paper's claims."""

import pytest
import torch

from chiar import ChiarForCausalLM, presets
from chiar.colours import entropy_colours, operator_colour, uncertainty
from chiar.routing.tables import entropy_legend, entropy_styles, route_text, routing_views
from commands import run


def test_the_threshold_is_half_way_between_light_and_dark():
    assert [uncertainty(h, 0.4) for h in (0.0, 0.2, 0.4, 0.7, 1.0)] == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert uncertainty(0.2, 0.3, 0.2, 0.4) == 0 and uncertainty(0.9, 0.3, 0.2, 0.4) == 1
    assert uncertainty(0.3, None, 0.2, 0.6) == (0.3 - 0.2) / (0.6 - 0.2) and uncertainty(0.5, None, 0.5, 0.5) == 0


@pytest.mark.parametrize("tau", [-0.7, -0.2, 0.0, 0.1, 0.3, 0.9])
@pytest.mark.parametrize("scores", [[0.2, 0.25, 0.3], [-0.5, -0.2, 0.1], [0.3, 0.3], [0.0]], ids=str)
def test_scores_up_to_the_threshold_are_light(scores, tau):
    for ends in ((min(scores), max(scores)), (0.0, 1.0)):
        shares = [uncertainty(score, tau, *ends) for score in scores]
        assert [0 <= share <= 0.5 for share in shares] == [score <= tau for score in scores]
        assert shares == sorted(shares) and shares[-1] <= 1


def test_entropy_colours_match_those_of_light_and_dark_routes():
    for strength in (0.0, 0.5, 1.0):
        assert entropy_colours(0.5 - strength / 2)[0] == operator_colour("carry", strength)
        assert entropy_colours(0.5 + max(strength, 1e-6) / 2)[0] == operator_colour("attention", strength)


def test_text_is_coloured_by_predictive_entropy_with_dark_bytes_underlined():
    routed = route_text("v5-tiny", "light and dark bytes", None, 0)
    layer = routed.trace.coloured_by
    layer.entropy_BT[0], layer.thresholds = torch.linspace(0, 1, 20), [0.5]
    layer.choice_BT[0] = (layer.entropy_BT[0] > 0.5).long()
    styles = entropy_styles(routed.trace)
    light, dark = operator_colour("carry"), operator_colour("attention")
    assert styles[0] == f"black on {light}" and styles[-1] == f"bold underline white on {dark}"
    assert ["underline" in style for style in styles] == [False] * 10 + [True] * 10
    heading, _, legend, text, stack, table = routing_views(routed)
    assert "random weights" in heading.plain and "predictive entropy, τ = 0.50" in legend.plain
    assert text.plain.strip() == "light and dark bytes"
    assert stack.plain == "layer 2–3    " + "░" * 10 + "█" * 10
    assert list(table.columns[0].cells) == ["1", "2–3", "4"]


def test_without_colour_there_is_no_legend(monkeypatch):
    arguments = ["trace", "v5-tiny", "--prompt", "light and dark"]
    plain = run(*arguments)[1]
    assert "underlined" not in plain and "coloured" not in plain and "layer 2–3    █" in plain
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    assert "; underlined: dark" in run(*arguments)[1]


def test_heading_notes_an_uncalibrated_threshold(tmp_path):
    note = "; τ is 0 until a model is trained or calibrated"
    assert route_text("v5-tiny", "light and dark", None, 0).heading.endswith(note), "a rise has either sign"
    assert note not in route_text("v3-tiny", "light and dark", None, 0).heading
    model = ChiarForCausalLM(presets.get("v5-tiny", router="predictive"))
    for tau, heading in ((0.0, f"{tmp_path}{note}, so every token is dark"), (0.99, str(tmp_path))):
        model.model.set_thresholds([tau])
        model.save_pretrained(tmp_path)
        assert route_text(str(tmp_path), "light and dark", None, 0).heading == heading


@pytest.mark.parametrize(("tau", "where"), [(0.5, "half-way"), (0.9, "above all values"), (-0.6, "below all values")])
def test_the_legend_shows_the_colours_of_the_text(tau, where):
    trace = route_text("v5-tiny", "light and dark bytes", None, 0).trace
    layer = trace.coloured_by
    layer.entropy_BT[0], layer.thresholds = torch.linspace(-0.5, 0.8, 20), [tau]
    layer.entropy_name, layer.choice_BT[0] = "rise of the predictive entropy", 0
    legend, styles = entropy_legend(trace), entropy_styles(trace)
    assert legend.plain.startswith(f"text coloured by rise of the predictive entropy, τ = {tau:.2f} ")
    assert f"{where}: -0.50 " in legend.plain and " 0.80" in legend.plain
    ends = legend.spans[0].style, legend.spans[-1].style
    assert [style.split(" ", 1)[1] for style in (styles[0], styles[-1])] == list(ends)


def test_flops_of_a_dark_stack():
    code, output = run("flops", "v5-16m", "--length", "1024,2048")
    assert code == 0 and "f = 0.2 of the tokens pass layers 3–14" in output and "a dark token, layers 3–14" in output
    assert "DCT" not in output and "paper" not in output and "attention saved in dark layers" in output
    assert "leave --keys" in run("flops", "v5-16m", "--keys", "all")[1]


def test_models_lists_dark_and_outer_layers():
    output = run("models")[1]
    for name in ("v5-16m", "v5-400m"):
        outer = presets.get(name).layer_types.count("attention")
        assert f"0+0+{len(presets.get(name).layer_types) - outer}+{outer}" in output
    assert "rise" in output and "carry" in output
