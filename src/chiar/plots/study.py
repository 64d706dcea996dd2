"""A study as a picture: loss against cost."""

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
    """What a variant is made of, and its mark: half light and half dark where tokens choose, or layers; rimmed where
    every token has the filter along time."""
    from chiar import presets
    from chiar.config_checks import LIGHT_LAYERS
    from chiar.registry import ROUTERS

    config = {**presets.get(declared["preset"]).to_dict(), **declared["config"]}
    kinds, dark = dict.fromkeys(config["layer_types"]), operator_colour("attention")
    routed, router = "routed" in kinds or "dark" in kinds, ROUTERS.get(config["router"])
    light = [config["operators"][0]] if routed else [kind for kind in kinds if kind in LIGHT_LAYERS]
    pale = operator_colour(light[0]) if light else dark
    if not light or (len(kinds) == len(light) and not routed):
        name, made = ("light layers only" if light else "dark: attention alone"), {"markerfacecolor": pale}
    else:
        tokens = routed and not (router and router.decides_by_layer)
        name, side = ("light or dark by token", "left") if tokens else ("light and dark layers", "bottom")
        made = {"markerfacecolor": dark, "markerfacecoloralt": pale, "fillstyle": side}
    name += ", light along time" if light == ["temporal"] else ""
    return name, MARK | made | (RIM if config.get("temporal_everywhere") else {})


def edge(values: Iterable[float]) -> float:
    """Of many, a few far above would press the others into one line: beyond this they stand at the axis's end."""
    known = sorted(values)
    far = 3 * median(known) - 2 * known[0]
    return far if len(known) >= 9 and far > known[0] else math.inf


@style()
def draw_pareto(results: dict[str, Any]) -> "Figure":
    """The results of a study: loss against counted FLOPs, and against step time where `chiar study time` measured it,
    or every variant was trained alone. Marks bear numbers, by rising FLOPs, which the legend names."""
    rows, device = results["variants"], (results["times"] or results["runs"][0])["device"]
    made = {run["variant"]: variant_look(run["declaration"]) for run in results["runs"]}
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
    for axis, places in costs.items():
        own = [(x, row, str(n)) for n, (x, row) in enumerate(zip(places, rows, strict=True), 1) if x is not None]
        far, lid = edge(x for x, *_ in own), edge(row[loss] for _, row, _ in own)
        spans = [y for _, row, _ in own for y in (row[loss], *row[seeds]) if y <= lid], [x for x, *_ in own if x <= far]
        airs = [(max(span) - min(span)) * 0.06 or 0.1 for span in spans]
        (low, top), (left, right) = ((min(s) - air, max(s) + air) for s, air in zip(spans, airs, strict=True))
        marks = [(min(x, right), min(row[loss], top), number) for x, row, number in own]
        best = [(x, y) for x, y, _ in sorted(marks) if y == min(b for a, b, _ in marks if a <= x)]
        lines = [Line(best, "" if panels else "frontier", color="#999999", linewidth=1)]
        for (x, row, number), (shown, y, _) in zip(own, marks, strict=True):
            beyond = (f" →{x:.4g}" if x > far else "") + (f" ↑{row[loss]:.2f}" if row[loss] > lid else "")
            name = f"{number}  {shorten(row['variant'], 32)}{beyond}" if not panels or beyond else ""
            look = made[row["variant"]][1] | {"marker": "s" if row["role"] == "control" else "o"}
            lines.append(Line([(shown, min(one, top)) for one in row[seeds]], **SPREAD))
            lines.append(Line([(shown, y)], name, zorder=3, clip_on=False, **look))
        panels.append(Panel(heading, lines, None, (low, top), axis, high=2.4 if panels else 3.6))
        frames.append((left, right))
        numbers.append([number for *_, number in own])
    key = [Line([], name, **look | {"markeredgecolor": "none"}) for name, look in dict(made.values()).items()]
    if any(RIM.items() <= look.items() for _, look in made.values()):
        key.append(Line([], "rim: filter along time", **HOLLOW | RIM))
    if {row["role"] for row in rows} == {"control", "candidate"}:
        key += [Line([], "candidate", **HOLLOW), Line([], "control", **HOLLOW | {"marker": "s"})]
    if any(len(row[seeds]) > 1 for row in rows):
        key.append(Line([], "between seeds", **SPREAD))
    panels[-1].lines += key
    figure = draw_panels(results["title"], panels)
    for axes, frame in zip(figure.axes, frames, strict=True):
        axes.set_xlim(frame)
    figure.draw_without_rendering()  # which settles where everything lies
    for axes, named in zip(figure.axes, numbers, strict=True):
        set_apart(axes, named)
    return figure


