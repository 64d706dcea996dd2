"""Figures: every metric is drawn in the right place, any text is safe, and nothing is overwritten."""

import json
import math
import re
import sys
from itertools import pairwise
from xml.etree import ElementTree

import pytest
import torch
from matplotlib.text import Text

from chiar import presets
from chiar.colours import operator_colour
from chiar.errors import InputError
from chiar.plots.cli import KINDS
from chiar.plots.curves import draw_curves
from chiar.plots.figure import svg_text
from chiar.plots.model import RULES, draw_model
from chiar.plots.routes import draw_routing
from chiar.plots.study import draw_pareto
from chiar.registry import ROUTERS, built_in
from commands import run
from small_corpora import language_corpus

SVG = "{http://www.w3.org/2000/svg}"
RECORD = {"rate": 1e-3, "use": [[0.4, 0.6], [0.7, 0.3]], "gate": {"text": 0.9}, "tokens_per_second": 64.0}
HOSTILE = "<script>&\"'$x^2$\x1b"


def make_run(folder, preset="v3-tiny", steps=4, **changes):
    """A run folder with what figures need: run.json and metrics.jsonl. A step reads 32 tokens."""
    folder.mkdir(parents=True)
    settings = {"batch": 4, "length": 8, "data": ["text"], "mixing": "weights", "evaluate_rows": 4}
    stored = {"config": presets.get(preset).to_dict(), "settings": settings, "data": {"text": "f1"}}
    (folder / "run.json").write_text(json.dumps({**stored, **changes.pop("run", {})}))
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            record = {"step": step, "loss": 6.0 / step, **(RECORD if preset != "baseline-tiny" else {"rate": 1e-3})}
            record |= {"validation": {"text": 6.5 / step}} if step % 2 == 0 else {}
            record |= {name: value[step - 1] if isinstance(value, tuple) else value for name, value in changes.items()}
            file.write(json.dumps(record) + "\n")
    return folder


def words(figure):
    return [element.text for element in ElementTree.fromstring(svg_text(figure)).iter(f"{SVG}text")]


def panels_of(figure):
    """The (label, points) of the lines, by panel title."""
    return {a.get_title("left"): [(x.get_label(), x.get_xydata().tolist()) for x in a.lines] for a in figure.axes}


def test_every_metric_of_every_run_is_a_line(tmp_path):
    gates = tuple({"text": g, "symbols": 0.99} for g in (0.21, 0.21, 0.21, 0.9))
    runs = [make_run(tmp_path / "baseline", "baseline-tiny"), make_run(tmp_path / "v3", loss=2.0, gate=gates)]
    figure = draw_curves(runs)
    assert len({axes.spines["left"].get_linewidth() for axes in figure.axes}) == 1, "an axis looks like a curve"
    drawn = panels_of(figure)
    # Losses (train and validation), their difference, learning rates, f by layer, g by corpus and its histogram.
    assert [len(lines) for lines in drawn.values()] == [4, 1, 2, 2, 2, 2]
    assert drawn["loss minus that of baseline"] == [("v3: train", [[1, -4], [2, -1], [3, 0], [4, 0.5]])]
    assert drawn["share of tokens sent to attention"][1] == ("v3: layer 3", [[s, 0.3] for s in (1, 2, 3, 4)])
    name, outline = drawn["share of logged steps, by g"][0]
    heights = {round(g * 50): share for g, share in outline}
    assert min(heights) == 10 and max(heights) == 46  # nothing outside the measured range
    assert name == "v3: g on text" and heights[10] == 0.75 and heights[45] == 0.25 and sum(heights.values()) == 1
    three = make_run(tmp_path / "v1", "v1-tiny", use=[[0.5, 0.3, 0.2], [1.0, 0.0, 0.0]])
    drawn = panels_of(draw_curves([three]))
    shares = [[points[0][1] for _, points in drawn[f"share of tokens sent to {name}"]] for name in ("rbf", "attention")]
    assert shares == [[0.3, 0.0], [0.2, 0.0]]
    config = {"layer_types": ["routed"] * 5, "operators": ["spectral", "attention"]}
    deep = make_run(tmp_path / "deep", use=[[0.4, 0.6]] * 5, run={"config": config})
    lines = panels_of(draw_curves([deep]))["share of tokens sent to attention"]
    assert lines[0][0] == "deep: mean of 5 layers (thin: each)" and len(lines) == 6
    stack = make_run(tmp_path / "v5", "v5-tiny", use=[[0.8, 0.2]], gate={})
    lines = panels_of(draw_curves([stack]))["share of tokens sent to attention"]
    assert lines == [("v5: layer 2–3", [[s, 0.2] for s in (1, 2, 3, 4)])]
    folder = make_run(tmp_path / "run", tokens_per_second=(1.0, 64.0, 32.0, 16.0))
    # The first step compiles and is not counted.
    for over, places in (("tokens", [32, 64, 96, 128]), ("time", [0, 0.5, 1.5, 3.5])):
        losses = panels_of(draw_curves([folder], over=over))["loss, nats per token"]
        assert [x for x, _ in losses[0][1]] == places


