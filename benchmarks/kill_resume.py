"""Kill a training run with `kill -9` at random moments, resume it, and compare it with an uninterrupted run.

    python benchmarks/kill_resume.py [--kills 30] [--seed 0]

Runs on the CPU on the stdlib corpus. Weights, optimiser state and metrics (except timings) must be identical.
"""

import os
import random
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file

from chiar.data.corpora import Stdlib
from chiar.data.prepare import prepare
from chiar.data.tokenizers import TokenizerChoice
from chiar.training.run_folder import RunFolder
from timing import elapsed, make_parser

STEPS = 40


def command(corpus: Path, out: Path, resume: bool) -> list[str]:
    settings = ["--steps", str(STEPS), "--batch", "8", "--micro-batch", "4", "--length", "32", "--no-compile"]
    for item in ("precision=fp32", "save_every=2", "evaluate_every=10", "evaluate_rows=8", "log_every=1", "warmup=5"):
        settings += ["--set", item]
    base = [sys.executable, "-m", "chiar", "train", "v3-tiny", "--data", str(corpus), "--out", str(out), *settings]
    return [*base, "--device", "cpu", *(["--resume"] if resume else [])]


def state(out: Path) -> tuple[dict[str, torch.Tensor], list[dict]]:
    records = RunFolder(out).read_metrics()
    return load_file(out / "checkpoints" / "latest" / "tensors-0.safetensors"), [
        {key: value for key, value in record.items() if key not in ("tokens_per_second", "mfu")} for record in records
    ]


def main() -> int:
    parser = make_parser(__doc__, device=False)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    moments = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as folder:
        corpus, reference = Path(folder) / "corpus", Path(folder) / "alone"
        prepare(Stdlib(), corpus, TokenizerChoice(kind="bytes"))
        uninterrupted = command(corpus, reference, resume=False)
        seconds = elapsed(lambda: subprocess.run(uninterrupted, check=True, stdout=subprocess.DEVNULL))
        expected, kills, runs, different = state(reference), 0, 0, 0
        while kills < options.kills:
            runs += 1
            out = Path(folder) / f"run{runs}"
            while True:
                arguments = command(corpus, out, resume=(out / "run.json").exists())
                process = subprocess.Popen(arguments, stdout=subprocess.DEVNULL)
                try:
                    # Long enough for a few steps, short enough that most processes are killed.
                    process.wait(timeout=moments.uniform(0.55, 1.0) * seconds)
                    break
                except subprocess.TimeoutExpired:
                    os.kill(process.pid, signal.SIGKILL)
                    process.wait()
                    kills += 1
            if process.returncode != 0:
                print(f"run {runs}: resuming failed with exit code {process.returncode}")
                return 1
            weights, records = state(out)
            same = weights.keys() == expected[0].keys() and records == expected[1]
            same = same and all(torch.equal(weights[name], value) for name, value in expected[0].items())
            different += not same
            print(f"run {runs}: {kills} kills so far, {'identical' if same else 'DIFFERENT'}", flush=True)
    print(f"{kills} kills in {runs} runs of {STEPS} steps, {different} differences")
    return int(different > 0)


if __name__ == "__main__":
    sys.exit(main())
