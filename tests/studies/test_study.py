"""A study from beginning to end on a CPU: its numbers, killed and continued, what is refused, what fails."""

import csv
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from safetensors.torch import load_file

from chiar.evaluation.harness import evaluate
from commands import run

SVG = "{http://www.w3.org/2000/svg}"
RUNS = ["dense-s0", "hash-s0", "dense-s1", "hash-s1", "learned-s1"]


def command(name, corpus, out, *more):
    return ["study", "run", str(name), "--data", corpus, "--out", str(out), "--device", "cpu", *map(str, more)]


def results(out):
    return json.loads((out / "results.json").read_text())


def test_loss(out, name):
    return json.loads((out / "runs" / name / "evaluation.json").read_text())["scores"]["nll"]


test_loss.__test__ = False


def weights(out, name):
    return load_file(out / "runs" / name / "final" / "model.safetensors")


@pytest.fixture(scope="module")
def declared(toml):
    return toml()


@pytest.fixture(scope="module")
def study(corpus, declared, tmp_path_factory):
    """The study, done once, one run at a time; tests read it and leave it as it is."""
    out = tmp_path_factory.mktemp("study") / "out"
    code, output = run(*command(declared, corpus, out))
    assert code == 0, output
    return out, output


@pytest.fixture
def copied(study, tmp_path):
    """The finished study, to be changed."""
    shutil.copytree(study[0], tmp_path / "copy", symlinks=True)
    return tmp_path / "copy"


def test_every_run_is_an_ordinary_run_and_is_measured(study, corpus):
    out, output = study
    found = results(out)
    assert {one["name"] for one in found["runs"]} == set(RUNS)
    for one in found["runs"]:
        folder = out / "runs" / one["name"]
        report = evaluate(str(folder / "final"), corpus, "test", length=16, rows=8, batch_size=2, device="cpu")
        assert one["test_loss"] == report.scores.loss
        records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        assert one["validation"] == [[r["step"], r["validation"]["text"]] for r in records if "validation" in r]
        assert [step for step, _ in one["validation"]] == [2, 4, 6]
        assert one["tokens"] == 384 and one["jobs"] == 1 and one["attempts"] == 1
        assert one["wall_seconds"] > 0 and one["step_ms"] > 0
        assert f"{one['name']}: done in" in output
    assert run("compare", out / "runs" / "dense-s0", out / "runs" / "hash-s0")[0] == 0


def test_the_table_says_what_the_runs_measured(study):
    out, output = study
    loss = {name: test_loss(out, name) for name in RUNS}
    rows = {row["variant"]: row for row in results(out)["variants"]}
    gaps = [loss["hash-s0"] - loss["dense-s0"], loss["hash-s1"] - loss["dense-s1"]]
    base = (loss["dense-s0"] + loss["dense-s1"]) / 2
    assert rows["dense"]["test_loss"] == pytest.approx(base, abs=1e-12)
    assert rows["dense"]["test_loss_spread"] == pytest.approx(abs(loss["dense-s0"] - loss["dense-s1"]), abs=1e-12)
    assert rows["dense"]["gap"] == 0.0
    assert rows["hash"]["gap"] == pytest.approx(sum(gaps) / 2, abs=1e-12)
    assert rows["hash"]["gap_spread"] == pytest.approx(abs(gaps[0] - gaps[1]), abs=1e-12)
    # Only seed 1 of the learned router ran: its difference is to the baseline of that seed.
    assert rows["learned"]["gap"] == pytest.approx(loss["learned-s1"] - loss["dense-s1"], abs=1e-12)
    assert rows["learned"]["gap_spread"] is None
    assert rows["learned"]["paired_loss"] == pytest.approx(base + rows["learned"]["gap"], abs=1e-12)
    assert f"{rows['hash']['gap']:+.4f}" in output
    text = (out / "table.md").read_text()
    assert f"{rows['learned']['test_loss']:.4f}" in text and "different seeds" in text