def test_an_unfinished_run_and_runs_that_cannot_be_drawn(tmp_path):
    folder = make_run(tmp_path / "run")
    whole = svg_text(draw_curves([folder]))
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "lo')
    assert svg_text(draw_curves([folder])) == whole
    settings = {"batch": 4, "length": 8, "data": ["a", "b"], "mixing": "added"}
    for name, changes, over, message in (
        ("new", {"steps": 0}, "steps", "no measurements yet"),
        ("nan", {"loss": math.nan, "validation": {}}, "steps", "no finite loss"),
        ("unsaid", {"run": {"settings": {}}}, "tokens", "how many tokens a step has"),
        ("added", {"run": {"settings": settings}}, "time", "how many tokens"),
        ("unmeasured", {"tokens_per_second": None}, "time", "without tokens_per_second"),
        ("run-2", {}, "weeks", "unknown axis 'weeks'"),
    ):
        with pytest.raises(InputError, match=message):
            draw_curves([make_run(tmp_path / name, **changes)], over=over)
    (tmp_path / "empty").mkdir()
    for runs, message in (([tmp_path / "empty"], "not a training run"), ([folder, folder], "named twice")):
        with pytest.raises(InputError, match=message):
            draw_curves(runs)


def variant(name, flops, loss, role="control", **times):
    row = {"variant": name, "role": role, "seeds": [0, 1]}
    row |= {"paired_loss": loss, "paired_losses": [loss, loss], "flops_per_token": {"forward": flops * 1e6}}
    return {**row, "step_ms": None, "step_ms_in_training": None, **times}


def pareto(*rows, **configs):
    """Results of a study. `configs`: changes of variants that are not plain v3-tiny."""
    runs = [
        {"device": "H", "variant": name, "declaration": {"preset": "v3-tiny", "config": configs.get(name, {})}}
        for name in (row["variant"] for row in rows)
    ]
    return {"format": "chiar-study-results/1", "title": "t", "variants": rows, "times": None, "runs": runs}


def test_pareto_has_a_frontier_and_outliers_at_the_end_of_the_axis():
    near = [variant(f"near-{n}", n, 4.0 + n / 100) for n in range(1, 10)]
    rows = *near, variant("far", 5, 9.0, "candidate"), variant("best", 9, 3.99), variant("dear", 90, 4.0)
    axes = draw_pareto(pareto(*rows)).axes[0]
    assert {"10  far ↑9.00", "9  near-9", "frontier", "12  dear →90"} <= set(axes.get_legend_handles_labels()[1])
    assert axes.get_ylim()[1] < 4.2 and axes.get_xlim()[1] < 10  # outliers do not squeeze the others
    assert axes.lines[0].get_xydata().tolist() == [[1, 4.01], [9, 3.99]]
    assert draw_pareto(pareto(*near[:3], variant("far", 5, 9.0))).axes[0].get_ylim()[1] > 9  # few have no outliers
    timed = [variant("a", 1, 4, step_ms=3.0), variant("b", 2, 3), variant("c", 3, 2, step_ms=4.0)]
    first, second = draw_pareto(pareto(*timed)).axes
    assert second.get_xlabel() == "measured training step, ms, H"
    assert [[note.get_text() for note in axes.texts] for axes in (first, second)] == [["1", "2", "3"], ["1", "3"]]


