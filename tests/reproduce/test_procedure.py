"""Each recipe from beginning to end on small corpora, killed and continued, and what is refused."""

import json
import math
import os
import shlex
import signal
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import load_file

from chiar.data.tokens import batches
from chiar.evaluation.harness import evaluate
from chiar.model.load import load_model
from chiar.reproduce.plan import make_plan
from chiar.routing.calibration import calibrate
from commands import run

LENGTH = 16
SMALL = [
    *("--size", "tiny", "--device", "cpu", "--budget", str(6 * 4 * LENGTH), "--set", "batch=4"),
    *("--set", f"length={LENGTH}", "--set", "micro_batch=2", "--set", "hidden_size=16", "--set", "compile=false"),
    *("--set", "precision=fp32", "--set", "save_every=2", "--set", "evaluate_every=2", "--set", "evaluate_rows=4"),
    *("--set", "learning_rate=0.01"),
]


def arguments(recipe, out, *data, small=SMALL):
    named = [part for path in data for part in ("--data", path)]
    return ["reproduce", recipe, *named, "--out", str(out), *small]


def table(out):
    return json.loads((out / "table.json").read_text())


def untimed(record, out):
    """A table without what depends on the clock, the machine or the folder."""
    rows = [
        {k: v for k, v in row.items() if k not in ("tokens_per_second", "run", "command")} for row in record["rows"]
    ]
    commands = [row["command"].replace(str(out), "OUT") for row in record["rows"]]
    return {**record, "rows": rows, "commands": commands, "command": None}


@pytest.fixture(scope="module")
def ablation(corpus, tmp_path_factory):
    """The ablation, done once; tests read it and leave it as it is."""
    out = tmp_path_factory.mktemp("ablation") / "out"
    code, output = run(*arguments("ablation-16m", out, corpus))
    assert code == 0, output
    return out, output


def test_the_ablation_fills_the_table(ablation, corpus):
    out, output = ablation
    record = table(out)
    assert record["complete"]
    rows = {row["name"]: row for row in record["rows"]}
    assert list(rows) == ["baseline", "soft", "hard", "threshold", "threshold-reg"]
    assert rows["baseline"]["gap"] == 0.0
    for name, row in rows.items():
        assert row["gap"] == pytest.approx(row["test_loss"] - rows["baseline"]["test_loss"], abs=1e-12)
        assert row["paper"]["gap"] == pytest.approx(math.log(row["paper"]["test_perplexity"] / 44.63), abs=1e-12)
        assert row["tokens_per_second"] > 0
        assert (out / name / "best").exists() and (out / name / "final").exists()
        assert f"({name})" in output and f"({name})" in (out / "table.md").read_text()
    assert rows["threshold"]["flops_of_baseline"] < 1.0 == rows["baseline"]["flops_of_baseline"]
    assert rows["soft"]["test_loss"] != rows["hard"]["test_loss"] != rows["threshold"]["test_loss"]
    # No gradient reaches the regulariser under threshold routing.
    assert rows["threshold-reg"]["test_loss"] == rows["threshold"]["test_loss"]


def test_the_caption_says_what_differs(ablation):
    out, _ = ablation
    text = (out / "table.md").read_text()
    assert "384 training tokens a row: 3.24e-05% of the paper's 1,183,711,232 (10 epochs of WikiText-103)" in text
    assert "6 step(s) of 4 × 16 tokens" in text
    assert "learning rate 0.01 → 1e-06" in text
    assert "seed 0" in text
    assert "Corpus: text. Hardware: cpu" in text
    assert "perplexities do not compare with the paper's" in text
    assert "Models of size tiny, not the paper's 16m." in text
    assert "batch = 4" in text
    assert "test of the final weights" in text


def test_the_threshold_is_that_of_the_trained_baseline(ablation, corpus):
    out, _ = ablation
    valid = make_plan("ablation-16m", [corpus], size="tiny").corpora[0].split("valid")
    count = min(200 * LENGTH, valid.tokens)
    baseline, _ = load_model(str(out / "baseline" / "best"))
    stream = batches(valid.read(0, count), 200, LENGTH, 50)
    low, high = (calibrate(baseline, stream, "embeddings").layers[0].percentiles[p] for p in (33, 67))
    tau = (low + high) / 2
    rows = {row["name"]: row for row in table(out)["rows"]}
    assert rows["threshold"]["threshold"] == rows["threshold-reg"]["threshold"] == tau
    assert rows["baseline"]["threshold"] is None and rows["soft"]["threshold"] is None
    for name in ("threshold", "threshold-reg"):
        for weights in ("best", "final"):
            assert load_model(str(out / name / weights))[0].config.thresholds == tau


def test_validation_is_of_the_best_and_test_of_the_final_weights(ablation, corpus):
    out, _ = ablation
    for row in table(out)["rows"]:
        run_folder = out / row["name"]
        records = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
        evaluated = {r["step"]: r["validation"]["text"] for r in records if "validation" in r}
        assert row["best_step"] == min(evaluated, key=evaluated.__getitem__)
        assert (run_folder / "best").resolve().name == f"best-step-{row['best_step']:08d}"
        final = load_file(run_folder / "final" / "model.safetensors")
        last = load_file(run_folder / "checkpoints" / "latest" / "tensors-0.safetensors")
        assert all(torch.equal(value, last[f"model.language.{name}"]) for name, value in final.items())
        for weights, split, loss in (("best", "valid", "validation_loss"), ("final", "test", "test_loss")):
            report = evaluate(str(run_folder / weights), corpus, split, length=LENGTH, batch_size=2, device="cpu")
            assert row[loss] == report.scores.loss


