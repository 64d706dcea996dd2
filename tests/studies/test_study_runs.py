"""Studies from beginning to end on a CPU: their numbers, killed and continued, what is refused, what fails."""

import json
import math
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import load_file

from chiar.data.shards import Corpus
from chiar.data.tokens import batches
from chiar.evaluation.harness import evaluate
from chiar.model.load import load_config, load_model
from chiar.routing.calibration import calibrate
from chiar.routing.flops import count_flops
from commands import run

RUNS = ["dense-s0", "hash-s0", "dense-s1", "hash-s1", "learned-s1"]


def command(name, corpus, out, *more):
    return ["study", "run", str(name), "--data", corpus, "--out", str(out), "--device", "cpu", *map(str, more)]


def done(*arguments):
    code, output = run(*arguments)
    assert code == 0, output
    return output


def refused(*arguments):
    code, output = run(*arguments)
    assert code == 2, output
    return output


def results(out, part=""):
    """All of them, or its runs by name, or its variants."""
    found = json.loads((out / "results.json").read_text())
    names = {"runs": "name", "variants": "variant"}
    return {one[names[part]]: one for one in found[part]} if part else found


def assert_same_weights(ours, theirs):
    """Trained by two processes, perhaps with other numbers of threads, so sums may round otherwise."""
    ours, theirs = (load_file(folder / "final" / "model.safetensors") for folder in (ours, theirs))
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-3, atol=1e-4)


@pytest.fixture
def copied(study, tmp_path):
    """The finished study, to be changed."""
    shutil.copytree(study[0], tmp_path / "copy", symlinks=True)
    return tmp_path / "copy"


def test_every_run_is_an_ordinary_run_and_is_measured(study, corpus, tmp_path):
    out, output = study
    runs = results(out, "runs")
    assert set(runs) == set(RUNS)
    for name, one in runs.items():
        model = str(out / "runs" / name / "final")
        report = evaluate(model, corpus, "test", length=16, rows=8, batch_size=2, device="cpu")
        assert one["test_loss"] == pytest.approx(report.scores.loss, rel=1e-5)  # computed by another process
        assert one["bits_per_byte"] == pytest.approx(report.scores.derived()["bits_per_byte"], rel=1e-5)
        assert (one["tokens"], one["jobs"], one["attempts"]) == (384, 1, 1)
        assert one["wall_seconds"] > 0 and one["step_ms"] > 0 and f"{name}: done in" in output
    told = runs["learned-s1"]["command"]
    assert shlex.join(told) in (out / "table.md").read_text() and told[-1] == str(out / "runs" / "learned-s1")
    done(*told[1:-1], tmp_path / "by-hand", "--device", "cpu")
    assert_same_weights(out / "runs" / "learned-s1", tmp_path / "by-hand")


def test_the_table_says_what_the_runs_measured(study):
    out, output = study
    loss, rows = {name: one["test_loss"] for name, one in results(out, "runs").items()}, results(out, "variants")
    base = (loss["dense-s0"] + loss["dense-s1"]) / 2
    # Only seed 1 of the learned router ran: its difference is to the baseline of that seed.
    for name, seeds in (("dense", (0, 1)), ("hash", (0, 1)), ("learned", (1,))):
        row, own = rows[name], [loss[f"{name}-s{seed}"] for seed in seeds]
        gaps = [mine - loss[f"dense-s{seed}"] for mine, seed in zip(own, seeds, strict=True)]
        gap, spreads = sum(gaps) / len(gaps), [max(values) - min(values) for values in (own, gaps)]
        found = [row[part] for part in ("test_loss", "gap", "paired_loss")]
        assert found == pytest.approx([sum(own) / len(own), gap, base + gap], abs=1e-12)
        expected = spreads if len(seeds) > 1 else [None, None]
        assert [row["test_loss_spread"], row["gap_spread"]] == pytest.approx(expected, abs=1e-12)
    text = (out / "table.md").read_text()
    assert f"{rows['hash']['gap']:+.4f}" in output and "different seeds" in text