def test_pareto_marks_and_numbers_cover_nothing():
    rows = [variant(f"v{n}", 5 + n % 3 / 1000, 4 + n % 2 / 1000) for n in range(12)]
    figure = draw_pareto(pareto(*rows, variant("wide", 9, 3.5)))
    axes, places = figure.axes[0], []
    figure.draw_without_rendering()
    for mark in axes.lines[2 : 2 * 13 + 1 : 2]:
        x, y = mark.get_transform().transform(mark.get_xydata()[0])
        places.append((x - 6, y - 6, x + 6, y + 6))  # in pixels; a point has 1.4
    places += [Text.get_window_extent(note).padded(-1).extents for note in axes.texts if note.get_text()]
    assert len(places) == 26
    frontier = axes.transData.transform(axes.lines[0].get_xydata())
    for begin, end in pairwise(frontier):
        dots = [begin + (end - begin) * n / 99 for n in range(100)]
        assert not any(a < x < c and b < y < d for x, y in dots for a, b, c, d in places[13:])
    for n, (left, low, right, high) in enumerate(places):
        assert not any(left < c and a < right and low < d and b < high for a, b, c, d in places[:n])


def test_pareto_marks_show_what_the_models_are_made_of():
    light, dark, time = (operator_colour(name) for name in ("spectral", "attention", "temporal"))
    made = {
        "dense": ({"layer_types": ["attention"] * 4}, (dark, "full", False)),
        "routed": ({}, (dark, "left", False)),
        "by layer": ({"router": "static"}, (dark, "bottom", False)),
        "no attention": ({"layer_types": ["spectral"] * 4}, (light, "full", False)),
        "along time": ({"operators": ["temporal", "attention"]}, (dark, "left", False)),
        "stack": ({"layer_types": ["attention", "dark", "dark", "attention"]}, (dark, "left", False)),
        "filtered": ({"layer_types": ["attention"] * 4, "temporal_everywhere": True}, (dark, "full", True)),
    }
    rows = [variant(name, n, 4.0) for n, name in enumerate(made, 1)]
    axes = draw_pareto(pareto(*rows, **{name: config for name, (config, _) in made.items()})).axes[0]
    marks = [(m.get_markerfacecolor(), m.get_fillstyle(), m.get_markeredgecolor() == time) for m in axes.lines[2:15:2]]
    assert marks == [look for _, look in made.values()]
    names = {"dark: attention alone", "light or dark by token", "light and dark layers", "light layers only"}
    names |= {"light or dark by token, light along time"}
    assert names | {"rim: temporal filter"} <= set(axes.get_legend_handles_labels()[1])


def test_a_diagram_shows_the_configuration(tmp_path):
    named = {"MetaRouter", "layer 1", "layers 2–27 (×26)", "layer 28", "light: H ≤ τ", "dark: H > τ", "v3-400m"}
    assert named <= set(words(draw_model(["v3-400m"])))
    for name, changes, expected in (
        ("v1-16m", {}, "RBF mixing"),
        ("v4-400m", {}, "layers 1, 3, … 27 (×14)"),
        ("v3-16m", {"router": "random"}, "hash of the token, f = 0.5"),
        ("v3-16m", {"temporal_everywhere": True}, "every token, over the last 16"),
        ("v5-400m", {"window": 1024}, "dark: the last 1,024 tokens"),
        ("v5-16m", {"router": "space"}, "the first space after a word"),
        ("v5-16m", {"router": "stride", "target_fraction": 0.25}, "every k-th token, f = 0.25"),
        ("v5-16m", {"inner_size": 512, "carry": "smoothed"}, "512 → 2048 → 512, GELU"),
    ):
        presets.get(name, **changes).save_pretrained(tmp_path)
        assert expected in words(draw_model([str(tmp_path)]))


