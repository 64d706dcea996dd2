"""`chiar figures` as a user runs it."""

import json
from xml.etree import ElementTree

import pytest
from recorded import SVG, elements, save_report, words, write_run

from chiar.figures.cli import PROMPT, figures_app
from commands import run

RECORD = {"loss": 1.0, "rate": 1e-3, "use": [[0.4, 0.6], [0.7, 0.3]], "gate": {"text": 0.9}, "tokens_per_second": 64.0}
NAMES = [command.name or command.callback.__name__ for command in figures_app.registered_commands]


@pytest.fixture
def inputs(tmp_path, mixed_run, nulltest):
    """For each figure what it is drawn from."""
    folder = write_run(tmp_path / "<b>run&", records=[{"step": s, **RECORD} for s in (1, 2)])
    report = save_report(tmp_path / "report.json")
    of_null = {name: [nulltest] for name in ("entropy", "compaction", "information", "classes", "flips")}
    return {
        **{"curves": [folder], "gate": [folder], "operators": [folder], "scaling": [report], "savings": ["v3-tiny"]},
        **{"routing": [mixed_run], **of_null},
    }


def test_the_list_says_what_each_is_drawn_from():
    code, output = run("figures", "list")
    assert code == 0
    rows = {line.split()[0]: line for line in output.splitlines()[1:-1]}
    assert set(rows) == set(NAMES) - {"list"}
    assert "training runs" in rows["gate"] and "a null test" in rows["compaction"] and "presets" in rows["savings"]


# The Pareto picture is drawn in tests/studies, where studies are.
@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("list", "pareto")])
def test_every_figure_is_a_titled_picture_and_overwrites_nothing(tmp_path, inputs, name):
    out = tmp_path / "new" / "f.svg"
    code, output = run("figures", name, *inputs[name], "--out", out)
    assert (code, output.splitlines()[0]) == (0, f"wrote {out}")
    first = ElementTree.parse(out).getroot()
    assert first.get("role") == "img" and first.get("aria-label")
    assert len(words(out.read_text())) > 5
    assert {element.tag.removeprefix(SVG) for element in first.iter()} <= {
        *("svg", "rect", "text", "path", "polyline", "polygon", "circle", "title")
    }
    before = out.read_text()
    code, output = run("figures", name, *inputs[name], "--out", out)
    assert code == 2 and "exists already" in output and out.read_text() == before
    assert run("figures", name, *inputs[name], "--out", out, "--overwrite")[0] == 0
    code, output = run("figures", name, *inputs[name], "--out", tmp_path / "f.png")
    assert code == 2 and "pictures are SVG" in output


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("list", "savings")])
def test_inputs_that_are_not_there_are_one_sentence(tmp_path, name):
    code, output = run("figures", name, tmp_path / "missing", "--out", tmp_path / "f.svg")
    assert code == 2 and output.startswith("error: ") and len(output.splitlines()) == 1
    assert not (tmp_path / "f.svg").exists()


def test_the_prompt_has_the_words_the_paper_names(tmp_path, mixed_run):
    assert {"the", "of", "many", "overwhelming", "consensus", "carbon"} <= set(PROMPT.split())
    run("figures", "routing", mixed_run, "--out", tmp_path / "f.svg")
    cells = elements((tmp_path / "f.svg").read_text(), "rect", "cell")
    assert len(cells) == 4 * len(PROMPT.encode())  # bytes are its tokens


def test_names_are_text(tmp_path):
    name = "<script>alert(1)</script>&\"'"
    folder = write_run(tmp_path / "run", records=[{"step": 1, **RECORD, "gate": {name: 0.5}}])
    assert run("figures", "gate", folder, "--out", tmp_path / "f.svg")[0] == 0
    text = (tmp_path / "f.svg").read_text()
    assert f"run: g on {name}" in words(text) and "<script" not in text


def test_pictures_of_a_null_test_are_those_it_drew_itself(tmp_path, nulltest):
    for name in ("compaction", "information", "classes", "flips"):
        assert run("figures", name, nulltest / "nulltest.json", "--out", tmp_path / f"{name}.svg")[0] == 0
        assert (tmp_path / f"{name}.svg").read_text() == (nulltest / f"{name}.svg").read_text()


def test_entropy_has_a_box_for_every_layer_and_basis(tmp_path, nulltest):
    run("figures", "entropy", nulltest, "--out", tmp_path / "f.svg")
    text = (tmp_path / "f.svg").read_text()
    report = json.loads((nulltest / "nulltest.json").read_text())
    boxes = elements(text, "path", "box")
    assert len(boxes) == 3 * len(report["layers"]) == len(elements(text, "path", "whisker"))
    assert len(elements(text, "rect", "noise")) == 2

    def ends(element):
        _, low, high = element.get("d").replace("M", "").replace("V", "").split()
        return float(low), float(high)

    # Heights are linear in H: the first box against the noise's band.
    band = elements(text, "rect", "noise")[1]
    top, height = float(band.get("y")), float(band.get("height"))
    null, own = report["null_percentiles"], report["layers"][0]["whiteness"][0]["percentiles"]
    scale = height / (null["75"] - null["25"])
    low, high = ends(boxes[0])
    assert low - high == pytest.approx(scale * (own["75"] - own["25"]), abs=0.3)
    assert high - top == pytest.approx(scale * (null["75"] - own["75"]), abs=0.3)


def test_flips_that_were_not_made(tmp_path, nulltest):
    record = json.loads((nulltest / "nulltest.json").read_text())
    (tmp_path / "none.json").write_text(json.dumps({**record, "worth": None, "flips": []}))
    code, output = run("figures", "flips", tmp_path / "none.json", "--out", tmp_path / "f.svg")
    assert code == 2 and "no routes were flipped" in output


def test_when_a_run_reaches_the_loss_of_the_first(tmp_path):
    def made(name, losses, speed):
        records = [
            {"step": s, **RECORD, "tokens_per_second": speed, "validation": {"text": loss}}
            for s, loss in enumerate(losses, start=1)
        ]
        return write_run(tmp_path / name, records=records)

    slow = made("slow", [5.0, 4.0, 3.0], 32.0)
    fast = made("fast", [5.0, 2.9, 2.8], 64.0)
    code, output = run("curves", slow, fast, "--over", "time", "--out", tmp_path / "f.svg")
    assert code == 0
    # A step is 32 tokens: a second for one, half of it for the other.
    assert "slow reaches the validation loss 3.0000, slow's least, at 2 seconds." in output
    assert "fast reaches the validation loss 3.0000, slow's least, at 0.5 seconds." in output
    _, output = run("curves", fast, slow, "--over", "tokens", "--out", tmp_path / "g.svg")
    assert "slow reaches the validation loss 2.8000, fast's least, not at all." in output
    other = write_run(
        tmp_path / "other", records=[{"step": 1, **RECORD, "validation": {"text": 1.0}}], data={"x": "f2"}
    )
    _, output = run("curves", slow, other, "--over", "tokens", "--out", tmp_path / "h.svg")
    assert "other was validated on other rows than slow" in output
