"""Curves of runs: valid SVG with a line for everything that was measured."""

import json
from xml.etree import ElementTree

import pytest

from chiar.analysis.chart import COLOURS, Line, Panel, draw_chart, ticks
from chiar.analysis.curves import draw_curves
from chiar.errors import InputError
from commands import run

SVG = "{http://www.w3.org/2000/svg}"


def make_run(folder, routed=True, steps=4, **changes):
    folder.mkdir(parents=True)
    kinds = ["spectral", "routed", "routed", "attention"] if routed else ["attention"] * 4
    (folder / "run.json").write_text(json.dumps({"config": {"layer_types": kinds}}))
    records = []
    for step in range(1, steps + 1):
        record = {"step": step, "loss": 6.0 / step, "rate": 1e-3, "use": [[0.4, 0.6], [0.7, 0.3]] if routed else []}
        record |= {"gate": {"text": 0.9}} if routed else {}
        record |= {"validation": {"text": 6.5 / step}} if step % 2 == 0 else {}
        records.append({**record, **changes})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def words(root):
    return [element.text for element in root.iter(f"{SVG}text")]


def lines(root):
    return [element for element in root.iter(f"{SVG}polyline") if element.get("class") == "line"]


def test_every_measurement_of_every_run_is_a_line(tmp_path):
    runs = [make_run(tmp_path / "baseline", routed=False), make_run(tmp_path / "v3")]
    root = ElementTree.fromstring(draw_curves(runs))
    # Train, validation and rate of both; the gap between them; f of two layers and g of v3.
    assert len(lines(root)) == 2 * 3 + 1 + 2 + 1
    assert {"baseline: train", "v3: validation", "v3: layer 2", "v3: layer 3", "v3: g on text", "steps"} <= set(
        words(root)
    )
    assert {line.get("stroke") for line in lines(root)} == set(COLOURS[:2])
    assert [len(line.get("points").split()) for line in lines(root)[:2]] == [4, 2]


def test_the_gap_is_to_the_first_run_where_both_measured(tmp_path):
    first, second = make_run(tmp_path / "first", steps=3), make_run(tmp_path / "second", steps=4, loss=2.0)
    root = ElementTree.fromstring(draw_curves([first, second]))
    assert "loss minus that of first" in words(root)
    losses, _, gap = [line for line in lines(root) if line.get("stroke") == COLOURS[1]][:3]
    assert [len(line.get("points").split()) for line in (losses, gap)] == [4, 3]
    heights = [float(point.split(",")[1]) for point in gap.get("points").split()]
    # 2 − 6, 2 − 3 and 2 − 2, and up is smaller in SVG.
    assert (heights[0] - heights[1]) / (heights[1] - heights[2]) == pytest.approx(3.0, rel=0.02)


def test_what_was_not_measured_is_no_panel(tmp_path):
    root = ElementTree.fromstring(draw_curves([make_run(tmp_path / "baseline", routed=False)]))
    assert not any("gate" in word or word.startswith("f:") for word in words(root))


def test_heights_are_right():
    svg = draw_chart("t", [Panel("p", [Line("a", [(0, 0.0), (10, 1.0)], "#000000")], None, (0, 1))], "x")
    ((x0, y0), (x1, y1)) = [
        tuple(map(float, p.split(","))) for p in lines(ElementTree.fromstring(svg))[0].get("points").split()
    ]
    assert x0 < x1
    assert y0 - y1 == 150
    assert ticks(0, 1) == [0, 0.2, 0.4, 0.6, 0.8, 1]
    assert ticks(0, 600, 6) == [0, 100, 200, 300, 400, 500, 600]
    assert ticks(4.3, 4.31, 4) == pytest.approx([4.3, 4.305, 4.31])


def test_hostile_names_are_text(tmp_path):
    folder = make_run(tmp_path / "<script>&\"'\x1b")
    root = ElementTree.fromstring(draw_curves([folder]))
    assert not list(root.iter(f"{SVG}script"))
    assert "<script>&\"'\\x1b: train" in words(root)


def test_a_run_that_goes_on(tmp_path):
    folder = make_run(tmp_path / "run")
    whole = draw_curves([folder])
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "lo')
    assert draw_curves([folder]) == whole
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('\n{"step": 6}\n')
    with pytest.raises(InputError, match="line 5 is damaged"):
        draw_curves([folder])


@pytest.mark.parametrize("steps", [1, 2])
def test_short_runs(tmp_path, steps):
    ElementTree.fromstring(draw_curves([make_run(tmp_path / "run", steps=steps)]))


def test_bad_input(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="not a training run"):
        draw_curves([tmp_path / "empty"])
    with pytest.raises(InputError, match="named twice"):
        draw_curves([make_run(tmp_path / "run")] * 2)
    with pytest.raises(InputError, match="no measurements yet"):
        draw_curves([make_run(tmp_path / "new", steps=0)])
    with pytest.raises(InputError, match="no finite loss"):
        draw_curves([make_run(tmp_path / "broken", loss=float("nan"), validation={})])


def test_the_command_overwrites_nothing(tmp_path):
    folder = make_run(tmp_path / "run")
    assert run("curves", folder, "--out", tmp_path / "c.svg")[0] == 0
    code, output = run("curves", folder, "--out", tmp_path / "c.svg")
    assert code == 2 and "exists already" in output
    assert run("curves", folder, "--out", tmp_path / "c.svg", "--overwrite")[0] == 0
    assert "pictures are SVG" in run("curves", folder, "--out", tmp_path / "c.png")[1]


def test_many_layers_are_one_entry(tmp_path):
    folder = make_run(tmp_path / "deep", use=[[0.4, 0.6]] * 5)
    (folder / "run.json").write_text(json.dumps({"config": {"layer_types": ["routed"] * 5}}))
    root = ElementTree.fromstring(draw_curves([folder]))
    assert "deep: mean of 5 layers" in words(root) and "deep: layer 2" not in words(root)
    assert len(lines(root)) == 3 + 5 + 1 + 1


def test_the_second_half_is_shown_by_itself(tmp_path):
    root = ElementTree.fromstring(draw_curves([make_run(tmp_path / "long", routed=False, steps=12)]))
    assert "validation loss in the second half" in words(root)
    assert [len(line.get("points").split()) for line in lines(root)] == [12, 6, 4, 12]


def test_a_long_legend_has_room(tmp_path):
    named = [Line(f"run {number}", [(0, 0.0), (1, 1.0)], "#000000") for number in range(12)]
    root = ElementTree.fromstring(draw_chart("t", [Panel("p", named), Panel("below", named[:1])], "x"))
    heights = {element.text: float(element.get("y")) for element in root.iter(f"{SVG}text")}
    assert heights["run 11"] < heights["below"]
