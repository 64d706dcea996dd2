"""What a run tells of itself: lines and a bar, TensorBoard events, model FLOPs utilisation (MFU)."""

import re
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from chiar.config import ChiarConfig
from chiar.data import Corpus
from chiar.data.optional import optional_module
from chiar.routing.flops import Shares, count_dense_execution, count_flops
from chiar.training.distributed import Processes
from chiar.training.settings import TrainSettings

# Dense bf16 matrix products with fp32 sums, TFLOP/s, from the makers' data sheets (without sparsity).
PEAKS = {
    "B200": 2250.0, "H200": 989.0, "H200 NVL": 835.0, "GH200": 989.0, "H100": 989.0, "H100 NVL": 835.0,
    "H100 PCIe": 756.0, "A100": 312.0, "A30": 165.0, "A10": 125.0, "A10G": 70.0, "L40S": 362.0, "L40": 181.0,
    "L4": 121.0, "RTX 6000 Ada": 364.0, "RTX A6000": 155.0, "RTX 5090": 210.0, "RTX 4090": 165.0, "RTX 3090": 71.0,
}  # fmt: skip
# A part of a GPU, or one with another power limit than the data sheet's.
UNKNOWN = ("MIG", "Laptop", "Max-Q", "RTX 4090 D")


class Display:
    """What a person sees: one line a record; in a terminal also a bar with the time left."""

    def __init__(self, steps: int, first: int, quiet: bool = False) -> None:
        self.steps, self.quiet = steps, quiet
        self.began: tuple[int, float] | None = None
        """The first step finished here, and when: what a run did before it was resumed, and compiling, do not count."""
        self.bar: Any = None
        if not quiet and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            columns = [TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()]
            self.bar = Progress(*columns, console=Console(stderr=True), transient=True, speed_estimate_period=300)
            self.task = self.bar.add_task("training", total=steps, completed=first)
            self.bar.start()

    def advance(self, step: int) -> None:
        self.began = self.began or (step, time.perf_counter())
        if self.bar is not None:
            self.bar.update(self.task, completed=step)

    def say(self, text: str) -> None:
        if self.bar is not None:
            self.bar.console.print(text, highlight=False, markup=False)
        elif not self.quiet:
            print(text, flush=True)

    def record(self, record: dict[str, Any]) -> None:
        parts = [f"step {record['step']}/{self.steps}", f"loss {record['loss']:.4f}", f"rate {record['rate']:.2e}"]
        if "tokens_per_second" in record:
            parts.append(f"{record['tokens_per_second']:,.0f} tokens/s")
        if "mfu" in record:
            parts.append(f"MFU {record['mfu']:.1%}")
        if record.get("use"):
            dark = [row[-1] for row in record["use"]]
            parts.append(f"f {sum(dark) / len(dark):.2f}")
        parts += [f"g({name}) {value:.3f}" for name, value in record.get("gate", {}).items()]
        parts += [f"valid({name}) {value:.4f}" for name, value in record.get("validation", {}).items()]
        parts += [f"accuracy({name}) {value:.2%}" for name, value in record.get("accuracy", {}).items()]
        if self.bar is None and self.began is not None and record["step"] > self.began[0]:
            each = (time.perf_counter() - self.began[1]) / (record["step"] - self.began[0])
            parts.append(f"{timedelta(seconds=round(each * (self.steps - record['step'])))} left")
        self.say("  ".join(parts))
        if "sample" in record:
            self.say(f"  sample: {record['sample']!r}")

    def close(self) -> None:
        if self.bar is not None:
            self.bar.stop()


def require_tensorboard() -> None:
    optional_module("tensorboard", "tensorboard", "the setting tensorboard=true")


class Events:
    """Writes RUN/tensorboard. Events behind the step a run is resumed from are told to be dropped."""

    def __init__(self, folder: Path, step: int, config: ChiarConfig) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.operators = config.operators or []
        self.writer = SummaryWriter(str(folder), purge_step=step + 1)

    def write(self, record: dict[str, Any]) -> None:
        """At once on disk, so that a killed run has lost nothing its checkpoint knows of."""
        for name, value in self.scalars(record):
            self.writer.add_scalar(name, value, record["step"])
        if "sample" in record:
            self.writer.add_text("sample", record["sample"], record["step"])
        self.writer.flush()

    def scalars(self, record: dict[str, Any]) -> Iterator[tuple[str, float]]:
        """Every number of a record by a name with slashes; routed layers count from 1."""
        for name, value in record.items():
            if name == "use":
                for number, shares in enumerate(value, start=1):
                    for operator, share in zip(self.operators, shares, strict=True):
                        yield f"use/routed {number} {operator}", share
            elif isinstance(value, dict):
                yield from ((f"{name}/{corpus}", number) for corpus, number in value.items())
            elif isinstance(value, int | float) and name != "step":
                yield name, float(value)


def known_peak(name: str) -> float | None:
    """TFLOP/s of the GPU called `name`; the longest entry that is part of the name wins."""
    words = f" {re.sub(r'[-_/]', ' ', name)} "
    if any(f" {part.replace('-', ' ')} " in words for part in UNKNOWN):
        return None
    found = [known for known in PEAKS if f" {known} " in words]
    return PEAKS[max(found, key=len)] if found else None


def training_flops(config: ChiarConfig, length: int, shares: Shares | None = None) -> float:
    """FLOPs of a token's forward and backward pass as MFU counts them: those of the model, as it is executed.

    Densely, every operator runs on every token with full T × T scores, so what routing could save is counted as work;
    with `shares`, what each operator got, only that is. What gradient checkpointing computes twice is counted once. The
    backward pass costs twice the forward pass, but for the spectrum of the entropy router, which has none.
    """
    count = count_dense_execution(config, length) if shares is None else count_flops(config, length, shares)
    without_backward = count.part("router") if config.router == "entropy" else 0.0
    return 3.0 * count.total - 2.0 * without_backward


class Utilisation:
    """Turns tokens a second into MFU. `of` gives None where the peak is not known, or not all tokens are counted."""

    def __init__(
        self, config: ChiarConfig, settings: TrainSettings, corpora: list[Corpus], processes: Processes
    ) -> None:
        self.config, self.length, self.peak = config, settings.length, settings.peak_tflops or None
        if not self.peak and processes.device.type == "cuda" and settings.precision == "bf16":
            self.peak = known_peak(torch.cuda.get_device_name(processes.device))
        # Documents differ in length, and added batches are not among the tokens a second.
        added = settings.mixing == "added" and len(corpora) > 1
        if added or any(corpus.kind != "language" for corpus in corpora):
            self.peak = None
        self.devices = processes.count
        self.sparse = config.execution != "dense" and config.can_run_sparse and config.dropout == 0

    def of(self, tokens_per_second: float, use: list[list[float]]) -> float | None:
        """`use` is the share of tokens each operator of each routed layer got."""
        if self.peak is None:
            return None
        shares = [dict(zip(self.config.operators or (), row, strict=True)) for row in use] if self.sparse else None
        flops = training_flops(self.config, self.length, shares)
        return round(tokens_per_second * flops / (self.peak * 1e12 * self.devices), 4)
