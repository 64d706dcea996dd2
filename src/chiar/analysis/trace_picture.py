"""A routed text as a picture: tokens across, layers down, light to dark by how far H lies from its threshold."""

from html import escape

from chiar.analysis.chart import document, label, shorten
from chiar.model.trace import LayerTrace, RoutingTrace
from chiar.registry import is_light
from chiar.routing.tables import RoutedText, operators_of
from chiar.visible import visible

WIDTH, LEFT, CELL, CHARACTER = 960, 168, 22, 8.2
Colour = tuple[int, int, int]
# Yellow against blue stays apart under the common colour blindnesses, and in grey: all light cells are paler than any
# dark one. Each pair goes from at the threshold to far from it.
LIGHT: tuple[Colour, Colour] = (255, 247, 205), (250, 205, 50)
RAMPS: dict[str, tuple[Colour, Colour]] = {
    "temporal": ((247, 250, 210), (205, 220, 60)),
    "rbf": ((221, 160, 195), (204, 121, 167)),
    "attention": ((120, 170, 215), (8, 40, 100)),
}
NAMES = {
    "spectral": "light: spectral filter",
    "temporal": "light: temporal filter",
    "skip": "light: nothing",
    "bypass": "light: value and output projections",
    "rbf": "between: RBF mixing",
    "attention": "dark: attention",
}


def draw_routing(routed: RoutedText) -> str:
    """SVG of the first row of the batch; a token is as wide as its text and the text wraps."""
    trace, farthest = routed.trace, farthest_from_threshold(routed.trace)
    pieces = [shown(piece) for piece in routed.pieces]
    parts = [label(WIDTH / 2, 28, shorten(routed.heading, 100), size=16, weight="700")]
    parts += legend(trace, 52, farthest)
    y = 92.0
    for tokens in wrap(pieces):
        x = float(LEFT)
        for token in tokens:
            width = room(pieces[token])
            parts.append(
                f'<text x="{x + width / 2:.1f}" y="{y + 14:.1f}" font-size="13" text-anchor="middle" '
                f'font-family="monospace" xml:space="preserve">{escape(pieces[token])}</text>'
            )
            for row, layer in enumerate(trace.layers):
                parts.append(cell(layer, token, x, y + 20 + row * CELL, width, pieces[token], farthest))
            x += width
        for row, layer in enumerate(trace.layers):
            parts.append(label(LEFT - 8, y + 35 + row * CELL, describe(trace, layer), size=11, anchor="end"))
        y += 20 + len(trace.layers) * CELL + 18
    return document(WIDTH, y + 4, f"Routing of a text by {routed.heading}", parts)


def shown(piece: str) -> str:
    """A token's text on one line; a space at its edge is shown, since the edges of tokens matter."""
    return visible(piece.replace("\n", "⏎").replace("\t", "⇥"), keep="").replace(" ", "·") or "∅"


def room(piece: str) -> float:
    return min(len(piece), 40) * CHARACTER + 8


def wrap(pieces: list[str]) -> list[list[int]]:
    lines: list[list[int]] = [[]]
    x = float(LEFT)
    for token, piece in enumerate(pieces):
        if lines[-1] and x + room(piece) > WIDTH - 12:
            lines.append([])
            x = LEFT
        lines[-1].append(token)
        x += room(piece)
    return lines


def distance(layer: LayerTrace, token: int) -> float | None:
    """H − τ, from the nearest of several thresholds; None where the layer compares no entropy."""
    if layer.entropy_BT is None or not layer.thresholds:
        return None
    entropy = float(layer.entropy_BT[0, token])
    return min((entropy - threshold for threshold in layer.thresholds), key=abs)


def farthest_from_threshold(trace: RoutingTrace) -> float:
    tokens = trace.layers[0].choice_BT.shape[1]
    found = [distance(layer, token) for layer in trace.layers for token in range(tokens)]
    return max((abs(value) for value in found if value is not None), default=0.0) or 1.0


def mix(operator: str, strength: float) -> str:
    near, far = RAMPS.get(operator, LIGHT)
    return "#" + "".join(f"{round(a + (b - a) * min(strength, 1.0)):02x}" for a, b in zip(near, far, strict=True))


def cell(layer: LayerTrace, token: int, x: float, y: float, width: float, piece: str, farthest: float) -> str:
    operator = layer.operators[int(layer.choice_BT[0, token])]
    gap = distance(layer, token)
    said = f"{piece} in layer {layer.index + 1}: {operator}"
    if layer.entropy_BT is not None:
        said += f", H {float(layer.entropy_BT[0, token]):.4f}"
    if gap is not None:
        said += f", H − τ {gap:+.4f}"
    fill = mix(operator, 0.5 if gap is None else abs(gap) / farthest)
    return (
        f'<rect class="cell" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{CELL}" fill="{fill}" '
        f'stroke="#ffffff"><title>{escape(said)}</title></rect>'
    )


def describe(trace: RoutingTrace, layer: LayerTrace) -> str:
    """What a layer is, in as many words as fit beside it."""
    if layer.kind != "routed":
        gate = f", g {float(layer.gate_BT[0].mean()):.2f}" if layer.gate_BT is not None else ""
        return f"layer {layer.index + 1}: all {layer.kind}{gate}"
    threshold = ", τ " + "/".join(f"{t:.3f}" for t in layer.thresholds) if layer.thresholds else ""
    return f"layer {layer.index + 1}: f {trace.attention_fraction(layer.index):.2f}{threshold}"


def legend(trace: RoutingTrace, y: float, farthest: float) -> list[str]:
    scaled = any(layer.thresholds for layer in trace.layers)
    parts, x = [], float(LEFT)
    for operator in operators_of(trace):
        steps = (1.0, 0.5, 0.0) if is_light(operator) else (0.0, 0.5, 1.0)
        for number, strength in enumerate(steps if scaled else (0.5,)):
            parts.append(
                f'<rect x="{x + 18 * number:g}" y="{y:g}" width="18" height="14" fill="{mix(operator, strength)}"/>'
            )
        x += 18 * len(steps if scaled else (0.5,)) + 6
        name = NAMES.get(operator, f"light: {operator}")
        parts.append(label(x, y + 11, name, anchor="start"))
        x += 7 * len(name) + 16
    if scaled:
        parts.append(label(x, y + 11, f"stronger: H farther from τ, up to {farthest:.3f}", anchor="start"))
    return parts
