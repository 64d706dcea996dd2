"""What routing saves by counting, against the size of the model."""

import math
from collections.abc import Callable

from chiar.analysis.chart import COLOURS, Line, Panel, draw_chart
from chiar.config import ChiarConfig
from chiar.errors import InputError
from chiar.model.load import count_parameters, load_config
from chiar.routing.flops import FlopCount, Savings
from chiar.routing.tables import PAPER_ATTENTION, PAPER_TOTAL, describe_fraction, is_light, savings_by_length

DEFAULT = ("v3-16m", "v3-400m", "v3-1b")
TRANSFORMS = {"free": "a free DCT", "even_odd": "the DCT by halves", "gemm": "the DCT as a matrix"}
DASHES = ("7 3", "", "2 3")


def draw_savings(
    names: list[str], length: int, fraction: float | None = None, keys: str | None = None, light_ffn: bool | None = None
) -> str:
    """The first panel is all FLOPs, the second those of the layers, the third attention in routed layers."""
    configs = [load_config(name) for name in names]
    for name, config in zip(names, configs, strict=True):
        if not config.routed_layers:
            raise InputError(f"{name} routes nothing, so there is nothing to save: name a CHIAR model.")
    places = [math.log10(count_parameters(config)) for config in configs]
    counted = [savings_by_length(config, [length], fraction, keys, light_ffn)[0] for config in configs]
    panels = [
        panel("all FLOPs saved, %", places, counted, lambda saved: saved.total, PAPER_TOTAL),
        panel("FLOPs of the layers saved (no output projection), %", places, counted, saved_in_layers, None),
        panel(
            "attention of routed layers saved, %", places, counted,
            lambda saved: saved.attention_in_routed_layers or 0.0, PAPER_ATTENTION,
        ),
    ]  # fmt: skip
    return draw_chart(
        f"counted savings of {', '.join(names)}: {setting(configs[0], length, fraction, keys, light_ffn)}",
        panels, "trainable parameters", sizes=True,
    )  # fmt: skip


def setting(config: ChiarConfig, length: int, fraction: float | None, keys: str | None, light_ffn: bool | None) -> str:
    ffn = "" if is_light(config, light_ffn) else ", no light FFN"
    return f"T {length}, {describe_fraction(config, fraction)}, keys {keys or config.keys}{ffn}"


def saved_in_layers(saved: Savings) -> float:
    def layers(count: FlopCount) -> float:
        return count.total - count.part("logits")

    return 1.0 - layers(saved.chiar) / layers(saved.baseline)


def panel(
    title: str,
    places: list[float],
    counted: list[dict[str, Savings]],
    share: Callable[[Savings], float],
    paper: str | None,
) -> Panel:
    """One line for each cost of the transform; one for all where they agree. The paper's claim is marked."""
    found = {
        cost: [(x, 100 * share(one[cost])) for x, one in sorted(zip(places, counted, strict=True), key=first)]
        for cost in TRANSFORMS
    }
    if len({tuple(points) for points in found.values()}) == 1:
        drawn = [Line("whatever the DCT costs", found["even_odd"], COLOURS[0], dots=True)]
    else:
        drawn = [
            Line(f"with {TRANSFORMS[cost]}", points, COLOURS[number], dashes, dots=True)
            for number, ((cost, points), dashes) in enumerate(zip(found.items(), DASHES, strict=True))
        ]
    level = None if paper is None else (float(paper.rstrip("%").split("–")[0]), f"the paper: {paper}")
    return Panel(title, drawn, level)


def first(pair: tuple[float, dict[str, Savings]]) -> float:
    return pair[0]