def test_flops_are_counted_at_the_measured_fractions(study):
    """Again by hand: D = 16, T = 16, 257 ids, an FFN of 64."""
    out, _ = study
    D, T, V = 16, 16, 257
    seen = (T - 1) / 2 + 1
    attention, ffn, dct = 8 * D * D + 4 * D * seen, 16 * D * D, D * D
    rows = {one["name"]: one for one in results(out)["runs"]}
    assert rows["dense-s0"]["flops_per_token"] == pytest.approx(
        {"layers": 3 * (attention + ffn), "logits": 2 * D * V, "forward": 3 * (attention + ffn) + 2 * D * V}
        | {"training": 3 * (3 * (attention + ffn) + 2 * D * V)}
    )
    hashed = rows["hash-s0"]
    layers = attention + 3 * ffn
    assert sorted(hashed["fraction_by_layer"]) == ["0", "1"]
    for f in hashed["fraction_by_layer"].values():
        assert 0.05 < f < 0.6
        layers += f * (4 * D * D + 4 * D * seen) + 4 * D * D + (1 - f) * dct
    assert hashed["flops_per_token"]["layers"] == pytest.approx(layers)
    assert hashed["fraction"] == pytest.approx(sum(hashed["fraction_by_layer"].values()) / 2)
    # The straight-through estimator of `learned` trains on both operators for every token.
    learned = rows["learned-s1"]["flops_per_token"]
    router = dct + 2 * (D + 1) * 2
    assert learned["training"] == pytest.approx(3 * (3 * (attention + ffn) + 2 * (dct + router) + 2 * D * V))
    summary = {row["variant"]: row for row in results(out)["variants"]}
    ratios = [
        rows[f"hash-s{s}"]["flops_per_token"]["forward"] / rows[f"dense-s{s}"]["flops_per_token"]["forward"]
        for s in (0, 1)
    ]
    by_layers = [rows[f"hash-s{s}"]["flops_per_token"]["layers"] / (3 * (attention + ffn)) for s in (0, 1)]
    assert summary["hash"]["layer_flops_of_baseline"] == pytest.approx(sum(by_layers) / 2)
    assert summary["hash"]["flops_of_baseline"] == pytest.approx(sum(ratios) / 2)


def test_rows_are_sorted_by_flops_and_the_frontier_is_marked(study):
    rows = results(study[0])["variants"]
    flops = [row["flops_per_token"]["forward"] for row in rows]
    assert flops == sorted(flops)
    for row in rows:
        cheaper = [o for o in rows if o["flops_per_token"]["forward"] < row["flops_per_token"]["forward"]]
        assert row["frontier"] == all(other["paired_loss"] > row["paired_loss"] for other in cheaper)


def test_the_csv_has_the_same_numbers(study):
    out, _ = study
    with (out / "table.csv").open() as file:
        rows = list(csv.DictReader(file))
    for row, expected in zip(rows, results(out)["variants"], strict=True):
        assert row["variant"] == expected["variant"]
        assert float(row["test_loss"]) == expected["test_loss"]
        assert float(row["flops_forward"]) == expected["flops_per_token"]["forward"]
        assert row["seeds"] == " ".join(map(str, expected["seeds"]))


def test_the_picture(study, tmp_path):
    root = ElementTree.fromstring((study[0] / "pareto.svg").read_text())
    words = [element.text for element in root.iter(f"{SVG}text")]
    # Trained one at a time, so the step times of training make a second panel.
    assert words.count("frontier, names in bold") == 2
    assert "counted MFLOPs a token, forward" in words
    assert {"dense", "hash", "learned"} <= {
        word.split(" ", 1)[1] for word in words if word and word[0].isdigit() and " " in word
    }
    for number, source in enumerate((study[0], study[0] / "results.json")):
        out = tmp_path / f"{number}.svg"
        assert run("plot", "pareto", source, "--out", out)[0] == 0
        assert out.read_text() == (study[0] / "pareto.svg").read_text()
    code, output = run("plot", "pareto", study[0] / "study.json", "--out", tmp_path / "x.svg")
    assert code == 2 and "does not hold the results of a study" in output


def test_a_run_trained_by_hand_is_the_same(study, tmp_path):
    out, _ = study
    told = next(one["command"] for one in results(out)["runs"] if one["name"] == "learned-s1")
    assert shlex.join(told) in (out / "table.md").read_text()
    assert told[-1] == str(out / "runs" / "learned-s1")
    code, output = run(*told[1:-1], tmp_path / "run", "--device", "cpu")
    assert code == 0, output
    ours, theirs = weights(out, "learned-s1"), load_file(tmp_path / "run" / "final" / "model.safetensors")
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_done_again_nothing_is_trained(copied, corpus, declared):
    runs = {path: path.stat().st_mtime_ns for path in (copied / "runs").rglob("*") if path.is_file()}
    before = results(copied)
    code, output = run(*command(declared, corpus, copied))
    assert code == 0
    assert output.count("done before") == len(RUNS)
    assert {path: path.stat().st_mtime_ns for path in runs} == runs
    assert [one["test_loss"] for one in results(copied)["runs"]] == [one["test_loss"] for one in before["runs"]]


