"""What a person sees of a run: a live line in a terminal, plain lines elsewhere."""

import sys
import time
from datetime import timedelta
from typing import Any


class Display:
    """One line a record; in a terminal also a bar with the time left."""

    def __init__(self, steps: int, first: int, quiet: bool = False) -> None:
        self.steps, self.first, self.quiet = steps, first, quiet
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
        if self.began is None:
            self.began = step, time.perf_counter()
        if self.bar is not None:
            self.bar.update(self.task, completed=step)

    def say(self, text: str) -> None:
        if self.quiet:
            return
        if self.bar is not None:
            self.bar.console.print(text, highlight=False, markup=False)
        else:
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
