"""A null test, measured now or read back, as pictures."""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from chiar.plots import COLOURS, DASHES, Line, Panel, draw_panels, style
from research.nulltest.measures import KLT, NOISE
from research.nulltest.report import NullTest, Worth

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOUR = dict(zip(("dct", "identity", "random", KLT, "hash"), COLOURS, strict=False)) | {"route": COLOURS[6]}
SIGNALS = {"route": "route", "hash": "random hash of the token"}
GREY = "#bbbbbb"
ZERO = (0.0, "")


def called(report: NullTest, what: str) -> str:
    return f"{Path(report.run or report.model).name}: {what}"


def columns_for(panels: int) -> int:
    return 2 if panels in (2, 4) else min(panels, 3)


def pictures(report: NullTest) -> "dict[str, Figure]":
    drawn = {"entropy": draw_entropy, "information": draw_information, "classes": draw_classes}
    drawn |= {"compaction": draw_compaction} | ({"flips": draw_flips} if report.worth is not None else {})
    return {name: draw(report) for name, draw in drawn.items()}


@style()
def draw_entropy(report: NullTest) -> "Figure":
    """For each layer and basis a bar from the 25th to the 75th percentile, a line from the 5th to the 95th, and a dot
    at the median; grey are the same percentiles of the noise, dashes the thresholds."""
    from matplotlib.figure import Figure

    title = called(report, f"H of each layer's input, D = {report.width}, {report.corpus} {report.split}")
    figure = Figure((max(7.5, 0.9 + 0.45 * len(report.layers)), 4.6), layout="constrained", label=title)
    figure.suptitle(title)
    axes = figure.add_subplot(xlabel="layer", ylabel="H, spectral entropy")
    noise = {int(name): value for name, value in report.null_percentiles.items()}
    axes.axhspan(noise[5], noise[95], color="#e4e4e4")
    axes.axhspan(noise[25], noise[75], color="#c8c8c8", label="white noise: 25–75%, 5–95%")
    axes.axhline(noise[50], color="#777777", linewidth=1)
    bases = [row.basis for row in report.layers[0].whiteness]
    for layer in report.layers:
        for number, row in enumerate(layer.whiteness):
            x, at = layer.layer + 1 + (number - (len(bases) - 1) / 2) * 0.8 / len(bases), row.percentiles
            name = row.basis + (" (the model's)" if number == 0 else "")
            axes.vlines(x, at["5"], at["95"], color=COLOUR[row.basis], linewidth=1)
            axes.vlines(x, at["25"], at["75"], color=COLOUR[row.basis], linewidth=5, label=name)
            axes.plot(x, at["50"], "o", color=COLOUR[row.basis], markerfacecolor="#ffffff", markersize=4)
        for cut in layer.thresholds or []:
            axes.hlines(cut, layer.layer + 0.55, layer.layer + 1.45, "#111111", (0, (5, 2)), label="τ", linewidth=1.2)
    axes.set_xticks([layer.layer + 1 for layer in report.layers])
    legend_below(figure, axes)
    return figure


def legend_below(figure: "Figure", axes: "Axes") -> None:
    handles = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=5)


def draw_information(report: NullTest) -> "Figure":
    panels = []
    for kind, title in (("token", "token identity"), ("word_class", "word class"), ("position", "position")):
        found: dict[str, list[tuple[float, float]]] = {}
        for layer in report.layers:
            for signal in layer.signals:
                found.setdefault(signal.name, []).append((layer.layer + 1.0, getattr(signal, kind).adjusted))
        lines = []
        for name, points in found.items():
            look = {"color": COLOUR[name], "linestyle": DASHES[2] if name == "route" else "-", "marker": "o"}
            lines.append(Line(points, SIGNALS.get(name, f"H, {name}"), **look))
        ticks = [layer.layer + 1 for layer in report.layers]
        panels.append(Panel(f"what {title} says about the route (adjusted share, 0: chance)", lines, ZERO, ticks=ticks))
    return draw_panels(called(report, "information in the route"), panels, "layer")


