"""Architecture diagrams drawn from a configuration, as self-contained SVG."""

from html import escape
from itertools import groupby, pairwise

from chiar.config import ChiarConfig
from chiar.registry import is_light

WIDTH = 640
CENTRE = WIDTH // 2
# Okabe and Ito's colours, which stay apart under the common colour blindnesses.
COLOURS = {
    "light": "#56b4e9",
    "temporal": "#f0e442",
    "rbf": "#cc79a7",
    "attention": "#d55e00",
    "router": "#009e73",
    "gate": "#e69f00",
    "plain": "#bbbbbb",
}
LABELS = {
    "spectral": "spectral filter",
    "temporal": "temporal filter",
    "skip": "nothing",
    "bypass": "value and output projections",
    "rbf": "RBF mixing",
    "attention": "causal attention",
}


class Canvas:
    """Boxes and arrows from top to bottom; `y` is where the next one goes."""

    def __init__(self) -> None:
        self.parts: list[str] = []
        self.y = 56

    def box(self, x: int, y: int, width: int, height: int, label: str, kind: str, note: str = "") -> None:
        colour = COLOURS.get(kind, COLOURS["light"])
        self.parts.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="6" fill="{colour}" fill-opacity="0.22" '
            f'stroke="{colour}" stroke-width="2"/>'
        )
        middle = y + height / 2 + (0 if note else 5)
        self.text(x + width / 2, middle, label, weight="600")
        if note:
            self.text(x + width / 2, middle + 16, note, size=11)

    def frame(self, y: int, height: int, label: str) -> None:
        self.parts.append(
            f'<rect x="20" y="{y}" width="{WIDTH - 40}" height="{height}" rx="10" fill="none" stroke="#888888" '
            'stroke-dasharray="5 4"/>'
        )
        self.text(32, y + 19, label, anchor="start", size=12, weight="600")

    def text(self, x: float, y: float, text: str, size: int = 13, anchor: str = "middle", weight: str = "400") -> None:
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}" font-weight="{weight}">'
            f"{escape(text)}</text>"
        )

    def arrow(self, x1: float, y1: float, x2: float, y2: float) -> None:
        self.parts.append(
            f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="#444444" stroke-width="1.5" '
            'marker-end="url(#tip)"/>'
        )

    def bypass(self, top: float, bottom: float, through: str, around: str) -> None:
        """A line around the right of what was drawn between `top` and `bottom`, meeting the main one in a sum."""
        right = WIDTH - 60
        self.parts.append(
            f'<polyline points="{CENTRE + 160},{top:g} {right},{top:g} {right},{bottom:g}" fill="none" '
            'stroke="#444444" stroke-width="1.5"/>'
        )
        self.arrow(right, bottom, CENTRE + 9, bottom)
        self.arrow(CENTRE, bottom - 24, CENTRE, bottom - 9)
        self.parts.append(f'<circle cx="{CENTRE}" cy="{bottom:g}" r="8" fill="#ffffff" stroke="#444444"/>')
        self.text(CENTRE, bottom + 4.5, "+", weight="600")
        self.text(CENTRE - 8, bottom - 12, through, size=11, anchor="end")
        self.text(right - 6, bottom - 6, around, size=11, anchor="end")

    def past(self, top: float, bottom: float) -> None:
        """A line down the left of what was drawn between `top` and `bottom`, joining the main one."""
        left = 52
        self.parts.append(
            f'<polyline points="{left},{top:g} {left},{bottom:g} {CENTRE},{bottom:g}" fill="none" stroke="#444444" '
            'stroke-width="1.5" marker-end="url(#tip)"/>'
        )
        self.parts.append(
            f'<line x1="{CENTRE}" y1="{self.y:g}" x2="{CENTRE}" y2="{bottom + 12:g}" stroke="#444444" '
            'stroke-width="1.5"/>'
        )

    def step(self, label: str, kind: str = "plain", note: str = "", height: int = 44, width: int = 320) -> None:
        """A centred box with an arrow to the next."""
        self.box(CENTRE - width // 2, self.y, width, height, label, kind, note)
        self.y += height
        self.arrow(CENTRE, self.y, CENTRE, self.y + 18)
        self.y += 20

    def svg(self, title: str) -> str:
        height = self.y + 10
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
            f'height="{height}" role="img" aria-label="{escape(title, quote=True)}" '
            'font-family="system-ui, sans-serif" fill="#111111">\n'
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            'orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="#444444"/></marker></defs>\n'
            f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>\n' + "\n".join(self.parts) + "\n</svg>\n"
        )


