"""Timing shared by all benchmarks: steps in turns, medians, and the hardware and versions they were measured on."""

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
echo = partial(print, flush=True)


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


@dataclass
class Times:
    """The milliseconds of every step, and the median of every turn."""

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
    """Time `steps` steps without synchronising in between."""
    synchronize(device)
    if device == "cuda":
        events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
        events[0].record()
        for event in events[1:]:
            step()
            event.record()
        synchronize(device)
        milliseconds = [first.elapsed_time(second) for first, second in pairwise(events)]
    else:
        milliseconds = [1e3 * elapsed(step) for _ in range(steps)]
    times.steps += milliseconds
    times.turns.append(statistics.median(milliseconds))


def interleave(steps: list[Step], device: str, turns: int, per_turn: int) -> list[Times]:
    """Time all steps in turns, so that a change of clock or load affects all of them; the order alternates."""
    times = [Times() for _ in steps]
    for turn in range(turns):
        pairs = list(zip(steps, times, strict=True))
        for step, own in reversed(pairs) if turn % 2 else pairs:
            time_turn(step, device, per_turn, own)
    return times


def measure(step: Step, repeats: int, device: str = "cuda", strict: bool = False) -> Times:
    """Time a step alone, after a warm-up. With `strict` it must not synchronise with the device."""
    for _ in range(WARM_UP):
        step()
    times = Times()
    if strict:
        synchronize(device)
        with forbid_sync(device):
            step()
    time_turn(step, device, repeats, times)
    return times


def ratios(baseline: Times, contender: Times) -> list[float]:
    return [a / b for a, b in zip(baseline.turns, contender.turns, strict=True)]


def speedup(baseline: Times, contender: Times) -> float:
    """The median over turns of the ratio of adjacent turns."""
    return statistics.median(ratios(baseline, contender))


def elapsed(work: Step, device: str = "cpu") -> float:
    """Seconds that one call takes."""
    synchronize(device)
    start = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - start


@contextmanager
def forbid_sync(device: str) -> Iterator[None]:
    """A block in which synchronising with the device is a RuntimeError."""
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
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    name = names[0] if names else platform.processor() or platform.machine()
    return f"{name}, {torch.get_num_threads()} threads"


def installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def environment(device: str) -> dict[str, str]:
    """Hardware and versions."""
    return {
        "hardware": hardware(device),
        "torch": torch.__version__,
        "cuda": (torch.version.cuda or "") if device == "cuda" else "",
        "triton": installed("triton"),
        "python": platform.python_version(),
        "commit": commit() or "",
    }


def describe_environment(device: str) -> str:
    """The non-empty values of `environment` in one line."""
    values = environment(device)
    return ", ".join([values.pop("hardware"), *(f"{name} {value}" for name, value in values.items() if value)])


def make_parser(description: str | None, device: bool = True) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    if device:
        default = "cuda" if torch.cuda.is_available() else "cpu"
        parser.add_argument("--device", choices=("cuda", "cpu"), default=default)
    return parser


def numbers(kind: type, low: float, high: float) -> Callable[[str], list]:
    """An argparse type: numbers within the bounds, separated by commas."""

    def parse(text: str) -> list:
        try:
            values = [kind(part) for part in text.split(",")]
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers separated by commas") from None
        if not all(low <= number <= high for number in values):
            raise argparse.ArgumentTypeError(f"{text!r}: numbers must lie between {low:g} and {high:g}")
        return list(dict.fromkeys(values))

    return parse


def report(name: str, ok: bool, details: str) -> bool:
    """Print the result of a comparison and return whether it succeeded."""
    echo(f"{'ok  ' if ok else 'FAIL'} {name}: {details}")
    return ok


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """‖difference‖ / ‖expected‖"""
    actual, expected = actual.detach().double(), expected.detach().double()
    return float((actual - expected).norm() / expected.norm().clamp(min=1e-30))


def exit_code(work: Callable[[], object]) -> int:
    """The exit code of a benchmark: 2, with one sentence, for bad input."""
    try:
        work()
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0
