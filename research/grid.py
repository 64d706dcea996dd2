"""Panels side by side with one legend below them, for the documents' figures."""

from typing import TYPE_CHECKING

from chiar.plots.figure import Panel, fill, new_figure, style

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@style()
def draw_grid(
    title: str, panels: list[Panel], axis: str, columns: int, high: float = 1.75, sizes: bool = True
) -> "Figure":
    """`sizes`: the axis below is logarithmic."""
    from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter

    rows, wide = -(-len(panels) // columns), max(9.6, 3.5 * columns + 0.4)
    names = {line.label for panel in panels for line in panel.lines if line.label}
    across = max(1, int(wide / (0.7 + 0.075 * max(map(len, names), default=1))))
    figure = new_figure(title, wide, (high + 0.5) * rows + 0.9 + 0.19 * -(-len(names) // across))
    handles = {}
    for number, panel in enumerate(panels):
        axes = figure.add_subplot(rows, columns, number + 1)
        fill(axes, panel)
        axes.set_xlabel((axis or panel.axis) if number + columns >= len(panels) else "")
        if sizes:
            axes.set_xscale("log")
            axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.xaxis.set_major_formatter(EngFormatter(sep=""))
            axes.xaxis.set_minor_formatter(NullFormatter())
        handles |= {name: handle for handle, name in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=across)
    return figure
