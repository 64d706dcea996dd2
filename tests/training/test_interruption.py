"""Ctrl-C and a GPU that is too small get a sentence."""

import os
import signal
import subprocess
import time

import pytest
import torch
from test_loop import command

from chiar.errors import InputError
from chiar.training.loop import train


def test_ctrl_c_says_how_to_go_on(corpus, tmp_path):
    out = tmp_path / "run"
    arguments = [*command(corpus, out), "--steps", "100000"]
    process = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not (out / "checkpoints" / "latest").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert said.startswith("interrupted: the same command with --resume goes on after step-")
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize("checkpointing", [False, True])
def test_out_of_memory_says_what_to_reduce(config, settings, tmp_path, monkeypatch, checkpointing):
    from chiar.training import trainer

    def full(self):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")

    monkeypatch.setattr(trainer.Trainer, "train_step", full)
    chosen = settings(gradient_checkpointing=checkpointing)
    with pytest.raises(InputError, match=r"memory does not suffice: make --micro-batch smaller than 2") as raised:
        train(config(), chosen, tmp_path / "run", device="cpu", quiet=True)
    assert ("gradient_checkpointing=true" in str(raised.value)) != checkpointing


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_that_is_too_small(config, settings, tmp_path):
    chosen = settings(batch=4096, micro_batch=4096, length=64)
    torch.cuda.set_per_process_memory_fraction(0.0005)
    try:
        with pytest.raises(InputError, match="memory does not suffice"):
            train(config(hidden_size=256), chosen, tmp_path / "run", device="cuda", quiet=True)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
