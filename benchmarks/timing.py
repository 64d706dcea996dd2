"""The one clock of all benchmarks: warm-up, turns side by side, medians; and what the numbers were measured on."""

import argparse
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path

import torch

from chiar.errors import InputError
from chiar.training.run_folder import commit

WARM_UP = 3
Step = Callable[[], object]
say = partial(print, flush=True)


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


@dataclass
class Times:
    """Milliseconds of every step, and the median of every turn."""

    steps: list[float] = field(default_factory=list)
    turns: list[float] = field(default_factory=list)

    def percentiles(self) -> tuple[float, float, float]:
        """p20, p50, p80."""
        if len(self.steps) == 1:
            return self.steps[0], self.steps[0], self.steps[0]
        cuts = statistics.quantiles(self.steps, n=10, method="inclusive")
        return cuts[1], cuts[4], cuts[7]

    @property
    def median(self) -> float:
        return statistics.median(self.steps)


def time_turn(step: Step, device: str, steps: int, times: Times) -> None:
    """`steps` steps without waiting for the device in between."""
    synchronize(device)
    if device == "cuda":
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
        marks[0].record()
        for mark in marks[1:]:
            step()
            mark.record()
        synchronize(device)
        found = [first.elapsed_time(second) for first, second in pairwise(marks)]
    else:
        found = [1e3 * elapsed(step) for _ in range(steps)]
    times.steps += found
    times.turns.append(statistics.median(found))


def interleave(steps: list[Step], device: str, turns: int, per_turn: int) -> list[Times]:
    """Turns of all steps one after the other, so that a change of clock or load meets all; who begins alternates."""
    times = [Times() for _ in steps]
    for turn in range(turns):
        pairs = list(zip(steps, times, strict=True))
        for step, found in reversed(pairs) if turn % 2 else pairs:
            time_turn(step, device, per_turn, found)
    return times


def measure(step: Step, repeats: int, device: str = "cuda", strict: bool = False) -> Times:
    """A step alone, after a warm-up. `strict`: waiting for the device inside it is an error."""
    for _ in range(WARM_UP):
        step()
    times = Times()
    if strict:
        synchronize(device)
        with no_waiting(device):
            step()
    time_turn(step, device, repeats, times)
    return times


def ratios(baseline: Times, contender: Times) -> list[float]:
    return [a / b for a, b in zip(baseline.turns, contender.turns, strict=True)]


def speedup(baseline: Times, contender: Times) -> float:
    """The median over turns of the ratio of neighbouring turns."""
    return statistics.median(ratios(baseline, contender))


def elapsed(work: Step, device: str = "cpu") -> float:
    """Seconds of one call."""
    synchronize(device)
    began = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - began


@contextmanager
def no_waiting(device: str) -> Iterator[None]:
    """Inside, waiting for the device is a RuntimeError."""
    if device != "cuda":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def hardware(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    described = Path("/proc/cpuinfo")
    lines = described.read_text().splitlines() if described.is_file() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    named = names[0] if names else platform.processor() or platform.machine()
    return f"{named}, {torch.get_num_threads()} threads"


def installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def surroundings(device: str) -> dict[str, str]:
    """Hardware and versions."""
    return {
        "hardware": hardware(device),
        "torch": torch.__version__,
        "cuda": (torch.version.cuda or "") if device == "cuda" else "",
        "triton": installed("triton"),
        "python": platform.python_version(),
        "commit": commit() or "",
    }


def header(device: str) -> str:
    """The same in a line, without what there is not."""
    found = surroundings(device)
    return ", ".join([found.pop("hardware"), *(f"{name} {value}" for name, value in found.items() if value)])


def parser(description: str | None, device: bool = True) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    if device:
        default = "cuda" if torch.cuda.is_available() else "cpu"
        made.add_argument("--device", choices=("cuda", "cpu"), default=default)
    return made


def numbers(kind: type, low: float, high: float) -> Callable[[str], list]:
    """An argparse type: numbers with commas between, each inside the bounds."""

    def read(text: str) -> list:
        try:
            found = [kind(part) for part in text.split(",")]
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers with commas between") from None
        if not all(low <= number <= high for number in found):
            raise argparse.ArgumentTypeError(f"{text!r}: numbers must lie between {low:g} and {high:g}")
        return list(dict.fromkeys(found))

    return read


def passed(name: str, fine: bool, more: str) -> bool:
    """One line of a comparison."""
    say(f"{'ok  ' if fine else 'FAIL'} {name}: {more}")
    return fine


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    """‖difference‖ / ‖expected‖"""
    found, expected = found.detach().double(), expected.detach().double()
    return float((found - expected).norm() / expected.norm().clamp(min=1e-30))


def exit_code(work: Callable[[], object]) -> int:
    """Of a benchmark: 2 with one sentence where its input is wrong."""
    try:
        work()
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0
