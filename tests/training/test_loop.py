"""A run: it learns, it resumes bit for bit, it stops when it must and says why."""

import json
import os
import random
import re
import shlex
import shutil
import signal
import time
from contextlib import ExitStack
from unittest.mock import Mock

import pytest
import torch
from runs import assert_same_run, command, final_state, full_disk, interrupted, metrics, run, start
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, pipeline

from chiar import ChiarConfig, ChiarForCausalLM
from chiar.training import checkpoint, memory
from chiar.training.checkpoint import TrainingStopped
from chiar.training.distributed import start as start_processes
from chiar.training.run_folder import RunFolder, launch
from chiar.training.trainer import Trainer
from commands import run as chiar
from commands import wait_until
from helpers import refused

RESUMED = {
    "threshold": ({}, {}),
    "hard": ({"routing": "hard"}, {}),
    "sparse": ({"execution": "sparse", "keys": "routed", "light_ffn": False, "dropout": 0.0}, {}),
    "quantile": ({"target_fraction": [0.3, 0.6], "gate_pool": "causal"}, {}),
    "recalibrated": ({}, {"recalibrate_every": 3}),
    "checkpointing": ({"dropout": 0.1}, {"gradient_checkpointing": True}),
    "finetuned": ({}, {"initial": "before/best", "recalibrate_every": 5}),
    "dark": ({"name": "v5-tiny", "target_fraction": 0.3}, {}),
    "dark checkpointing": ({"name": "v5-tiny", "target_fraction": 0.3}, {"gradient_checkpointing": True}),
    "dark finetuned": ({"name": "v5-tiny", "target_fraction": 0.3}, {"initial": "before/best"}),
}


@pytest.mark.parametrize(("fields", "changes"), RESUMED.values(), ids=RESUMED)
def test_a_resumed_run_is_the_same_run(fields, changes, config, go, labelled, tmp_path, monkeypatch):
    if "initial" in changes:
        go("before", config(**fields), steps=1)
        changes = {**changes, "initial": str(tmp_path / "before" / "best"), "data": [str(labelled)]}
    go("straight", config(**fields), ema=0.9, **changes)
    with monkeypatch.context() as patch, pytest.raises(interrupted(patch, 7)):
        go("resumed", config(**fields), ema=0.9, **changes)
    go("resumed", config(**fields), resume=True, ema=0.9, **changes)
    assert_same_run(tmp_path / "straight", tmp_path / "resumed")
    exports = [load_file(tmp_path / name / "best" / "model.safetensors") for name in ("straight", "resumed")]
    assert all(torch.equal(value, exports[1][name]) for name, value in exports[0].items())
    state = json.loads((tmp_path / "straight" / "checkpoints" / "latest" / checkpoint.STATE).read_text())
    assert isinstance(state["thresholds"], list) == ("recalibrate_every" in changes)
    kept, final = final_state(tmp_path / "straight"), load_file(tmp_path / "straight" / "final" / "model.safetensors")
    followed = [name for name in final if "router_state" in name]
    assert bool(followed) == ("target_fraction" in fields)
    assert all(torch.equal(final[name], kept[f"model.language.{name}"]) for name in followed)


def test_kill_9_at_a_random_moment_changes_nothing(corpus, tmp_path):
    """The whole process is killed, by its number, while it trains or writes."""
    run(command(corpus, tmp_path / "straight"), tmp_path / "log")
    out = tmp_path / "killed"
    process = start(command(corpus, out), tmp_path / "log")
    wait_until((out / "checkpoints" / "latest").exists)
    time.sleep(random.Random(os.getpid()).uniform(0, 0.05))
    process.kill()
    process.join()
    assert process.exitcode in (-signal.SIGKILL, 0)
    run(command(corpus, out, "--resume"), tmp_path / "log")
    assert_same_run(tmp_path / "straight", out)


