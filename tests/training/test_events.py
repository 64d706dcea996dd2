"""TensorBoard's files, read back by TensorBoard."""

import subprocess
import sys

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_loop import command, interrupted

from chiar.training.loop import train
from chiar.training.run_folder import RunFolder


def scalars(out):
    events = EventAccumulator(str(out / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_events_hold_what_metrics_hold(config, settings, tmp_path):
    train(config(), settings(tensorboard=True, sample="light"), tmp_path / "run", device="cpu", quiet=True)
    found, records = scalars(tmp_path / "run"), RunFolder(tmp_path / "run").read_metrics()
    for name in ("loss", "rate", "gradient_norm", "tokens_per_second"):
        assert found[name] == [(r["step"], pytest.approx(r[name])) for r in records]
    assert found["validation/text"] == [(r["step"], pytest.approx(r["validation"]["text"])) for r in records[5::6]]
    assert found["use/routed 2 attention"] == [(r["step"], pytest.approx(r["use"][1][1])) for r in records]
    assert len(found["gate/text"]) == 12


def test_events_behind_the_checkpoint_are_dropped_on_resume(config, settings, tmp_path, monkeypatch):
    chosen = settings(tensorboard=True)
    with monkeypatch.context() as patch, pytest.raises(interrupted(patch, 7)):
        train(config(), chosen, tmp_path / "run", device="cpu", quiet=True)
    assert [step for step, _ in scalars(tmp_path / "run")["loss"]] == list(range(1, 8))
    train(config(), chosen, tmp_path / "run", resume=True, device="cpu", quiet=True)
    assert [step for step, _ in scalars(tmp_path / "run")["loss"]] == list(range(1, 13))


def test_without_the_package_nothing_is_begun(corpus, tmp_path):
    # A module that is None cannot be imported: as if it were not installed.
    code = "import sys; sys.modules['tensorboard'] = None; from chiar.cli import main; main()"
    arguments = command(corpus, tmp_path / "run", "--set", "tensorboard=true")[3:]
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
    assert done.returncode == 2
    assert "pip install 'chiar[tensorboard]'" in done.stderr and len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "run").exists()
