"""A diagram of a model's architecture."""

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from chiar.colours import NAMES, operator_colour
from chiar.plots.figure import COLOURS, DASHES, new_figure, style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from chiar.config import ChiarConfig

Box = tuple[str, str, str]  # label, note below it, colour
PLAIN, ROUTER, GATE = "#999999", COLOURS[2], COLOURS[1]
# By router: its rule, filled in from the configuration, and the condition for each operator.
RULES = {"entropy": "spectral entropy H(x), cut at τ", "random": "hash of the {random_key}, f = {random_fraction:g}"}
RULES |= {"learned": "linear map of x, {routing}", "static": "one operator per layer"}
RULES |= {"rise": "rise of the predictive entropy H, cut at τ"}
RULES |= {"predictive": "predictive entropy H, cut at τ", "forecast": "forecast of the final entropy, cut at τ"}
RULES |= {"spectral": RULES["entropy"], "boundary": "difference from the previous token: cosine below 0"}
RULES |= {"space": "the first space after a word", "stride": "every k-th token, f = {target_fraction}"}
CUTS: dict[tuple[str, int], tuple[str, ...]] = {
    ("entropy", 2): ("H ≤ τ", "H > τ"),
    ("entropy", 3): ("H ≤ τ_low", "τ_low < H ≤ τ_high", "H > τ_high"),
    ("rise", 2): ("rise ≤ τ", "rise > τ"),
}


@style()
def draw_model(sources: Sequence[str]) -> "Figure":
    """The architecture. Equal consecutive layers, and layers that alternate, are drawn once."""
    from chiar.model.load import load_config

    config = load_config(sources[0])
    layered = config.routed_layers and not config.stacks
    norm, keys = config.norm.replace("norm", " norm"), f", keys {config.keys}" if layered else ""
    shape = f"D {config.hidden_size}, {config.num_hidden_layers} layers, {config.num_attention_heads} heads"
    note = "learned positions added" if config.positions == "learned" else "RoPE rotates queries and keys instead"
    note += "; then RMS norm" if config.embedding_norm else ""
    rows: list[tuple[str, list[Box]]] = [("", [("token embedding", note, PLAIN)])]
    layers = [(kind, bool(config.meta_router) and n == 0) for n, kind in enumerate(config.layer_types or [])]
    groups = [(layer, [n for n, _ in group]) for layer, group in groupby(enumerate(layers, 1), lambda pair: pair[1])]
    if len(groups) > 6:
        groups = [(one, [n for n, layer in enumerate(layers, 1) if layer == one]) for one in dict.fromkeys(layers)]
    for (kind, gated), numbers in groups:
        first, last, count = numbers[0], numbers[-1], len(numbers)
        span = f"{first}–{last}" if last - first == count - 1 else f"{first}, {numbers[1]}, … {last}"
        boxes = layer_rows(config, kind, gated)
        names = [f"layer {first}" if count == 1 else f"layers {span} (×{count})"] + [""] * (len(boxes) - 1)
        rows += around_stack(config, names, boxes) if kind == "dark" else zip(names, boxes, strict=True)
    tied = "tied to the embedding" if config.tie_word_embeddings else "not tied to the embedding"
    rows.append(("output", [("final norm, output projection", tied, PLAIN)]))
    figure = new_figure(Path(sources[0]).name, 8.6, 0.75 * len(rows) + 0.6)
    axes = figure.add_subplot(xlim=(0, 1), ylim=(0.5 - len(rows), 0.5))
    axes.set_title(f"{shape}, {config.norm_position}-{norm}{keys}", weight="normal")
    axes.axis("off")
    previous: list[float] = []
    for number, (name, row) in enumerate(rows):
        centres = [0.6 + (place - (len(row) - 1) / 2) * 0.28 for place in range(len(row))]
        axes.text(0, -number, name, weight="bold", va="center")
        if name:
            axes.axhline(0.5 - number, color="#bbbbbb", linewidth=0.8, linestyle=DASHES[2])
        for column, (x, (label, note, colour)) in enumerate(zip(centres, row, strict=True)):
            # Between two rows of several boxes each column is connected to itself; an empty box is only a line.
            starts = previous if len(row) == 1 or len(previous) == 1 else previous[column : column + 1]
            if not label:
                axes.plot([x, x], [0.69 - number, -0.31 - number], color="#444444", linewidth=1)
                continue
            box = {"boxstyle": "round,pad=0.5", "facecolor": (colour, 0.22), "edgecolor": colour, "linewidth": 1.5}
            axes.text(x, -number, f"{label}\n{note}", ha="center", va="center", bbox=box)
            for start in starts:
                arrow = {"arrowstyle": "-|>", "color": "#444444", "shrinkA": 0, "shrinkB": 0, "mutation_scale": 9}
                axes.annotate("", (x, 0.31 - number), (start, 0.69 - number), arrowprops=arrow)
        previous = centres
    return figure


