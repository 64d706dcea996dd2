"""Metrics of training runs over steps, tokens or time."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import accumulate, cycle, groupby, pairwise
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

from chiar.colours import layer_numbers
from chiar.errors import InputError, require, unknown_name
from chiar.plots.figure import COLOURS, DASHES, UNIT, Line, Panel, Points, draw_panels, shorten

if TYPE_CHECKING:
    from matplotlib.figure import Figure


OVER = {"steps": "steps", "tokens": "training tokens", "time": "seconds of training, without evaluations"}


class Run:
    """The records of a training run, with their `x`: steps, tokens, or seconds since the first record."""

    def __init__(self, path: Path, name: str, colour: str, over: str) -> None:
        from chiar.training.run_folder import RunFolder

        self.name, self.path, self.colour = name, path, colour
        stored, self.records = RunFolder(path).read(), RunFolder(path).read_metrics()
        require(self.records, f"{path} has no measurements yet: let it train a few steps.")
        config, settings = stored.get("config", {}), stored.get("settings", {})
        pairs = groupby(enumerate(config.get("layer_types") or []), lambda pair: pair[1])
        groups = [(kind, [layer for layer, _ in group]) for kind, group in pairs]
        # Layers whose shares are recorded together: each routed layer, and all layers of a dark stack.
        self.routed = [[layer] for kind, layers in groups if kind == "routed" for layer in layers]
        self.routed += [layers for kind, layers in groups if kind == "dark"]
        self.operators: list[str] = config.get("operators") or []
        self.x = [float(record["step"]) for record in self.records]
        if over == "steps":
            return
        added = settings.get("mixing") == "added" and len(settings.get("data", [])) > 1
        if not {"batch", "length"} <= settings.keys() or added or any("accuracy" in record for record in self.records):
            raise InputError(f"{path} does not say how many tokens a step has: plot it over steps.")
        self.x = [step * settings["batch"] * settings["length"] for step in self.x]
        if over == "time":
            # Speed is that of the steps since the previous record, without evaluations. The first step compiles.
            speeds = [record.get("tokens_per_second") or 0.0 for record in self.records[1:]]
            require(all(speeds), f"{path} has records without tokens_per_second: plot it over steps.")
            seconds = [(b - a) / speed for (a, b), speed in zip(pairwise(self.x), speeds, strict=True)]
            self.x = [0.0, *accumulate(seconds)]

    def points(self, values: Iterable[Any]) -> Points:
        """The finite ones of one value per record, with their x."""
        pairs = zip(self.x, values, strict=True)
        return [(x, float(value)) for x, value in pairs if value is not None and math.isfinite(value)]

    def metric(self, name: str) -> Points:
        return self.points(record.get(name) for record in self.records)

    def by_corpus(self, name: str, label: str) -> dict[str, Points]:
        """A metric that has one value per corpus."""
        values = [record.get(name) or {} for record in self.records]
        corpora = dict.fromkeys(corpus for value in values for corpus in value)
        return {f"{label} {corpus}": self.points([value.get(corpus) for value in values]) for corpus in corpora}

    def operator_shares(self, operator: str) -> list[Line]:
        """Share of the tokens sent to this operator, by layer; with many layers also the mean."""
        number = self.operators.index(operator)
        shares = [[layer[number] for layer in record.get("use") or []] for record in self.records]

        def mean_over(rows: slice) -> Points:
            return self.points(mean(share[rows]) if share else None for share in shares)

        layers = {f"layer {layer_numbers(group)}": mean_over(slice(n, n + 1)) for n, group in enumerate(self.routed)}
        if len(layers) <= len(DASHES):
            return self.lines(layers)
        thin = [Line(points, color=self.colour, linewidth=0.5, alpha=0.6) for points in layers.values()]
        return [*self.lines({f"mean of {len(layers)} layers (thin: each)": mean_over(slice(None))}), *thin]

    def lines(self, metrics: dict[str, Points], **look: Any) -> list[Line]:
        """Lines in the run's colour, with different dashes."""
        dashed = zip(metrics.items(), cycle(DASHES), strict=False)
        return [Line(p, f"{self.name}: {n}", color=self.colour, linestyle=d, **look) for (n, p), d in dashed if p]


def draw_curves(sources: Sequence[Path | str], data: Path | None = None, over: str = "steps") -> "Figure":
    """Of run folders: losses, learning rate, each operator's share of tokens by layer (except the first, which gets the
    rest), g and its histogram. With a corpus also the unigram entropy of its validation split."""
    from chiar.evaluation.report import short_names

    if over not in OVER:
        raise unknown_name("axis", over, OVER)
    paths = [Path(source) for source in sources]
    runs = [Run(*arguments, over) for arguments in zip(paths, short_names(paths), cycle(COLOURS), strict=False)]
    baseline = {record["step"]: record.get("loss") or math.nan for record in runs[0].records}
    losses, gaps = Panel("loss, nats per token"), Panel(f"loss minus that of {runs[0].name}")
    rates, histograms = Panel("learning rate"), Panel("share of logged steps, by g", axis="g")
    operators = dict.fromkeys(name for run in runs if run.routed for name in reversed(run.operators[1:]))
    shares = {name: Panel(f"share of tokens sent to {name}", bounds=UNIT) for name in operators}
    gates = Panel("g: gate of layer 1 (0: bypassed, 1: whole)", axis=OVER[over])
    for run in runs:
        losses.lines += run.lines({"train": run.metric("loss")}, linewidth=1, alpha=0.55)
        losses.lines += run.lines(run.by_corpus("validation", "validation"), marker="o")
        if run is not runs[0]:
            gap = [(record.get("loss") or math.nan) - baseline.get(record["step"], math.nan) for record in run.records]
            gaps.lines += run.lines({"train": run.points(gap)}, linewidth=1)
        rates.lines += run.lines({"rate": run.metric("rate")})
        for name in shares.keys() & {*run.operators}:
            shares[name].lines += run.operator_shares(name)
        gates.lines += run.lines(run.by_corpus("gate", "g on"))
    for line in gates.lines:
        counts = Counter(min(int(50 * g), 49) for _, g in line.points)
        outline = [(b / 50, counts[b] / len(line.points)) for b in range(min(counts), max(counts) + 2)]
        histograms.lines.append(Line(outline, line.label, drawstyle="steps-post", **line.look))
    require(losses.lines, "these runs have no finite loss: there is nothing to draw.")
    if data is not None:
        from chiar.data.shards import Corpus
        from chiar.evaluation.harness import unigram_entropy

        corpus = Corpus.open(data)
        entropy = unigram_entropy(corpus.split("valid"), corpus.vocab_size)
        losses.level = entropy, shorten(f"unigram entropy of {corpus.name} valid, {entropy:.2f}", 40)
    panels = [panel for panel in (losses, gaps, rates, *shares.values(), gates, histograms) if panel.lines]
    panels[-1].axis = panels[-1].axis or OVER[over]
    return draw_panels(" and ".join(run.name for run in runs), panels)
