"""What a measurement leaves behind: a line on the screen, a row of the CSV, a picture."""

import csv
import platform
from dataclasses import asdict, dataclass, fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from chiar.errors import InputError
from chiar.plots import COLOURS, Line, Panel, draw_panels
from chiar.training.run_folder import commit

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Row:
    """One measurement. Empty where a thing was not measured or has no meaning."""

    contender: str
    what: str
    mode: str
    size: str
    layers: int
    length: int
    batch: int
    fraction: float | None
    """f as forced: None where the contender decides for itself."""
    chosen: float | None
    """The share of attention in decoding steps of a model that routes itself, by thresholds calibrated for f."""
    execution: str
    compiled: str
    """"layers", "whole", or nothing where it is not."""
    precision: str
    graph: bool
    """Replayed as a CUDA graph."""
    sdpa: str
    samples: int
    p20_ms: float
    p50_ms: float
    p80_ms: float
    tokens_per_second: float
    peak_gb: float | None
    """Weights, gradients and everything else of this model at its highest."""
    baseline_p50_ms: float
    speedup: float
    """Over the dense baseline, measured in turns with this contender: the median over turns."""
    lowest_speedup: float
    highest_speedup: float
    bound: float | None
    """The same by counted FLOPs."""
    realised: float | None
    """speedup / bound."""
    synchronises: bool | None
    recompiled: bool | None
    """Whether another split made the compiler work again, in the comparison before the timing."""
    parity_error: float
    cache_bytes: int | None
    cache_share: float | None
    """Of the baseline's cache after as many tokens."""
    hardware: str
    torch: str
    cuda: str
    triton: str
    python: str
    commit: str

    def sentence(self) -> str:
        fraction = "" if self.fraction is None else f" f {self.fraction:g}"
        if self.chosen is not None:
            fraction += f" (own routes: {self.chosen:.3f})"
        parts = [
            f"{self.contender} {self.mode} T {self.length} × {self.batch}{fraction} ({self.execution}):",
            f"p50 {self.p50_ms:.2f} ms (p20 {self.p20_ms:.2f}, p80 {self.p80_ms:.2f}),",
            f"{self.tokens_per_second:,.0f} tokens/s, {self.speedup:.3f}× the baseline",
            f"({self.lowest_speedup:.3f} to {self.highest_speedup:.3f})",
        ]
        if self.bound is not None:
            parts.append(f"(bound {self.bound:.3f}, {self.realised:.0%} of it)")
        if self.peak_gb is not None:
            parts.append(f"peak {self.peak_gb:.2f} GB")
        if self.cache_bytes is not None:
            parts.append(f"cache {self.cache_bytes / 1e6:,.1f} MB ({self.cache_share:.0%})")
        if self.synchronises:
            parts.append("WAITS FOR THE DEVICE")
        if self.recompiled:
            parts.append("RECOMPILED")
        return " ".join(parts)


COLUMNS = [field.name for field in fields(Row)]


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


def new_file(path: Path | None) -> None:
    """Refuse a file that is there already, before anything is measured."""
    if path is not None and path.exists():
        raise InputError(f"{path} exists: name a new file, measurements are never overwritten or mixed.")
    if path is not None and not path.parent.is_dir():
        raise InputError(f"{path.parent} is not a folder: make it first.")


class Table:
    """Rows as they come, each in the file before the next is measured."""

    def __init__(self, path: Path | None) -> None:
        self.rows: list[Row] = []
        self.file = None if path is None else path.open("x", newline="", encoding="utf-8")
        self.writer: Any = None
        if self.file is not None:
            self.writer = csv.DictWriter(self.file, COLUMNS)
            self.writer.writeheader()
            self.file.flush()

    def add(self, row: Row) -> None:
        self.rows.append(row)
        if self.file is not None:
            self.writer.writerow({name: plain(value) for name, value in asdict(row).items()})
            self.file.flush()

    def close(self) -> None:
        if self.file is not None:
            self.file.close()


def plain(value: Any) -> Any:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.6g}" if isinstance(value, float) else value


def draw_speedups(rows: list[Row], baseline: str) -> "Figure":
    """Speed-up against length, a panel for each fraction (and for every seven contenders), bounds as thin lines.

    A contender without a fraction is drawn with every fraction.
    """
    rows = [row for row in rows if row.contender != baseline]
    fractions = sorted({row.fraction for row in rows if row.fraction is not None}, reverse=True)
    panels = []
    for fraction in fractions or (None,):
        shown = [row for row in rows if row.fraction in (fraction, None)]
        names = list(dict.fromkeys(row.contender for row in shown))
        for first in range(0, len(names), len(COLOURS)):
            lines = []
            for colour, name in zip(COLOURS, names[first : first + len(COLOURS)], strict=False):
                own = sorted((row for row in shown if row.contender == name), key=lambda row: row.length)
                lines.append(Line([(row.length, row.speedup) for row in own], name, color=colour, marker="o"))
                bounds = [(float(row.length), row.bound) for row in own if row.bound is not None]
                if bounds:
                    lines.append(Line(bounds, color=colour, linewidth=0.8, linestyle="--"))
            title = "speed-up" if fraction is None else f"speed-up at f = {fraction:g}"
            panels.append(Panel(f"{title} (thin: by counted FLOPs)", lines, level=(1.0, "compiled dense baseline")))
    some = rows[0]
    shape = f"{some.size}, {some.layers} layers, {some.batch * some.length:,} tokens"
    if not some.compiled:
        for panel in panels:
            panel.level = (1.0, "dense baseline")
    return draw_panels(f"{some.mode}, {shape}, {some.precision}, {some.hardware}", panels, "length, tokens")
