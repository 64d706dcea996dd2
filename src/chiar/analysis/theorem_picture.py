"""The check of Theorem 1 as a picture: coding gain and kept energy against width, a column for each ρ."""

import math
from collections.abc import Callable

from chiar.analysis.chart import COLOURS, Line
from chiar.analysis.panels import SmallPanel, draw_grid
from chiar.analysis.theorem import BASES, KEPT, SHUFFLED, Check

DASHES = ("", "7 3", "", "2 3", "9 3 2 3")
LOOKS = {name: (colour, dashes) for name, colour, dashes in zip(BASES, COLOURS, DASHES, strict=False)}


def draw_theorem(checks: list[Check]) -> str:
    rhos = list(dict.fromkeys(check.rho for check in checks))
    panels = [panel(f"ρ = {rho:g}: coding gain, dB", checks, rho, lambda check: check.gain_db) for rho in rhos]
    panels += [
        panel(f"ρ = {rho:g}: energy in the first D/{KEPT}, %", checks, rho, lambda check: 100 * check.first_share)
        for rho in rhos
    ]
    legend = [Line(name, [], *look) for name, look in LOOKS.items()]
    title = "Theorem 1: the DCT against the best basis, for features correlated by ρ^|i−j|"
    return draw_grid(title, panels, legend, "D, number of features", "", columns=min(len(rhos), 3))


def panel(title: str, checks: list[Check], rho: float, height: Callable[[Check], float]) -> SmallPanel:
    own = [check for check in checks if check.rho == rho]
    lines, bars = [], []
    for name, (colour, dashes) in LOOKS.items():
        points = [(math.log2(check.width), height(check)) for check in own if check.basis == name]
        lines.append(Line(name, sorted(points), colour, dashes, dots=True))
    for check in own:
        if check.gain_range is not None and "gain" in title:
            bars.append((math.log2(check.width), *check.gain_range, LOOKS[SHUFFLED][0]))
    names = sorted({(math.log2(check.width), str(check.width)) for check in own})
    bounds = None if "gain" in title else (0.0, 100.0)
    return SmallPanel(title, lines, bars=bars, names=names, bounds=bounds)
