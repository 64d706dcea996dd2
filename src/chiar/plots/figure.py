"""What all pictures share: style, panels of lines, and how a figure is written. Matplotlib may be missing, and is
imported when something is drawn."""

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
# For what is not an operator: none of the language's colours, so that blue is always attention.
COLOURS = ("#d55e00", "#6a3d9a", "#111111", "#9c7a1a", "#8a1538", "#7f7f7f")
DASHES: tuple[Any, ...] = ("-", (0, (7, 3)), (0, (2, 2)), (0, (9, 3, 2, 3)))
UNIT = (-0.02, 1.02)
# Text stays text and a $ in it is a dollar; a fixed salt makes equal pictures equal files.
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
    matplotlib = optional_module("matplotlib", "plots", "a picture")
    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # an SVG is shown with the reader's fonts
        yield


@style()
def render(figure: "Figure", kind: str) -> bytes:
    from matplotlib.text import Text

    for text in figure.findobj(Text):
        assert isinstance(text, Text)
        text.set_text(visible(text.get_text(), keep="\n"))
    out = BytesIO()
    undated = {"svg": {"Date": None, "Creator": None}, "pdf": {"CreationDate": None}}
    figure.savefig(out, format=kind, metadata=undated.get(kind, {}))
    return out.getvalue()


def svg_text(figure: "Figure") -> str:
    """Equal for equal pictures. A page whose policy forbids inline styles shows it as an image."""
    _, tag, rest = render(figure, "svg").decode().partition("<svg ")
    return f'{tag}role="img" aria-label="{escape(visible(str(figure.get_label()), keep=""))}" {rest}'


def check_picture(out: Path, overwrite: bool = False) -> None:
    if out.suffix not in (".svg", ".png", ".pdf"):
        raise InputError(f"pictures are SVG, PNG or PDF: name the file {out.with_suffix('.svg').name}.")
    check_new(out, overwrite)


def save(figure: "Figure", path: Path, overwrite: bool = False) -> None:
    check_picture(path, overwrite)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(svg_text(figure).encode() if path.suffix == ".svg" else render(figure, path.suffix[1:]))


def shorten(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


class Line:
    """Points, and how matplotlib draws them; without a label it is not in the legend."""

    def __init__(self, points: Points, label: str = "", **look: Any) -> None:
        self.points, self.label, self.look = points, shorten(label, 44), look


@dataclass
class Panel:
    title: str
    lines: list[Line] = field(default_factory=list)
    level: tuple[float, str] | None = None  # a height to mark across the panel, and its name in the legend
    bounds: tuple[float, float] | None = None
    axis: str = ""
    high: float = 1.75


def new_figure(title: str, wide: float, high: float) -> "Figure":
    from matplotlib.figure import Figure

    figure = Figure((wide, high), label=title)
    figure.suptitle(shorten(title, int(wide * 9)))
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
    """One below the other, their legends beside them."""
    from matplotlib.ticker import EngFormatter

    heights = [max(panel.high, 0.18 * len([line for line in panel.lines if line.label]) + 0.3) for panel in panels]
    figure = new_figure(title, 9.6, sum(heights) + 0.5 * len(panels) + 0.9)
    for panel, (axes,) in zip(panels, figure.subplots(len(panels), squeeze=False, height_ratios=heights), strict=True):
        fill(axes, panel)
        axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.04))
        if axes.get_xlim()[1] >= 1000:
            axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    return figure
