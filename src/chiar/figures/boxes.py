"""H of every layer's input beside the white-noise null, as percentiles: one picture for a model of any depth."""

from chiar.analysis.chart import Axes, document, label, shorten, spread
from chiar.nulltest.pictures import COLOUR, called
from chiar.nulltest.report import NullTest
from chiar.nulltest.white import Whiteness

LEFT, RIGHT, TOP, HEIGHT, LAYER, LEAST = 76, 30, 92, 320, 46, 700


def draw_boxes(report: NullTest) -> str:
    """For each layer and basis a bar from the 25th to the 75th percentile, a line from the 5th to the 95th, and a dot
    at the median; grey are the same percentiles of the noise, dashes the thresholds."""
    wide = max(LEFT + RIGHT + LAYER * len(report.layers), LEAST)
    heights = list(report.null_percentiles.values())
    for layer in report.layers:
        heights += [value for row in layer.whiteness for value in row.percentiles.values()]
    names = tuple((float(layer.layer + 1), str(layer.layer + 1)) for layer in report.layers)
    span = (names[0][0] - 0.6, names[-1][0] + 0.6)
    axes = Axes(LEFT, wide - RIGHT, TOP, TOP + HEIGHT, span, spread(heights), names)
    title = called(report, f"H of each layer's input, D = {report.width}, {report.corpus} {report.split}")
    parts = [label(wide / 2, 26, shorten(title, 80), size=16, weight="700"), *noise(report, axes), *axes.draw()]
    bases = [row.basis for row in report.layers[0].whiteness]
    for layer in report.layers:
        step = 0.8 / len(bases)
        for number, row in enumerate(layer.whiteness):
            parts += box(row, axes, layer.layer + 1 + (number - (len(bases) - 1) / 2) * step)
        for cut in layer.thresholds or []:
            if axes.up_range[0] <= cut <= axes.up_range[1]:
                ends = axes.across(layer.layer + 0.55), axes.across(layer.layer + 1.45)
                parts.append(
                    f'<path class="cut" d="M{ends[0]:.1f} {axes.up(cut):.1f} H{ends[1]:.1f}" stroke="#111111" '
                    'stroke-width="1.5" stroke-dasharray="5 2"/>'
                )
    parts.append(label((LEFT + wide - RIGHT) / 2, TOP + HEIGHT + 40, "layer"))
    parts.append(label(LEFT, TOP - 10, "H, spectral entropy", anchor="start", size=13, weight="600"))
    return document(wide, TOP + HEIGHT + 54, title, parts + legend(bases, any(x.thresholds for x in report.layers)))


def noise(report: NullTest, axes: Axes) -> list[str]:
    at = {int(name): axes.up(value) for name, value in report.null_percentiles.items()}
    wide = axes.right - axes.left
    parts = [
        f'<rect class="noise" x="{axes.left:g}" y="{at[high]:.1f}" width="{wide:g}" height="{at[low] - at[high]:.1f}" '
        f'fill="{fill}"/>'
        for low, high, fill in ((5, 95, "#e4e4e4"), (25, 75, "#c8c8c8"))
    ]
    return [*parts, f'<path d="M{axes.left:g} {at[50]:.1f} H{axes.right:g}" stroke="#777777"/>']


def box(row: Whiteness, axes: Axes, place: float) -> list[str]:
    at = {int(name): axes.up(value) for name, value in row.percentiles.items()}
    x, colour = axes.across(place), COLOUR[row.basis]
    return [
        f'<path class="whisker" d="M{x:.1f} {at[5]:.1f} V{at[95]:.1f}" stroke="{colour}" stroke-width="1.2"/>',
        f'<path class="box" d="M{x:.1f} {at[25]:.1f} V{at[75]:.1f}" stroke="{colour}" stroke-width="7"/>',
        f'<circle cx="{x:.1f}" cy="{at[50]:.1f}" r="3" fill="#ffffff" stroke="{colour}" stroke-width="1.5"/>',
    ]


def legend(bases: list[str], cuts: bool) -> list[str]:
    parts, x = [], float(LEFT)
    entries = [(name + (" (the model's)" if name == bases[0] else ""), COLOUR[name], 7.0, "") for name in bases]
    entries.append(("white noise: 25–75%, 5–95%", "#c8c8c8", 10.0, ""))
    entries += [("τ", "#111111", 1.5, "5 2")] if cuts else []
    for name, colour, width, dashes in entries:
        parts.append(
            f'<path d="M{x:g} 52 h20" stroke="{colour}" stroke-width="{width:g}" stroke-dasharray="{dashes}"/>'
        )
        parts.append(label(x + 26, 56, name, size=11, anchor="start"))
        x += 44 + 6.4 * len(name)
    return parts
