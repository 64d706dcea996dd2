"""Which share of tokens each operator got in training, layer by layer."""

from pathlib import Path

from chiar.analysis.chart import COLOURS, Line
from chiar.analysis.curves import Curves, open_curves
from chiar.analysis.panels import SmallPanel, draw_grid
from chiar.errors import InputError

COLOUR = {"attention": COLOURS[0], "rbf": COLOURS[3]}
LIGHT = COLOURS[4]
DASHES = {"attention": "", "rbf": "2 3"}


def draw_operators(paths: list[Path], corpus: Path | None = None) -> str:
    """The mean of all routed layers, then a panel for each; over epochs of the corpus, or over steps without one."""
    runs, axis = open_curves(paths)
    for run, path in zip(runs, paths, strict=True):
        if not run.routed or not any(record.get("use") for record in run.records):
            raise InputError(f"{path} has no routed layers: operators are chosen in those only.")
        if corpus is not None:
            run.rescale(steps_per_epoch(run, corpus))
            axis = "epochs"
    panels = []
    for run in runs:
        before = f"{run.name}, " if len(runs) > 1 else ""
        if len(run.routed) > 1:
            shares = [mean_use(run, number) for number in range(len(run.operators))]
            panels.append(panel(f"{before}mean of the routed layers", run, shares))
        for row, layer in enumerate(run.routed):
            shares = [run.use(row, number) for number in range(len(run.operators))]
            panels.append(panel(f"{before}layer {layer + 1}", run, shares))
    names = list(dict.fromkeys(name for run in runs for name in run.operators))
    legend = [Line(name, [], colour(name), dashes(name)) for name in names]
    title = f"{', '.join(run.name for run in runs)}: operators in training"
    return draw_grid(title, panels, legend, axis, "share of the tokens of a logged step")


def panel(title: str, run: Curves, shares: list[list[tuple[float, float]]]) -> SmallPanel:
    lines = [
        Line("", points, colour(name), dashes(name), 1.8)
        for name, points in zip(run.operators, shares, strict=True)
        if points
    ]
    return SmallPanel(title, lines, bounds=(-0.02, 1.02))


def mean_use(run: Curves, operator: int) -> list[tuple[float, float]]:
    return run.points(lambda r: sum(row[operator] for row in r["use"]) / len(r["use"]) if r.get("use") else None)


def colour(operator: str) -> str:
    return COLOUR.get(operator, LIGHT)


def dashes(operator: str) -> str:
    return DASHES.get(operator, "7 3")


def steps_per_epoch(run: Curves, corpus: Path) -> float:
    """Of the run's first corpus, which must be this one and be in every batch."""
    from chiar.data.shards import Corpus
    from chiar.training.run_folder import told
    from chiar.training.trainer import open_rows

    opened, settings = Corpus.open(corpus), told(run.stored, "settings", run.name)
    if next(iter(told(run.stored, "data", run.name).values()), None) != opened.fingerprint:
        raise InputError(f"{run.name} was not trained on {corpus} first: epochs are counted of a run's first corpus.")
    if len(settings["data"]) > 1 and settings["mixing"] != "added":
        raise InputError(f"{run.name} drew its batches from several corpora: leave --data out to draw it over steps.")
    return open_rows(opened, "train", settings["length"]).count / settings["batch"]