@style()
def draw_classes(report: NullTest) -> "Figure":
    """A row a word class, a column a layer: the distance of H from the noise, and the share that is light."""
    from matplotlib.figure import Figure

    classes, title = report.layers[0].classes, called(report, "H by word class")
    wide, high = 4.6 + 0.62 * len(report.layers), 1.6 + 0.3 * len(classes)
    figure = Figure((wide, high), layout="constrained", label=title)
    figure.suptitle(title)
    axes = figure.add_subplot()
    effects = np.array([[layer.classes[row].effect for layer in report.layers] for row in range(len(classes))])
    most = max(1.5, float(np.abs(effects).max()))
    image = axes.imshow(effects, "PuOr_r", vmin=-most, vmax=most, aspect="auto", alpha=0.8)
    for row, column in np.ndindex(effects.shape):
        found = report.layers[column].classes[row]
        axes.text(column, row, f"{found.effect:+.2f}  {found.light:.0%}", ha="center", va="center", fontsize=6.5)
    axes.set_xticks(range(len(report.layers)), [f"layer {layer.layer + 1}" for layer in report.layers])
    axes.set_yticks(range(len(classes)), [f"{one.name}, {one.tokens:,}" for one in classes])
    for one, label in zip(classes, axes.get_yticklabels(), strict=True):
        label.set_fontweight("bold" if one.function else "normal")
    axes.grid(False)
    figure.colorbar(image, label="mean H in σ of the noise from its mean")
    figure.supxlabel("in a cell: that number, and the share that is light; bold: function words", fontsize=8)
    return figure


@style()
def draw_flips(report: NullTest) -> "Figure":
    assert report.worth is not None
    worths = [(f"layer {layer.layer + 1}", layer.worth) for layer in report.layers if layer.worth is not None]
    worths.append(("all routed layers", report.worth))
    panels = []
    for title, worth in worths:
        line = Line(benefit_points(worth), "mean ± standard error", color=COLOURS[0], marker="o")
        panels.append(Panel(title, [line], ZERO, ticks=range(1, report.bins + 1)))
    title, up = called(report, "what attention adds to a token, by its H"), "loss with filter − attention, nats"
    figure = draw_panels(title, panels, "bin of rising H", up, columns_for(len(panels)))
    for axes, (_, worth) in zip(figure.axes, worths, strict=True):
        errors = [found.error or 0.0 for found in worth.benefit if found.mean is not None]
        axes.errorbar(*zip(*benefit_points(worth), strict=True), errors, fmt="none", ecolor=COLOURS[0], capsize=3)
    return figure


def benefit_points(worth: Worth) -> list[tuple[float, float]]:
    return [(bin + 1.0, found.mean) for bin, found in enumerate(worth.benefit) if found.mean is not None]


def draw_compaction(report: NullTest) -> "Figure":
    """By bins of rising H: what the first k coefficients hold, and the token's own k largest."""
    widths = sorted({row.k for row in report.layers[0].compaction})
    k = widths[len(widths) // 2]
    panels = []
    for layer in report.layers:
        rows = [row for row in layer.compaction if row.k == k and not row.centred]
        lines = []
        for row in (row for row in rows if row.basis != NOISE):
            for part, shares, look in (
                ("first", row.first, {"marker": "o"}),
                ("largest", row.largest, {"linestyle": "--"}),
            ):
                points = [(float(x), share) for x, share in enumerate(shares[1:], start=1) if share is not None]
                lines.append(Line(points, f"{row.basis.replace(KLT, 'KLT')}, {part}", color=COLOUR[row.basis], **look))
        noise = next(row.largest[0] for row in rows if row.basis == NOISE)
        assert noise is not None
        lines.append(Line([(1.0, noise), (report.bins, noise)], "noise, largest", color=GREY, linestyle=DASHES[2]))
        title = f"layer {layer.layer + 1} ({layer.kind})"
        panels.append(Panel(title, lines, bounds=(0, 1), ticks=range(1, report.bins + 1)))
    title, up = called(report, f"energy in {k} of {report.width} coefficients"), "mean share of a token's energy"
    return draw_panels(title, panels, "bin of rising H", up, columns_for(len(panels)))
