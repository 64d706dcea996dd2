"""Draws the figures of the documents from docs/results: `python -m research.figures [NAME…]`, or `make figures`."""

import csv
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from chiar.console import guarded
from chiar.errors import unknown_name
from chiar.model.trace import RoutingTrace
from chiar.plots.figure import COLOURS, DASHES, Line, Panel, new_figure, save, style
from chiar.plots.model import draw_model
from chiar.plots.routes import draw_routing
from chiar.plots.study import draw_study
from research.grid import draw_grid
from research.nulltest.pictures import draw_entropy
from research.nulltest.report import read_report
from research.scaling import MODELS as SIZES
from research.scaling import draw_savings
from research.surprisal import Measurement
from research.surprisal import draw as draw_surprisal
from research.theorem import check_theorem, draw_theorem

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DOCS = Path(__file__).parents[1] / "docs"
RESULTS = DOCS / "results"
MODELS = ("v1-16m", "v3-400m", "v4-400m", "v5-16m")


def speed() -> "Figure":
    """Speed-up against length, one panel per f, with the bound by counted FLOPs dashed; `half-layers` has no f."""
    rows: dict[tuple[str, str, str], dict[str, str]] = {}
    for name in ("train.csv", "train-8192.csv", "peers-8192.csv"):
        with (RESULTS / "speed-h200" / name).open(newline="") as file:
            contenders = {contender for contender, *_ in rows}
            for row in csv.DictReader(file):
                if row["contender"] != "baseline" and (name != "peers-8192.csv" or row["contender"] in contenders):
                    rows[row["contender"], row["fraction"], row["length"]] = row
    panels = []
    for fraction in sorted({fraction for _, fraction, _ in rows if fraction}, reverse=True):
        lines = []
        for contender, colour in zip(dict.fromkeys(contender for contender, *_ in rows), COLOURS, strict=False):
            own = [row for key, row in rows.items() if key[0] == contender and key[1] in (fraction, "")]
            parts = (("speedup", contender, {"marker": "o"}), ("bound", "", {"linestyle": DASHES[2]}))
            for part, label, look in parts:
                points = sorted((float(row["length"]), float(row[part])) for row in own if row[part])
                lines.append(Line(points, label, color=colour, **look))
        panels.append(Panel(f"speed-up, f {fraction}; dotted: counted FLOPs", lines, (1.0, "dense baseline")))
    title = "training speed relative to the compiled dense baseline, 400m, bf16, NVIDIA H200"
    return draw_grid(title, panels, "sequence length, tokens", 2, 3.0)


def recorded_routes(path: Path, heading: str) -> "Figure":
    """Draws the routes of a text in bytes as written by `chiar trace --json`."""
    trace = RoutingTrace.from_json(path.read_text(encoding="utf-8"))
    assert trace.token_ids_BT is not None
    return draw_routing(trace, [chr(byte) for byte in trace.token_ids_BT[0].tolist()], heading)


# Variants of the byte study, with their labels; True where the label stands on the left of the point.
ROUTERS = {
    "rise": ("rise of the predictive entropy", False),
    "rise-3": ("rise, f 0.3", False),
    "predictive": ("predictive entropy", False),
    "boundary": ("H-Net's boundaries", False),
    "hash": ("hash of the byte", True),
    "spectral": ("the paper's H, and every fifth byte", False),
    "random": ("random bytes", False),
    "space": ("whitespace rule", True),
    "forecast": ("forecast of the final entropy", True),
    "stride": ("", False),
    "learned": ("learned score", True),
}


@style()
def byte_routers() -> "Figure":
    """Loss against FLOPs: the mean over seeds, with a bar from the lowest to the highest."""
    with (RESULTS / "bytes" / "results.json").open(encoding="utf-8") as file:
        runs = json.load(file)["runs"]
    costs: dict[str, list[float]] = {}
    losses: dict[str, list[float]] = {}
    for run in runs:
        costs.setdefault(run["variant"], []).append(run["flops_per_token"]["forward"] / 1e6)
        losses.setdefault(run["variant"], []).append(run["bits_per_byte"])
    points = {name: (fmean(costs[name]), fmean(losses[name])) for name in costs}
    figure = new_figure("which bytes pass the inner stack: loss against FLOPs, 140M bytes, width 256", 9.6, 5.0)
    axes = figure.add_subplot()
    depths = sorted((name for name in points if re.fullmatch(r"dense-\d+", name)), key=lambda name: points[name])
    axes.plot(*zip(*(points[name] for name in depths), strict=True), color="#444444", marker="s")
    dense = {name: (f"{name.removeprefix('dense-')} dense layers", name == "dense-4") for name in depths}
    for name, (label, on_left) in {**dense, **ROUTERS}.items():
        colour = "#444444" if name in dense else COLOURS[0] if "rise" in name else COLOURS[1]
        x, y = points[name]
        axes.plot([x, x], [min(losses[name]), max(losses[name])], color=colour, linewidth=1)
        axes.plot([x], [y], color=colour, marker="s" if name in dense else "o")
        where = {"xytext": (-7 if on_left else 7, 0), "ha": "right" if on_left else "left", "va": "center"}
        axes.annotate(label, (x, y), textcoords="offset points", color=colour, fontsize=8.5, **where)
    axes.set(xlabel="MFLOP per byte, forward", ylabel="bits/byte", xlim=(4, 38))
    return figure


def surprisal() -> "Figure":
    with (RESULTS / "bytes-small" / "surprisal.json").open(encoding="utf-8") as file:
        return draw_surprisal([Measurement(**kind) for kind in json.load(file)["kinds"]])


FIGURES: "dict[str, Callable[[], Figure]]" = {
    **{name: lambda name=name: draw_model([name]) for name in MODELS},  # type: ignore[misc]
    "byte-routers": byte_routers,
    "demo-routing": lambda: recorded_routes(RESULTS / "demo" / "routing.json", "runs/demo/v5"),
    "entropy-null": lambda: draw_entropy(read_report(RESULTS / "reproduction-16m" / "threshold")),
    "routers40m_long": lambda: draw_study([str(RESULTS / "routers40m_long" / "results.json")]),
    "savings": lambda: draw_savings(SIZES, 256, 0.5, "routed"),
    "speed": speed,
    "surprisal": surprisal,
    "theorem": lambda: draw_theorem(check_theorem([16, 64, 256, 1024], [0.5, 0.9, 0.99])),
}


def main() -> None:
    for name in sys.argv[1:] or FIGURES:
        if name not in FIGURES:
            raise unknown_name("figure", name, FIGURES)
        save(FIGURES[name](), DOCS / "figures" / f"{name}.svg", overwrite=True)
        print(f"drew {name}")


if __name__ == "__main__":
    guarded(main)