def test_flops_are_counted_at_the_measured_fractions(study):
    runs, rows, folder = results(study[0], "runs"), results(study[0], "variants"), study[0] / "runs"
    report = json.loads((folder / "hash-s0" / "evaluation.json").read_text())
    shares = [layer["use"] for layer in report["routing"]["layers"]]
    hashed, learned = (load_config(str(folder / name / "final")) for name in ("hash-s0", "learned-s1"))
    assert runs["hash-s0"]["flops_per_token"]["forward"] == pytest.approx(count_flops(hashed, 16, shares).total)
    learned.routing = "soft"  # its straight-through estimator trains on both operators for every token
    assert runs["learned-s1"]["flops_per_token"]["training"] == pytest.approx(3 * count_flops(learned, 16).total)
    flops, losses = ([row[part] for row in rows.values()] for part in ("flops_of_baseline", "paired_loss"))
    assert flops == sorted(flops) and rows["dense"]["flops_of_baseline"] == 1
    better = [all(other > loss for other in losses[:number]) for number, loss in enumerate(losses)]
    assert [row["frontier"] for row in rows.values()] == better


def test_done_again_nothing_is_trained(copied, corpus, toml):
    runs = {path: path.stat().st_mtime_ns for path in (copied / "runs").rglob("*") if path.is_file()}
    before = results(copied)
    for name in ("table.md", "results.json", "pareto.svg"):
        (copied / name).unlink()
    assert "learned" in done("study", "table", copied) and results(copied)["variants"] == before["variants"]
    # How it is shown may change.
    assert done(*command(toml(("warmup", "log_every = 7, warmup")), corpus, copied)).count("done before") == len(RUNS)
    assert {path: path.stat().st_mtime_ns for path in runs} == runs and (copied / "pareto.svg").is_file()


def test_the_most_memory_a_run_logged_is_kept(copied):
    metrics = copied / "runs" / "hash-s0" / "metrics.jsonl"
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    peaks = [{"peak_memory_gb": 2.5}, {"peak_memory_gb": 2.0}, *[{}] * len(records)]
    lines = [json.dumps(record | peak) for record, peak in zip(records, peaks, strict=False)]
    metrics.write_text("\n".join(lines) + "\n")
    assert len(records) > 1 and "peak GB" in done("study", "table", copied)
    assert results(copied, "runs")["dense-s0"]["peak_memory_gb"] is None
    assert results(copied, "variants")["hash"]["peak_memory_gb"] == 2.5