@pytest.mark.parametrize("presses", [1, 2])
def test_ctrl_c_saves_first_and_says_how_to_go_on(presses, corpus, tmp_path, monkeypatch):
    """The second one leaves at once, with the checkpoint before."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have had it ignored
    out, real = tmp_path / "a run", Trainer.train_step

    def pressed(self):
        for _ in range(presses if self.step == 4 else 0):
            signal.raise_signal(signal.SIGINT)
        return real(self)

    try:
        with monkeypatch.context() as patch:
            patch.setattr(Trainer, "train_step", pressed)
            code, said = chiar(*command(corpus, out))
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    saved = f"step-0000000{6 - presses} is saved, go on with: chiar train --resume '{out}'\n"
    assert code == 130 and said.endswith(f"interrupted: {saved}")
    if presses == 1:
        monkeypatch.chdir(tmp_path)
        assert chiar(*shlex.split(said.split("chiar ")[-1]))[0] == 0
        assert chiar(*command(corpus, tmp_path / "straight"))[0] == 0
        assert_same_run(tmp_path / "straight", out)


def test_a_run_goes_on_by_its_name_alone(corpus, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(corpus, tmp_path / "corpus")
    assert chiar(*command("corpus", "run", "--steps", "4", "--set", "warmup=0"))[0] == 0
    resume = ["train", "--resume", tmp_path / "run"]
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert "resuming after step 4 of 4: nothing is left to train (--steps N --extend" in chiar(*resume)[1]
    for arguments, sentence in (
        (
            ["--steps", 8],
            r"with 8 steps instead of 4 the cosine .* step 4 is 0.0015 \(1e-06 as begun\)\. Add --extend",
        ),
        (["--seed", 1], "begun with settings seed = 0, not 1: leave that out"),
        (["--set", "keys=routed"], "begun with config keys = 'all', not 'routed'"),
        (["--set", "kyes=routed"], "Did you mean 'keys'"),
        (["--thresholds", "x"], "leave them out"),
    ):
        code, said = chiar(*resume, *arguments)
        assert code == 2 and re.search(sentence, said), said
    (tmp_path / "corpus").rename(tmp_path / "moved")
    assert "there is no folder" in chiar(*resume)[1]
    code, said = chiar(*resume, "--steps", 8, "--extend", "--data", tmp_path / "moved")
    assert code == 0 and "note: with 8 steps instead of 4" in said and "step 8/8" in said
    assert "resuming after step 8 of 8" in chiar(*resume)[1]
    folder = RunFolder(tmp_path / "run")
    for text in ('{"settings": 3, "config": {}}', '{"settings": {}, "config": []}', "[]", "x"):
        (folder.path / "run.json").write_text(text)
        code, said = chiar(*resume)
        assert code == 2 and len(said.splitlines()) == 1
    assert "there is no folder" in chiar("train", "--resume", tmp_path / "none")[1]


GPU = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 3.0 GiB"
CPU = "[enforce fail at alloc_cpu.cpp:121] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
CPU += "2147483648 bytes. Error code 12 (Cannot allocate memory)"
NUMPY = "Unable to allocate 2.00 GiB for an array with shape (268435456,) and data type float64"


@pytest.mark.parametrize("error", [torch.OutOfMemoryError(GPU), RuntimeError(CPU), MemoryError(NUMPY)], ids=repr)
def test_out_of_memory_says_what_did_not_fit_and_what_to_reduce(error, go, monkeypatch):
    monkeypatch.setattr(Trainer, "train_step", Mock(side_effect=error))
    for done, way in ((False, " or --set gradient_checkpointing=true"), (True, "")):
        reason = rf"a tensor of 2\.1 GB did not .* --micro-batch 2 instead of 4 or a --length below 16{way}\."
        refused(reason, go, f"run {done}", gradient_checkpointing=done, batch=12, micro_batch=4)


def test_an_allocation_that_really_fails_is_a_sentence_and_other_errors_stay(go, monkeypatch):
    monkeypatch.setattr(Trainer, "train_step", lambda self: torch.empty(2**60, dtype=torch.uint8))
    refused(r"a tensor of 1,152,921,504\.6 GB did not fit", go, "run")
    monkeypatch.setattr(Trainer, "train_step", Mock(side_effect=RuntimeError("another")))
    with pytest.raises(RuntimeError, match="another"):
        go("other")


@pytest.mark.parametrize("preset", ["baseline-tiny", "v1-tiny", "v2-tiny", "v3-tiny", "v4-tiny"])
def test_it_learns_and_exports_the_best(preset, config, go, tmp_path):
    record = go("run", config(preset), steps=40, evaluate_every=20, sample="light")
    assert record["loss"] < 0.75 * metrics(tmp_path / "run")[0]["loss"]
    assert record["sample"].startswith("light") and record["sample"] != "light"
    assert ChiarForCausalLM.from_pretrained(tmp_path / "run" / "best").config.hidden_size == 16
    assert AutoTokenizer.from_pretrained(tmp_path / "run" / "best")("ab")["input_ids"] == [97, 98]
    write = pipeline("text-generation", str(tmp_path / "run" / "best"), max_new_tokens=4, do_sample=False)
    short, long = write(["light", "dark and dark"], batch_size=2)
    assert short[0]["generated_text"].startswith("light") and long[0]["generated_text"].startswith("dark and dark")
    stored = RunFolder(tmp_path / "run").read()
    assert stored["settings"]["steps"] == 40 and stored["config"]["gate_generation"] == "refuse"
    assert set(stored) >= {"command", "config", "settings", "versions", "commit", "data", "processes"}


def test_mixed_training_goes_through_the_whole_model(config, go, corpus, labelled, tmp_path):
    both = [str(corpus), str(labelled)]
    go("run", config(gate_init="neutral"), data=both, mixing="added", added_share=0.5, length=32, steps=8)
    records = metrics(tmp_path / "run")
    assert any("listops" in r["loss_by_corpus"] for r in records)
    assert any(set(r["gate"]) == {"text", "listops"} for r in records)
    assert set(records[-1]["validation"]) == {"text", "listops"}
    assert final_state(tmp_path / "run")["optimizer.heads.listops.weight.exp_avg"].abs().max() > 0
    refused("text is a language corpus: name it first, before listops", go, "other", data=both[::-1])
    refused("auto, cpu, cuda", start_processes, "tpu")


def test_a_gradient_that_is_not_finite_stops_the_run_and_keeps_its_batch(go, tmp_path, monkeypatch):
    real = Trainer._backward

    def poisoned(self, batch, sync):
        result = real(self, batch, sync)
        self.model.language.model.norm.weight.grad.mul_(float("nan") if self.step == 5 else 1.0)
        return result

    monkeypatch.setattr(Trainer, "_backward", poisoned)
    with pytest.raises(TrainingStopped, match="step 6 is not finite"):
        go("run", log_every=4)
    assert checkpoint.find(tmp_path / "run" / "checkpoints").state["step"] == 4
    kept = load_file(tmp_path / "run" / "not-finite-step-00000006.safetensors")
    assert kept["slot0.text.ids"].shape == (2, 16)


def test_a_full_disk_is_reported_and_the_old_checkpoint_or_export_stays(go, tmp_path, monkeypatch):
    real = Trainer.tensors
    with ExitStack() as limits:

        def tensors(self):
            if self.step > 4:
                limits.enter_context(full_disk())
            return real(self)

        monkeypatch.setattr(Trainer, "tensors", tensors)
        with pytest.raises(TrainingStopped, match=r"checkpoint step-00000008 .*File too large.*earlier ones are kept"):
            go("run")
    assert checkpoint.find(tmp_path / "run" / "checkpoints").state["step"] == 4
    assert not list((tmp_path / "run" / "checkpoints").glob(".*"))
    monkeypatch.undo()
    go("run", resume=True)
    final = tmp_path / "run" / "final" / "model.safetensors"
    before = final.read_bytes()
    with full_disk(20_000), pytest.raises(TrainingStopped, match="final model, of step 12, could not be written"):
        go("run", resume=True)
    assert final.read_bytes() == before
    go("run", resume=True)
    assert len(list((tmp_path / "run" / "exports").iterdir())) == 2
    assert [entry["step"] for entry in RunFolder(tmp_path / "run").read()["resumed"]] == [4, 12, 12]


def test_an_existing_run_is_not_touched_unless_resumed_alike(config, go, tmp_path, monkeypatch):
    go("run", steps=4)
    folder = RunFolder(tmp_path / "run")
    before = folder.metrics_path.read_bytes()
    for sentence, name, model, changes in (
        ("chiar train --resume", "run", None, {"resume": False}),
        ("settings seed = 0, not 1", "run", None, {"seed": 1}),
        ("config keys = 'all', not 'routed'", "run", config(keys="routed"), {}),
        (r"there is no folder", "other", None, {}),
    ):
        refused(sentence, go, name, model, **{"resume": True, **changes})
    assert folder.metrics_path.read_bytes() == before
    go("run", resume=True, steps=6)
    assert metrics(folder.path)[-1]["step"] == 6
    # torchrun goes on with its own run only.
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "ours")
    folder.write({"launch": launch()})
    assert folder.should_resume(False)
    folder.write({"launch": "theirs"})
    refused("exists already", folder.should_resume, False)


def test_an_older_run_is_resumed(config, go, tmp_path):
    """It lacks fields that have their default now, and has fields and buffers that are gone."""
    model, folder = config(target_fraction=0.5), RunFolder(tmp_path / "run")
    go("run", model, steps=2)
    record = folder.read()
    del record["config"]["embedding_norm"], record["settings"]["ema"]
    record["config"] |= {"settle": 0.0, "anneal": 0.0, "own_ffn": False}
    folder.write(record)
    saved = checkpoint.steps(folder.checkpoints)[0]
    file, state = saved / "tensors-0.safetensors", "model.language.model.router_state"
    gone = {f"{state}.spread_L": torch.ones(2), f"{state}.progress": torch.zeros(())}
    save_file(load_file(file) | gone, file, {"starts": "{}"})
    hashes = checkpoint.read_manifest(saved) | {file.name: checkpoint.synced_hash(file)}
    (saved / checkpoint.MANIFEST).write_text(json.dumps({"files": hashes}))
    other = config(target_fraction=0.5, embedding_norm=True)
    refused("config embedding_norm = False, not True", go, "run", other, resume=True)
    go("run", model, resume=True, steps=4)
    assert metrics(folder.path)[-1]["step"] == 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch": 7}, "does not divide into micro-batches of 2"),
        ({"steps": 0}, "steps must lie between 1 and 4,294,967,295, got 0"),
        ({"weights": [-1.0]}, "weights must lie between 0 and"),
        ({"weights": [float("inf")]}, "weights must lie between 0 and"),
        ({"data": ["a", "b"], "mixing": "added", "weights": [1, 0]}, "not all be 0"),
        ({"clip": float("nan")}, "clip must lie between 0 and 4,294,967,295, got nan"),
        ({"learning_rate": 1e30}, "learning_rate must lie between 0 and 1,000, got 1e\\+30"),
        ({"seed": 2**64}, "seed must lie between 0"),
        *(({name: 1.0}, f"{name} must lie between 0 and 0.999999, got 1.0") for name in ("beta1", "beta2", "ema")),
        (
            {"batch": 10**8},
            r"a step of 100,000,000 rows of 16 tokens takes at least 51\.2 GB .*--batch may be [\d,]+ at most",
        ),
        ({"batch": 10**6, "micro_batch": 10**6}, r"a pass of 1,000,000 rows .*--micro-batch may be [\d,]+ at most"),
        (
            {"steps": 10**9},
            r"the order of 1,000,000,000 steps of 4 rows takes at least .*--steps may be [\d,]+ at most",
        ),
        ({"precision": "bf61"}, "Did you mean 'bf16'"),
        ({"initial": "x"}, "there is no model in x"),
        ({"vocab_size": 2**70}, "vocab_size must be a number of at most"),
        ({"entropy_eps": float("inf")}, "entropy_eps must be a number of at most"),
        ({"hidden_size": 10**9}, "hidden_size must be a number of at most 268,435,456"),
        ({"num_hidden_layers": 10**9, "layer_types": None}, "num_hidden_layers must be a number of at most 10,000"),
        ({"pad_token_id": -1}, "pad_token_id must not be negative"),
        ({"eos_token_id": [0, -1]}, r"eos_token_id must not be negative, got \[0, -1\]"),
        ({"eos_token_id": []}, "eos_token_id is an empty list"),
        ({"data": []}, "no data"),
        ({"weights": [1, 2]}, "2 weights for 1 corpora"),
        ({"length": 10**7}, "too few for one row"),
        ({"tensorboard": 1}, "tensorboard must be true or false"),
        ({"recalibrate_every": 1, "router": "learned"}, "entropy router"),
        ({"recalibrate_every": 1, "target_fraction": 0.5}, "already moves the thresholds"),
        ({"vocab_size": 100, "bos_token_id": None, "eos_token_id": None}, "257 token ids, the model only 100"),
    ],
    ids=str,
)
def test_impossible_settings(changes, message, config, go, tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "machine_memory", lambda: 1e9)
    fields = {key: changes[key] for key in changes.keys() & ChiarConfig.__annotations__.keys()}
    refused(message, lambda: go("run", config(**fields), **{k: changes[k] for k in changes.keys() - fields.keys()}))
    assert not (tmp_path / "run").exists()


DAMAGES = {
    "cut off": (lambda text: text[:-20], "line 8 dropped, 7 records kept"),
    "foreign bytes": (lambda text: text.replace(b'"step": 3', b"\xff\xfe\x00", 1), "line 3 dropped, 7 records kept"),
    "another program's": (lambda text: b'[1]\n{"a": 1}\n' + text, "lines 1, 2 dropped, 8 records kept"),
    "gone": (lambda text: b"", None),
}


@pytest.mark.parametrize(("damage", "sentence"), DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_log_is_read_as_far_as_it_can_be_and_the_run_goes_on(damage, sentence, go, tmp_path, capsys):
    go("run", steps=8)
    path = tmp_path / "run" / "metrics.jsonl"
    path.write_bytes(damage(path.read_bytes()))
    capsys.readouterr()
    go("run", resume=True, quiet=False, steps=10)
    said = capsys.readouterr().out
    assert f"warning: metrics.jsonl is damaged: {sentence}." in said if sentence else "warning" not in said
    steps = [record["step"] for record in metrics(tmp_path / "run")]
    assert steps[-2:] == [9, 10] and steps == sorted(set(steps))


def test_a_validation_loss_that_is_not_finite_exports_nothing_and_is_no_success(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(Trainer, "evaluate", lambda self: {"validation": {"text": float("nan")}})
    code, said = chiar(*command(corpus, tmp_path / "run", "--steps", "3"))
    sentence = "stopped: the validation loss on text of step 3 is not finite: .* a --learning-rate below 0.003 may do"
    assert code == 1 and re.search(sentence, said) and "step-00000002 is the last good checkpoint" in said
    assert not (tmp_path / "run" / "final").exists() and not (tmp_path / "run" / "best").exists()


def test_weights_that_are_not_finite_are_never_exported(go, tmp_path, monkeypatch):
    real = Trainer.train_step

    def poisoned(self):
        done = real(self)
        if self.step == 6:
            next(self.model.parameters()).data.view(-1)[0] = float("inf")
        return done

    monkeypatch.setattr(Trainer, "train_step", poisoned)
    with pytest.raises(TrainingStopped, match=r"a weight of step 6 is not finite.*step-00000004 is the last good"):
        go("run", evaluate_every=5, log_every=100, steps=6)
    assert not (tmp_path / "run" / "final").exists()
