"""Loss against cost as self-contained SVG: every variant a mark, its seeds small, the frontier a line."""

from dataclasses import dataclass, field
from math import inf
from statistics import median
from typing import Any

from chiar.analysis.chart import COLOURS, Axes, document, label, shorten, spread

LEFT, RIGHT, WIDTH, TOP, HEIGHT, GAP, ENTRY = 76, 250, 860, 60, 320, 84, 17
MANY = 9
# Controls are hollow squares, everything else filled circles: told apart without colour.
CONTROL, OTHER = COLOURS[6], COLOURS[0]


@dataclass(frozen=True)
class Mark:
    number: int
    name: str
    role: str
    x: float
    y: float
    """The mean."""
    seeds: list[tuple[float, float]] = field(default_factory=list)


@dataclass(frozen=True)
class Scatter:
    title: str
    axis: str
    marks: list[Mark]


def frontier(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """From left to right, every point lower than all before it."""
    found: list[tuple[float, float]] = []
    for x, y in sorted(points):
        if not found or y < found[-1][1]:
            found.append((x, y))
    return found


def lid(heights: list[float]) -> float:
    """Up to here marks are drawn to scale: of many, a few that lost by far would press the others into one line."""
    if len(heights) < MANY or not (distance := median(heights) - min(heights)):
        return inf
    return min(heights) + 4 * distance


def draw_pareto(rows: list[dict[str, Any]], title: str = "", device: str = "") -> str:
    """A study's variants: loss against counted FLOPs, and against step time where it was measured (on `device`)."""
    paired = all(row["paired_loss"] is not None for row in rows)
    unequal = paired and len({tuple(sorted(row["seeds"])) for row in rows}) > 1
    loss = "test loss, nats per token" + (" (baseline's mean + paired Δ)" if unequal else "")
    flops = [row["flops_per_token"]["forward"] / 1e6 for row in rows]
    panels = [Scatter(loss, "counted MFLOPs a token, forward", marks_of(rows, flops, paired, by_seed=True))]
    timed = any(row["step_ms"] for row in rows)
    if timed or all(row["step_ms_in_training"] for row in rows):
        times = [row["step_ms" if timed else "step_ms_in_training"] for row in rows]
        how = "" if timed else " (median in training)"
        panels.append(Scatter(loss, f"measured training step, ms{how}, {device}", marks_of(rows, times, paired)))
    return draw_scatters(title, panels)


def marks_of(rows: list[dict[str, Any]], places: list[Any], paired: bool, by_seed: bool = False) -> list[Mark]:
    marks = []
    for number, (row, x) in enumerate(zip(rows, places, strict=True), 1):
        mean, losses = (row["paired_loss"], row["paired_losses"]) if paired else (row["test_loss"], row["losses"])
        seeds = zip(row["seeds"], row["flops_by_seed"], strict=True)
        flops = [count / 1e6 for seed, count in seeds if not paired or seed in row["gap_seeds"]]
        each = [(count if by_seed else x, y) for count, y in zip(flops, losses, strict=True)]
        if x is not None:
            marks.append(Mark(number, row["variant"], row["role"], x, mean, each))
    return marks


def draw_scatters(title: str, panels: list[Scatter]) -> str:
    """The panels one above the other, each with the names of its marks beside it."""
    parts, top = [label(WIDTH / 2, 28, shorten(title, 90), size=16, weight="700")], float(TOP)
    for panel in panels:
        height = max(HEIGHT, ENTRY * (len(panel.marks) + 5))
        parts += draw_scatter(panel, top, height)
        top += height + GAP
    return document(WIDTH, top, title, parts)


def draw_scatter(panel: Scatter, top: float, height: float) -> list[str]:
    right, bottom = WIDTH - RIGHT, top + height
    highest = lid([mark.y for mark in panel.marks])
    points = [point for mark in panel.marks for point in ((mark.x, mark.y), *mark.seeds)]
    ranges = spread([x for x, _ in points]), spread([y for _, y in points if y <= highest])
    axes = Axes(LEFT, right, top, bottom, *ranges)
    across, up = axes.across, axes.up
    parts = [label(LEFT, top - 10, panel.title, anchor="start", size=13, weight="600"), *axes.draw()]
    parts.append(label((LEFT + right) / 2, bottom + 38, panel.axis))
    best = frontier([(mark.x, mark.y) for mark in panel.marks])

    def place_of(y: float) -> float:
        return top if y > highest else up(y)

    line = " ".join(f"{across(x):.1f},{place_of(y):.1f}" for x, y in best)
    parts.append(f'<polyline class="frontier" points="{line}" fill="none" stroke="#d55e00" stroke-width="1.6"/>')
    for mark in panel.marks:
        seeds = mark.seeds if len(mark.seeds) > 1 else []
        parts += [shape("seed", mark.role, across(x), up(y), 2.2) for x, y in seeds if y <= highest]
    taken = [(across(mark.x), place_of(mark.y) + 4) for mark in panel.marks]
    for mark in panel.marks:
        x, y = across(mark.x), place_of(mark.y)
        parts.append(shape("mean", mark.role, x, y, 5))
        place = free_place(x, y + 4, taken, (top, bottom - 2))
        if abs(place[1] - y) > 16:
            parts.append(
                f'<path d="M{x:.1f} {y:.1f} L{place[0] - 1:g} {place[1] - 4:g}" stroke="#999999" stroke-width="0.6"/>'
            )
        parts.append(label(*place, str(mark.number), size=10, anchor="start"))
    return parts + legend(panel, right + 18, top, best)


def shape(kind: str, role: str, x: float, y: float, size: float) -> str:
    if role == "control":
        where = f'x="{x - size:.1f}" y="{y - size:.1f}" width="{2 * size:g}" height="{2 * size:g}"'
        return f'<rect class="{kind} control" {where} fill="#ffffff" stroke="{CONTROL}" stroke-width="1.4"/>'
    return f'<circle class="{kind} candidate" cx="{x:.1f}" cy="{y:.1f}" r="{size:g}" fill="{OTHER}"/>'


def free_place(
    x: float, y: float, taken: list[tuple[float, float]], between: tuple[float, float]
) -> tuple[float, float]:
    """A number's place beside its mark, where neither a mark nor an earlier number stands: right or left of it, else
    some lines above or below, but inside the axes."""
    lines = [sign * 10 * n for n in range(24) for sign in (-1, 1)]
    places = [(x + side, y + line) for line in lines for side in (8, -20) if between[0] <= y + line <= between[1]]
    free = [p for p in places if all(abs(p[0] - a) > 13 or abs(p[1] - b) > 9 for a, b in taken if (a, b) != (x, y))]
    place = (free or places or [(x + 8, y)])[0]
    taken.append(place)
    return round(place[0], 1), round(place[1], 1)


def legend(panel: Scatter, x: float, top: float, best: list[tuple[float, float]]) -> list[str]:
    parts, highest = [], lid([mark.y for mark in panel.marks])
    for place, mark in enumerate(panel.marks):
        name = f"{mark.number} {mark.name}" + (f" ↑{mark.y:.2f}" if mark.y > highest else "")
        y = top + 6 + ENTRY * place
        weight = "700" if (mark.x, mark.y) in best else "400"
        parts.append(shape("key", mark.role, x, y, 4))
        parts.append(label(x + 10, y + 4, shorten(name, 32), 11, "start", weight))
    y = top + 12 + ENTRY * len(panel.marks)
    parts.append(f'<path d="M{x - 6:g} {y:g} h16" stroke="#d55e00" stroke-width="1.6"/>')
    parts.append(label(x + 16, y + 4, "frontier, names in bold", 11, "start"))
    parts.append(label(x - 6, y + 4 + ENTRY, "square: control, circle: candidate", 11, "start"))
    parts.append(label(x - 6, y + 4 + 2 * ENTRY, "small marks: single seeds", 11, "start"))
    if any(mark.y > highest for mark in panel.marks):
        parts.append(label(x - 6, y + 4 + 3 * ENTRY, "↑ above the picture", 11, "start"))
    return parts
