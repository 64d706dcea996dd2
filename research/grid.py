"""A grid of panels above one legend, for the figures of the documents."""

from typing import TYPE_CHECKING

from chiar.plots.figure import Panel, fill, new_figure, style

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@style()
def draw_grid(
    title: str, panels: list[Panel], axis: str, columns: int, height: float = 1.75, log_x: bool = True
) -> "Figure":
    """`axis` labels the x axes; `height` is that of a panel in inches."""
    from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter

    rows, width = -(-len(panels) // columns), max(9.6, 3.5 * columns + 0.4)
    labels = {line.label for panel in panels for line in panel.lines if line.label}
    across = max(1, int(width / (0.7 + 0.075 * max(map(len, labels), default=1))))
    figure = new_figure(title, width, (height + 0.5) * rows + 0.9 + 0.19 * -(-len(labels) // across))
    handles = {}
    for number, panel in enumerate(panels):
        axes = figure.add_subplot(rows, columns, number + 1)
        fill(axes, panel)
        axes.set_xlabel((axis or panel.axis) if number + columns >= len(panels) else "")
        if log_x:
            axes.set_xscale("log")
            axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.xaxis.set_major_formatter(EngFormatter(sep=""))
            axes.xaxis.set_minor_formatter(NullFormatter())
        handles |= {label: handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=across)
    return figure