def test_a_diagram_packs_the_stack_between_router_and_carry():
    found = words(draw_model(["v5-16m"]))
    order = ["layers 1–2 (×2)", "early head", "rise router", "light tokens", "pack dark tokens", "rise > τ, f = 0.2"]
    order += ["layers 3–14 (×12)", "dark: among dark tokens", "carry", "layers 15–16 (×2)", "output"]
    assert [word for word in found if word in order] == order
    for name, kind in ROUTERS.items():
        assert not built_in(kind) or name in RULES


@pytest.mark.parametrize(("light_ffn", "columns"), [(True, [0.46, 0.74]), (False, [0.74])])
def test_light_tokens_bypass_a_network_they_skip(tmp_path, light_ffn, columns):
    presets.get("v3-16m", light_ffn=light_ffn).save_pretrained(tmp_path)
    texts = draw_model([str(tmp_path)]).axes[0].texts
    (routed,) = [text for text in texts if text.get_text().startswith("feed-forward") and text.get_position()[1] == -7]
    arrows = [
        text for text in texts if hasattr(text, "xy") and text.xy == pytest.approx((routed.get_position()[0], -6.69))
    ]
    assert [arrow.get_position()[0] for arrow in arrows] == pytest.approx(columns)


def test_routing_colours_show_routes_and_tokens_are_text(lively):
    pieces = ["</text><script>", "$x^2$", "\x00\x1b", "\n\t", "", "\udc80", "日本", "x" * 500, *["token"] * 30]
    with torch.no_grad():
        trace = lively({})(torch.arange(len(pieces))[None] % 20, output_routing=True).routing
    figure = draw_routing(trace, pieces, HOSTILE)
    assert {"</text><script>", "$x^2$", "\\x00\\x1b", "⏎⇥", "日本"} <= set(words(figure))
    assert "<script" not in svg_text(figure)
    parts = [axes.images[0].get_array() for axes in figure.axes]
    assert [part.shape for part in parts] == [(4, 19, 3)] * 2  # 38 tokens: both lines are full
    for row, layer in enumerate(trace.layers):
        for token in range(len(pieces)):
            operator = layer.operators[int(layer.choice_BT[0, token])]
            luminance = float(parts[token // 19][row, token % 19] @ [0.2126, 0.7152, 0.0722])
            assert (luminance < 0.7) == (operator == "attention")


def test_bytes_are_coloured_by_the_entropy_the_router_compares(lively):
    pieces = ["</text><script>", "\x1b", *"bytes, light and dark"]
    with torch.no_grad():
        trace = lively({"preset": "v5-tiny"})(torch.arange(len(pieces))[None] % 20, output_routing=True).routing
    layer = trace.layers[1]
    layer.entropy_BT[0], layer.thresholds = torch.linspace(0.1, 0.7, len(pieces)), [0.3]
    layer.choice_BT[0] = (layer.entropy_BT[0] > 0.3).long()
    figure = draw_routing(trace, pieces, HOSTILE)
    (axes,), dark = figure.axes, int(layer.choice_BT.sum())
    assert "<script" not in svg_text(figure) and "dashed: τ = 0.300" in words(figure)
    heights = [bar.get_height() for bar in axes.patches[: len(pieces)]]
    assert heights == pytest.approx(layer.entropy_BT[0].tolist())
    assert [luminance(bar.get_facecolor()[:3]) < 0.7 for bar in axes.patches[: len(pieces)]] == [
        bool(choice) for choice in layer.choice_BT[0]
    ]
    assert len(axes.lines) == dark + 1, "a line below each dark byte, and the threshold"


@pytest.mark.parametrize("cut", [-0.6, 0.0, 0.9])
def test_light_and_dark_colours_meet_at_any_threshold(lively, cut):
    pieces = [*"a rise has any sign"]
    with torch.no_grad():
        trace = lively({"preset": "v5-tiny"})(torch.arange(len(pieces))[None] % 20, output_routing=True).routing
    layer = trace.layers[1]
    layer.entropy_BT[0], layer.thresholds = torch.linspace(-0.5, 0.7, len(pieces)), [cut]
    figure = draw_routing(trace, pieces, "a model")
    (axes,), (legend,) = figure.axes, figure.legends
    bars = [luminance(bar.get_facecolor()[:3]) < 0.7 for bar in axes.patches[: len(pieces)]]
    assert bars == [score > cut for score in layer.entropy_BT[0].tolist()]
    low, high = axes.get_ylim()
    assert low < min(cut, -0.5) and max(cut, 0.7) < high
    shown = {
        text.get_text(): patch.get_facecolor() for text, patch in zip(legend.texts, legend.get_patches(), strict=True)
    }
    assert shown["least, -0.50"] == axes.patches[0].get_facecolor()
    assert shown["most, 0.70"] == axes.patches[len(pieces) - 1].get_facecolor() and "at τ" in shown


def luminance(colour):
    return sum(share * part for share, part in zip((0.2126, 0.7152, 0.0722), colour, strict=True))


def test_text_is_safe_and_figures_are_deterministic(tmp_path):
    folder = make_run(tmp_path / HOSTILE.replace("/", ""), gate={HOSTILE: 0.5})
    text = svg_text(draw_curves([folder]))
    assert text == svg_text(draw_curves([folder])) and "<script" not in text
    assert re.search(r'^<svg role="img" aria-label="[^"]*&lt;script', text)
    assert any("$x^2$\\x1b: g on" in (word or "") for word in words(draw_curves([folder])))


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_a_command_that_overwrites_nothing(tmp_path, kind):
    (tmp_path / "results.json").write_text(json.dumps(pareto(variant("a", 1, 4.0))))
    sources = {"curves": make_run(tmp_path / "run"), "pareto": tmp_path / "results.json"}
    more = {"curves": ["--data", language_corpus(tmp_path, 120)], "routing": ["--prompt", "light & dark"]}
    arguments = ["plot", kind, sources.get(kind, "v3-tiny"), *more.get(kind, [])]
    out = tmp_path / "new" / "f.svg"
    code, output = run(*arguments, "--out", out)
    assert (code, output.splitlines()[0]) == (0, f"wrote {out}")
    assert len([e for e in ElementTree.parse(out).iter(f"{SVG}text") if e.text]) > 4
    assert ("unigram entropy" in out.read_text()) == (kind == "curves")
    for path, message in ((out, "exists already"), (tmp_path / "f.txt", "figures are SVG, PNG or PDF")):
        code, output = run(*arguments, "--out", path)
        assert code == 2 and message in output
    assert run(*arguments, "--out", out, "--overwrite")[0] == 0
    code, output = run("plot", kind, tmp_path / "missing", "--out", tmp_path / "g.svg")
    assert code == 2 and output.startswith("error: ") and len(output.splitlines()) == 1


def test_what_the_command_cannot_draw(tmp_path, monkeypatch):
    for arguments, message in (
        (["pie", "x"], "unknown kind of figure 'pie'"),
        (["curves"], "name a source. curves is drawn from training runs"),
        (["model", "v3-tiny", "v1-tiny"], "takes one source"),
        (["model", "v3-tiny", "--prompt", "x"], "--prompt does not apply to model"),
        (["routing", "v3-tiny"], "give it with --prompt"),
        (["pareto", __file__], "holds no results of a study"),
    ):
        code, output = run("plot", *arguments, "--out", tmp_path / "f.svg")
        assert code == 2 and message in output
    for kind in ("png", "pdf"):
        assert run("plot", "model", "v3-tiny", "--out", tmp_path / f"f.{kind}")[0] == 0
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(InputError, match=re.escape("pip install 'chiar[plots]'")):
        draw_model(["v3-tiny"])
