"""The course of training runs as a picture: losses, learning rate, routing and gate over steps, tokens or time."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from chiar.analysis.chart import COLOURS, Line, Panel, draw_chart
from chiar.analysis.run_axis import places, unit
from chiar.errors import InputError
from chiar.evaluation.compare import read_measured_on, short_names
from chiar.training.run_folder import RunFolder, read_records

DASHES = ("", "7 3", "2 3", "9 3 2 3")
MANY = 4
"""Routed layers above which single ones are not named."""


class Curves:
    """One run's records, ready to be drawn."""

    def __init__(self, path: Path, name: str, number: int, over: str = "steps") -> None:
        folder = RunFolder(path)
        self.stored = folder.read()
        self.records = read_records(folder.metrics_path) if folder.metrics_path.is_file() else []
        if not self.records:
            raise InputError(f"{path} has no measurements yet: let it train a few steps.")
        self.name, self.number, self.colour = name, number, COLOURS[number % len(COLOURS)]
        config = self.stored.get("config", {})
        self.routed = [layer for layer, kind in enumerate(config.get("layer_types") or []) if kind == "routed"]
        self.operators: list[str] = config.get("operators") or []
        self.places = places(self.stored, self.records, over, str(path))

    def rescale(self, factor: float) -> None:
        self.places = [place / factor for place in self.places]

    def points(self, read: Callable[[dict[str, Any]], Any]) -> list[tuple[float, float]]:
        """What `read` finds in the records, where it finds something finite."""
        found = [(place, read(record)) for place, record in zip(self.places, self.records, strict=True)]
        return [(place, float(value)) for place, value in found if value is not None and math.isfinite(value)]

    def named(self, part: str, name: str) -> list[tuple[float, float]]:
        """One corpus of something measured by corpus."""
        return self.points(lambda record: (record.get(part) or {}).get(name))

    def line(self, name: str, points: list[tuple[float, float]], **look: Any) -> list[Line]:
        """A list of one line, or of none where nothing was measured."""
        return [Line(f"{self.name}: {name}" if name else "", points, self.colour, **look)] if points else []

    def validations(self) -> dict[str, list[tuple[float, float]]]:
        """By corpus."""
        names = dict.fromkeys(name for record in self.records for name in record.get("validation") or {})
        return {name: self.named("validation", name) for name in names}

    def losses(self) -> list[Line]:
        lines = self.line("train", self.points(lambda r: r.get("loss")), width=1.2, opacity=0.55)
        return lines + self.validation_lines(0.0)

    def validation_lines(self, first: float) -> list[Line]:
        """From this place on."""
        lines: list[Line] = []
        found = self.validations()
        for number, (name, points) in enumerate(found.items()):
            called = "validation" if len(found) == 1 else f"validation {name}"
            kept = [point for point in points if point[0] >= first]
            lines += self.line(called, kept, dots=True, dashes=DASHES[number % len(DASHES)])
        return lines

    def gaps(self, first: "Curves") -> list[Line]:
        """Training loss over the first run's, at the steps both measured."""
        reference = {r["step"]: r["loss"] for r in first.records if r.get("loss") is not None}

        def gap(record: dict[str, Any]) -> float | None:
            loss, other = record.get("loss"), reference.get(record["step"])
            return None if loss is None or other is None else loss - other

        return self.line("train", self.points(gap), width=1.2)

    def rates(self) -> list[Line]:
        """Often the same for all runs, so later ones are dashed and let the first be seen."""
        dashes = DASHES[self.number % len(DASHES)]
        return self.line("rate", self.points(lambda r: r.get("rate")), dashes=dashes)

    def use(self, row: int, operator: int) -> list[tuple[float, float]]:
        """Share of the tokens of the row-th routed layer this operator got."""
        return self.points(lambda r: r["use"][row][operator] if len(r.get("use", [])) > row else None)

    def fractions(self) -> list[Line]:
        if len(self.routed) <= MANY:
            lines = [
                self.line(f"layer {layer + 1}", self.use(row, -1), dashes=DASHES[row % len(DASHES)])
                for row, layer in enumerate(self.routed)
            ]
            return [line for one in lines for line in one]
        thin = [self.line("", self.use(row, -1), width=0.8, opacity=0.3) for row in range(len(self.routed))]
        mean = self.points(lambda r: sum(row[-1] for row in r["use"]) / len(r["use"]) if r.get("use") else None)
        name = f"mean of {len(self.routed)} layers"
        return [*(line for one in thin for line in one), *self.line(name, mean)]

    def gates(self) -> list[Line]:
        names = list(dict.fromkeys(name for r in self.records for name in r.get("gate", {})))
        lines = []
        for number, name in enumerate(names):
            lines += self.line(f"g on {name}", self.named("gate", name), dashes=DASHES[number % len(DASHES)])
        return lines


