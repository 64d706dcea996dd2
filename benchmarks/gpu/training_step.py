"""Do training passes recorded as CUDA graphs give the results of ordinary ones, and how much time do they save?

    python benchmarks/gpu/training_step.py

Models are trained twice from the same weights, with and without CUDA graphs, with one, two and three micro-batches per
step: losses and weights must agree. So must the losses of `chiar train` with dropout, averaged weights, evaluations and
new thresholds in between. Then steps of 16M models are timed: with all logits in memory, with the fused loss, and
recorded. Needs a CUDA device; exit code 1 if anything differs.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from chiar import presets
from chiar.training.compiling import GraphedPasses
from chiar.training.tasks import TaskModel, materialise, outline

sys.path.append(str(Path(__file__).parents[1]))
from timing import echo, interleave, make_parser, report

CASES: dict[str, dict[str, Any]] = {
    "baseline-tiny": {},
    "v3-tiny": {"execution": "dense"},
    "v3-tiny, sparse": {"execution": "sparse", "keys": "routed"},
    "v3-tiny, sparse, light_ffn off": {
        "execution": "sparse", "keys": "routed", "light_ffn": False, "norm_position": "pre", "norm": "rmsnorm",
        "basis": "identity", "gate_pool": "causal",
    },
}  # fmt: skip
STEPS, ROWS, LENGTH = 10, 8, 64
LIMIT = 1e-5
# Compiled or not, passes are the same kernels; thresholds set in between may turn a token round at the last bit.
TRAINER_LIMIT = 1e-3


class Run:
    def __init__(self, model: Any, compile: bool) -> None:
        """`compile`: layer by layer, the last norm and the loss by themselves."""
        self.model = model.train()
        for layer in model.language.model.layers if compile else ():
            layer.compile(dynamic=False)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def both(self, ids_BT: Tensor, targets_BT: Tensor) -> tuple[Tensor, ...]:
        with torch.autocast("cuda", torch.bfloat16):
            result = self.model(ids_BT, targets_BT, None, None)
        result.loss.backward()
        return (result.loss.detach(),)

    def train(self, graphs: bool, micro_batches: int) -> list[float]:
        run = GraphedPasses(self.both, self.model.parameters()) if graphs else self.both
        generator = torch.Generator().manual_seed(0)
        losses = []
        for _ in range(STEPS):
            for _ in range(micro_batches):
                ids = torch.randint(0, 50, (ROWS, LENGTH + 1), generator=generator).cuda()
                losses.append(run(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())[0])
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        if isinstance(run, GraphedPasses) and (run.failure or not run.records):
            raise RuntimeError(f"nothing was recorded: {run.failure}")
        return [float(loss) for loss in losses]


def make(name: str, changes: dict[str, Any]) -> TaskModel:
    return materialise(outline(presets.get(name.split(",")[0], dropout=0.0, **changes), {}), 0, "cuda")


def parity() -> bool:
    good = True
    for name, changes in CASES.items():
        for micro_batches in (1, 2, 3):
            plain, recorded = (Run(make(name, changes), False) for _ in range(2))
            recorded = recomputing(recorded) if micro_batches == 3 else recorded
            losses = plain.train(False, micro_batches), recorded.train(True, micro_batches)
            error = max(abs(a - b) for a, b in zip(*losses, strict=True))
            pairs = zip(plain.model.parameters(), recorded.model.parameters(), strict=True)
            with torch.no_grad():
                apart = max(float((a - b).norm() / b.norm().clamp_min(1e-9)) for a, b in pairs)
            # The same kernels in the same order: nothing should differ at all. Sums by atomic additions would.
            same = error <= LIMIT * losses[0][0] and apart <= LIMIT
            good &= report(f"{name}, {micro_batches} a step", same, f"losses {error:.1e}, weights {apart:.1e}")
    return good


def trainer_parity(compile: bool) -> bool:
    """`chiar train` with everything that happens between passes, recorded and not: the same losses."""
    extras = ("recalibrate_every=10", "evaluate_every=10", "ema=0.9", "log_every=1", "warmup=5", "micro_batch=8")
    losses = {}
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder, "corpus")
        run = [sys.executable, "-m", "chiar"]
        subprocess.run([*run, "data", "prepare", "stdlib", "--tokenizer", "bytes", "--out", corpus], check=True)
        for graphs in ("true", "false"):
            out = Path(folder, graphs)
            options = [part for extra in (*extras, f"cuda_graphs={graphs}") for part in ("--set", extra)]
            options += ["--steps", "30", "--batch", "16", "--length", "64", "--compile" if compile else "--no-compile"]
            subprocess.run([*run, "train", "v3-tiny", "--data", corpus, "--out", out, *options], check=True)
            records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
            losses[graphs] = [record["loss"] for record in records if "loss" in record]
    error = max(abs(a - b) for a, b in zip(*losses.values(), strict=True))
    name = f"chiar train v3-tiny, {'compiled' if compile else 'plain'}, dropout, recalibration"
    return report(name, error < TRAINER_LIMIT, f"losses {error:.1e} apart")


class Unfused(torch.nn.Module):
    """The language task with all logits in memory, as a compiler alone would have it."""

    def __init__(self, model: TaskModel) -> None:
        super().__init__()
        self.language = model.language

    def forward(self, ids_BT: Tensor, targets_BT: Tensor, *_: None) -> Any:
        states_BTD = self.language.model(ids_BT).last_hidden_state
        logits = self.language.lm_head(states_BTD).flatten(0, 1)
        return SimpleNamespace(loss=F.cross_entropy(logits.float(), targets_BT.flatten()))


def recomputing(run: Run) -> Run:
    """Keeps a layer's input only and computes the rest again in the backward pass."""
    run.model.language.model.gradient_checkpointing_enable({"preserve_rng_state": False})
    return run


