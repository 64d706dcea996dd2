"""Runs started, read and compared by tests."""

import json
import os
import resource
import sys
from contextlib import contextmanager
from multiprocessing import get_context
from unittest.mock import Mock

import torch
import torch.distributed as dist
from safetensors import safe_open

from chiar.training.run_folder import RunFolder
from chiar.training.trainer import Trainer

TIMINGS = ("tokens_per_second", "mfu")
# Processes fork from a server that has imported everything but computed nothing.
CONTEXT = get_context("forkserver")
CONTEXT.set_forkserver_preload(["chiar.cli", "chiar.training.loop", "chiar.generation.writer"])


def sets(*changes):
    return [word for change in changes for word in ("--set", change)]


def command(corpus, out, *more):
    """A short run of a tiny model on the CPU, as a user would start it."""
    sizes = ["--steps", "12", "--batch", "8", "--micro-batch", "2", "--length", "16", "--no-compile", "--device", "cpu"]
    changes = sets("precision=fp32", "save_every=2", "evaluate_every=6", "log_every=1", "hidden_size=16")
    base = ["train", "v3-tiny", "--data", str(corpus), "--out", str(out), *sizes, *changes, *sets("evaluate_rows=4")]
    return [*base, *more]


def torchrun(processes, restarts, arguments):
    """The same command under torchrun."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    return [*launcher, "--max-restarts", str(restarts), "-m", "chiar.train", *arguments[1:]]


def _chiar(arguments, environment, log):
    os.environ |= environment
    sys.argv = ["chiar", *arguments]
    with open(log, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        sys.stdout, sys.stderr = (open(number, "w", closefd=False) for number in (1, 2))  # noqa: SIM115
        torch.set_num_threads(1)
        from chiar.cli import main

        main()


def start(arguments, log, **environment):
    """`chiar …` in a process of its own, what it says in the file `log`."""
    process = CONTEXT.Process(target=_chiar, args=(arguments, environment, log))
    process.start()
    return process


def run(arguments, log, count=1):
    """`chiar …` in `count` processes that train together; what the first one said."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": str(count)}
    common |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    logs = [log.with_suffix(f".{rank}") for rank in range(count)]
    started = [start(arguments, file, RANK=str(rank), LOCAL_RANK=str(rank), **common) for rank, file in enumerate(logs)]
    for process, file in zip(started, logs, strict=True):
        process.join()
        assert process.exitcode == 0, file.read_text()[-2000:]
    return logs[0].read_text()


class Killed(BaseException):
    pass


def interrupted(monkeypatch, step, stop=None):
    """Make the run stop dead before the optimiser step numbered `step`, as a kill would."""
    real, stop = Trainer.train_step, stop or Mock(side_effect=Killed)
    monkeypatch.setattr(Trainer, "train_step", lambda self: stop() if self.step == step else real(self))
    return Killed


def final_state(out):
    """Everything of the newest checkpoint, pieces of sharded tensors put together."""
    pieces = {}
    for path in sorted((out / "checkpoints" / "latest").glob("tensors-*.safetensors")):
        with safe_open(path, framework="pt") as file:
            starts = json.loads(file.metadata()["starts"])
            for name in file.keys():  # noqa: SIM118 (it is not a dictionary)
                pieces.setdefault(name, {}).setdefault(starts.get(name, 0), file.get_tensor(name))
    parts = {name: [part for _, part in sorted(rows.items())] for name, rows in pieces.items()}
    return {name: rows[0] if rows[0].ndim == 0 else torch.cat(rows) for name, rows in parts.items()}


def metrics(out):
    return [{k: v for k, v in r.items() if k not in TIMINGS} for r in RunFolder(out).read_metrics()]


def assert_same_run(first, second):
    """Bit for bit: the same program on the same machine."""
    ours, theirs = final_state(first), final_state(second)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert metrics(first) == metrics(second)


@contextmanager
def full_disk(largest=1000):
    """No file may grow beyond `largest` bytes: a real error from a real write."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
