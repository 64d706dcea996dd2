"""What a run tells: in a terminal and in plain lines, to TensorBoard (which reads it back), as MFU."""

import io
import re
import sys
from types import SimpleNamespace

import pytest
import torch
from runs import interrupted
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from chiar import presets
from chiar.routing.flops import count_dense_execution, count_flops, operator_shares
from chiar.training import reporting
from chiar.training.distributed import Processes
from chiar.training.reporting import Display, known_peak, training_flops, utilisation
from chiar.training.run_folder import RunFolder
from helpers import refused


def test_a_terminal_shows_bar_time_left_and_records(go, monkeypatch):
    screen = io.StringIO()
    screen.isatty = lambda: True
    with monkeypatch.context() as patch:
        patch.setenv("TERM", "xterm")
        patch.setenv("COLUMNS", "150")
        patch.setattr(sys, "stdout", screen)
        patch.setattr(sys, "stderr", screen)
        go("run", quiet=False, steps=30, log_every=15)
    shown = screen.getvalue()
    assert "━" in shown and re.search(r"\b\d+/30", shown) and re.search(r"\d:\d\d:\d\d", shown)
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown)
    for step in (1, 15, 30):
        assert re.search(rf"step {step}/30  loss \d+\.\d{{4}}", plain)
    # The bar is gone at the end, and the cursor back.
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")
    assert "━" not in shown[shown.rindex("\x1b[?25h") :]


def test_a_plain_line_shows_the_time_left_from_the_steps_of_this_process(monkeypatch, capsys):
    shown = Display(steps=100, first=90)
    for step, now in ((91, 1000.0), (93, 1004.0)):  # resuming and compiling took the first 1,000 seconds
        monkeypatch.setattr(reporting.time, "perf_counter", lambda now=now: now)
        shown.advance(step)
        shown.record({"step": step, "loss": 1.0, "rate": 1e-3})
    first, second = capsys.readouterr().out.splitlines()
    assert "left" not in first and second.endswith("  0:00:14 left")


def scalars(out):
    events = EventAccumulator(str(out / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_events_hold_what_metrics_hold_and_those_behind_the_checkpoint_are_dropped(go, tmp_path, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(interrupted(patch, 7)):
        go("run", tensorboard=True, sample="light")
    assert [step for step, _ in scalars(tmp_path / "run")["loss"]] == list(range(1, 8))
    go("run", resume=True, tensorboard=True, sample="light")
    found, records = scalars(tmp_path / "run"), RunFolder(tmp_path / "run").read_metrics()
    assert len(records) == 12
    for name in ("loss", "rate", "gradient_norm", "tokens_per_second"):
        assert found[name] == [(r["step"], pytest.approx(r[name])) for r in records]
    assert found["validation/text"] == [(r["step"], pytest.approx(r["validation"]["text"])) for r in records[5::6]]
    assert found["use/routed 2 attention"] == [(r["step"], pytest.approx(r["use"][1][1])) for r in records]
    assert len(found["gate/text"]) == 12


def test_without_the_package_nothing_is_begun(go, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)  # cannot be imported: as if it were not installed
    refused(r"pip install 'chiar\[tensorboard\]'", go, "run", tensorboard=True)
    assert not (tmp_path / "run").exists()


def test_peaks_by_name():
    peaks = {"H200": 989, "H100 PCIe": 756, "A100-SXM4-80GB": 312, "GeForce RTX 4090": 165}
    unknown = ("GeForce RTX 4090 D", "A100-SXM4-40GB MIG 1g.5gb", "H2000")
    for name, peak in (peaks | dict.fromkeys(unknown)).items():
        assert known_peak(f"NVIDIA {name}") == peak


def test_training_takes_three_times_the_forward_pass_and_the_entropy_router_has_no_backward_one():
    config, T = presets.get("baseline-tiny"), 64
    D, V, layers = config.hidden_size, config.vocab_size, len(config.layer_types)
    assert training_flops(config, T) == 3 * (layers * (8 * D * D + 16 * D * D + 4 * D * T) + 2 * D * V)
    config = presets.get("v3-tiny")
    routers = len(config.routed_layers) * config.hidden_size**2  # the DCT by halves
    assert training_flops(config, T) == 3 * (count_dense_execution(config, T).total - routers) + routers
    learned = presets.get("v3-tiny", routing="hard")
    assert training_flops(learned, T) == 3 * count_dense_execution(learned, T).total


def test_early_heads_learn_in_training_and_are_counted_once():
    head = 2 * 32 * 257
    for router, runs in (("predictive", 0), ("space", 0), ("boundary", 1)):
        config = presets.get("v5-tiny", router=router)
        count = count_flops(config, 64, shares := operator_shares(config))
        without = 3 * (count.total - count.part("router")) + (3 if runs else 0) * count.part("router")
        assert training_flops(config, 64, shares) == pytest.approx(without + 3 * head)
    quiet = presets.get("v5-tiny", router="space", early_weight=0.0)
    assert training_flops(quiet, 64) == 3 * count_dense_execution(quiet, 64).total


def test_mfu_is_in_the_metrics_where_the_peak_is_known(config, go, capsys):
    record = go("run", quiet=False, steps=2, peak_tflops=0.5)
    assert record["mfu"] == round(record["tokens_per_second"] * training_flops(config(), 16) / 0.5e12, 4)
    assert "MFU" in capsys.readouterr().out
    assert "mfu" not in go("unknown", quiet=False, steps=2)
    assert "MFU" not in capsys.readouterr().out
    refused("peak_tflops must lie between 0 and", go, "other", peak_tflops=-1.0)


def test_mfu_counts_devices_and_what_was_chosen_but_no_unknown_tokens(config, settings):
    def mfu(*kinds, count=1, mixing="weights", execution="dense"):
        """At ten million tokens a second of devices of 1 TFLOP/s."""
        model = config(dropout=0.0, execution=execution, keys="routed")
        run = SimpleNamespace(config=model, settings=settings(peak_tflops=1.0, mixing=mixing))
        run.corpora = [SimpleNamespace(kind=kind) for kind in kinds]
        run.processes = Processes(0, count, torch.device("cpu"))
        return utilisation(run, 1e7, [[row[name] for name in model.operators] for row in shares])

    model = config(dropout=0.0, execution="sparse", keys="routed")
    count = count_flops(model, 16, shares := operator_shares(model, 0.25))
    sparse = round(1e7 * (3 * count.total - 2 * count.part("router")) / 1e12, 4)
    assert mfu("language", execution="sparse") == sparse < mfu("language")
    assert mfu("language") == pytest.approx(2 * mfu("language", count=2), abs=1e-4) != 0
    assert mfu("language", "classification") is None
    assert mfu("language", "language", mixing="added") is None
