"""A null test as pictures: entropies against the null, information, word classes, flips, compaction."""

from pathlib import Path

import torch
from torch import Tensor

from chiar.analysis.chart import COLOURS, Line, Panel, draw_chart
from chiar.analysis.panels import SmallPanel, draw_grid
from chiar.nulltest.class_picture import draw_classes
from chiar.nulltest.compaction import KLT, NOISE
from chiar.nulltest.flips import Worth
from chiar.nulltest.report import LayerNull, NullTest
from chiar.nulltest.tables import SIGNALS

BARS = 48
COLOUR = {
    "dct": COLOURS[0],
    "identity": COLOURS[1],
    "random": COLOURS[2],
    KLT: COLOURS[3],
    "hash": COLOURS[4],
    "route": COLOURS[6],
}


def pictures(report: NullTest) -> dict[str, str]:
    """SVG by file name."""
    drawn = {"entropy.svg": draw_entropy(report), "information.svg": draw_information(report)}
    drawn["classes.svg"] = draw_classes(report, called(report, "H by word class"))
    if report.worth is not None:
        drawn["flips.svg"] = draw_flips(report)
    return {**drawn, "compaction.svg": draw_compaction(report)}


def called(report: NullTest, what: str) -> str:
    return f"{Path(report.run or report.model).name}: {what}"


def density(values_N: Tensor, low: float, high: float) -> list[tuple[float, float]]:
    """A histogram's outline that encloses an area of 1, were all values inside."""
    counts = torch.histc(values_N.float(), BARS, low, high).double() / len(values_N) * BARS / (high - low)
    step = (high - low) / BARS
    outline = [(low, 0.0)]
    for number, height in enumerate(counts.tolist()):
        outline += [(low + number * step, height), (low + (number + 1) * step, height)]
    return [*outline, (high, 0.0)]


def draw_entropy(report: NullTest) -> str:
    panels = []
    for layer in report.layers:
        every = torch.cat([*layer.entropies.values(), report.null_sample]).double()
        low, high = torch.quantile(every, torch.tensor([0.002, 0.998], dtype=torch.float64)).tolist()
        high = max(high, low + 1e-6)
        lines = [
            Line(name, density(values_N, low, high), COLOUR[name], width=1.8 if number == 0 else 1.1)
            for number, (name, values_N) in enumerate(layer.entropies.items())
        ]
        cuts = [(cut, "τ") for cut in layer.thresholds or [] if low <= cut <= high]
        own = layer.whiteness[0]
        title = f"layer {layer.layer + 1} ({layer.kind}): effect {own.effect:+.2f}, KS {own.distance:.2f}"
        panels.append(SmallPanel(title, lines, density(report.null_sample, low, high), cuts))
    names = list(report.layers[0].entropies)
    legend = [Line("white noise", [], "#bbbbbb", width=8)]
    legend += [Line(name + (" (the model's)" if name == names[0] else ""), [], COLOUR[name]) for name in names]
    return draw_grid(called(report, "H of each layer's input against white noise"), panels, legend, "H", "density")


def draw_information(report: NullTest) -> str:
    names = list(dict.fromkeys(signal.name for layer in report.layers for signal in layer.signals))
    panels = []
    for kind, title in (("token", "token identity"), ("word_class", "word class"), ("position", "position")):
        lines = []
        for name in names:
            points = [
                (float(layer.layer + 1), getattr(signal, kind).adjusted)
                for layer in report.layers
                for signal in layer.signals
                if signal.name == name
            ]
            label = SIGNALS.get(name, f"H, {name}")
            dashes = "2 3" if name == "route" else ""
            lines.append(Line(label, points, COLOUR[name], dashes=dashes, dots=True))
        panels.append(Panel(f"what {title} says about the route (adjusted share)", lines, (0.0, "chance")))
    return draw_chart(called(report, "information in the route"), panels, "layer")


def worth_panel(title: str, worth: Worth) -> SmallPanel:
    colour = COLOURS[0]
    points, bars, names = [], [], []
    for number, found in enumerate(worth.benefit):
        x = float(number + 1)
        names.append((x, f"{number + 1}"))
        if found.mean is not None:
            points.append((x, found.mean))
            if found.error is not None:
                bars.append((x, found.mean - found.error, found.mean + found.error, colour))
    return SmallPanel(title, [Line("", points, colour, dots=True)], bars=bars, names=names, level=0.0)


def draw_flips(report: NullTest) -> str:
    assert report.worth is not None
    panels = [
        worth_panel(f"layer {layer.layer + 1}", layer.worth) for layer in report.layers if layer.worth is not None
    ]
    panels.append(worth_panel("all routed layers", report.worth))
    legend = [Line("loss with the filter − loss with attention, ± standard error", [], COLOURS[0])]
    title = called(report, "what attention adds to a token, by its H")
    return draw_grid(title, panels, legend, "bin of rising H", "nats, summed over its own and later predictions")


def draw_compaction(report: NullTest) -> str:
    widths = sorted({row.k for row in report.layers[0].compaction})
    k = widths[len(widths) // 2]
    panels = [compaction_panel(layer, k, report.bins) for layer in report.layers]
    bases = list(dict.fromkeys(row.basis for row in report.layers[0].compaction if row.basis != NOISE))
    legend = [Line(name.replace(KLT, "KLT"), [], COLOUR[name]) for name in bases]
    legend += [Line(f"first {k}", [], "#444444"), Line(f"own {k} largest", [], "#444444", dashes="4 3")]
    legend.append(Line("noise, largest", [], "#444444", dashes="2 4", width=1))
    title = called(report, f"share of energy in {k} of {report.width} coefficients")
    return draw_grid(title, panels, legend, "bin of rising H", "mean share of a token's energy")


def compaction_panel(layer: LayerNull, k: int, bins: int) -> SmallPanel:
    lines, level = [], None
    for row in layer.compaction:
        if row.k != k or row.centred:
            continue
        if row.basis == NOISE:
            level = row.largest[0]
            continue
        for shares, dashes in ((row.first, ""), (row.largest, "4 3")):
            points = [(float(x), share) for x, share in enumerate(shares[1:], start=1) if share is not None]
            lines.append(Line("", points, COLOUR[row.basis], dashes=dashes, width=1.5, dots=not dashes))
    names = [(float(number + 1), f"{number + 1}") for number in range(bins)]
    return SmallPanel(f"layer {layer.layer + 1} ({layer.kind})", lines, names=names, level=level)
