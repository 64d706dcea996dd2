"""What training runs measured, over steps, tokens or time."""

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
    """One training run's records; `places` is where each lies: steps, tokens, or seconds since the first record."""

    def __init__(self, path: Path, name: str, colour: str, over: str) -> None:
        from chiar.training.run_folder import RunFolder

        self.name, self.path, self.colour = name, path, colour
        stored, self.records = RunFolder(path).read(), RunFolder(path).read_metrics()
        require(self.records, f"{path} has no measurements yet: let it train a few steps.")
        config, settings = stored.get("config", {}), stored.get("settings", {})
        kinds = groupby(enumerate(config.get("layer_types") or []), lambda pair: pair[1])
        runs = [(kind, [layer for layer, _ in own]) for kind, own in kinds]
        """Where tokens are routed: layers, and dark stacks."""
        self.routed = [[n] for kind, own in runs if kind == "routed" for n in own]
        self.routed += [own for kind, own in runs if kind == "dark"]
        self.operators: list[str] = config.get("operators") or []
        self.places = [float(record["step"]) for record in self.records]
        if over == "steps":
            return
        added = settings.get("mixing") == "added" and len(settings.get("data", [])) > 1
        if not {"batch", "length"} <= settings.keys() or added or any("accuracy" in one for one in self.records):
            raise InputError(f"{path} does not say how many tokens a step has: draw it over steps.")
        self.places = [step * settings["batch"] * settings["length"] for step in self.places]
        if over == "time":
            # A speed is that of the steps since the record before, without evaluations. The first step compiles.
            speeds = [record.get("tokens_per_second") or 0.0 for record in self.records[1:]]
            require(all(speeds), f"{path} has records without tokens_per_second: draw it over steps.")
            spent = [(b - a) / speed for (a, b), speed in zip(pairwise(self.places), speeds, strict=True)]
            self.places = [0.0, *accumulate(spent)]

    def points(self, values: Iterable[Any]) -> Points:
        """A value for each record, where it is something finite."""
        found = zip(self.places, values, strict=True)
        return [(place, float(value)) for place, value in found if value is not None and math.isfinite(value)]

    def measured(self, part: str) -> Points:
        return self.points(record.get(part) for record in self.records)

    def by_corpus(self, part: str, called: str) -> dict[str, Points]:
        """What was measured for each of several corpora."""
        parts = [record.get(part) or {} for record in self.records]
        names = dict.fromkeys(name for one in parts for name in one)
        return {f"{called} {name}": self.points([one.get(name) for one in parts]) for name in names}

    def use(self, operator: str) -> list[Line]:
        """Share of the tokens this operator got in each routed layer; of many layers, in the mean of them."""
        number = self.operators.index(operator)
        shares = [[layer[number] for layer in record.get("use") or []] for record in self.records]

        def course(rows: slice) -> Points:
            return self.points(mean(share[rows]) if share else None for share in shares)

        layers = {f"layer {layer_numbers(own)}": course(slice(n, n + 1)) for n, own in enumerate(self.routed)}
        if len(layers) <= len(DASHES):
            return self.lines(layers)
        thin = [Line(points, color=self.colour, linewidth=0.5, alpha=0.6) for points in layers.values()]
        return [*self.lines({f"mean of {len(layers)} layers (thin: each)": course(slice(None))}), *thin]

    def lines(self, found: dict[str, Points], **look: Any) -> list[Line]:
        """Of what was measured, told apart by dashes."""
        named = zip(found.items(), cycle(DASHES), strict=False)
        return [Line(p, f"{self.name}: {n}", color=self.colour, linestyle=d, **look) for (n, p), d in named if p]


def draw_curves(sources: Sequence[Path | str], data: Path | None = None, over: str = "steps") -> "Figure":
    """Run folders: losses, learning rate, each operator's share of tokens by layer (the first one gets the rest), g and
    how often it took which value. With a corpus, its validation split's unigram entropy."""
    from chiar.evaluation.report import short_names

    if over not in OVER:
        raise unknown_name("axis", over, OVER)
    paths = [Path(source) for source in sources]
    runs = [Run(*known, over) for known in zip(paths, short_names(paths), cycle(COLOURS), strict=False)]
    first = {record["step"]: record.get("loss") or math.nan for record in runs[0].records}
    losses, gaps = Panel("loss, nats per token"), Panel(f"loss minus that of {runs[0].name}")
    rates, bars = Panel("learning rate"), Panel("share of the logged steps, by g", axis="g")
    chosen = dict.fromkeys(name for run in runs if run.routed for name in reversed(run.operators[1:]))
    shares = {name: Panel(f"share of tokens sent to {name}", bounds=UNIT) for name in chosen}
    gates = Panel("g: gate of layer 1 (0: bypassed, 1: whole)", axis=OVER[over])
    for run in runs:
        losses.lines += run.lines({"train": run.measured("loss")}, linewidth=1, alpha=0.55)
        losses.lines += run.lines(run.by_corpus("validation", "validation"), marker="o")
        if run is not runs[0]:
            apart = [(one.get("loss") or math.nan) - first.get(one["step"], math.nan) for one in run.records]
            gaps.lines += run.lines({"train": run.points(apart)}, linewidth=1)
        rates.lines += run.lines({"rate": run.measured("rate")})
        for name in shares.keys() & {*run.operators}:
            shares[name].lines += run.use(name)
        gates.lines += run.lines(run.by_corpus("gate", "g on"))
    for line in gates.lines:
        counts = Counter(min(int(50 * g), 49) for _, g in line.points)
        outline = [(bar / 50, counts[bar] / len(line.points)) for bar in range(min(counts), max(counts) + 2)]
        bars.lines.append(Line(outline, line.label, drawstyle="steps-post", **line.look))
    require(losses.lines, "no finite loss was measured in these runs: there is nothing to draw.")
    if data is not None:
        from chiar.data.shards import Corpus
        from chiar.evaluation.harness import unigram_entropy

        corpus = Corpus.open(data)
        entropy = unigram_entropy(corpus.split("valid"), corpus.vocab_size)
        losses.level = entropy, shorten(f"unigram entropy of {corpus.name} valid, {entropy:.2f}", 40)
    panels = [panel for panel in (losses, gaps, rates, *shares.values(), gates, bars) if panel.lines]
    panels[-1].axis = panels[-1].axis or OVER[over]
    return draw_panels(" and ".join(run.name for run in runs), panels)
