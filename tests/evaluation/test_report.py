"""Reports and runs side by side."""

import dataclasses
import json
from pathlib import Path

import pytest

from chiar.evaluation import report as reports
from chiar.evaluation.report import EvaluationReport, LanguageScores, RoutingUse
from commands import run
from helpers import refused

BASE = EvaluationReport(
    model="base", run=None, corpus="text", fingerprint="abc", split="test", length=16, stride=None, rows=None,
    batch_size=4, precision="fp32", device="cpu", scores=LanguageScores(100, 2.0, 30, 5, 90),
    routing=RoutingUse([], None, None), flops=4e6, baseline_flops=4e6, flops_length=16, remarks=["a subset"],
)  # fmt: skip
USE = RoutingUse([reports.LayerUse(1, {"spectral": 0.75, "attention": 0.25})], 0.5, "batch")
ROUTED = dataclasses.replace(BASE, scores=LanguageScores(100, 2.25, 30, 5, 90), routing=USE, flops=3e6)


def write(path, report):
    path.write_text(report.to_json())
    return path


def compared(paths, *options):
    """The notes, and the figures of each column."""
    entries = [reports.read_entry(path, name) for path, name in zip(paths, reports.short_names(paths), strict=True)]
    table, *notes = reports.compare(entries, *options)
    figures, *columns = table.columns
    return "\n".join(notes), {one.header: dict(zip(figures.cells, one.cells, strict=True)) for one in columns}


@pytest.fixture
def two(tmp_path):
    return [write(tmp_path / "base.json", BASE), write(tmp_path / "routed.json", ROUTED)]


def run_folder(path, losses, speeds=(90.0, 100.0, 300.0), tail="", data=None, **settings):
    path.mkdir()
    settings = {"length": 16, "evaluate_rows": 4, **settings}
    (path / "run.json").write_text(json.dumps({"data": data or {"text": "abc"}, "settings": settings}))
    lines = [{"step": n, "loss": 3.0, "tokens_per_second": speed} for n, speed in enumerate(speeds)]
    lines += [{"step": 9, "validation": {"text": 9.0}}, {"step": 10, "validation": losses}]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + tail)
    return path


def test_gap_and_ratio(two):
    text, columns = compared(two)
    routed = columns["routed"]
    assert (routed["token perplexity"], routed["loss, nats"]) == ("9.48774", "2.2500")
    assert (routed["gap to the baseline, nats"], routed["FLOPs ÷ baseline"]) == ("+0.2500", "0.7500")
    assert routed["f, mean of the routed layers"] == "0.2500" and "(pool: batch)" in routed["g, mean of the gate"]
    assert columns["base"]["gap to the baseline, nats"] == "+0.0000"
    assert text.count("a subset") == 1
    classes = reports.ClassScores(10, 50, 0, 0.5, ["no", "yes"], [[3, 1], [2, 4]])
    write(two[0], dataclasses.replace(BASE, scores=classes))
    assert compared(two[:1])[1]["base"]["accuracy"] == "70.00%"


def test_one_model_is_no_baseline(two, runs):
    for path in (two[1], runs[0]):
        code, output = run("eval", path)
        assert code == 0 and "baseline" not in output and "gap" not in output and "100" in output


@pytest.fixture
def runs(tmp_path):
    return [run_folder(tmp_path / "a", {"text": 2.0}), run_folder(tmp_path / "b", {"text": 2.5}, tail='{"step": 1')]


REPORTS = [("corpus", {"fingerprint": "x"}), ("split", {"split": "valid"}), ("length", {"length": 8})]
RUNS = [("data", {"data": {"text": "xyz"}}), ("length", {"length": 8}), ("evaluate_rows", {"evaluate_rows": 5})]


@pytest.mark.parametrize(("kind", "field", "changes"), [("report", *r) for r in REPORTS] + [("run", *r) for r in RUNS])
def test_what_was_measured_otherwise_is_refused_or_marked(tmp_path, two, runs, kind, field, changes):
    if kind == "report":
        paths = [*two, write(tmp_path / "other.json", dataclasses.replace(ROUTED, **changes))]
    else:
        paths = [*runs, run_folder(tmp_path / "other", {"text": 2.5}, **changes)]
    refused(f"other was evaluated with another {field} than {paths[0].stem}", compared, paths)
    text, columns = compared(paths, True)
    assert columns["other"]["evaluated"] == f"≠ {field}" and columns[paths[1].stem]["evaluated"] == "alike"
    assert "mean little" in text


def test_runs_show_what_training_measured(runs):
    text, columns = compared(runs)
    assert list(columns["b"].values()) == ["2.5000", "+0.5000", "100"] and "training's own evaluations" in text
    (runs[1] / "run.json").unlink()  # it says its data no more
    for order in (runs, runs[::-1]):
        refused("was evaluated with another data", compared, order)
    (runs[0] / "run.json").write_text('{"settings": {}}')
    refused(r"run\.json is damaged", compared, runs)


def test_runs_beside_reports(tmp_path, two):
    evaluated, plain = (run_folder(tmp_path / name, {"a": 2.5, "b": 1.0}) for name in ("evaluated", "plain"))
    write(evaluated / "evaluation.json", ROUTED)
    told = write(tmp_path / "told.json", dataclasses.replace(ROUTED, run=str(plain)))
    _, columns = compared([plain, two[0], evaluated, told])
    for name in ("evaluated", "told"):
        assert columns[name]["gap to the baseline, nats"] == "+0.2500"
        assert columns[name]["last validation loss on b"] == "1.0000" and columns[name]["train tokens/s"] == "100"
    assert (
        columns["plain"]["gap to the baseline, nats"] == "–"
        and columns["plain"]["last validation loss on a"] == "2.5000"
    )


def test_bad_arguments(tmp_path, two):
    damaged, torn = tmp_path / "damaged.json", run_folder(tmp_path / "run", {"text": 1.0})
    (torn / "metrics.jsonl").write_text('x\n{"step": 1}\n')
    assert "there is no file" in run("eval", tmp_path / "none.json")[1]
    assert "named twice" in run("eval", two[0], two[0])[1]
    assert "line 1 is damaged" in run("eval", torn)[1]
    for text in ("{", "[]", "{}", '{"format": "chiar-evaluation/2"}', '{"format": "chiar-evaluation/1"}'):
        damaged.write_text(text)
        assert "not an evaluation report" in run("eval", damaged)[1]


def test_recorded_reports_are_still_read():
    recorded = [path for path in Path("docs/results").rglob("*.json") if "chiar-evaluation/1" in path.read_text()[:60]]
    assert recorded and all(EvaluationReport.read(path).flops > 0 for path in recorded)