def ways(name: str) -> dict[str, tuple[Run, Callable[..., Any]]]:
    """Kinds of a training step. The first is what torch.compile makes of the plain model."""
    changes = {} if name.startswith("baseline") else {"keys": "routed", "execution": "sparse"}
    unfused = Run(torch.compile(Unfused(make(name, changes)), dynamic=False), False)
    plain, recorded, spare = (Run(make(name, changes), True) for _ in range(3))
    recomputing(spare)
    return {
        "logits in memory": (unfused, unfused.both),
        "fused loss": (plain, plain.both),
        "fused loss, recorded": (recorded, GraphedPasses(recorded.both, recorded.model.parameters())),
        "fused loss, recorded, layers recomputed": (spare, GraphedPasses(spare.both, spare.model.parameters())),
    }


def step(run: Run, both: Callable[..., Any], inputs: tuple[Tensor, Tensor]) -> None:
    both(*inputs)
    run.optimizer.step()
    run.optimizer.zero_grad(set_to_none=True)


def speed(names: list[str], turns: int) -> None:
    """Steps of 16M models in turns; memory is what a plain step takes above what was there before the model."""
    for name in names:
        ids = torch.randint(0, 50257, (128, 257), device="cuda")
        inputs = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
        memory, steps = [], {way: partial(step, *parts, inputs) for way, parts in ways(name).items()}
        for one in steps.values():
            run = one.args[0]
            for _ in range(2):
                one()
            torch.cuda.synchronize()
            others = torch.cuda.memory_allocated() - own_bytes(run)
            torch.cuda.reset_peak_memory_stats()
            one()
            memory.append((torch.cuda.max_memory_allocated() - others) / 1e9)
            for _ in range(4):
                one()
        found = interleave(list(steps.values()), "cuda", turns, 5)
        for way, times, peak in zip(steps, found, memory, strict=True):
            shown = f"{times.median:.2f} ms, {32768e3 / times.median:,.0f} tokens/s, peak {peak:.2f} GB"
            echo(f"{name}, 128 × 256, optimiser included, {way}: {shown}")


def own_bytes(run: Run) -> int:
    """Weights and the optimiser's state."""
    held = [*run.model.parameters(), *(x for state in run.optimizer.state.values() for x in state.values())]
    return sum(x.numel() * x.element_size() for x in held if isinstance(x, Tensor) and x.is_cuda)


def main(arguments: list[str] | None = None) -> int:
    parser = make_parser(__doc__, device=False)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--models", nargs="+", default=["baseline-16m", "v3-16m"])
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        echo("needs a CUDA device")
        return 2
    echo(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    if not (parity() and trainer_parity(False) and trainer_parity(True)):
        return 1
    speed(options.models, options.turns)
    return 0


if __name__ == "__main__":
    sys.exit(main())
