"""The course of training runs as a picture: losses, learning rate, routing and gate over steps."""

import math
from pathlib import Path
from typing import Any

from chiar.analysis.chart import COLOURS, Line, Panel, draw_chart
from chiar.errors import InputError
from chiar.evaluation.compare import short_names
from chiar.training.run_folder import RunFolder, read_records

DASHES = ("", "7 3", "2 3", "9 3 2 3")


class Curves:
    """One run's records, ready to be drawn."""

    def __init__(self, path: Path, name: str, number: int) -> None:
        folder = RunFolder(path)
        stored = folder.read()
        self.records = read_records(folder.metrics_path) if folder.metrics_path.is_file() else []
        if not self.records:
            raise InputError(f"{path} has no measurements yet: let it train a few steps.")
        self.name, self.number, self.colour = name, number, COLOURS[number % len(COLOURS)]
        kinds = stored.get("config", {}).get("layer_types") or []
        self.routed = [layer for layer, kind in enumerate(kinds) if kind == "routed"]

    def line(self, name: str, points: list[tuple[float, Any]], **look: Any) -> list[Line]:
        """A list of one line, or of none where nothing was measured."""
        drawn = [(x, float(y)) for x, y in points if y is not None and math.isfinite(y)]
        return [Line(f"{self.name}: {name}", drawn, self.colour, **look)] if drawn else []

    def losses(self) -> list[Line]:
        validations = [(r["step"], r["validation"]) for r in self.records if r.get("validation")]
        lines = self.line("train", [(r["step"], r.get("loss")) for r in self.records], width=1.2, opacity=0.55)
        names = list(dict.fromkeys(name for _, losses in validations for name in losses))
        for number, name in enumerate(names):
            called = "validation" if len(names) == 1 else f"validation {name}"
            points = [(step, losses.get(name)) for step, losses in validations]
            lines += self.line(called, points, dots=True, dashes=DASHES[number % len(DASHES)])
        return lines

    def gaps(self, first: "Curves") -> list[Line]:
        """Training loss over the first run's, at the steps both measured."""
        reference = {r["step"]: r["loss"] for r in first.records if r.get("loss") is not None}
        both = [r for r in self.records if r.get("loss") is not None and r["step"] in reference]
        return self.line("train", [(r["step"], r["loss"] - reference[r["step"]]) for r in both], width=1.2)

    def rates(self) -> list[Line]:
        """Often the same for all runs, so later ones are dashed and let the first be seen."""
        dashes = DASHES[self.number % len(DASHES)]
        return self.line("rate", [(r["step"], r.get("rate")) for r in self.records], dashes=dashes)

    def fractions(self) -> list[Line]:
        lines = []
        for row, layer in enumerate(self.routed):
            points = [(r["step"], r["use"][row][-1]) for r in self.records if len(r.get("use", [])) > row]
            lines += self.line(f"layer {layer + 1}", points, dashes=DASHES[row % len(DASHES)])
        return lines

    def gates(self) -> list[Line]:
        names = list(dict.fromkeys(name for r in self.records for name in r.get("gate", {})))
        lines = []
        for number, name in enumerate(names):
            points = [(r["step"], r.get("gate", {}).get(name)) for r in self.records]
            lines += self.line(f"g on {name}", points, dashes=DASHES[number % len(DASHES)])
        return lines


def draw_curves(paths: list[Path], corpus: Path | None = None) -> str:
    """SVG of one or several runs. With the corpus, the unigram entropy of its validation split is marked."""
    names = short_names(paths)
    if len(set(names)) < len(names):
        raise InputError(f"{next(name for name in names if names.count(name) > 1)} is named twice.")
    runs = [Curves(path, name, number) for number, (path, name) in enumerate(zip(paths, names, strict=True))]
    panels = [
        Panel("loss, nats per token", [line for run in runs for line in run.losses()], level(corpus)),
        Panel(f"loss minus that of {names[0]}", [line for run in runs[1:] for line in run.gaps(runs[0])]),
        Panel("learning rate", [line for run in runs for line in run.rates()]),
        Panel("f: share of tokens sent to attention", [line for run in runs for line in run.fractions()], None, (0, 1)),
        Panel("g: gate of layer 1", [line for run in runs for line in run.gates()], None, (0, 1)),
    ]
    if not panels[0].lines:
        raise InputError("no finite loss was measured in these runs: there is nothing to draw.")
    return draw_chart(" and ".join(names), [panel for panel in panels if panel.lines], "steps")


def level(corpus: Path | None) -> tuple[float, str] | None:
    if corpus is None:
        return None
    from chiar.data.shards import Corpus
    from chiar.evaluation.unigram import unigram_entropy

    opened = Corpus.open(corpus)
    entropy = unigram_entropy(opened.split("valid"), opened.vocab_size)
    return entropy, f"unigram entropy of {opened.name} valid, {entropy:.2f}"
