"""What a measurement leaves behind: a line on the screen, a row of the CSV, a picture."""

import csv
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from chiar.errors import InputError


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


def draw_speedups(rows: list[Row], baseline: str, path: Path) -> None:
    """Speed-up against length, a panel for each fraction, bounds as thin lines. A contender without a fraction is drawn
    with every one."""
    from matplotlib.figure import Figure

    rows = [row for row in rows if row.contender != baseline]
    fractions = sorted({row.fraction for row in rows if row.fraction is not None}, reverse=True) or [None]
    names = list(dict.fromkeys(row.contender for row in rows))
    figure = Figure(figsize=(6 * len(fractions), 4.5), layout="constrained")
    for number, fraction in enumerate(fractions):
        axes = figure.add_subplot(1, len(fractions), number + 1)
        for place, name in enumerate(names):
            own = [row for row in rows if row.contender == name and row.fraction in (fraction, None)]
            own.sort(key=lambda row: row.length)
            style = {"color": f"C{place % 10}", "gid": f"line-{name}"}
            axes.plot([row.length for row in own], [row.speedup for row in own], marker="o", label=name, **style)
            bounds = [(row.length, row.bound) for row in own if row.bound is not None]
            axes.plot(*zip(*bounds, strict=True), linewidth=0.8, linestyle="--", **style) if bounds else None
        axes.axhline(1.0, color="grey", linewidth=0.8)
        axes.set_xscale("log", base=2)
        title = "speed-up" if fraction is None else f"speed-up at f = {fraction:g}"
        axes.set(title=f"{title} (dashed: by counted FLOPs)", xlabel="length, tokens")
        axes.legend(fontsize="small")
    some = rows[0]
    shape = f"{some.size}, {some.layers} layers, {some.batch * some.length:,} tokens"
    over = "compiled dense baseline" if some.compiled else "dense baseline"
    figure.suptitle(f"{some.mode} over the {over}, {shape}, {some.precision}, {some.hardware}")
    figure.savefig(path, format="svg")
