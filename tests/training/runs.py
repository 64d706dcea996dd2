"""Runs started, read and compared by tests."""

import json
import os
import resource
import subprocess
import sys
from contextlib import contextmanager

import torch
from safetensors import safe_open

from chiar.training.run_folder import RunFolder

TIMINGS = ("tokens_per_second", "mfu")


def command(corpus, out, *more):
    """A short run of a tiny model on the CPU, as a user would start it."""
    changes = ("precision=fp32", "save_every=2", "evaluate_every=6", "log_every=1", "hidden_size=16", "evaluate_rows=4")
    options = [
        "--steps",
        "12",
        "--batch",
        "8",
        "--micro-batch",
        "2",
        "--length",
        "16",
        "--no-compile",
        "--device",
        "cpu",
    ]
    options += [word for change in changes for word in ("--set", change)]
    program = [sys.executable, "-m", "chiar", "train", "v3-tiny"]
    return [*program, "--data", str(corpus), "--out", str(out), *options, *more]


def torchrun(processes, restarts, arguments):
    """The same command in several processes."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    return [*launcher, "--max-restarts", str(restarts), "-m", "chiar.train", *arguments[4:]]


def run(arguments):
    done = subprocess.run(arguments, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-2000:]
    return done


def final_state(out):
    """The last checkpoint's tensors, rows of several files put together."""
    pieces: dict[str, dict[int, torch.Tensor]] = {}
    for path in sorted((out / "checkpoints" / "latest").glob("tensors-*.safetensors")):
        with safe_open(path, framework="pt") as file:
            starts = json.loads(file.metadata()["starts"])
            for name in file.keys():  # noqa: SIM118 (it is not a dictionary)
                pieces.setdefault(name, {}).setdefault(starts.get(name, 0), file.get_tensor(name))
    whole = {}
    for name, rows in pieces.items():
        parts = [part for _, part in sorted(rows.items())]
        whole[name] = parts[0] if parts[0].ndim == 0 else torch.cat(parts)
    return whole


def metrics(out):
    return [{k: v for k, v in r.items() if k not in TIMINGS} for r in RunFolder(out).read_metrics()]


def assert_same_run(first, second):
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
