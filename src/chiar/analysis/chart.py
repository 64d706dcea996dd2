"""Line charts as self-contained SVG: panels one above the other over one horizontal axis."""

import math
from dataclasses import dataclass, field
from html import escape

from chiar.visible import visible

WIDTH, LEFT, RIGHT, TOP, PANEL, GAP, ENTRY = 760, 70, 230, 54, 150, 42, 18
# Okabe and Ito's colours, which stay apart under the common colour blindnesses; yellow is too pale for a line.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")


@dataclass(frozen=True)
class Line:
    label: str
    """Its entry beside the panel; "" gives none."""
    points: list[tuple[float, float]]
    colour: str
    dashes: str = ""
    width: float = 2.0
    opacity: float = 1.0
    dots: bool = False


@dataclass
class Panel:
    title: str
    lines: list[Line] = field(default_factory=list)
    level: tuple[float, str] | None = None
    """A height to mark across the panel, and its name."""
    bounds: tuple[float, float] | None = None
    """Of the vertical axis; what the lines need where it is None."""


def label(x: float, y: float, text: str, size: int = 12, anchor: str = "middle", weight: str = "400") -> str:
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}" font-weight="{weight}">'
        f"{escape(visible(text, keep=''))}</text>"
    )


def document(width: float, height: float, title: str, parts: list[str]) -> str:
    """On white, so that it reads the same on a dark page."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
        f'height="{height:g}" role="img" aria-label="{escape(visible(title, keep=""), quote=True)}" '
        'font-family="system-ui, sans-serif" fill="#111111">\n'
        f'<rect width="{width:g}" height="{height:g}" fill="#ffffff"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def shorten(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """Round numbers between the two: 1, 2 or 5 times a power of ten apart."""
    rough = (high - low) / wanted
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(number * step, 12) for number in range(first, last + 1)]


def size_ticks(low: float, high: float) -> list[tuple[float, str]]:
    """Round numbers between two decimal logarithms, with their names: (7.3, "20M")."""
    powers = range(math.floor(low), math.ceil(high) + 1)
    factors = (1,) if high - low > 2.5 else (1, 2, 5) if high - low > 0.9 else (1, 1.5, 2, 3, 4, 5, 6, 8)
    values = [factor * 10.0**power for power in powers for factor in factors]
    found = [value for value in values if low <= math.log10(value) <= high]
    if len(found) < 2:
        found = ticks(10**low, 10**high, 4)
    return [(math.log10(value), size_name(value)) for value in found]


def size_name(value: float) -> str:
    for power, letter in ((12, "T"), (9, "G"), (6, "M"), (3, "k")):
        if value >= 0.9995 * 10**power:
            return f"{value / 10**power:.4g}{letter}"
    return f"{value:.4g}"


def spread(values: list[float]) -> tuple[float, float]:
    """The range of the values with a little air, never empty."""
    low, high = min(values), max(values)
    air = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    return low - air, high + air


@dataclass(frozen=True)
class Axes:
    """Where numbers lie in a panel: its box, and the ranges of both directions."""

    left: float
    right: float
    top: float
    bottom: float
    across_range: tuple[float, float]
    up_range: tuple[float, float]
    names: tuple[tuple[float, str], ...] = ()
    """Places on the horizontal axis with what stands there, instead of round numbers."""

    def across(self, x: float) -> float:
        first, last = self.across_range
        return self.left + (x - first) / (last - first) * (self.right - self.left)

    def up(self, y: float) -> float:
        low, high = self.up_range
        return self.bottom - (y - low) / (high - low) * (self.bottom - self.top)

    def draw(self) -> list[str]:
        """Lines, numbers and frame."""
        parts = []
        for tick in ticks(*self.up_range):
            parts.append(f'<path d="M{self.left} {self.up(tick):.1f} H{self.right}" stroke="#dddddd"/>')
            parts.append(label(self.left - 8, self.up(tick) + 4, f"{tick:g}", size=11, anchor="end"))
        for tick, name in self.names or [(tick, f"{tick:g}") for tick in ticks(*self.across_range, 6)]:
            parts.append(f'<path d="M{self.across(tick):.1f} {self.bottom:g} v5" stroke="#444444"/>')
            parts.append(label(self.across(tick), self.bottom + 18, name, size=11))
        frame = f"M{self.left} {self.top:g} V{self.bottom:g} H{self.right}"
        return [*parts, f'<path d="{frame}" fill="none" stroke="#444444"/>']


def draw_chart(title: str, panels: list[Panel], axis: str, sizes: bool = False) -> str:
    """The panels under one title; each must have a line. `sizes`: horizontally are decimal logarithms of sizes."""
    xs = [x for panel in panels for line in panel.lines for x, _ in line.points]
    across = spread(xs) if sizes else (min(0, *xs), max(xs) if max(xs) > 0 else 1)
    names = tuple(size_ticks(*across)) if sizes else ()
    parts = [label(WIDTH / 2, 28, shorten(title, 90), size=16, weight="700")]
    y = TOP
    for panel in panels:
        y += 18
        height = max(PANEL, ENTRY * sum(bool(line.label) for line in panel.lines) + 4)
        parts += draw_panel(panel, y, height, across, names)
        y += height + GAP
    parts.append(label((LEFT + WIDTH - RIGHT) / 2, y - 4, axis))
    return document(WIDTH, y + 10, title, parts)


def draw_panel(
    panel: Panel, top: float, height: float, span: tuple[float, float], names: tuple[tuple[float, str], ...]
) -> list[str]:
    right, bottom = WIDTH - RIGHT, top + height
    heights = [y for line in panel.lines for _, y in line.points] + ([panel.level[0]] if panel.level else [])
    axes = Axes(LEFT, right, top, bottom, span, panel.bounds or spread(heights), names)
    across, up = axes.across, axes.up
    parts = [label(LEFT, top - 8, panel.title, anchor="start", size=13, weight="600"), *axes.draw()]
    if panel.level:
        height, name = panel.level
        parts.append(f'<path d="M{LEFT} {up(height):.1f} H{right}" stroke="#444444" stroke-dasharray="2 4"/>')
        parts.append(label(right - 4, up(height) - 5, name, size=11, anchor="end"))
    named_lines = 0
    for line in panel.lines:
        look = f'stroke="{line.colour}" stroke-width="{line.width:g}" opacity="{line.opacity:g}"'
        look += f' stroke-dasharray="{line.dashes}"' if line.dashes else ""
        points = " ".join(f"{across(x):.1f},{up(y):.1f}" for x, y in line.points)
        parts.append(f'<polyline class="line" points="{points}" fill="none" {look}/>')
        if line.dots or len(line.points) == 1:
            parts += [
                f'<circle cx="{across(x):.1f}" cy="{up(y):.1f}" r="3" fill="{line.colour}"/>' for x, y in line.points
            ]
        if not line.label:
            continue
        beside = top + 10 + ENTRY * named_lines
        named_lines += 1
        parts.append(f'<path d="M{right + 14} {beside:g} h24" {look}/>')
        parts.append(label(right + 44, beside + 4, shorten(line.label, 28), size=11, anchor="start"))
    return parts
