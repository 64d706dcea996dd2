"""Shared by all figures: style, panels of lines, and writing to files. Matplotlib is optional and slow, so it is
imported only to draw."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from html import escape
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chiar.errors import InputError, optional_module
from chiar.files import check_new
from chiar.visible import visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


Points = list[tuple[float, float]]
# For lines that are not operators: none of the operators' colours, so that blue is always attention.
COLOURS = ("#d55e00", "#6a3d9a", "#111111", "#9c7a1a", "#8a1538", "#7f7f7f")
DASHES: tuple[Any, ...] = ("-", (0, (7, 3)), (0, (2, 2)), (0, (9, 3, 2, 3)))
UNIT = (-0.02, 1.02)
# Text is stored as text, with $ taken literally. A fixed salt gives equal figures equal files.
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none", "svg.hashsalt": "chiar", "text.parse_math": False, "font.family": "DejaVu Sans",
    "font.size": 9, "axes.titlesize": 9.5, "axes.titleweight": "bold", "axes.titlelocation": "left",
    "figure.titlesize": 12, "figure.titleweight": "bold", "legend.frameon": False, "legend.fontsize": 8.5,
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "axes.grid.axis": "y",
    "grid.color": "#dddddd", "axes.axisbelow": True, "lines.markersize": 4, "lines.linewidth": 1.6,
    "legend.handlelength": 3, "legend.borderaxespad": 0, "savefig.dpi": 150,
    "figure.constrained_layout.use": True,
}  # fmt: skip


@contextmanager
def style() -> Iterator[None]:
    matplotlib = optional_module("matplotlib", "plots", "a figure")
    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # an SVG is displayed with the reader's fonts
        yield


@style()
def render(figure: "Figure", file_type: str) -> bytes:
    from matplotlib.text import Text

    for text in figure.findobj(Text):
        assert isinstance(text, Text)
        text.set_text(visible(text.get_text(), keep="\n"))
    out = BytesIO()
    metadata = {"svg": {"Date": None, "Creator": None}, "pdf": {"CreationDate": None}}
    figure.savefig(out, format=file_type, metadata=metadata.get(file_type, {}))
    return out.getvalue()


def svg_text(figure: "Figure") -> str:
    """SVG, equal for equal figures. Pages whose security policy forbids inline styles must show it as an image."""
    _, tag, rest = render(figure, "svg").decode().partition("<svg ")
    return f'{tag}role="img" aria-label="{escape(visible(str(figure.get_label()), keep=""))}" {rest}'


def check_figure_path(out: Path, overwrite: bool = False) -> None:
    if out.suffix not in (".svg", ".png", ".pdf"):
        raise InputError(f"figures are SVG, PNG or PDF: name the file {out.with_suffix('.svg').name}.")
    check_new(out, overwrite)


def save(figure: "Figure", path: Path, overwrite: bool = False) -> None:
    check_figure_path(path, overwrite)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(svg_text(figure).encode() if path.suffix == ".svg" else render(figure, path.suffix[1:]))


def shorten(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


class Line:
    """Points, with a `look` for matplotlib's plot(). Without a label it is not in the legend."""

    def __init__(self, points: Points, label: str = "", **look: Any) -> None:
        self.points, self.label, self.look = points, shorten(label, 44), look


@dataclass
class Panel:
    title: str
    lines: list[Line] = field(default_factory=list)
    level: tuple[float, str] | None = None  # a horizontal line: its y and its label
    bounds: tuple[float, float] | None = None
    axis: str = ""
    height: float = 1.75


def new_figure(title: str, width: float, height: float) -> "Figure":
    from matplotlib.figure import Figure

    figure = Figure((width, height), label=title)
    figure.suptitle(shorten(title, int(width * 9)))
    return figure


def fill(axes: "Axes", panel: Panel) -> None:
    for line in panel.lines:
        look = {"marker": "o"} | line.look if len(line.points) == 1 else line.look
        axes.plot([x for x, _ in line.points], [y for _, y in line.points], label=line.label or None, **look)
    if panel.level is not None:
        axes.axhline(panel.level[0], color="#444444", dashes=(2, 4), linewidth=1, label=panel.level[1] or None)
    axes.set(title=panel.title, xlabel=panel.axis)
    axes.set_ylim(panel.bounds)


@style()
def draw_panels(title: str, panels: list[Panel]) -> "Figure":
    """Panels below each other, with their legends on the right."""
    from matplotlib.ticker import EngFormatter

    heights = [max(panel.height, 0.18 * len([line for line in panel.lines if line.label]) + 0.3) for panel in panels]
    figure = new_figure(title, 9.6, sum(heights) + 0.5 * len(panels) + 0.9)
    for panel, (axes,) in zip(panels, figure.subplots(len(panels), squeeze=False, height_ratios=heights), strict=True):
        fill(axes, panel)
        axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.04))
        if axes.get_xlim()[1] >= 1000:
            axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    return figure
