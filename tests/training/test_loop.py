"""A run: it learns, it resumes bit for bit, it stops when it must and says why."""

import json
import os
import random
import signal
import subprocess
import time
from contextlib import ExitStack

import pytest
import torch
from safetensors.torch import load_file

from chiar import ChiarForCausalLM
from chiar.errors import InputError
from chiar.training import checkpoint
from chiar.training.loop import TrainingStopped, train
from chiar.training.run_folder import RunFolder
from runs import assert_same_run, command, final_state, full_disk, metrics


def interrupted(monkeypatch, step):
    """Make the run stop dead before the optimiser step numbered `step`, as a kill would."""
    from chiar.training import trainer

    class Killed(BaseException):
        pass

    real = trainer.Trainer.train_step

    def train_step(self):
        if self.step == step:
            raise Killed
        return real(self)

    monkeypatch.setattr(trainer.Trainer, "train_step", train_step)
    return Killed


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"routing": "hard"},
        {"gate_pool": "causal", "keys": "routed", "light_ffn": False},
        {"execution": "sparse", "keys": "routed", "light_ffn": False, "dropout": 0.0},
        {"target_fraction": [0.3, 0.6], "entropy_gradient": "straight_through", "anneal": 0.5},
    ],
    ids=["threshold", "hard", "causal", "sparse", "quantile, annealed"],
)
def test_a_resumed_run_is_the_same_run(changes, config, settings, tmp_path, monkeypatch):
    model = config(**changes)
    train(model, settings(ema=0.9), tmp_path / "straight", device="cpu", quiet=True)
    with monkeypatch.context() as patch, pytest.raises(interrupted(patch, 7)):
        train(model, settings(ema=0.9), tmp_path / "resumed", device="cpu", quiet=True)
    train(model, settings(ema=0.9), tmp_path / "resumed", resume=True, device="cpu", quiet=True)
    assert_same_run(tmp_path / "straight", tmp_path / "resumed")


def test_thresholds_follow_a_run_and_its_end_is_exported(config, settings, tmp_path):
    model = config(routing="hard", target_fraction=0.25, anneal=0.5, norm_position="pre")
    train(model, settings(learning_rate=5e-4), tmp_path / "run", device="cpu", quiet=True)
    state = ChiarForCausalLM.from_pretrained(tmp_path / "run" / "final").model.router_state
    kept = final_state(tmp_path / "run")
    # Four micro-batches a step; the last of twelve steps began when eleven were done.
    assert set(state.updates_L.tolist()) == {12 * 4} and float(state.progress) == pytest.approx(11 / 12)
    for name, value in state.state_dict().items():
        assert torch.equal(kept[f"model.language.model.router_state.{name}"], value), name
    assert (state.threshold_L != 0).all()
    use = torch.tensor([record["use"] for record in metrics(tmp_path / "run")[4:]])[..., 1].mean(0)
    # 128 tokens a step, eight steps, thresholds that are a few passes behind.
    assert use.tolist() == pytest.approx([0.25, 0.25], abs=0.08)


def test_recalibrated_thresholds_are_resumed_too(config, settings, tmp_path, monkeypatch):
    chosen = settings(recalibrate_every=3)
    train(config(), chosen, tmp_path / "straight", device="cpu", quiet=True)
    with monkeypatch.context() as patch, pytest.raises(interrupted(patch, 9)):
        train(config(), chosen, tmp_path / "resumed", device="cpu", quiet=True)
    train(config(), chosen, tmp_path / "resumed", resume=True, device="cpu", quiet=True)
    assert_same_run(tmp_path / "straight", tmp_path / "resumed")
    state = json.loads((tmp_path / "straight" / "checkpoints" / "latest" / checkpoint.STATE).read_text())
    assert len(state["thresholds"]) == 2


