"""Drawings that are no charts: the routes of a text, and the architecture of a model."""

from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any

from chiar.config import ChiarConfig
from chiar.model.trace import LayerTrace, RoutingTrace
from chiar.plots import COLOURS, NAMES, RAMPS, operator_colour, shorten, style
from chiar.visible import visible

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PLAIN, ROUTER, GATE = "#999999", COLOURS[2], COLOURS[4]


class Canvas:
    """Free drawing in pixels, y down; the figure is as high as what was drawn."""

    def __init__(self, title: str, wide: float) -> None:
        from matplotlib.figure import Figure

        self.figure, self.wide = Figure(label=title), wide
        self.axes = self.figure.add_axes((0, 0, 1, 1))
        self.axes.axis("off")

    def text(self, x: float, y: float, text: str, size: float = 9, ha: str = "center", **look: Any) -> None:
        self.axes.text(x, y, text, fontsize=size, ha=ha, va="center", **look)

    def box(self, x: float, y: float, wide: float, high: float, label: str, note: str, colour: str) -> None:
        from matplotlib.patches import FancyBboxPatch

        look: dict[str, Any] = {"boxstyle": "round,pad=0,rounding_size=6", "linewidth": 1.5, "edgecolor": colour}
        self.axes.add_patch(FancyBboxPatch((x, y), wide, high, facecolor=(colour, 0.22), **look))
        self.text(x + wide / 2, y + high / 2 - (8 if note else 0), label, weight="bold")
        self.text(x + wide / 2, y + high / 2 + 9, note, 8)

    def line(self, *points: tuple[float, float], tip: bool = True) -> None:
        """Through these points, with an arrow at the last."""
        arrow = {"arrowstyle": "-|>" if tip else "-", "color": "#444444", "shrinkA": 0, "shrinkB": 0}
        self.axes.plot([x for x, _ in points[:-1]], [y for _, y in points[:-1]], color="#444444", linewidth=1)
        self.axes.annotate("", points[-1], points[-2], arrowprops=arrow | {"linewidth": 1, "mutation_scale": 9})

    def finish(self, high: float) -> "Figure":
        self.axes.set(xlim=(0, self.wide), ylim=(high, 0))
        self.figure.set_size_inches(self.wide / 96, high / 96)
        return self.figure


@style()
def draw_routing(trace: RoutingTrace, pieces: list[str], heading: str) -> "Figure":
    """The first row of a batch: tokens across, wrapped; layers down; the stronger, the farther H is from τ."""
    from matplotlib.patches import Rectangle

    left, wide, cell = 175.0, 980.0, 20.0
    canvas = Canvas(f"Routing of a text by {heading}", wide)
    canvas.text(wide / 2, 22, shorten(heading, 100), 12, weight="bold")
    gaps = [abs(gap) for layer in trace.layers for token in range(len(pieces)) if (gap := distance(layer, token))]
    farthest, x, y = max(gaps, default=0.0), left, 92.0
    used = dict.fromkeys(name for layer in trace.layers for name in layer.operators)
    for operator in sorted(used, key=lambda name: [*RAMPS].index(name) if name in RAMPS else -1):
        for strength in (0.0, 0.5, 1.0) if farthest else (0.5,):
            canvas.axes.add_patch(Rectangle((x, 44), 18, 14, facecolor=operator_colour(operator, strength)))
            x += 18
        canvas.text(x + 6, 51, NAMES.get(operator, f"light: {operator}"), ha="left")
        x += 180
    canvas.text(x, 51, f"stronger: H farther from τ, up to {farthest:.3f}" if farthest else "", ha="left")
    shown = [piece.replace("\n", "⏎").replace("\t", "⇥").replace(" ", "·") or "∅" for piece in pieces]
    shown, x = [shorten(visible(piece, keep=""), 40) for piece in shown], left
    for token, piece in enumerate(shown):
        room = len(piece) * 7.9 + 8
        if x + room > wide - 12 and x > left:
            x, y = left, y + 38 + cell * len(trace.layers)
        canvas.text(x + room / 2, y, piece, 9, family="DejaVu Sans Mono")
        for row, layer in enumerate(trace.layers):
            gap, operator = distance(layer, token), layer.operators[int(layer.choice_BT[0, token])]
            colour = operator_colour(operator, 0.5 if gap is None else abs(gap) / (farthest or 1.0))
            place = x, y + 13 + row * cell
            canvas.axes.add_patch(Rectangle(place, room, cell, facecolor=colour, edgecolor="#ffffff", linewidth=0.7))
            if x == left:
                canvas.text(left - 8, place[1] + cell / 2, layer_name(trace, layer), 8, "right")
        x += room
    return canvas.finish(y + 26 + cell * len(trace.layers))


