"""What a run reports: lines and a bar, metrics.jsonl, TensorBoard events, model FLOPs utilisation (MFU)."""

import json
import os
import re
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from chiar.config import ChiarConfig
from chiar.routing.flops import Shares, count_dense_execution, count_flops, early_head_cost
from chiar.training.trainer import Trainer

# TFLOP/s of bf16 matrix products with fp32 accumulation, without sparsity, from the makers' data sheets.
PEAKS = {
    "B200": 2250.0, "H200": 989.0, "H200 NVL": 835.0, "GH200": 989.0, "H100": 989.0, "H100 NVL": 835.0,
    "H100 PCIe": 756.0, "A100": 312.0, "A30": 165.0, "A10": 125.0, "A10G": 70.0, "L40S": 362.0, "L40": 181.0,
    "L4": 121.0, "RTX 6000 Ada": 364.0, "RTX A6000": 155.0, "RTX 5090": 210.0, "RTX 4090": 165.0, "RTX 3090": 71.0,
}  # fmt: skip
UNKNOWN = ("MIG", "Laptop", "Max Q", "RTX 4090 D")  # parts of a GPU, or another power limit: peak unknown
# What a line shows of a record, and how. A value is a number, or a number for each corpus.
SHOWN = {
    "loss": "loss {:.4f}", "rate": "rate {:.2e}", "tokens_per_second": "{:,.0f} tokens/s", "mfu": "MFU {:.1%}",
    "f": "f {:.2f}", "gate": "g({name}) {:.3f}", "validation": "valid({name}) {:.4f}",
    "accuracy": "accuracy({name}) {:.2%}",
}  # fmt: skip


def by_name(value: Any) -> dict[str, Any]:
    """The value of each corpus, or the only one under an empty name."""
    return value if isinstance(value, dict) else {"": value}


class Display:
    """Progress on the screen: one line per record; in a terminal also a bar with the time left."""

    def __init__(self, steps: int, first: int, quiet: bool = False) -> None:
        self.steps, self.quiet = steps, quiet
        self.began: tuple[int, float] | None = None  # after the first step here: compiling does not count
        columns = [TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()]
        console, plain = Console(stderr=True), quiet or not sys.stderr.isatty()
        self.bar = Progress(*columns, console=console, transient=True, disable=plain, speed_estimate_period=300)
        self.task = self.bar.add_task("training", total=steps, completed=first)
        self.bar.start()

    def advance(self, step: int) -> None:
        self.began = self.began or (step, time.perf_counter())
        self.bar.update(self.task, completed=step)

    def say(self, text: str) -> None:
        if not self.bar.disable:
            self.bar.console.print(text, highlight=False, markup=False)
        elif not self.quiet:
            print(text, flush=True)

    def record(self, record: dict[str, Any]) -> None:
        dark, parts = [row[-1] for row in record.get("use", ())], [f"step {record['step']}/{self.steps}"]
        values = {**record, "f": sum(dark) / len(dark)} if dark else record
        for key, form in SHOWN.items():
            parts += [form.format(value, name=name) for name, value in by_name(values.get(key, {})).items()]
        if self.bar.disable and self.began is not None and record["step"] > self.began[0]:
            seconds = (time.perf_counter() - self.began[1]) / (record["step"] - self.began[0])
            parts.append(f"{timedelta(seconds=round(seconds * (self.steps - record['step'])))} left")
        self.say("  ".join(parts))
        if "sample" in record:
            self.say(f"  sample: {record['sample']!r}")

    def close(self) -> None:
        self.bar.stop()


class Metrics:
    """Appends one JSON object per line, and TensorBoard events, dropping older events after `step`."""

    def __init__(self, path: Path, step: int = 0, operators: list[str] | None = None) -> None:
        self.file, self.operators, self.events = path.open("a"), operators, None
        if operators is not None:
            from torch.utils.tensorboard import SummaryWriter

            self.events = SummaryWriter(str(path.parent / "tensorboard"), purge_step=step + 1)

    def write(self, record: dict[str, Any]) -> None:
        """Flushed at once, so that a killed run keeps the records up to its checkpoint. Routed layers count from 1."""
        self.file.write(json.dumps(record) + "\n")
        self.file.flush()
        if self.events is None:
            return
        step, operators = record["step"], list(enumerate(self.operators or ()))
        use = {f"routed {n} {name}": row[k] for n, row in enumerate(record["use"], start=1) for k, name in operators}
        for name, value in {**record, "use": use}.items():
            for key, number in by_name(value).items():
                if isinstance(number, int | float) and name != "step":
                    self.events.add_scalar(f"{name}/{key}" if key else name, float(number), step)
        if "sample" in record:
            self.events.add_text("sample", record["sample"], step)
        self.events.flush()

    def sync(self) -> None:
        """Call before a checkpoint is written, so that the records up to it are on disk first."""
        os.fsync(self.file.fileno())

    def close(self) -> None:
        self.file.close()
        if self.events is not None:
            self.events.close()


def known_peak(name: str) -> float | None:
    """TFLOP/s of the GPU called `name`, by the longest entry that is part of the name; None if it is not known."""
    words = f" {re.sub(r'[-_/]', ' ', name)} "
    matches = [known for known in (*PEAKS, *UNKNOWN) if f" {known} " in words]
    return None if set(matches) & set(UNKNOWN) else PEAKS.get(max(matches, key=len, default=""))


def training_flops(config: ChiarConfig, length: int, shares: Shares | None = None) -> float:
    """FLOPs of a token's forward and backward pass as MFU counts them: dense, or by the `shares` of tokens that each
    operator got; recomputed layers count once. A backward pass costs two forward passes; a router without a gradient
    has none. Early heads are added; where a router reads them, it already counts their forward pass."""
    count = count_dense_execution(config, length) if shares is None else count_flops(config, length, shares)
    kind = config.router_kind
    early = len(config.stacks) * early_head_cost(config) if config.early_weight > 0 or kind.reads_prediction else 0.0
    total = 3.0 * count.total - 2.0 * (0.0 if kind.has_gradient else count.part("router"))
    return total + (3 - kind.reads_prediction) * early


def utilisation(run: Trainer, tokens_per_second: float, use: list[list[float]]) -> float | None:
    """MFU; None if the peak is not known, for documents, whose lengths vary, and with mixing=added.
    `use`: the share of tokens that each operator of each routed layer got."""
    config, settings, device = run.config, run.settings, run.processes.device
    peak = settings.peak_tflops or None
    if not peak and device.type == "cuda" and settings.precision == "bf16":
        peak = known_peak(torch.cuda.get_device_name(device))
    added = settings.mixing == "added" and len(run.corpora) > 1
    if peak is None or added or any(corpus.kind != "language" for corpus in run.corpora):
        return None
    sparse = config.execution != "dense" and config.can_run_sparse and config.dropout == 0
    shares = [dict(zip(config.operators or (), row, strict=True)) for row in use] if sparse else None
    flops = training_flops(config, settings.length, shares)
    return round(tokens_per_second * flops / (peak * 1e12 * run.processes.count), 4)