def draw(config: ChiarConfig, title: str) -> str:
    """The model as SVG: equal neighbouring layers, and layers that alternate, are drawn once."""
    assert config.layer_types is not None
    canvas = Canvas()
    canvas.text(CENTRE, 26, title, size=18, weight="700")
    canvas.text(CENTRE, 44, describe(config), size=11)
    canvas.y = 58
    learned = config.positions == "learned"
    note = "learned positions added" if learned else "RoPE turns queries and keys instead"
    canvas.step("token embedding", note=f"{note}; then RMS norm" if config.embedding_norm else note)
    gates = [bool(config.meta_router) and i == 0 for i in range(len(config.layer_types))]
    for (kind, gated), name in named(list(zip(config.layer_types, gates, strict=True))):
        draw_layer(canvas, config, kind, name, gated)
    canvas.step("final norm", height=34)
    tied = "output projection (tied to the embedding)" if config.tie_word_embeddings else "output projection"
    canvas.box(CENTRE - 160, canvas.y, 320, 34, tied, "plain")
    canvas.y += 34
    return canvas.svg(f"Architecture of {title}")


def named(layers: list[tuple[str, bool]]) -> list[tuple[tuple[str, bool], str]]:
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


def describe(config: ChiarConfig) -> str:
    norm = "RMSNorm" if config.norm == "rmsnorm" else "LayerNorm"
    heads = f"{config.num_attention_heads} heads"
    keys = f", keys {config.keys}" if config.routed_layers else ""
    return f"D {config.hidden_size}, {config.num_hidden_layers} layers, {heads}, {config.norm_position}-{norm}{keys}"


def draw_layer(canvas: Canvas, config: ChiarConfig, kind: str, name: str, gated: bool) -> None:
    assert config.operators is not None
    top = canvas.y
    canvas.y += 30
    branch = canvas.y + 22
    if gated:
        pooled = {"batch": "over the batch", "sequence": "over the row", "causal": "over the row so far"}
        canvas.step("MetaRouter", "gate", f"g = σ(w·x̄ + b), x̄ the mean {pooled[config.gate_pool]}")
    if config.temporal_everywhere:
        canvas.step("temporal filter", "temporal", f"every token, over the last {config.temporal_window}")
    if kind == "routed":
        canvas.box(CENTRE - 160, canvas.y, 320, 44, f"{config.router} router", "router", rule(config))
        canvas.y += 44
        ends = draw_operators(canvas, config)
    else:
        canvas.step(LABELS[kind], kind)
    routed = kind == "routed"
    whose = "one for light tokens, one for the others" if config.own_ffn else "shared by the operators"
    label = f"feed-forward, {whose}" if routed and config.light_ffn else "feed-forward"
    hidden = "4D" if config.intermediate_size == 4 * config.hidden_size else str(config.intermediate_size)
    note = f"D → {hidden} → D, GELU" if config.light_ffn or not routed else "light tokens skip it"
    canvas.box(CENTRE - 160, canvas.y, 320, 44, label, "plain", note)
    canvas.y += 44
    if routed and not config.light_ffn:
        canvas.past(ends, canvas.y + 14)
        canvas.y += 16
    if gated:
        canvas.bypass(branch, canvas.y + 24, "× g", "× (1 − g): identity")
        canvas.y += 28
    canvas.frame(top, canvas.y - top + 10, name)
    canvas.arrow(CENTRE, canvas.y + 10, CENTRE, canvas.y + 28)
    canvas.y += 30


def rule(config: ChiarConfig) -> str:
    assert config.operators is not None
    if config.router == "entropy":
        if config.signal == "temporal":
            return f"H of the last {config.temporal_window} tokens along time, cut at τ"
        return "spectral entropy H(x), cut at τ" if len(config.operators) == 2 else "H(x), cut at τ_low and τ_high"
    if config.router == "learned":
        read = "[x; H]" if config.router_reads == "state_and_entropy" else "x"
        return f"{'two-layer' if config.router_hidden else 'linear'} map of {read}, {config.routing}"
    if config.router == "random":
        return f"hash of the {config.random_key}, f = {config.random_fraction:g}"
    return "one operator a layer" if config.router == "static" else str(config.router)


def draw_operators(canvas: Canvas, config: ChiarConfig) -> float:
    """The operators of a routed layer side by side; returns where their boxes end."""
    assert config.operators is not None
    count, gap = len(config.operators), 16
    width = (WIDTH - 80 - gap * (count - 1)) // count
    y = canvas.y + 30
    for k, operator in enumerate(config.operators):
        x = 40 + k * (width + gap)
        note = {"rbf": "between", "attention": "dark"}.get(operator, "light")
        if config.router == "entropy":
            bounds = ["H ≤ τ", "H > τ"] if count == 2 else ["H ≤ τ_low", "τ_low < H ≤ τ_high", "H > τ_high"]
            note = f"{note}: {bounds[k]}"
        canvas.arrow(CENTRE, canvas.y, x + width / 2, y)
        canvas.box(x, y, width, 46, LABELS.get(operator, operator), operator, note)
        if config.light_ffn or not is_light(operator):
            canvas.arrow(x + width / 2, y + 46, CENTRE, y + 76)
    canvas.y = y + 78
    return y + 46
