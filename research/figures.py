"""What draws the documents' figures from docs/results: `python -m research.figures [NAME…]`, or `make figures`."""

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
from research.theorem import check_theorem, draw_theorem

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DOCS = Path(__file__).parents[1] / "docs"
RESULTS = DOCS / "results"
MODELS = ("v1-16m", "v3-400m", "v4-400m", "v5-16m")


def speed() -> "Figure":
    """Speed-up against length, a panel for each f; dashed: by counted FLOPs. Half-layers have no f of their own."""
    rows: dict[tuple[str, str, str], dict[str, str]] = {}
    for name in ("train.csv", "train-8192.csv", "peers-8192.csv"):
        with (RESULTS / "speed-h200" / name).open(newline="") as file:
            known = {contender for contender, *_ in rows}
            for row in csv.DictReader(file):
                if row["contender"] != "baseline" and (name != "peers-8192.csv" or row["contender"] in known):
                    rows[row["contender"], row["fraction"], row["length"]] = row
    panels = []
    for fraction in sorted({fraction for _, fraction, _ in rows if fraction}, reverse=True):
        lines = []
        for contender, colour in zip(dict.fromkeys(contender for contender, *_ in rows), COLOURS, strict=False):
            own = [row for key, row in rows.items() if key[0] == contender and key[1] in (fraction, "")]
            for part, label, look in (("speedup", contender, {"marker": "o"}), ("bound", "", {"linestyle": DASHES[2]})):
                points = sorted((float(row["length"]), float(row[part])) for row in own if row[part])
                lines.append(Line(points, label, color=colour, **look))
        panels.append(Panel(f"speed-up, f {fraction}; dots: counted FLOPs", lines, (1.0, "dense baseline")))
    title = "training over the compiled dense baseline, 400m, bf16, NVIDIA H200"
    return draw_grid(title, panels, "length, tokens", 2, 3.0)


def recorded_routes(path: Path, heading: str) -> "Figure":
    """From what `chiar trace --json` wrote of a text in bytes."""
    trace = RoutingTrace.from_json(path.read_text(encoding="utf-8"))
    assert trace.token_ids_BT is not None
    return draw_routing(trace, [chr(byte) for byte in trace.token_ids_BT[0].tolist()], heading)


# Of docs/results/bytes: what is drawn, and what the legend calls it.
CHOOSERS = {
    "rise": "rise of the predictive entropy",
    "predictive": "predictive entropy",
    "forecast": "forecast of the final entropy",
    "space": "rule for spaces",
    "boundary": "H-Net's boundaries",
    "spectral": "the paper's H",
    "learned": "learned score",
    "hash": "hash of the byte",
    "stride": "every fifth byte",
    "random": "random places",
}


def choosers() -> "Figure":
    """Loss against FLOPs of the byte study, a mark for every run of a 2-12-2 stack; plain layers of seed 0 joined."""
    with (RESULTS / "bytes" / "results.json").open(encoding="utf-8") as file:
        runs = json.load(file)["runs"]
    found: dict[str, list[tuple[float, float]]] = {}
    for run in runs:
        found.setdefault(run["variant"], []).append((run["flops_per_token"]["forward"] / 1e6, run["bits_per_byte"]))
    dense = sorted(points[0] for name, points in found.items() if re.fullmatch(r"dense-\d+", name))
    lines = [Line(dense, "plain layers", color="#444444", marker="s")]
    lines += [Line([point], color="#444444", marker="s") for point in found["dense-6"][1:]]
    colours = [*COLOURS, *COLOURS]
    marks = "o" * len(COLOURS) + "^" * len(COLOURS)
    for (name, label), colour, mark in zip(CHOOSERS.items(), colours, marks, strict=False):
        own = [
            point for variant, points in found.items() if re.fullmatch(rf"{name}(-\d+)?", variant) for point in points
        ]
        lines.append(Line(sorted(own), label if own else "", color=colour, marker=mark, linestyle="none"))
    return draw_grid("bits/byte of the test set, 140M bytes", [Panel("bits/byte", lines)], "MFLOP a byte", 1, 4.2)


FIGURES: "dict[str, Callable[[], Figure]]" = {
    **{name: lambda name=name: draw_model([name]) for name in MODELS},  # type: ignore[misc]
    "choosers": choosers,
    "demo-routing": lambda: recorded_routes(RESULTS / "demo" / "routing.json", "runs/demo/v5"),
    "entropy-null": lambda: draw_entropy(read_report(RESULTS / "reproduction-16m" / "threshold")),
    "routers40m_long": lambda: draw_study([str(RESULTS / "routers40m_long" / "results.json")]),
    "savings": lambda: draw_savings(SIZES, 256, 0.5, "routed"),
    "speed": speed,
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
