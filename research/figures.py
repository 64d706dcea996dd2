"""What draws the documents' figures from docs/results: `python -m research.figures [NAME…]`, or `make figures`."""

import csv
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from benchmarks.rows import draw_speedups

from chiar import presets
from chiar.console import guarded
from chiar.errors import unknown_name
from chiar.model.trace import LayerTrace, RoutingTrace
from chiar.plots import draw_curves, draw_gate, draw_operators, draw_pareto, draw_savings, draw_scaling, save
from chiar.plots_diagrams import draw_model, draw_routing
from chiar.studies.results import read_results
from research.nulltest import pictures
from research.nulltest.report import NullTest, read_report
from research.theorem import check_theorem, draw_theorem

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DOCS = Path(__file__).parents[1] / "docs"
RESULTS = DOCS / "results"
SMALL = RESULTS / "reproduction-16m"
MODELS = ("baseline-16m", "v1-16m", "v2-16m", "v3-400m", "v4-400m")
STUDIES = (
    *("candidates", "own-networks", "scale-one"),
    *("routers40m", "routers40m_even", "routers40m_long", "routers40m_steps"),
)


def model(name: str) -> "Figure":
    return draw_model(presets.get(name), name)


def study(name: str) -> "Figure":
    results = read_results(RESULTS / name / "results.json")
    return draw_pareto(results["variants"], results["title"], (results["times"] or results["runs"][0])["device"])


def null_test() -> NullTest:
    return read_report(SMALL / "threshold")


def runs(folder: str, *names: str) -> list[Path]:
    return [RESULTS / folder / name for name in names]


def sparse_follows_dense() -> "Figure":
    """Only the metrics of these runs were kept."""
    with tempfile.TemporaryDirectory() as aside:
        folders = [Path(aside) / name for name in ("dense", "sparse", "dense-seed1")]
        for folder in folders:
            folder.mkdir()
            metrics = RESULTS / "sparse-follows-dense" / f"{folder.name}.metrics.jsonl"
            (folder / "metrics.jsonl").write_bytes(metrics.read_bytes())
            (folder / "run.json").write_text("{}")
        return draw_curves(folders)


def scaling() -> "Figure":
    found = [f"{kind}={RESULTS}/sizes/{kind}-{width}" for kind in ("dense", "v3") for width in (48, 96, 192)]
    return draw_scaling(found)


def speed() -> "Figure":
    def number(row: dict[str, str], name: str) -> float | None:
        return float(row[name]) if row[name] else None

    rows: dict[tuple[Any, ...], Any] = {}
    for name in ("train.csv", "train-8192.csv", "peers-8192.csv"):
        with (RESULTS / "speed-h200" / name).open(newline="") as file:
            for row in csv.DictReader(file):
                counts = {part: int(row[part]) for part in ("layers", "length", "batch")}
                shares = {part: number(row, part) for part in ("fraction", "speedup", "bound")}
                known = {contender for contender, *_ in rows}
                if name != "peers-8192.csv" or row["contender"] in known:
                    key = row["contender"], shares["fraction"], counts["length"]
                    rows[key] = SimpleNamespace(**{**row, **counts, **shares})
    return draw_speedups(list(rows.values()), "baseline")


def recorded_routes(path: Path, heading: str) -> "Figure":
    """From what `chiar trace --csv` wrote."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    count = 1 + max(int(row["position"]) for row in rows)
    layers = []
    for index in range(max(int(row["layer"]) for row in rows)):
        own = [row for row in rows if int(row["layer"]) == index + 1]
        operators = sorted({row["operator"] for row in own}, key=["spectral", "attention"].index)
        choice_BT = torch.tensor([[operators.index(row["operator"]) for row in own]])
        entropy_BT = torch.tensor([[float(row["entropy"]) for row in own]])
        gate_BT = torch.tensor([[float(row["gate"]) for row in own]]) if own[0]["gate"] else None
        cuts = [float(cut) for cut in own[0]["thresholds"].split()] or None
        weights_BTK = torch.nn.functional.one_hot(choice_BT, len(operators)).float()
        layers.append(
            LayerTrace(index, own[0]["kind"], operators, choice_BT, weights_BTK, entropy_BT, None, gate_BT, cuts)
        )
    pieces = [row["piece"] for row in rows if row["layer"] == "1"]
    return draw_routing(RoutingTrace(layers, torch.ones(1, count, dtype=torch.bool)), pieces, heading)


FIGURES: "dict[str, Callable[[], Figure]]" = {
    **{name: lambda name=name: model(name) for name in MODELS},  # type: ignore[misc]
    **{name: lambda name=name: study(name) for name in STUDIES},  # type: ignore[misc]
    "classes": lambda: pictures.draw_classes(null_test()),
    "compaction": lambda: pictures.draw_compaction(null_test()),
    "entropy-null": lambda: pictures.draw_entropy(null_test()),
    "flips": lambda: pictures.draw_flips(null_test()),
    "curves-16m": lambda: draw_curves(runs("reproduction-16m", "baseline", "threshold")),
    "curves-400m": lambda: draw_curves(runs("pair-400m", "dense", "v4", "half", "dense-time"), over="tokens"),
    "wikitext2": lambda: draw_curves(
        runs("reproduction-16m", "wt2-baseline-0.1", "wt2-v3-0.1", "wt2-baseline-0.3", "wt2-v3-0.3")
    ),
    "sparse-follows-dense": sparse_follows_dense,
    "demo-curves": lambda: draw_curves(runs("demo", "baseline", "v3")),
    "demo-routing": lambda: recorded_routes(RESULTS / "demo" / "routing.csv", "runs/demo/v3"),
    "routing-v3": lambda: recorded_routes(SMALL / "threshold" / "routing.csv", "v3-16m"),
    "gate": lambda: draw_gate(runs("reproduction-16m", "mixed-biased", "mixed-neutral", "threshold")),
    "v1-operators": lambda: draw_operators(runs("reproduction-16m", "v1")),
    "savings": lambda: draw_savings(["v3-16m", "v3-400m", "v3-1b"], 256, 0.5, "routed", None),
    "scaling": scaling,
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
