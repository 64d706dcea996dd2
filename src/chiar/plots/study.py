"""A study as a figure: loss against cost."""

import json
import math
from collections.abc import Iterable, Sequence
from itertools import pairwise, product
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from chiar.colours import operator_colour
from chiar.errors import InputError
from chiar.files import check_file
from chiar.plots.figure import Line, Panel, draw_panels, shorten, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


RIM = {"markeredgecolor": operator_colour("temporal"), "markeredgewidth": 1.8}
MARK: dict[str, Any] = {"marker": "o", "markersize": 9, "linestyle": "", "markeredgecolor": "#555555"}
SPREAD: dict[str, Any] = {"color": "#999999", "linewidth": 0.8, "marker": ""}
HOLLOW = MARK | {"markerfacecolor": "none"}


def variant_look(declared: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Legend entry and mark of a variant by its layers: half light and half dark if tokens or layers are divided,
    with a rim if every token passes a temporal filter."""
    from chiar import presets
    from chiar.config_checks import LIGHT_LAYERS
    from chiar.registry import ROUTERS

    config = {**presets.get(declared["preset"]).to_dict(), **declared["config"]}
    kinds, dark = dict.fromkeys(config["layer_types"]), operator_colour("attention")
    routed, router = "routed" in kinds or "dark" in kinds, ROUTERS.get(config["router"])
    light = [config["operators"][0]] if routed else [kind for kind in kinds if kind in LIGHT_LAYERS]
    pale = operator_colour(light[0]) if light else dark
    if not light or (len(kinds) == len(light) and not routed):
        name, face = ("light layers only" if light else "dark: attention alone"), {"markerfacecolor": pale}
    else:
        by_token = routed and not (router and router.decides_by_layer)
        name, side = ("light or dark by token", "left") if by_token else ("light and dark layers", "bottom")
        face = {"markerfacecolor": dark, "markerfacecoloralt": pale, "fillstyle": side}
    name += ", light along time" if light == ["temporal"] else ""
    return name, MARK | face | (RIM if config.get("temporal_everywhere") else {})


def outlier_limit(values: Iterable[float]) -> float:
    """With many values, those above this are drawn at the end of the axis: they would squeeze the others together."""
    ascending = sorted(values)
    limit = 3 * median(ascending) - 2 * ascending[0]
    return limit if len(ascending) >= 9 and limit > ascending[0] else math.inf


def padded(values: list[float]) -> tuple[float, float]:
    """Limits of an axis with a margin around the values."""
    margin = (max(values) - min(values)) * 0.06 or 0.1
    return min(values) - margin, max(values) + margin


@style()
def draw_pareto(results: dict[str, Any]) -> "Figure":
    """Loss of a study's variants against counted FLOPs, and against step time if `chiar study time` measured it or all
    variants were trained alone. Marks are numbered in order of FLOPs; the legend names them."""
    rows, device = results["variants"], (results["times"] or results["runs"][0])["device"]
    looks = {run["variant"]: variant_look(run["declaration"]) for run in results["runs"]}
    paired = all(row["paired_loss"] is not None for row in rows)
    loss, seeds = ("paired_loss", "paired_losses") if paired else ("test_loss", "losses")
    unequal = paired and len({tuple(sorted(row["seeds"])) for row in rows}) > 1
    heading = "test loss, nats per token" + (" (baseline's mean + paired Δ)" if unequal else "")
    costs = {"counted MFLOPs a token, forward": [row["flops_per_token"]["forward"] / 1e6 for row in rows]}
    timed = any(row["step_ms"] for row in rows)
    if timed or all(row["step_ms_in_training"] for row in rows):
        part, how = ("step_ms", "") if timed else ("step_ms_in_training", " (median in training)")
        costs[f"measured training step, ms{how}, {device}"] = [row[part] for row in rows]
    panels, frames, numbers = list[Panel](), [], []
    for axis, values in costs.items():
        points = [(x, row, str(n)) for n, (x, row) in enumerate(zip(values, rows, strict=True), 1) if x is not None]
        most_x, most_y = outlier_limit(x for x, *_ in points), outlier_limit(row[loss] for _, row, _ in points)
        shown_y = [y for _, row, _ in points for y in (row[loss], *row[seeds]) if y <= most_y]
        (low, top), (left, right) = padded(shown_y), padded([x for x, *_ in points if x <= most_x])
        marks = [(min(x, right), min(row[loss], top), number) for x, row, number in points]
        best = [(x, y) for x, y, _ in sorted(marks) if y == min(b for a, b, _ in marks if a <= x)]
        lines = [Line(best, "" if panels else "frontier", color="#999999", linewidth=1)]
        for (x, row, number), (shown_x, y, _) in zip(points, marks, strict=True):
            beyond = (f" →{x:.4g}" if x > most_x else "") + (f" ↑{row[loss]:.2f}" if row[loss] > most_y else "")
            name = f"{number}  {shorten(row['variant'], 32)}{beyond}" if not panels or beyond else ""
            look = looks[row["variant"]][1] | {"marker": "s" if row["role"] == "control" else "o"}
            lines.append(Line([(shown_x, min(one, top)) for one in row[seeds]], **SPREAD))
            lines.append(Line([(shown_x, y)], name, zorder=3, clip_on=False, **look))
        panels.append(Panel(heading, lines, None, (low, top), axis, height=2.4 if panels else 3.6))
        frames.append((left, right))
        numbers.append([number for *_, number in points])
    key = [Line([], name, **look | {"markeredgecolor": "none"}) for name, look in dict(looks.values()).items()]
    if any(RIM.items() <= look.items() for _, look in looks.values()):
        key.append(Line([], "rim: temporal filter", **HOLLOW | RIM))
    if {row["role"] for row in rows} == {"control", "candidate"}:
        key += [Line([], "candidate", **HOLLOW), Line([], "control", **HOLLOW | {"marker": "s"})]
    if any(len(row[seeds]) > 1 for row in rows):
        key.append(Line([], "between seeds", **SPREAD))
    panels[-1].lines += key
    figure = draw_panels(results["title"], panels)
    for axes, frame in zip(figure.axes, frames, strict=True):
        axes.set_xlim(frame)
    figure.draw_without_rendering()  # computes the layout
    for axes, labels in zip(figure.axes, numbers, strict=True):
        separate_marks(axes, labels)
    return figure


def separate_marks(axes: "Axes", numbers: list[str]) -> None:
    """Move marks that would cover others, with a thin line to the true place, and write each mark's number where it
    covers no mark, number or line. Boxes are in points."""
    from matplotlib.transforms import offset_copy

    figure: Any = axes.get_figure(root=True)
    points = 72 / figure.dpi
    left, bottom, right, top = axes.get_window_extent().padded(8).extents * points
    occupied: list[tuple[float, ...]] = []

    def free_shift(place: Any, half_x: float, half_y: float, distances: Iterable[float]) -> tuple[float, float]:
        for distance, angle in product(distances, range(45, 405, 15)):
            shift = distance * math.cos(math.radians(angle)), distance * math.sin(math.radians(angle))
            x, y = place + shift
            box = x - half_x, y - half_y, x + half_x, y + half_y
            inside = left < box[0] and bottom < box[1] and box[2] < right and box[3] < top
            if inside and not any(a < box[2] and box[0] < c and b < box[3] and box[1] < d for a, b, c, d in occupied):
                break
        occupied.append(box)
        return shift

    lines: list[Any] = list(axes.lines)
    spreads, marks = (lines[first : 2 * len(numbers) + 1 : 2] for first in (1, 2))
    places = [axes.transData.transform(mark.get_xydata()[0]) * points for mark in marks]
    shifts = [free_shift(place, 6, 6, range(0, 60, 2)) for place in places]
    for line in (lines[0], *spreads):  # the first line is the frontier
        for start, end in pairwise(axes.transData.transform(line.get_xydata()) * points):
            steps = 1 + int(math.hypot(*(end - start)) / 2)
            dots = (start + (end - start) * step / steps for step in range(steps + 1))
            occupied += [(x - 1, y - 1, x + 1, y + 1) for x, y in dots]
    look: dict[str, Any] = {"textcoords": "offset points", "ha": "center", "va": "center", "fontsize": 7.5, "zorder": 2}
    lead: dict[str, Any] = {"arrowstyle": "-", "color": "#777777", "linewidth": 0.6, "shrinkA": 0, "shrinkB": 0}
    for mark, place, shift, number in zip(marks, places, shifts, numbers, strict=True):
        value = mark.get_xydata()[0]
        if any(shift):
            axes.annotate("", value, shift, arrowprops=lead, **look)
            mark.set_transform(offset_copy(axes.transData, figure, *shift, units="points"))
        offset = free_shift(place + shift, 2.5 * len(number) + 0.5, 4, (12, 15, 20, 26, 33, 41))
        arrow = lead if math.hypot(*offset) > 13 else None
        axes.annotate(number, value, offset, xycoords=mark.get_transform(), arrowprops=arrow, **look)


def draw_study(sources: Sequence[str]) -> "Figure":
    path = Path(sources[0], "results.json") if Path(sources[0]).is_dir() else Path(sources[0])
    check_file(path)
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
        assert results["format"] == "chiar-study-results/1"
    except (ValueError, TypeError, KeyError, AssertionError):
        raise InputError(f"{path} holds no results of a study: write them with chiar study table.") from None
    return draw_pareto(results)
