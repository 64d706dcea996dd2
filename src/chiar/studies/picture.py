"""The results of a study as a picture: loss against counted FLOPs, and against step time where it is known."""

from typing import Any

from chiar.plots import draw_pareto, svg_text


def draw(results: dict[str, Any]) -> str:
    device = (results["times"] or results["runs"][0])["device"]
    return svg_text(draw_pareto(results["variants"], results["title"], device))