def distance(layer: LayerTrace, token: int) -> float | None:
    """H − τ, from the nearest of several thresholds; None where the layer compares no entropy."""
    if layer.entropy_BT is None or not layer.thresholds:
        return None
    entropy = float(layer.entropy_BT[0, token])
    return min((entropy - threshold for threshold in layer.thresholds), key=abs)


def layer_name(trace: RoutingTrace, layer: LayerTrace) -> str:
    if layer.kind != "routed":
        gate = f", g {float(layer.gate_BT[0].mean()):.2f}" if layer.gate_BT is not None else ""
        return f"layer {layer.index + 1}: all {layer.kind}{gate}"
    cut = ", τ " + "/".join(f"{t:.3f}" for t in layer.thresholds) if layer.thresholds else ""
    return f"layer {layer.index + 1}: f {trace.attention_fraction(layer.index):.2f}{cut}"


@style()
def draw_model(config: ChiarConfig, title: str) -> "Figure":
    """The architecture: equal neighbouring layers, and layers that alternate, are drawn once."""
    assert config.layer_types is not None
    canvas, norm = Canvas(f"Architecture of {title}", 640), "RMSNorm" if config.norm == "rmsnorm" else "LayerNorm"
    canvas.text(320, 20, title, 13, weight="bold")
    keys = f", keys {config.keys}" if config.routed_layers else ""
    shape = f"D {config.hidden_size}, {config.num_hidden_layers} layers, {config.num_attention_heads} heads"
    canvas.text(320, 42, f"{shape}, {config.norm_position}-{norm}{keys}", 8)
    note = "learned positions added" if config.positions == "learned" else "RoPE turns queries and keys instead"
    canvas.box(160, 58, 320, 44, "token embedding", note + ("; then RMS norm" if config.embedding_norm else ""), PLAIN)
    y = 102.0
    gates = [bool(config.meta_router) and i == 0 for i in range(len(config.layer_types))]
    for (kind, gated), name in layer_groups(list(zip(config.layer_types, gates, strict=True))):
        canvas.line((320, y), (320, y + 18))
        y = draw_layer(canvas, config, kind, name, gated, y + 18)
    canvas.line((320, y), (320, y + 18))
    canvas.box(160, y + 18, 320, 32, "final norm", "", PLAIN)
    canvas.line((320, y + 50), (320, y + 68))
    tied = "output projection (tied to the embedding)" if config.tie_word_embeddings else "output projection"
    canvas.box(160, y + 68, 320, 32, tied, "", PLAIN)
    return canvas.finish(y + 112)


