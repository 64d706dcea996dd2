"""Pictures of a null test."""

from pathlib import Path
from typing import TYPE_CHECKING

from chiar.plots.figure import COLOURS, Line, Panel, new_figure, style
from research.grid import draw_grid
from research.nulltest.report import NullTest, Worth

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOUR_OF = dict(zip(("dct", "identity", "random"), COLOURS, strict=False))


def titled(report: NullTest, what: str) -> str:
    return f"{Path(report.run or report.model).name}: {what}"


def pictures(report: NullTest) -> "dict[str, Figure]":
    return {"entropy": draw_entropy(report)} | ({"flips": draw_flips(report)} if report.worth is not None else {})


@style()
def draw_entropy(report: NullTest) -> "Figure":
    """A box plot for each layer and basis: a bar from the 25th to the 75th percentile, a line from the 5th to the 95th,
    a dot at the median. Grey: the same percentiles of white noise. Dashed: the thresholds."""
    title = titled(report, f"H of each layer's input, D = {report.width}, {report.corpus} {report.split}")
    figure = new_figure(title, max(7.5, 0.9 + 0.45 * len(report.layers)), 4.6)
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
            axes.vlines(x, at["5"], at["95"], color=COLOUR_OF[row.basis], linewidth=1)
            axes.vlines(x, at["25"], at["75"], color=COLOUR_OF[row.basis], linewidth=5, label=name)
            axes.plot(x, at["50"], "o", color=COLOUR_OF[row.basis], markerfacecolor="#ffffff", markersize=4)
        for tau in layer.thresholds or []:
            axes.hlines(tau, layer.layer + 0.55, layer.layer + 1.45, "#111111", (0, (5, 2)), label="τ", linewidth=1.2)
    axes.set_xticks([layer.layer + 1 for layer in report.layers])
    handles = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=5)
    return figure


@style()
def draw_flips(report: NullTest) -> "Figure":
    assert report.worth is not None
    worths = [(f"layer {layer.layer + 1}", layer.worth) for layer in report.layers if layer.worth is not None]
    worths.append(("all routed layers", report.worth))
    panels = []
    for title, worth in worths:
        line = Line(benefit_points(worth), "mean ± standard error", color=COLOURS[0], marker="o")
        panels.append(Panel(title, [line], (0.0, "")))
    title = titled(report, "benefit of attention for a token, by its H")
    columns = 2 if len(panels) in (2, 4) else min(len(panels), 3)
    figure = draw_grid(title, panels, "bin of rising H", columns, log_x=False)
    figure.supylabel("loss with filter − with attention, nats", fontsize=9)
    for axes, (_, worth) in zip(figure.axes, worths, strict=True):
        axes.set_xticks(range(1, report.bins + 1))
        errors = [mean.error or 0.0 for mean in worth.benefit if mean.mean is not None]
        axes.errorbar(*zip(*benefit_points(worth), strict=True), errors, fmt="none", ecolor=COLOURS[0], capsize=3)
        axes.autoscale(axis="y")  # to include the error bars
    return figure


def benefit_points(worth: Worth) -> list[tuple[float, float]]:
    return [(bin + 1.0, mean.mean) for bin, mean in enumerate(worth.benefit) if mean.mean is not None]