def test_kill_9_at_a_random_moment_changes_nothing(corpus, tmp_path):
    """The whole process is killed, by its number, while it trains or writes."""
    subprocess.run(command(corpus, tmp_path / "straight"), check=True, capture_output=True)
    out = tmp_path / "killed"
    process = subprocess.Popen(command(corpus, out), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not (out / "checkpoints" / "latest").exists() and time.monotonic() < deadline:
        time.sleep(0.002)
    time.sleep(random.Random(os.getpid()).uniform(0, 0.05))
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() in (-signal.SIGKILL, 0)
    subprocess.run(command(corpus, out, "--resume"), check=True, capture_output=True)
    assert_same_run(tmp_path / "straight", out)


def test_it_learns_and_exports_the_best(config, settings, tmp_path, corpus):
    record = train(config(), settings(steps=60, evaluate_every=20), tmp_path / "run", device="cpu", quiet=True)
    first = metrics(tmp_path / "run")[0]
    assert record["loss"] < 0.75 * first["loss"]
    best = ChiarForCausalLM.from_pretrained(tmp_path / "run" / "best")
    assert best.config.hidden_size == 16
    from transformers import AutoTokenizer

    assert AutoTokenizer.from_pretrained(tmp_path / "run" / "best")("ab")["input_ids"] == [97, 98]
    stored = RunFolder(tmp_path / "run").read()
    assert stored["settings"]["steps"] == 60
    assert set(stored) >= {"command", "config", "settings", "versions", "commit", "data", "processes"}


def test_mixed_training_goes_through_the_whole_model(config, settings, corpus, labelled, tmp_path):
    chosen = settings(data=[str(corpus), str(labelled)], mixing="added", added_share=0.5, length=32, steps=8)
    train(config(gate_init="neutral"), chosen, tmp_path / "run", device="cpu", quiet=True)
    records = metrics(tmp_path / "run")
    assert any("listops" in r["loss_by_corpus"] for r in records)
    assert any(set(r["gate"]) == {"text", "listops"} for r in records)
    assert set(records[-1]["validation"]) == {"text", "listops"}
    moments = final_state(tmp_path / "run")
    assert moments["optimizer.heads.listops.weight.exp_avg"].abs().max() > 0


def test_a_gradient_that_is_not_finite_stops_the_run_and_keeps_its_batch(config, settings, tmp_path, monkeypatch):
    from chiar.training import trainer

    real = trainer.Trainer._backward

    def poisoned(self, batch, sync):
        result = real(self, batch, sync)
        if self.step == 5:
            self.model.language.model.norm.weight.grad.fill_(float("nan"))
        return result

    monkeypatch.setattr(trainer.Trainer, "_backward", poisoned)
    with pytest.raises(TrainingStopped, match="step 6 is not finite"):
        train(config(), settings(log_every=4), tmp_path / "run", device="cpu", quiet=True)
    assert checkpoint.find(tmp_path / "run" / "checkpoints").state["step"] == 4
    kept = load_file(tmp_path / "run" / "not-finite-step-00000006.safetensors")
    assert kept["slot0.text.ids"].shape == (2, 16)


def test_a_full_disk_is_reported_and_the_old_checkpoint_stays(config, settings, tmp_path, monkeypatch):
    from chiar.training import trainer

    real = trainer.Trainer.tensors
    with ExitStack() as limits:

        def tensors(self):
            if self.step > 4:
                limits.enter_context(full_disk())
            return real(self)

        monkeypatch.setattr(trainer.Trainer, "tensors", tensors)
        with pytest.raises(TrainingStopped, match=r"checkpoint of step 8 .*File too large.*earlier ones are kept"):
            train(config(), settings(), tmp_path / "run", device="cpu", quiet=True)
    assert checkpoint.find(tmp_path / "run" / "checkpoints").state["step"] == 4
    assert not list(checkpoint.partials(tmp_path / "run" / "checkpoints"))


def test_an_export_that_cannot_be_written_leaves_the_one_before(config, settings, tmp_path):
    train(config(), settings(), tmp_path / "run", device="cpu", quiet=True)
    before = ChiarForCausalLM.from_pretrained(tmp_path / "run" / "final").state_dict()
    with full_disk(20_000), pytest.raises(TrainingStopped, match="final model, of step 12, could not be written"):
        train(config(), settings(), tmp_path / "run", resume=True, device="cpu", quiet=True)
    after = ChiarForCausalLM.from_pretrained(tmp_path / "run" / "final").state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    train(config(), settings(), tmp_path / "run", resume=True, device="cpu", quiet=True)
    assert len(list((tmp_path / "run" / "exports").iterdir())) == 2
    assert [entry["step"] for entry in RunFolder(tmp_path / "run").read()["resumed"]] == [12, 12]


def test_an_existing_run_is_not_touched_unless_resumed_alike(config, settings, tmp_path):
    train(config(), settings(steps=4), tmp_path / "run", device="cpu", quiet=True)
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    with pytest.raises(InputError, match="add --resume"):
        train(config(), settings(), tmp_path / "run", device="cpu", quiet=True)
    with pytest.raises(InputError, match="settings seed = 0, not 1"):
        train(config(), settings(seed=1), tmp_path / "run", resume=True, device="cpu", quiet=True)
    with pytest.raises(InputError, match="config keys = 'all', not 'routed'"):
        train(config(keys="routed"), settings(), tmp_path / "run", resume=True, device="cpu", quiet=True)
    with pytest.raises(InputError, match=r"no run\.json"):
        train(config(), settings(), tmp_path / "other", resume=True, device="cpu", quiet=True)
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before
    train(config(), settings(steps=6), tmp_path / "run", resume=True, device="cpu", quiet=True)
    assert metrics(tmp_path / "run")[-1]["step"] == 6


def test_a_run_older_than_a_field_is_resumed_with_its_default(config, settings, tmp_path):
    train(config(), settings(steps=2), tmp_path / "run", device="cpu", quiet=True)
    folder = RunFolder(tmp_path / "run")
    record = folder.read()
    del record["config"]["embedding_norm"], record["settings"]["ema"]
    folder.write(record)
    with pytest.raises(InputError, match="config embedding_norm = False, not True"):
        train(config(embedding_norm=True), settings(), folder.path, resume=True, device="cpu", quiet=True)
    train(config(), settings(steps=4), folder.path, resume=True, device="cpu", quiet=True)
    assert metrics(folder.path)[-1]["step"] == 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch": 7}, "does not divide into micro-batches of 2"),
        ({"steps": 0}, "steps must be at least 1"),
        ({"precision": "bf61"}, "Did you mean 'bf16'"),
        ({"data": []}, "no data"),
        ({"weights": [1, 2]}, "2 weights for 1 corpora"),
        ({"length": 10**7}, "too few for one row"),
        ({"recalibrate_every": 1, "router": "learned"}, "entropy router"),
        ({"recalibrate_every": 1, "target_fraction": 0.5}, "already moves the thresholds"),
        ({"vocab_size": 100}, "257 token ids, the model only 100"),
        ({"device": "cuda"}, "no GPU"),
        ({"device": "tpu"}, "auto, cpu or cuda"),
    ],
    ids=str,
)
def test_impossible_settings(changes, message, config, settings, tmp_path):
    if message == "no GPU" and torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    changes = dict(changes)
    model = {key: changes.pop(key) for key in ("router", "vocab_size", "target_fraction") if key in changes}
    if "vocab_size" in model:
        model |= {"bos_token_id": None, "eos_token_id": None}
    device = changes.pop("device", "cpu")
    with pytest.raises(InputError, match=message):
        train(config(**model), settings(**changes), tmp_path / "run", device=device, quiet=True)
    assert not (tmp_path / "run" / "checkpoints").exists()