def test_a_row_trained_by_hand_is_the_same(ablation, corpus, tmp_path):
    out, _ = ablation
    row = next(row for row in table(out)["rows"] if row["name"] == "threshold")
    command = row["command"].replace(str(out / "threshold"), str(tmp_path / "run"))
    code, output = run(*shlex.split(command)[1:], "--device", "cpu")
    assert code == 0, output
    ours = load_file(out / "threshold" / "final" / "model.safetensors")
    theirs = load_file(tmp_path / "run" / "final" / "model.safetensors")
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_chiar_eval_reads_the_rows(ablation):
    out, _ = ablation
    code, output = run("eval", out / "baseline", out / "threshold")
    assert code == 0
    gap = next(row["gap"] for row in table(out)["rows"] if row["name"] == "threshold")
    assert f"{gap:+.4f}" in output


def test_done_again_nothing_is_trained(ablation, corpus):
    out, _ = ablation
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.name not in ("table.md", "table.json")}
    record = table(out)
    code, output = run(*arguments("ablation-16m", out, corpus))
    assert code == 0
    assert output.count("done before") == 5
    assert untimed(table(out), out) == untimed(record, out)
    assert {path: path.stat().st_mtime_ns for path in before} == before


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--seed", "1"], "was started with seed = 0, not 1"),
        (["--budget", "640"], "was started with tokens = 384, not 640"),
        (["--set", "dropout=0.0"], "was started with other changes|was started with changes"),
        (["--size", "16m"], 'was started with size = "tiny", not "16m"'),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_another_procedure_is_refused(ablation, corpus, more, message):
    out, _ = ablation
    code, output = run(*arguments("ablation-16m", out, corpus), *more)
    assert code == 2
    assert any(part in output for part in message.split("|")), output


def test_a_folder_of_something_else_is_left_alone(corpus, tmp_path):
    (tmp_path / "letter.txt").write_text("dear")
    code, output = run(*arguments("ablation-16m", tmp_path, corpus))
    assert code == 2
    assert "exists already and is no reproduction" in output
    assert [path.name for path in tmp_path.iterdir()] == ["letter.txt"]


@pytest.mark.slow
def test_killed_and_continued_it_gives_the_same_table(ablation, corpus, tmp_path):
    """The process is killed, by its number, while it trains the second row."""
    straight, _ = ablation
    out = tmp_path / "out"
    command = [sys.executable, "-m", "chiar", *arguments("ablation-16m", out, corpus)]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(command, **quiet, env={**os.environ, "OMP_NUM_THREADS": "1"})
    deadline = time.monotonic() + 240
    while not (out / "soft" / "checkpoints" / "latest").exists() and time.monotonic() < deadline:
        time.sleep(0.002)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert not (out / "hard").exists()
    half = table(out)
    assert not half["complete"]
    assert [row["name"] for row in half["rows"]] == ["baseline"]
    assert any("Unfinished: 1 of 5 rows." in line for line in half["caption"])
    code, output = run(*arguments("ablation-16m", out, corpus))
    assert code == 0, output
    assert "baseline: done before" in output
    assert untimed(table(out), out) == untimed(table(straight), straight)


def test_scaling(corpus, tmp_path):
    code, output = run(*arguments("scaling-400m", tmp_path / "out", corpus))
    assert code == 0, output
    record = table(tmp_path / "out")
    assert [(row["name"], row["preset"]) for row in record["rows"]] == [
        ("baseline", "baseline-tiny"),
        ("threshold", "v3-tiny"),
    ]
    assert record["rows"][1]["paper"]["gap"] == pytest.approx(math.log(27.51 / 23.58))


def test_mixed(corpus, reviews, listops, tmp_path):
    out = tmp_path / "out"
    code, output = run(*arguments("mixed", out, corpus, reviews, listops), "--set", "added_share=1.0")
    assert code == 0, output
    record = table(out)
    rows = {row["name"]: row for row in record["rows"]}
    assert list(rows) == ["baseline", "threshold", "mixed"]
    assert set(rows["mixed"]["gate_by_corpus_in_training"]) == {"text", "imdb", "listops"}
    assert set(rows["threshold"]["gate_by_corpus_in_training"]) == {"text"}
    beside = rows["mixed"]["beside"]
    assert beside["gap"] == pytest.approx(rows["mixed"]["test_loss"] - rows["threshold"]["test_loss"])
    assert beside["gap"] != 0.0
    assert beside["paper_gap"] == pytest.approx(math.log(28.56 / 27.51))
    assert f"mixed against threshold: {beside['gap']:+.4f} nats, the paper +0.0375." in output
    assert rows["mixed"]["threshold"] == rows["threshold"]["threshold"]
    assert set(record["data"]) == {"text", "imdb", "listops"}


def test_it_is_not_for_torchrun(corpus, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    code, output = run(*arguments("scaling-400m", tmp_path / "out", corpus))
    assert code == 2
    assert "one process" in output
    assert not (tmp_path / "out").exists()