def test_folders_that_are_not_free(copied, corpus, toml, tmp_path, monkeypatch):
    for *replaced, message in (
        ("random_fraction = 0.25", "random_fraction = 0.5", "config random_fraction = 0.25, not 0.5"),
        ("tokens = 390", "tokens = 640", "steps = 6, not 10"),
        ("test_rows = 8", "test_rows = 9", "test_rows = 8, not 9"),
    ):
        output = refused(*command(toml(replaced), corpus, copied))
        assert message in output and "was started with" in output and "choose another folder" in output
    other = tmp_path / "other"
    other.mkdir()
    (other / "letter.txt").write_text("dear")
    assert "is no study" in refused(*command(toml(), corpus, other))
    assert [path.name for path in other.iterdir()] == ["letter.txt"]
    (other / "study.json").write_text('{"format": "chiar-study/1"}')
    assert "commit bde4d4f reads it" in refused(*command(toml(), corpus, other))
    fcntl = pytest.importorskip("fcntl")
    with (copied / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert "another process is running the study" in refused(*command(toml(), corpus, copied))
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "without torchrun" in refused(*command(toml(), corpus, tmp_path / "out"))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "pip install 'chiar[plots]'" in refused(*command(toml(), corpus, tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_a_limit_begins_nothing_that_would_not_end_in_time(copied, corpus, toml):
    more = '\n[variants.soft]\nrole = "control"\nconfig = { router = "learned", routing = "soft" }\n'
    output = done(*command(toml(more=more), corpus, copied, "--limit-minutes", "0.001"))
    assert not (copied / "runs" / "soft-s0").exists()
    assert "soft-s0: not begun, it would take about" in output
    assert "left, for the same command: soft-s0, soft-s1" in output
    # A control that has not run is named in every table.
    assert "Controls without a finished run: soft." in (copied / "table.md").read_text()


@pytest.mark.slow
def test_a_run_that_fails_costs_itself_and_what_comes_after_it(corpus, toml, tmp_path):
    more = '[variants.later]\nrole = "candidate"\nafter = { weights = "learned" }\n'
    broken = toml(
        ("seeds = [1]", "settings = { learning_rate = 1000, weight_decay = 1000, warmup = 0, clip = 0.0 }"), more=more
    )
    wanted = ["--only", "later", "--only", "dense", "--seeds", "1"]
    code, output = run(*command(broken, corpus, tmp_path / "out", *wanted))
    assert code == 1
    assert "learned-s1: failed: " in output and "is not finite" in output
    assert "later-s1: not begun, the weights of learned-s1 are not here" in output
    assert "dense-s1: done in" in output and "failed, tried again by the same command: learned-s1, later-s1" in output
    assert list(results(tmp_path / "out")["failed"]) == ["learned-s1"]
    assert "learned-s1 failed: " in (tmp_path / "out" / "table.md").read_text()


def at_work(out):
    """Numbers of the runs' processes; the study's own command line has no such word before the folder."""
    return subprocess.run(["pgrep", "-f", f"studies.runner {out}"], capture_output=True, text=True).stdout.split()


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("pgrep"), reason="needs pgrep to see that no process is left")
def test_killed_and_continued_it_gives_the_same_results(study, corpus, toml, tmp_path):
    """The study is killed, by its number, while it trains two runs at a time; its runs end with it."""
    straight, out, both = study[0], tmp_path / "out", {"dense-s0", "hash-s0"}
    arguments = command(toml(), corpus, out, "--only", "dense", "--only", "hash", "--seeds", "0", "--jobs", "2")
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen([sys.executable, "-m", "chiar", *arguments], **quiet)
    deadline = time.monotonic() + 240
    while not list(out.glob("runs/*/checkpoints/latest")) and time.monotonic() < deadline:
        time.sleep(0.002)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    while at_work(out) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not at_work(out)
    assert not all((out / "runs" / name / "evaluation.json").exists() for name in both)
    done(*arguments)
    ours, theirs = results(out, "runs"), results(straight, "runs")
    assert set(ours) == both
    for name, one in ours.items():
        assert_same_weights(out / "runs" / name, straight / "runs" / name)
        assert one["test_loss"] == pytest.approx(theirs[name]["test_loss"], rel=1e-4)  # of such weights
        assert one["jobs"] == 2 and one["step_ms"] is None  # two at a time: their speeds do not count
    assert max(one["attempts"] for one in ours.values()) == 2
    assert "shared the device" in (out / "table.md").read_text()


def test_step_times_are_measured_with_the_trained_weights(copied, corpus, toml, tmp_path):
    arguments = ["study", "time", toml(), "--data", corpus, "--out", copied, "--device", "cpu", "--steps", "2"]
    done(*arguments)
    stored, rows = json.loads((copied / "study.json").read_text()), results(copied, "variants")
    times = stored["times"]
    assert times["device"] == "cpu" and times["versions"]["torch"] == torch.__version__
    assert set(times["variants"]) == set(rows) == {"dense", "hash", "learned"}
    for name, timed in times["variants"].items():
        assert timed["tokens_per_second"] == pytest.approx(1e3 * 64 / timed["step_ms"], rel=1e-3)
        assert rows[name]["step_ms"] == timed["step_ms"] > 0
        assert timed["weights"] == "trained"  # `learned` ran with seed 1 only, which is the seed it is timed with
    assert not times["variants"]["dense"]["use"] and all(0 < f[-1] < 0.6 for f in times["variants"]["hash"]["use"])
    assert "Step times are of chiar study time: cpu" in (copied / "table.md").read_text()
    # Added elsewhere they are kept, beside those of the same machine only.
    here, file, hashed = tmp_path / "here", tmp_path / "times.json", {"hash": {"step_ms": 7.0}}
    for device, expected in (("cpu", {**times["variants"], **hashed}), ("another", hashed)):
        file.write_text(json.dumps(results(copied) | {"times": times | {"variants": hashed}}))
        done("study", "add", here / device, file)
        file.write_text(json.dumps(results(copied) | {"times": times | {"device": device}}))
        output = done("study", "add", here / device, file)
        assert ("of another machine (another)" in output) == (device == "another")
        assert results(here / device)["times"]["variants"] == expected
    (copied / "study.json").write_text(json.dumps(stored | {"times": times | {"device": "another"}}))
    assert "are of another machine" in refused(*arguments)


@pytest.mark.slow
def test_results_from_elsewhere_count_as_done(copied, corpus, toml, tmp_path):
    """Half of the study in one folder, the other half in another, from the results of the first alone."""
    there, here, file = results(copied), tmp_path / "here", tmp_path / "half.json"
    half = there | {part: [one for one in there[part] if one["variant"] != "learned"] for part in ("runs", "variants")}
    file.write_text(json.dumps(half))
    assert "added dense-s0, dense-s1, hash-s0, hash-s1" in done("study", "add", here, file)
    assert "Candidates without a finished run: learned." in (here / "table.md").read_text()
    output = done(*command(toml(), corpus, here))
    assert output.count("done before") == 4 and "learned-s1: done in" in output
    for part in ("variant", "seeds", "frontier"):
        assert [row[part] for row in results(here)["variants"]] == [row[part] for row in there["variants"]]
    assert "nothing new" in done("study", "add", here, file)
    file.write_text(json.dumps(half | {"common": half["common"] | {"steps": 7}}))
    assert "steps = 6, not 7" in refused("study", "add", here, file)
    assert "run learned-s1" in refused("study", "add", here, copied / "results.json")
    assert "does not say format" in refused("study", "add", tmp_path / "new", copied / "study.json")
    assert not (tmp_path / "new").exists()


SMALL = """
extends = "table2"
tokens = 384
config = { hidden_size = 16, num_hidden_layers = 3, num_attention_heads = 2, intermediate_size = 32 }
settings = { batch = 4, length = 16, micro_batch = 2, warmup = 1, compile = false, precision = "fp32", \
save_every = 2, evaluate_every = 2, evaluate_rows = 4, learning_rate = 0.01 }
"""


@pytest.mark.slow
def test_the_papers_procedure(corpus, listops, tmp_path):
    """Table 2: a baseline, τ from its embeddings, the rows that route by it, one of them with mixed corpora."""
    out, small = tmp_path / "out", tmp_path / "small.toml"
    small.write_text(SMALL)
    output = done(*command(small, corpus, out, "--data", listops, "--jobs", "2"))
    runs, rows, valid = results(out, "runs"), results(out, "variants"), Corpus.open(corpus).split("valid")
    baseline, _ = load_model(str(out / "runs" / "baseline-s0" / "best"))
    stream = batches(valid.read(0, min(200 * 16, valid.tokens)), 200, 16, 50)
    low, high = (calibrate(baseline, stream, "embeddings").layers[0].percentiles[p] for p in (33, 67))
    tau = rows["threshold"]["threshold"]
    assert tau == pytest.approx((low + high) / 2, rel=1e-4)  # in other batches
    assert rows["mixed"]["threshold"] == tau and rows["baseline"]["threshold"] is None
    for name, test in (("baseline", 23.58), ("threshold", 27.51), ("mixed", 28.56)):
        folder, one = out / "runs" / f"{name}-s0", runs[f"{name}-s0"]
        if name != "baseline":
            assert load_model(str(folder / "final"))[0].config.thresholds == tau
            assert f"thresholds={tau}" in one["command"]
        for kind, split, loss in (("best", "valid", "validation_loss"), ("final", "test", "test_loss")):
            report = evaluate(str(folder / kind), corpus, split, length=16, batch_size=2, device="cpu")
            assert one[loss] == pytest.approx(report.scores.loss, rel=1e-5)  # computed by another process
        assert rows[name]["paper_gap"] == pytest.approx(math.log(test / 23.58), abs=1e-12)
        assert rows[name]["test_perplexity"] == pytest.approx(math.exp(one["test_loss"]))
    assert "five epochs of WikiText-103" in output and "384 training tokens a run of text + listops" in output
    (out / "runs" / "threshold-s0" / "evaluation.json").unlink()  # as if killed before: it goes on with the τ it had
    (out / "runs" / "baseline-s0" / "best").unlink()
    assert "threshold-s0: done in" in done(*command(small, corpus, out, "--only", "threshold"))
    again = results(out, "runs")["threshold-s0"]["test_loss"]
    assert again == pytest.approx(runs["threshold-s0"]["test_loss"], rel=1e-5)  # another process
