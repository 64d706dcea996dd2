"""Small charts in a grid, as self-contained SVG: often one panel a layer, each with axes of its own."""

from dataclasses import dataclass, field

from chiar.analysis.chart import Line, document, label, shorten, spread, ticks

WIDTH, HEIGHT, COLUMNS = 300, 150, 3
LEFT, GAP_X, GAP_Y, TOP = 54, 62, 62, 84
TITLE_CHARACTER = 9.2
"""Width of a letter of the title, about."""


@dataclass
class SmallPanel:
    title: str
    lines: list[Line]
    area: list[tuple[float, float]] = field(default_factory=list)
    """A filled outline behind the lines."""
    marks: list[tuple[float, str]] = field(default_factory=list)
    """Places on the horizontal axis, with their names."""
    bars: list[tuple[float, float, float, str]] = field(default_factory=list)
    """Error bars: x, low, high, colour."""
    names: list[tuple[float, str]] = field(default_factory=list)
    """Names in place of numbers on the horizontal axis."""
    level: float | None = None
    """A height to mark across the panel."""
    axis: str = ""
    """What is across, where panels differ in it."""
    bounds: tuple[float, float] | None = None
    """Of the vertical axis; what is drawn needs where it is None."""


def draw_grid(title: str, panels: list[SmallPanel], legend: list[Line], across: str, up: str, columns: int = 0) -> str:
    """The panels under one title and one legend; `across` and `up` name the axes all panels share."""
    columns = columns or (2 if len(panels) == 4 else min(COLUMNS, len(panels)))
    wide = max(LEFT + columns * (WIDTH + GAP_X), 560)
    parts = [label(wide / 2, 26, shorten(title, int(wide / TITLE_CHARACTER)), size=16, weight="700")]
    named, legend_ends = draw_legend(legend, wide)
    parts += named
    top = max(TOP, legend_ends + 14) + 22
    rows = -(-len(panels) // columns)
    for number, panel in enumerate(panels):
        row, column = divmod(number, columns)
        parts += draw_small(panel, LEFT + column * (WIDTH + GAP_X), top + row * (HEIGHT + GAP_Y))
    height = top + rows * (HEIGHT + GAP_Y)
    axes = [f"{way}: {name}" for way, name in (("across", across), ("up", up)) if name]
    parts.append(label(wide / 2, height - 8, "; ".join(axes), size=12))
    return document(wide, height + 8, title, parts)


def draw_legend(lines: list[Line], wide: float) -> tuple[list[str], float]:
    """What it is drawn with, and the height of its last row."""
    parts, x, y = [], float(LEFT), 52.0
    for line in lines:
        width = 46 + 6.6 * len(line.label)
        if x + width > wide and x > LEFT:
            x, y = float(LEFT), y + 18
        dashes = f' stroke-dasharray="{line.dashes}"' if line.dashes else ""
        parts.append(f'<path d="M{x:g} {y:g} h24" stroke="{line.colour}" stroke-width="{line.width:g}"{dashes}/>')
        parts.append(label(x + 30, y + 4, line.label, size=11, anchor="start"))
        x += width
    return parts, y


def draw_small(panel: SmallPanel, left: float, top: float) -> list[str]:
    right, bottom = left + WIDTH, top + HEIGHT
    points = [*panel.area, *(point for line in panel.lines for point in line.points)]
    heights = [y for _, y in points] + [end for _, a, b, _ in panel.bars for end in (a, b)]
    heights += [] if panel.level is None else [panel.level]
    low, high = panel.bounds or spread(heights)
    first, last = spread([x for x, _ in points] + [x for x, _ in panel.marks] + [x for x, _ in panel.names])
    low = 0.0 if panel.area else low  # a histogram stands on its axis

    def across(x: float) -> float:
        return left + (x - first) / (last - first) * WIDTH

    def up(y: float) -> float:
        return bottom - (y - low) / (high - low) * HEIGHT

    parts = [label(left, top - 8, shorten(panel.title, 48), anchor="start", size=12, weight="600")]
    for tick in ticks(low, high, 4):
        parts.append(f'<path d="M{left:g} {up(tick):.1f} H{right:g}" stroke="#dddddd"/>')
        parts.append(label(left - 6, up(tick) + 4, f"{tick:g}", size=10, anchor="end"))
    for x, name in panel.names or [(tick, f"{tick:g}") for tick in ticks(first, last, 5)]:
        parts.append(f'<path d="M{across(x):.1f} {bottom:g} v4" stroke="#444444"/>')
        parts.append(label(across(x), bottom + 16, name, size=10))
    if panel.axis:
        parts.append(label((left + right) / 2, bottom + 32, panel.axis, size=11))
    if panel.area:
        outline = " ".join(f"{across(x):.1f},{up(y):.1f}" for x, y in panel.area)
        parts.append(f'<polygon class="area" points="{outline}" fill="#bbbbbb" opacity="0.6"/>')
    parts.append(f'<path d="M{left:g} {top:g} V{bottom:g} H{right:g}" fill="none" stroke="#444444"/>')
    if panel.level is not None:
        parts.append(f'<path d="M{left:g} {up(panel.level):.1f} H{right:g}" stroke="#444444" stroke-dasharray="2 4"/>')
    for x, name in panel.marks:
        parts.append(f'<path d="M{across(x):.1f} {top:g} V{bottom:g}" stroke="#444444" stroke-dasharray="2 3"/>')
        parts.append(label(across(x) + 3, top + 11, name, size=10, anchor="start"))
    for x, a, b, colour in panel.bars:
        parts.append(f'<path class="bar" d="M{across(x):.1f} {up(a):.1f} V{up(b):.1f}" stroke="{colour}"/>')
    for line in panel.lines:
        drawn = " ".join(f"{across(x):.1f},{up(y):.1f}" for x, y in line.points)
        look = f'stroke="{line.colour}" stroke-width="{line.width:g}"'
        look += f' stroke-dasharray="{line.dashes}"' if line.dashes else ""
        parts.append(f'<polyline class="line" points="{drawn}" fill="none" {look}/>')
        if line.dots:
            parts += [
                f'<circle cx="{across(x):.1f}" cy="{up(y):.1f}" r="2.5" fill="{line.colour}"/>' for x, y in line.points
            ]
    return parts
