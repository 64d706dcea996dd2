"""H by word class and layer as a heat map: blue below white noise, orange above."""

from chiar.analysis.chart import COLOURS, document, label, shorten
from chiar.nulltest.report import NullTest

LEFT, TOP, WIDTH, HEIGHT = 150, 84, 52, 24
FULL = 3.0
"""Standard deviations of the noise at which a colour is full."""


def shade(effect: float) -> str:
    strength = min(abs(effect) / FULL, 1.0)
    return f'fill="{COLOURS[0] if effect < 0 else COLOURS[1]}" fill-opacity="{0.8 * strength:.2f}"'


def draw_classes(report: NullTest, title: str) -> str:
    """One row a class, one column a layer; in a cell the distance from the noise and the share that is light."""
    classes = report.layers[0].classes
    wide = max(LEFT + WIDTH * len(report.layers) + 90, 620)
    parts = [label(wide / 2, 26, shorten(title, 80), size=16, weight="700")]
    note = (
        "mean H in σ of the noise from its mean; below it, the share of the class that is light; bold: function words"
    )
    parts.append(label(wide / 2, 46, note, size=11))
    for column, layer in enumerate(report.layers):
        parts.append(label(LEFT + (column + 0.5) * WIDTH, TOP - 8, f"{layer.layer + 1}", size=11))
    parts.append(label(LEFT - 8, TOP - 8, "layer", size=11, anchor="end"))
    for row, first in enumerate(classes):
        y = TOP + row * HEIGHT
        parts.append(label(LEFT - 8, y + 16, first.name, anchor="end", weight="700" if first.function else "400"))
        for column, layer in enumerate(report.layers):
            found, x = layer.classes[row], LEFT + column * WIDTH
            parts.append(
                f'<rect class="cell" x="{x}" y="{y}" width="{WIDTH - 2}" height="{HEIGHT - 2}" {shade(found.effect)}/>'
            )
            parts.append(label(x + WIDTH / 2 - 1, y + 11, f"{found.effect:+.2f}", size=10))
            parts.append(label(x + WIDTH / 2 - 1, y + 20, f"{found.light:.0%}", size=8))
        parts.append(label(LEFT + WIDTH * len(report.layers) + 6, y + 16, f"{first.tokens:,}", size=10, anchor="start"))
    parts.append(label(LEFT + WIDTH * len(report.layers) + 6, TOP - 8, "tokens", size=10, anchor="start"))
    return document(wide, TOP + len(classes) * HEIGHT + 16, title, parts)
