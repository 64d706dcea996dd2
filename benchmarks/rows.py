"""What a measurement leaves behind: a line on the screen, a row of the CSV, a picture."""

import csv
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from chiar.errors import InputError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# `fraction` is f as forced, empty where the contender decides for itself, and `chosen` the share of attention in
# decoding steps of a model that routes itself; `compiled` is "layers", "whole" or nothing; `graph`: replayed as a CUDA
# graph; `peak_gb`: this model's weights, gradients and everything else at their highest; `speedup`: over the dense
# baseline, the median over turns beside it, `bound` the same by counted FLOPs and `realised` their ratio; `recompiled`:
# another split made the compiler work again; `cache_share`: of the baseline's cache.
NAMES = (
    "contender what mode size layers length batch fraction chosen execution compiled precision graph sdpa samples "
    "p20_ms p50_ms p80_ms tokens_per_second peak_gb baseline_p50_ms speedup lowest_speedup highest_speedup bound "
    "realised synchronises recompiled parity_error cache_bytes cache_share hardware torch cuda triton python commit"
)
COLUMNS = NAMES.split()
Row = SimpleNamespace
"""One measurement, with these columns; None where a thing was not measured or has no meaning."""


def sentence(row: Row) -> str:
    fraction = "" if row.fraction is None else f" f {row.fraction:g}"
    if row.chosen is not None:
        fraction += f" (own routes: {row.chosen:.3f})"
    parts = [
        f"{row.contender} {row.mode} T {row.length} × {row.batch}{fraction} ({row.execution}):",
        f"p50 {row.p50_ms:.2f} ms (p20 {row.p20_ms:.2f}, p80 {row.p80_ms:.2f}),",
        f"{row.tokens_per_second:,.0f} tokens/s, {row.speedup:.3f}× the baseline",
        f"({row.lowest_speedup:.3f} to {row.highest_speedup:.3f})",
    ]
    if row.bound is not None:
        parts.append(f"(bound {row.bound:.3f}, {row.realised:.0%} of it)")
    if row.peak_gb is not None:
        parts.append(f"peak {row.peak_gb:.2f} GB")
    if row.cache_bytes is not None:
        parts.append(f"cache {row.cache_bytes / 1e6:,.1f} MB ({row.cache_share:.0%})")
    parts += ["WAITS FOR THE DEVICE"] * bool(row.synchronises) + ["RECOMPILED"] * bool(row.recompiled)
    return " ".join(parts)


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
            self.writer.writerow({name: plain(value) for name, value in vars(row).items()})
            self.file.flush()

    def close(self) -> None:
        if self.file is not None:
            self.file.close()


def plain(value: Any) -> Any:
    if value is None or isinstance(value, bool):
        return {None: "", True: "yes", False: "no"}[value]
    return f"{value:.6g}" if isinstance(value, float) else value


def draw_speedups(rows: list[Row], baseline: str) -> "Figure":
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
    return figure
