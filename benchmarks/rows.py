"""The output of a measurement: a line on the screen, a row in the CSV, a picture."""

import csv
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from chiar.errors import InputError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# `fraction`: the forced f, empty if the contender has none; `chosen`: the share of attention in decoding steps of a
# model that routes itself; `compiled`: "layers", "whole" or empty; `graph`: replayed as a CUDA graph; `peak_gb`: peak
# memory of this model alone; `speedup`: over the dense baseline, median over turns; `bound`: the same by counted FLOPs;
# `realised`: their ratio; `recompiled`: other routes caused a recompilation; `cache_share`: relative to the baseline's.
NAMES = (
    "contender what mode size layers length batch fraction chosen execution compiled precision graph sdpa samples "
    "p20_ms p50_ms p80_ms tokens_per_second peak_gb baseline_p50_ms speedup lowest_speedup highest_speedup bound "
    "realised synchronises recompiled parity_error cache_bytes cache_share hardware torch cuda triton python commit"
)
COLUMNS = NAMES.split()
Row = SimpleNamespace
"""One measurement with these columns; None if a value was not measured or does not apply."""


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
    parts += ["SYNCHRONISES WITH THE DEVICE"] * bool(row.synchronises) + ["RECOMPILED"] * bool(row.recompiled)
    return " ".join(parts)


def check_new_file(path: Path | None) -> None:
    """Refuse an existing file before anything is measured."""
    if path is not None and path.exists():
        raise InputError(f"{path} exists: choose a new file, measurements are never overwritten or mixed.")
    if path is not None and not path.parent.is_dir():
        raise InputError(f"{path.parent} is not a folder: create it first.")


class Table:
    """The rows so far; each is in the file before the next one is measured."""

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
            self.writer.writerow({name: as_cell(value) for name, value in vars(row).items()})
            self.file.flush()

    def close(self) -> None:
        if self.file is not None:
            self.file.close()


def as_cell(value: Any) -> Any:
    if value is None or isinstance(value, bool):
        return {None: "", True: "yes", False: "no"}[value]
    return f"{value:.6g}" if isinstance(value, float) else value


def draw_speedups(rows: list[Row], baseline: str) -> "Figure":
    """Speed-up against length, one panel per fraction, bounds dashed. Contenders without f are in every panel."""
    from matplotlib.figure import Figure

    rows = [row for row in rows if row.contender != baseline]
    fractions = sorted({row.fraction for row in rows if row.fraction is not None}, reverse=True) or [None]
    names = list(dict.fromkeys(row.contender for row in rows))
    figure = Figure(figsize=(6 * len(fractions), 4.5), layout="constrained")
    for number, fraction in enumerate(fractions):
        axes = figure.add_subplot(1, len(fractions), number + 1)
        for index, name in enumerate(names):
            own = [row for row in rows if row.contender == name and row.fraction in (fraction, None)]
            own.sort(key=lambda row: row.length)
            style = {"color": f"C{index % 10}", "gid": f"line-{name}"}
            axes.plot([row.length for row in own], [row.speedup for row in own], marker="o", label=name, **style)
            bounds = [(row.length, row.bound) for row in own if row.bound is not None]
            axes.plot(*zip(*bounds, strict=True), linewidth=0.8, linestyle="--", **style) if bounds else None
        axes.axhline(1.0, color="grey", linewidth=0.8)
        axes.set_xscale("log", base=2)
        title = "speed-up" if fraction is None else f"speed-up at f = {fraction:g}"
        axes.set(title=f"{title} (dashed: by counted FLOPs)", xlabel="sequence length, tokens")
        axes.legend(fontsize="small")
    first = rows[0]
    shape = f"{first.size}, {first.layers} layers, {first.batch * first.length:,} tokens"
    baseline = "compiled dense baseline" if first.compiled else "dense baseline"
    figure.suptitle(f"{first.mode} relative to the {baseline}, {shape}, {first.precision}, {first.hardware}")
    return figure