def open_curves(paths: list[Path], over: str = "steps") -> tuple[list[Curves], str]:
    """The runs in a common unit, and the name of the horizontal axis."""
    names = short_names(paths)
    if len(set(names)) < len(names):
        raise InputError(f"{next(name for name in names if names.count(name) > 1)} is named twice.")
    runs = [Curves(path, name, number, over) for number, (path, name) in enumerate(zip(paths, names, strict=True))]
    factor, axis = unit(over, max(run.places[-1] for run in runs))
    for run in runs:
        run.rescale(factor)
    return runs, axis


def draw_curves(paths: list[Path], corpus: Path | None = None, over: str = "steps") -> str:
    """SVG of one or several runs. With the corpus, the unigram entropy of its validation split is marked."""
    runs, axis = open_curves(paths, over)
    panels = [
        Panel("loss, nats per token", [line for run in runs for line in run.losses()], level(corpus)),
        Panel("validation loss in the second half", second_half(runs)),
        Panel(f"loss minus that of {runs[0].name}", [line for run in runs[1:] for line in run.gaps(runs[0])]),
        Panel("learning rate", [line for run in runs for line in run.rates()]),
        Panel("f: share of tokens sent to attention", [line for run in runs for line in run.fractions()], None, (0, 1)),
        Panel("g: gate of layer 1", [line for run in runs for line in run.gates()], None, (0, 1)),
    ]
    if not panels[0].lines:
        raise InputError("no finite loss was measured in these runs: there is nothing to draw.")
    title = " and ".join(run.name for run in runs)
    return draw_chart(title, [panel for panel in panels if panel.lines], axis)


def second_half(runs: list[Curves]) -> list[Line]:
    """Beside the first steps' losses the last ones all look alike. None where there are too few to look at."""
    half = max(run.places[-1] for run in runs) / 2
    lines = [line for run in runs for line in run.validation_lines(half)]
    return lines if any(len(line.points) > 2 for line in lines) else []


def reaching(paths: list[Path], over: str) -> list[str]:
    """When each run's validation loss first was at most the least of the first run, on its first corpus."""
    runs, axis = open_curves(paths, over)
    found = [next(iter(run.validations().items()), ("", [])) for run in runs]
    if len(runs) < 2 or not found[0][1]:
        return []
    goal, rows = min(loss for _, loss in found[0][1]), read_measured_on(paths[0])
    said = []
    for path, run, (corpus, points) in zip(paths, runs, found, strict=True):
        if corpus != found[0][0] or read_measured_on(path) != rows:
            said.append(f"{run.name} was validated on other rows than {runs[0].name}: their losses do not compare.")
            continue
        place = next((x for x, loss in points if loss <= goal), None)
        when = "not at all" if place is None else f"at {place:,.4g} {axis.split(' of training')[0]}"
        said.append(f"{run.name} reaches the validation loss {goal:.4f}, {runs[0].name}'s least, {when}.")
    return said


def level(corpus: Path | None) -> tuple[float, str] | None:
    if corpus is None:
        return None
    from chiar.data.shards import Corpus
    from chiar.evaluation.harness import unigram_entropy

    opened = Corpus.open(corpus)
    entropy = unigram_entropy(opened.split("valid"), opened.vocab_size)
    return entropy, f"unigram entropy of {opened.name} valid, {entropy:.2f}"
