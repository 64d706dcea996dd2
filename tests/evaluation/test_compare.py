"""Reports and runs side by side."""

import dataclasses
import io
import json

import pytest
from rich.console import Console

from chiar.errors import InputError
from chiar.evaluation.compare import compare
from chiar.evaluation.report import ClassScores, EvaluationReport, LanguageScores, LayerUse, RoutingUse

BASE = EvaluationReport(
    model="base", run=None, corpus="text", fingerprint="abc", split="test", length=16, stride=None, rows=None,
    batch_size=4, precision="fp32", device="cpu", scores=LanguageScores(100, 2.0, 30, 5, 90),
    routing=RoutingUse([], None, None), flops=4e6, baseline_flops=4e6, flops_length=16, remarks=["a subset"],
)  # fmt: skip
ROUTED = dataclasses.replace(
    BASE,
    scores=LanguageScores(100, 2.25, 30, 5, 90),
    routing=RoutingUse([LayerUse(1, {"spectral": 0.75, "attention": 0.25})], 0.5, "batch"),
    flops=3e6,
)


def write(path, report):
    path.write_text(report.to_json())
    return path


def printed(parts) -> str:
    console = Console(width=300, file=io.StringIO())
    for part in parts:
        console.print(part)
    return console.file.getvalue()


@pytest.fixture
def two(tmp_path):
    return [write(tmp_path / "base.json", BASE), write(tmp_path / "routed.json", ROUTED)]


def row(text: str, name: str) -> list[str]:
    return next(line.split() for line in text.splitlines() if line.split()[:1] == [name])


def test_gap_and_ratio(two):
    text = printed(compare(two))
    cells = row(text, "routed")
    assert "9.488" in cells and "2.2500" in cells and "+0.2500" in cells and "0.7500" in cells
    assert "0.250" in cells and "(batch)" in cells
    assert "+0.0000" in row(text, "base")
    assert text.count("a subset") == 1


def test_another_baseline(two):
    for name in ("routed", str(two[1])):
        assert "-0.2500" in row(printed(compare(two, name)), "base")
    with pytest.raises(InputError, match=r"unknown baseline 'route'\. Did you mean 'routed'"):
        compare(two, "route")


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"fingerprint": "x"}, "corpus"),
        ({"split": "valid"}, "split"),
        ({"length": 8}, "length"),
        ({"stride": 4}, "stride"),
    ],
)
def test_what_differs_is_refused_or_marked(tmp_path, two, changes, field):
    other = write(tmp_path / "other.json", dataclasses.replace(ROUTED, **changes))
    with pytest.raises(InputError, match=f"other was evaluated with another {field} than base"):
        compare([*two, other])
    text = printed(compare([*two, other], anyway=True))
    assert "≠" in row(text, "other") and field in row(text, "other")
    assert "≠" not in row(text, "routed")


def run_folder(path, losses, speeds=(90.0, 100.0, 300.0), tail="", data=None, **settings):
    path.mkdir()
    settings = {"length": 16, "evaluate_rows": 4, **settings}
    (path / "run.json").write_text(json.dumps({"data": data or {"text": "abc"}, "settings": settings}))
    lines = [{"step": n, "loss": 3.0, "tokens_per_second": speed} for n, speed in enumerate(speeds)]
    lines += [{"step": 9, "validation": {"text": 9.0}}, {"step": 10, "validation": losses}]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + tail)
    return path


def test_runs_show_what_training_measured(tmp_path):
    runs = [run_folder(tmp_path / "a", {"text": 2.0}), run_folder(tmp_path / "b", {"text": 2.5}, tail='{"step": 1')]
    text = printed(compare(runs))
    assert row(text, "b") == ["b", "2.5000", "+0.5000", "100"]
    assert "training's own evaluations" in text


@pytest.mark.parametrize(
    ("changes", "field"),
    [({"data": {"text": "xyz"}}, "data"), ({"length": 8}, "length"), ({"evaluate_rows": 5}, "evaluate_rows")],
)
def test_runs_validated_otherwise_are_refused_or_marked(tmp_path, changes, field):
    runs = [run_folder(tmp_path / "a", {"text": 2.0}), run_folder(tmp_path / "b", {"text": 2.5})]
    runs.append(run_folder(tmp_path / "other", {"text": 2.5}, **changes))
    with pytest.raises(InputError, match=f"other was evaluated with another {field} than a: "):
        compare(runs)
    text = printed(compare(runs, anyway=True))
    assert row(text, "other")[-2:] == ["≠", field] and row(text, "b")[-1] == "alike"
    assert "mean little" in text


def test_a_run_that_does_not_say_its_data(tmp_path):
    runs = [run_folder(tmp_path / "a", {"text": 2.0}), run_folder(tmp_path / "b", {"text": 2.5})]
    (runs[1] / "run.json").unlink()
    for first, second in (runs, runs[::-1]):
        with pytest.raises(InputError, match="was evaluated with another data"):
            compare([first, second])
    (runs[0] / "run.json").unlink()
    with pytest.raises(InputError, match="b was evaluated with another data"):
        compare(runs)
    (runs[0] / "run.json").write_text('{"settings": {}}')
    with pytest.raises(InputError, match=r"run\.json is damaged"):
        compare(runs)


def test_a_run_with_an_evaluation(tmp_path, two):
    run = run_folder(tmp_path / "run", {"text": 2.5})
    write(run / "evaluation.json", ROUTED)
    cells = row(printed(compare([two[0], run])), "run")
    assert "+0.2500" in cells and cells[-2:] == ["2.5000", "100"]


def test_a_report_of_a_run_finds_its_metrics(tmp_path, two):
    run = run_folder(tmp_path / "run", {"a": 2.5, "b": 1.0})
    report = write(tmp_path / "report.json", dataclasses.replace(ROUTED, run=str(run)))
    assert "a 2.5000, b 1.0000" in printed(compare([two[0], report]))


def test_a_run_without_evaluation_beside_reports(tmp_path, two):
    run = run_folder(tmp_path / "run", {"text": 2.5})
    text = printed(compare([run, *two]))
    assert row(text, "run")[-2:] == ["2.5000", "100"]
    assert "+0.2500" in row(text, "routed")
    assert "+0.2500" not in printed(compare([run, *two], "run"))


def test_classifiers(tmp_path):
    scores = ClassScores(10, 50, 0, 0.5, ["no", "yes"], [[3, 1], [2, 4]])
    first = write(tmp_path / "one.json", dataclasses.replace(BASE, scores=scores))
    second = write(tmp_path / "two.json", dataclasses.replace(BASE, scores=dataclasses.replace(scores, loss=0.75)))
    assert {"70.00%", "+0.2500"} <= set(row(printed(compare([first, second])), "two"))


def test_bad_arguments(tmp_path, two):
    with pytest.raises(InputError, match="there is no file"):
        compare([tmp_path / "none.json"])
    with pytest.raises(InputError, match="neither a training run"):
        compare([tmp_path])
    with pytest.raises(InputError, match="named twice"):
        compare([two[0], two[0]])
    damaged = tmp_path / "damaged.json"
    for text, sentence in (
        ("{", "not an evaluation report"),
        ("[]", "does not say format"),
        ('{"format": "chiar-evaluation/1"}', "is damaged"),
    ):
        damaged.write_text(text)
        with pytest.raises(InputError, match=sentence):
            compare([damaged])
    run = run_folder(tmp_path / "run", {"text": 1.0})
    (run / "metrics.jsonl").write_text('x\n{"step": 1}\n')
    with pytest.raises(InputError, match="line 1 is damaged"):
        compare([run])