def layer_rows(config: "ChiarConfig", kind: str, gated: bool) -> list[list[Box]]:
    """The boxes of a layer from top to bottom, operators side by side."""
    from chiar.registry import is_light

    routed, operators = kind == "routed", list(config.operators or []) if kind == "routed" else [kind]
    if kind == "dark":
        return stack_rows(config)
    cuts = CUTS.get((config.router or "", len(operators)), ("",) * len(operators)) if routed else ("",)
    hidden = "4D" if config.intermediate_size == 4 * config.hidden_size else str(config.intermediate_size)
    rows: list[list[Box]] = []
    if config.temporal_everywhere:
        note = f"every token, over the last {config.temporal_window}"
        rows.append([("temporal filter", note, operator_colour("temporal"))])
    if routed:
        rule = RULES.get(config.router or "", "custom router").format(**config.to_dict())
        rows.append([(f"{config.router} router", rule, ROUTER)])
    side_by_side: list[Box] = []
    for operator, cut in zip(operators, cuts, strict=True):
        shade, _, name = NAMES.get(operator, f"light: {operator}").partition(": ")
        cut = cut or (f"the last {config.window:,} tokens" if kind == "attention" and config.window else "")
        side_by_side.append((name, f"{shade}: {cut}" if cut else shade, operator_colour(operator)))
    network = ("feed-forward", f"D → {hidden} → D, GELU", PLAIN)
    skips = routed and not config.light_ffn
    rows += [side_by_side, [BYPASS if is_light(name) else network for name in operators] if skips else [network]]
    if gated:
        gate = ("MetaRouter", f"g = σ(w·x̄ + b), x̄ the mean ({config.gate_pool})", GATE)
        rows = [[gate], *rows, [("MetaRouter", "g × the layer + (1 − g) × its input", GATE)]]
    return rows


BYPASS = ("", "", "")  # a line past the boxes beside it
# What light tokens get after a dark stack, and what dark ones get.
CARRIES = {
    "linear": ("W · last change of the stack", "and the carry"),
    "smoothed": ("running mean of its changes", "in the same mean"),
    "none": ("nothing", "their own"),
}


def stack_rows(config: "ChiarConfig") -> list[list[Box]]:
    """The boxes of a dark layer, which light tokens bypass."""
    inner, hidden = config.inner_size, config.of_layer(config.routed_layers[0]).intermediate_size
    width, wider = ("D", "4D") if not inner and hidden == 4 * config.hidden_size else (str(inner or "D"), str(hidden))
    boxes: list[Box] = [("attention", "dark: among dark tokens", operator_colour("attention"))]
    boxes.append(("feed-forward", f"{width} → {wider} → {width}, GELU", PLAIN))
    if config.temporal_everywhere:
        note = f"the last {config.temporal_window} dark tokens"
        boxes.insert(0, ("temporal filter", note, operator_colour("temporal")))
    return [[BYPASS, box] for box in boxes]


def around_stack(config: "ChiarConfig", names: list[str], rows: list[list[Box]]) -> list[tuple[str, list[Box]]]:
    """The layers of a dark stack, with the boxes before and after them."""
    kind, light, dark = config.router_kind, operator_colour("carry"), operator_colour("attention")
    rule = RULES.get(config.router or "", "custom router").format(**config.to_dict())
    cuts = CUTS.get((config.router or "", 2), CUTS["entropy", 2])
    below, above = cuts if kind.score else ("bypass", "")
    if kind.can_follow or kind.has_gradient:
        above += f"{', ' if above else ''}f = {', '.join(f'{f:g}' for f in config.layer_fractions() or [])}"
    width = f" to width {config.inner_size}" if config.inner_size else ""
    before: list[list[Box]] = [[(f"{config.router} router", rule, ROUTER)]]
    before.append([("light tokens", below, light), (f"pack dark tokens{width}", above or "in order", dark)])
    if kind.reads_prediction:
        before.insert(0, [("early head", "predicts the next token; H is the prediction's entropy", PLAIN)])
    for_light, for_dark = CARRIES[config.carry]
    after: list[Box] = [("carry", for_light, light), ("change", for_dark, dark)]
    headings = ["before the stack", *[""] * (len(before) - 1)]
    return [*zip(headings, before, strict=True), *zip(names, rows, strict=True), ("after the stack", after)]