def test_the_table_alone(copied):
    for name in ("table.md", "table.csv", "results.json", "pareto.svg"):
        (copied / name).unlink()
    code, output = run("study", "table", copied)
    assert code == 0 and "learned" in output
    assert {row["variant"] for row in results(copied)["variants"]} == {"dense", "hash", "learned"}


@pytest.mark.parametrize(
    ("replaced", "message"),
    [
        (("random_fraction = 0.25", "random_fraction = 0.5"), "config random_fraction = 0.25, not 0.5"),
        (("learning_rate = 0.01", "learning_rate = 0.02"), "settings learning_rate = 0.01, not 0.02"),
        (("tokens = 390", "tokens = 640"), "steps = 6, not 10"),
        (("test_rows = 8", "test_rows = 9"), "test_rows = 8, not 9"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_changed_declaration_is_refused(study, corpus, toml, replaced, message):
    code, output = run(*command(toml(replaced), corpus, study[0]))
    assert code == 2
    assert f"was started with {message}: declare it as it was" in output
    assert "choose another folder" in output


def test_how_it_is_shown_may_change(copied, corpus, declared):
    assert run(*command(declared, corpus, copied, "--set", "log_every=7"))[0] == 0


def test_a_folder_of_something_else_is_left_alone(corpus, declared, tmp_path):
    (tmp_path / "letter.txt").write_text("dear")
    code, output = run(*command(declared, corpus, tmp_path))
    assert code == 2 and "is no study" in output
    assert [path.name for path in tmp_path.iterdir()] == ["letter.txt"]


def test_two_processes_do_not_run_one_study(copied, corpus, declared):
    fcntl = pytest.importorskip("fcntl")
    with (copied / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        code, output = run(*command(declared, corpus, copied))
    assert code == 2 and "another process is running the study" in output


def test_a_limit_begins_nothing_that_would_not_end_in_time(copied, corpus, toml):
    more = '\n[variants.soft]\nrole = "control"\nconfig = { router = "learned", routing = "soft" }\n'
    code, output = run(*command(toml(more=more), corpus, copied, "--limit-minutes", "0.001"))
    assert code == 0
    assert "soft-s0: not begun, it would take about" in output
    assert "left, for the same command: soft-s0, soft-s1" in output
    assert not (copied / "runs" / "soft-s0").exists()
    # A control that has not run is named in every table.
    assert "Controls without a finished run: soft." in (copied / "table.md").read_text()


@pytest.mark.slow
def test_a_run_that_fails_costs_itself_only(corpus, toml, tmp_path):
    out = tmp_path / "out"
    broken = toml(("rank = 2", "rank = 0\nsettings = { learning_rate = 1e30, warmup = 0, clip = 0.0 }"))
    code, output = run(*command(broken, corpus, out, "--only", "learned", "--only", "dense", "--seeds", "1"))
    assert code == 1
    assert "learned-s1: failed: error: the gradient of step" in output
    assert "dense-s1: done in" in output and "failed, tried again by the same command: learned-s1" in output
    assert list(results(out)["failed"]) == ["learned-s1"]
    assert "learned-s1 failed: error: the gradient of step" in (out / "table.md").read_text()


def at_work(out):
    """Processes with this folder in their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if str(out).encode() in path.read_bytes() and path.parent.name != str(os.getpid()):
                found.append(path.parent.name)
        except OSError:
            continue
    return found


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="needs /proc to see that no process is left")
def test_killed_and_continued_it_gives_the_same_results(study, corpus, declared, tmp_path):
    """The study is killed, by its number, while it trains two runs at a time; its runs end with it."""
    straight, _ = study
    out = tmp_path / "out"
    arguments = command(declared, corpus, out, "--only", "dense", "--only", "hash", "--seeds", "0", "--jobs", "2")
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
    assert not all((out / "runs" / name / "evaluation.json").exists() for name in ("dense-s0", "hash-s0"))
    code, output = run(*arguments)
    assert code == 0, output
    ours, theirs = ({one["name"]: one for one in results(folder)["runs"]} for folder in (out, straight))
    assert set(ours) == {"dense-s0", "hash-s0"}
    for name, one in ours.items():
        for part in ("test_loss", "validation", "fraction_by_layer", "flops_per_token", "parameters", "tokens"):
            assert one[part] == theirs[name][part]
        assert all(torch.equal(value, weights(straight, name)[key]) for key, value in weights(out, name).items())
        # Two at a time: their speeds do not count, and neither makes a second panel.
        assert one["jobs"] == 2 and one["step_ms"] is None
    assert max(one["attempts"] for one in ours.values()) == 2
    assert "shared the device" in (out / "table.md").read_text()
    assert (out / "pareto.svg").read_text().count('class="frontier"') == 1


def test_step_times_are_measured_with_the_trained_weights(copied, corpus, declared):
    arguments = ["study", "time", declared, "--data", corpus, "--out", copied, "--device", "cpu", "--steps", "2"]
    code, output = run(*arguments)
    assert code == 0, output
    times = json.loads((copied / "times.json").read_text())
    assert set(times["variants"]) == {"dense", "hash", "learned"}
    assert times["device"] == "cpu" and times["versions"]["torch"] == torch.__version__ and times["drift"] > 0
    rows = {row["variant"]: row for row in results(copied)["variants"]}
    for name, timed in times["variants"].items():
        assert timed["fastest_ms"] <= timed["step_ms"] <= timed["slowest_ms"]
        assert timed["tokens_per_second"] == pytest.approx(1e3 * 64 / timed["step_ms"], rel=1e-3)
        assert rows[name]["step_ms"] == timed["step_ms"]
        # `learned` ran with seed 1 only, which is the seed it is timed with.
        assert timed["weights"] == "trained"
    assert times["variants"]["dense"]["fraction"] is None and 0 < times["variants"]["hash"]["fraction"] < 0.6
    assert "Step times are of chiar study time: cpu" in (copied / "table.md").read_text()
    before = (copied / "times.json").read_text()
    assert run(*arguments)[0] == 0
    assert (copied / "times.json").read_text() == before  # nothing was left to measure
    (copied / "times.json").write_text(before.replace('"device": "cpu"', '"device": "another"'))
    code, output = run(*arguments)
    assert code == 2 and "times of two machines do not compare" in output


def test_results_from_elsewhere_count_as_done(copied, corpus, declared, tmp_path):
    """Half of the study in one folder, the other half in another, from the results of the first alone."""
    there, here = results(copied), tmp_path / "here"
    half = {**there, "runs": [one for one in there["runs"] if one["variant"] != "learned"]}
    (tmp_path / "half.json").write_text(json.dumps(half))
    code, output = run("study", "add", here, tmp_path / "half.json")
    assert code == 0 and "added dense-s0, dense-s1, hash-s0, hash-s1" in output
    assert "Candidates without a finished run: learned." in (here / "table.md").read_text()
    code, output = run(*command(declared, corpus, here))
    assert code == 0 and output.count("done before") == 4 and "learned-s1: done in" in output
    ours, theirs = results(here)["variants"], there["variants"]
    for part in ("variant", "test_loss", "gap", "gap_spread", "flops_per_token", "frontier"):
        assert [row[part] for row in ours] == [row[part] for row in theirs]
    code, output = run("study", "add", here, tmp_path / "half.json")
    assert code == 0 and "nothing new" in output
    half["common"]["steps"] = 7
    (tmp_path / "other.json").write_text(json.dumps(half))
    code, output = run("study", "add", here, tmp_path / "other.json")
    assert code == 2 and "steps = 6, not 7" in output
    code, output = run("study", "add", here, copied / "results.json")
    assert code == 2 and "run learned-s1" in output and "finished" in output
    code, output = run("study", "add", tmp_path / "new", copied / "study.json")
    assert code == 2 and "does not hold the results of a study" in output
    assert not (tmp_path / "new").exists()


def test_it_is_not_for_torchrun(corpus, declared, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    code, output = run(*command(declared, corpus, tmp_path / "out"))
    assert code == 2 and "without torchrun" in output
    assert not (tmp_path / "out").exists()