def layer_groups(layers: list[tuple[str, bool]]) -> list[tuple[tuple[str, bool], str]]:
    """What to draw, with a name: layers that alternate all the way once each, else equal neighbours once."""
    total = len(layers)
    for period in range(2, total // 4 + 1):
        pattern = layers[:period]
        if layers == pattern * (total // period) and all(a != b for a, b in pairwise(pattern)):
            ends = [(pattern[k], k + 1, total - period + k + 1) for k in range(period)]
            return [(layer, f"layers {a}, {a + period}, … {b} (×{total // period})") for layer, a, b in ends]
    found, first = [], 1
    for layer, group in groupby(layers):
        count = len(list(group))
        found.append((layer, f"layer {first}" if count == 1 else f"layers {first}–{first + count - 1} (×{count})"))
        first += count
    return found


def draw_layer(canvas: Canvas, config: ChiarConfig, kind: str, name: str, gated: bool, top: float) -> float:
    """From `top` down; returns where the layer's frame ends."""
    from matplotlib.patches import FancyBboxPatch

    y, routed = top + 30, kind == "routed"
    steps: list[tuple[str, str, str]] = []
    if gated:
        pooled = {"batch": "over the batch", "sequence": "over the row", "causal": "over the row so far"}
        steps.append(("MetaRouter", f"g = σ(w·x̄ + b), x̄ the mean {pooled[config.gate_pool]}", GATE))
    if config.temporal_everywhere:
        steps.append(
            ("temporal filter", f"every token, over the last {config.temporal_window}", operator_colour("temporal"))
        )
    if routed:
        steps.append((f"{config.router} router", rule(config), ROUTER))
    else:
        steps.append((NAMES[kind].split(": ")[1], "", operator_colour(kind)))
    for number, step in enumerate(steps):
        canvas.box(160, y, 320, 44, *step)
        y += 44
        if number + 1 < len(steps) or not routed:
            canvas.line((320, y), (320, y + 18))
            y += 18
    if routed:
        y = draw_operators_of(canvas, config, y)
    hidden = "4D" if config.intermediate_size == 4 * config.hidden_size else str(config.intermediate_size)
    skipped = routed and not config.light_ffn
    shared = ", shared by the operators" if routed and config.light_ffn else ""
    canvas.box(
        160,
        y,
        320,
        44,
        f"feed-forward{shared}",
        "light tokens skip it" if skipped else f"D → {hidden} → D, GELU",
        PLAIN,
    )
    y += 44
    if skipped:
        canvas.line((52, y - 74), (52, y + 14), (320, y + 14))
        canvas.line((320, y), (320, y + 22), tip=False)
        y += 22
    if gated:
        canvas.line((480, top + 52), (580, top + 52), (580, y + 26), (329, y + 26))
        canvas.line((320, y), (320, y + 17))
        canvas.text(320, y + 25, "⊕", 14)
        canvas.text(308, y + 12, "× g", 8, "right")
        canvas.text(574, y + 16, "× (1 − g): identity", 8, "right")
        y += 36
    look: dict[str, Any] = {
        "boxstyle": "round,pad=0,rounding_size=10",
        "linestyle": (0, (5, 4)),
        "edgecolor": "#888888",
    }
    canvas.axes.add_patch(FancyBboxPatch((20, top), 600, y + 10 - top, facecolor="none", **look))
    canvas.text(32, top + 15, name, 9, "left", weight="bold")
    canvas.line((320, y), (320, y + 10), tip=False)
    return y + 10


def draw_operators_of(canvas: Canvas, config: ChiarConfig, y: float) -> float:
    """A routed layer's operators side by side, from the router down to what follows."""
    assert config.operators is not None
    count = len(config.operators)
    wide = (560 - 16 * (count - 1)) / count
    bounds = ["H ≤ τ", "H > τ"] if count == 2 else ["H ≤ τ_low", "τ_low < H ≤ τ_high", "H > τ_high"]
    for number, operator in enumerate(config.operators):
        x = 40 + number * (wide + 16)
        shade, _, name = NAMES.get(operator, f"light: {operator}").partition(": ")
        canvas.line((320, y), (x + wide / 2, y + 28))
        note = f"{shade}: {bounds[number]}" if config.router == "entropy" else shade
        canvas.box(x, y + 28, wide, 44, name, note, operator_colour(operator))
        if config.light_ffn or shade != "light":
            canvas.line((x + wide / 2, y + 72), (320, y + 100))
    return y + 102


def rule(config: ChiarConfig) -> str:
    assert config.operators is not None
    if config.router == "entropy":
        return "spectral entropy H(x), cut at τ" if len(config.operators) == 2 else "H(x), cut at τ_low and τ_high"
    if config.router == "random":
        return f"hash of the {config.random_key}, f = {config.random_fraction:g}"
    if config.router == "learned":
        return f"linear map of x, {config.routing}"
    return "one operator a layer" if config.router == "static" else str(config.router)
