"""The overhead of the training loop over the bare step. The target is at most 3%.

    python benchmarks/loop_overhead.py CORPUS --preset baseline-16m --batch 128 --micro-batch 128

The bare step is forward, backward, clipping and the optimiser on a fixed batch that already is on the device. The loop
is `train()` itself: batches, seeds, learning rates, measurements, metrics.jsonl. Both run in one process on the same
(compiled) model in turns of `--turn` steps, so that a change of clock or load affects both. Evaluations and checkpoints
are part of neither.
"""

import argparse
import tempfile
import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch

from chiar.training import loop
from chiar.training.cli import configuration
from chiar.training.settings import TrainSettings
from chiar.training.tasks import Batch
from chiar.training.trainer import Trainer
from timing import Times, hardware, make_parser, time_turn

WARM_UP = 2
"""Turns that are not counted: they compile and allocate."""


class Done(Exception):
    """Raised after the last turn, before a run would evaluate and save."""


def bare_step(trainer: Trainer, batches: list[Batch]) -> None:
    for batch in batches:
        with trainer.autocast():
            result = trainer.forward.call(batch.ids, batch.targets, batch.mask, None)
        (result.loss / len(batches)).backward()
    torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), trainer.settings.clip)
    trainer.optimizer.step()
    trainer.optimizer.zero_grad(set_to_none=True)


class Turns(loop.Run):
    """A run that also times the bare step after each record."""

    turns: list[tuple[float, float]]
    """Seconds per step, bare and in the loop."""
    wanted: int
    turn_began = 0

    def go(self, interruption: loop.CtrlC) -> dict[str, Any] | None:
        batches = [self.schedule.batches(0, slot)[0] for slot in range(self.schedule.slots)]
        self.fixed = [batch.to(self.processes.device) for batch in batches]
        return super().go(interruption)

    def measure(self, measured: dict[str, Any]) -> dict[str, Any]:
        steps, self.turn_began = self.step - self.turn_began, self.step
        record = super().measure(measured)  # synchronises with the device
        in_loop = self.settings.batch * self.settings.length / record["tokens_per_second"]
        times = Times()
        time_turn(partial(bare_step, self, self.fixed), self.processes.device.type, steps, times)
        Turns.turns.append((sum(times.steps) / steps / 1e3, in_loop))
        if len(Turns.turns) == Turns.wanted:
            raise Done
        self.marked_time = time.perf_counter()
        return record


def show(arguments: argparse.Namespace, compiled: bool, turns: list[tuple[float, float]]) -> None:
    batch = f"{arguments.batch} × {arguments.length} tokens per step in micro-batches of {arguments.micro_batch}"
    where = hardware("cuda" if torch.cuda.is_available() else "cpu")
    title = f"{arguments.preset}, {batch}, {'compiled' if compiled else 'plain'}\n{where}, torch {torch.__version__}"
    print(title)
    for number, name in enumerate(("bare", "in train()")):
        times = [turn[number] for turn in turns]
        low, middle, high = (f"{1e3 * value:,.3f}" for value in (min(times), median(times), max(times)))
        rate = arguments.batch * arguments.length / median(times)
        print(f"{name:10} median {middle} ms ({low} to {high}), {rate:,.0f} tokens/s")
    overhead = median(ours / bare for bare, ours in turns) - 1
    print(f"train() takes {overhead:+.2%} over the bare step (median of {len(turns)} turns; the target is at most 3%)")


def main(argv: list[str] | None = None) -> None:
    parser = make_parser(__doc__, device=False)
    add = parser.add_argument
    add("data", help="a prepared language corpus")
    add("--preset", default="v3-tiny")
    add("--batch", type=int, default=32)
    add("--micro-batch", type=int, default=32)
    add("--length", type=int, default=256)
    add("--steps", type=int, default=200, help="timed steps of each kind")
    add("--turn", type=int, default=10, help="steps per turn")
    add("--device", default="auto")
    add("--compile", action=argparse.BooleanOptionalAction, default=torch.cuda.is_available())
    arguments = parser.parse_args(argv)
    Turns.turns, Turns.wanted = [], WARM_UP + 1 + arguments.steps // arguments.turn  # step 1 is a separate turn
    settings = TrainSettings(
        data=[arguments.data], length=arguments.length, batch=arguments.batch, micro_batch=arguments.micro_batch,
        steps=Turns.wanted * arguments.turn + 1, log_every=arguments.turn, compile=arguments.compile,
        evaluate_every=1 << 30, save_every=1 << 30,
    )  # fmt: skip
    config = configuration(arguments.preset, {}, Path(arguments.data))
    print(f"{Turns.wanted} turns of {arguments.turn} steps of each kind …", flush=True)
    with patch.object(loop, "Run", Turns), tempfile.TemporaryDirectory() as folder:
        try:
            loop.train(config, settings, Path(folder) / "run", device=arguments.device, quiet=True)
        except Done:
            show(arguments, settings.compile, Turns.turns[WARM_UP + 1 :])


if __name__ == "__main__":
    main()
