"""Loss against size: reports of models of several sizes as lines, and what each loses to its own dense baseline."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from chiar.analysis.chart import COLOURS, Line, Panel, draw_chart, shorten
from chiar.config import ChiarConfig
from chiar.errors import InputError, unknown_name
from chiar.evaluation.compare import differences, read_entry
from chiar.evaluation.report import EvaluationReport, LanguageScores
from chiar.model.load import count_parameters, load_config
from chiar.training.run_folder import RUN, RunFolder, told

AGAINST = {"parameters": "trainable parameters", "flops": "counted FLOPs a token, forward"}


@dataclass(frozen=True)
class Point:
    series: str
    size: float
    report: EvaluationReport

    @property
    def place(self) -> float:
        return math.log10(self.size)

    @property
    def loss(self) -> float:
        return self.report.scores.loss

    @property
    def dense(self) -> bool:
        return is_dense(self.report)


def is_dense(report: EvaluationReport) -> bool:
    """Attention in every layer and nothing else."""
    return not report.routing.layers and math.isclose(report.flops, report.baseline_flops)


def read_points(arguments: list[str], against: str) -> list[Point]:
    """From `[SERIES=]PATH`, a report or a run folder with one; without a name it is dense or CHIAR."""
    if against not in AGAINST:
        raise unknown_name("size", against, AGAINST)
    points: list[Point] = []
    for argument in arguments:
        series, _, path = argument.rpartition("=") if not Path(argument).exists() else ("", "", argument)
        report = read_entry(Path(path), path).report
        if report is None:
            raise InputError(f"{path} was not evaluated: chiar eval {path} --data CORPUS --json {path}/evaluation.json")
        if not isinstance(report.scores, LanguageScores):
            raise InputError(f"{path} is a report of a classifier: sizes are compared by the loss on running text.")
        if points and (other := differences(report, points[0].report)):
            raise InputError(f"{path} was evaluated with another {' and '.join(other)} than {arguments[0]}.")
        size = report.flops if against == "flops" else float(parameters(Path(path), report))
        points.append(Point(series or ("dense" if is_dense(report) else "CHIAR"), size, report))
    return points


def parameters(path: Path, report: EvaluationReport) -> int:
    """Of the run in the folder, or of the model the report is about."""
    if (path / RUN).is_file():
        return count_parameters(ChiarConfig.from_dict(told(RunFolder(path).read(), "config", str(path))))
    try:
        return count_parameters(load_config(report.model))
    except InputError:
        raise InputError(
            f"{path} is about {report.model}, which is not here, so its parameters cannot be counted: name the run's "
            "folder, or take --against flops."
        ) from None


def draw_scaling(arguments: list[str], against: str = "parameters") -> str:
    points = read_points(arguments, against)
    first = points[0].report
    panels = [Panel("loss, nats per token", lines(points, lambda point: point.loss))]
    gaps = lines(points, lambda point: gap(point, points))
    if gaps:
        panels.append(Panel("loss − that of the dense model of its shape, nats", gaps, (0.0, "no loss")))
    series = ", ".join(dict.fromkeys(shorten(point.series, 24) for point in points))
    title = f"{first.corpus} {first.split}, T = {first.length}: {series}"
    return draw_chart(title, panels, AGAINST[against], sizes=True)


def gap(point: Point, points: list[Point]) -> float | None:
    """To the mean of the dense models with as many FLOPs as attention in all of its layers would cost."""
    dense = [p.loss for p in points if p.dense and math.isclose(p.report.flops, point.report.baseline_flops)]
    return None if point.dense or not dense else point.loss - mean(dense)


def lines(points: list[Point], height: Callable[[Point], float | None]) -> list[Line]:
    """A line a series through the means of each size, and a dot for every report."""
    names = list(dict.fromkeys(point.series for point in points))
    found = []
    for number, name in enumerate(names):
        dots = [(point.place, height(point)) for point in points if point.series == name]
        kept = sorted((x, y) for x, y in dots if y is not None)
        places = sorted({x for x, _ in kept})
        means = [(place, mean(y for x, y in kept if x == place)) for place in places]
        if kept:
            colour = COLOURS[number % len(COLOURS)]
            found += [Line(name, means, colour), Line("", kept, colour, width=0, dots=True)]
    return found
