"""Draws the figures of the documents from docs/results: `python -m research.figures [NAME…]`, or `make figures`."""

import csv
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from chiar.console import guarded
from chiar.errors import unknown_name
from chiar.model.trace import RoutingTrace
from chiar.plots.figure import COLOURS, DASHES, Line, Panel, save
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
            for part, label, style in parts:
                points = sorted((float(row["length"]), float(row[part])) for row in own if row[part])
                lines.append(Line(points, label, color=colour, **style))
        panels.append(Panel(f"speed-up, f {fraction}; dotted: counted FLOPs", lines, (1.0, "dense baseline")))
    title = "training speed relative to the compiled dense baseline, 400m, bf16, NVIDIA H200"
    return draw_grid(title, panels, "sequence length, tokens", 2, 3.0)


def recorded_routes(path: Path, heading: str) -> "Figure":
    """Draws the routes of a text in bytes as written by `chiar trace --json`."""
    trace = RoutingTrace.from_json(path.read_text(encoding="utf-8"))
    assert trace.token_ids_BT is not None
    return draw_routing(trace, [chr(byte) for byte in trace.token_ids_BT[0].tolist()], heading)


# Routers of the byte studies, with their labels in the legend.
ROUTERS = {
    "rise": "rise of the predictive entropy",
    "predictive": "predictive entropy",
    "forecast": "forecast of the final entropy",
    "space": "whitespace rule",
    "boundary": "H-Net's boundaries",
    "spectral": "the paper's H",
    "learned": "learned score",
    "hash": "hash of the byte",
    "stride": "every fifth byte",
    "random": "random bytes",
}


def router_panel(study: str, heading: str) -> Panel:
    """Loss against FLOPs, one marker per run of a 2-12-2 stack; seed 0 of the dense models joined."""
    with (RESULTS / study / "results.json").open(encoding="utf-8") as file:
        runs = json.load(file)["runs"]
    results: dict[str, list[tuple[float, float]]] = {}
    for run in runs:
        results.setdefault(run["variant"], []).append((run["flops_per_token"]["forward"] / 1e6, run["bits_per_byte"]))
    dense = {name: points for name, points in results.items() if re.fullmatch(r"dense-\d+", name)}
    first = sorted(points[0] for points in dense.values())
    lines = [Line(first, "dense models", color="#444444", marker="s")] if dense else []
    lines += [Line([point], color="#444444", marker="s") for points in dense.values() for point in points[1:]]
    colours = [*COLOURS, *COLOURS]
    markers = "o" * len(COLOURS) + "^" * len(COLOURS)
    for (name, label), colour, marker in zip(ROUTERS.items(), colours, markers, strict=False):
        own = [point for key, points in results.items() if re.fullmatch(rf"{name}(-\d+)?", key) for point in points]
        lines.append(Line(sorted(own), label if own else "", color=colour, marker=marker, linestyle="none"))
    return Panel(heading, lines)


def byte_routers() -> "Figure":
    """The byte study, and the small one, whose rows are trained too briefly to compare with dense models."""
    panels = [router_panel("bytes", "width 256, 140M bytes"), router_panel("bytes-small", "width 128, 12M bytes")]
    return draw_grid("bits/byte by the choice of dark bytes", panels, "MFLOP per byte", 2, 3.8, log_x=False)


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