def set_apart(axes: "Axes", numbers: list[str]) -> None:
    """Moves a mark that would cover another one aside, a thin line leads back to its place; and writes each mark's
    number where it covers no mark, number or line. Boxes are in points."""
    from matplotlib.transforms import offset_copy

    figure: Any = axes.get_figure(root=True)
    points = 72 / figure.dpi
    left, low, right, high = axes.get_window_extent().padded(8).extents * points
    taken: list[tuple[float, ...]] = []

    def free(place: Any, wide: float, tall: float, distances: Iterable[float]) -> tuple[float, float]:
        for distance, angle in product(distances, range(45, 405, 15)):
            shift = distance * math.cos(math.radians(angle)), distance * math.sin(math.radians(angle))
            x, y = place + shift
            box = x - wide, y - tall, x + wide, y + tall
            inside = left < box[0] and low < box[1] and box[2] < right and box[3] < high
            if inside and not any(a < box[2] and box[0] < c and b < box[3] and box[1] < d for a, b, c, d in taken):
                break
        taken.append(box)
        return shift

    known: list[Any] = list(axes.lines)
    spreads, marks = (known[first : 2 * len(numbers) + 1 : 2] for first in (1, 2))
    places = [axes.transData.transform(mark.get_xydata()[0]) * points for mark in marks]
    shifts = [free(place, 6, 6, range(0, 60, 2)) for place in places]
    for line in (known[0], *spreads):  # the frontier too
        for begin, end in pairwise(axes.transData.transform(line.get_xydata()) * points):
            steps = 1 + int(math.hypot(*(end - begin)) / 2)
            dots = (begin + (end - begin) * step / steps for step in range(steps + 1))
            taken += [(x - 1, y - 1, x + 1, y + 1) for x, y in dots]
    look: dict[str, Any] = {"textcoords": "offset points", "ha": "center", "va": "center", "fontsize": 7.5, "zorder": 2}
    lead: dict[str, Any] = {"arrowstyle": "-", "color": "#777777", "linewidth": 0.6, "shrinkA": 0, "shrinkB": 0}
    for mark, place, shift, number in zip(marks, places, shifts, numbers, strict=True):
        true = mark.get_xydata()[0]
        if any(shift):
            axes.annotate("", true, shift, arrowprops=lead, **look)
            mark.set_transform(offset_copy(axes.transData, figure, *shift, units="points"))
        away = free(place + shift, 2.5 * len(number) + 0.5, 4, (12, 15, 20, 26, 33, 41))
        led = lead if math.hypot(*away) > 13 else None
        axes.annotate(number, true, away, xycoords=mark.get_transform(), arrowprops=led, **look)


def draw_study(sources: Sequence[str]) -> "Figure":
    path = Path(sources[0], "results.json") if Path(sources[0]).is_dir() else Path(sources[0])
    check_file(path)
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
        assert results["format"] == "chiar-study-results/1"
    except (ValueError, TypeError, KeyError, AssertionError):
        raise InputError(f"{path} holds no results of a study: write them with chiar study table.") from None
    return draw_pareto(results)
