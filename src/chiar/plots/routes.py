"""The route of each token of a text, as a figure."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chiar.colours import NAMES, entropy_colours, layer_numbers, operator_colour, uncertainty
from chiar.errors import require
from chiar.plots.figure import COLOURS, new_figure, shorten, style
from chiar.visible import visible

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from chiar.model.trace import RoutingTrace


def symbols(piece: str) -> str:
    return visible(piece.replace("\n", "⏎").replace("\t", "⇥").replace(" ", "·"), keep="")


@style()
def draw_routing(trace: "RoutingTrace", pieces: list[str], heading: str, per_line: int = 32) -> "Figure":
    """The first row of a batch: tokens across, at most `per_line`; layers down; stronger colours far from τ."""
    if trace.coloured_by is not None:
        return draw_uncertainty(trace, pieces, heading)
    from matplotlib.colors import to_rgb
    from matplotlib.patches import Patch

    lines = -(-len(pieces) // per_line)
    per_line = -(-len(pieces) // lines)  # lines of equal length
    shown = [shorten(symbols(piece) or "∅", 16) for piece in pieces]
    distances = {}  # |H − τ| to the nearest threshold, in layers that compare an entropy
    for layer in trace.layers:
        if layer.entropy_BT is not None and layer.thresholds:
            gaps_TC = layer.entropy_BT[0, :, None] - layer.entropy_BT.new_tensor(layer.thresholds)
            distances[layer.index] = gaps_TC.abs().amin(1)
    farthest = max((float(gap_T.max()) for gap_T in distances.values()), default=1.0) or 1.0
    rows: dict[str, list[Any]] = {}
    for layer in trace.layers:
        cut = "".join(f", τ {threshold:.3f}" for threshold in layer.thresholds or [])
        cut += "" if layer.gate_BT is None else f", g {float(layer.gate_BT[0].mean()):.2f}"
        chosen = [layer.operators[choice] for choice in layer.choice_BT[0].tolist()]
        known = layer.index in distances
        strengths = (distances[layer.index] / farthest).tolist() if known else [0.5] * len(pieces)
        cells = [to_rgb(operator_colour(*cell)) for cell in zip(chosen, strengths, strict=True)]
        empty = [(1.0, 1.0, 1.0)] * (lines * per_line - len(cells))
        rows[f"layer {layer.index + 1}: f {trace.attention_fraction(layer.index):.2f}{cut}"] = cells + empty
    height = 0.2 * len(rows) + 0.12 * max(map(len, shown)) + 0.3
    figure = new_figure(f"Routing of a text by {heading}", 10.0, height * lines + 0.8)
    for line, (axes,) in enumerate(figure.subplots(lines, squeeze=False)):
        part = slice(line * per_line, (line + 1) * per_line)
        look: dict[str, Any] = {"rotation": 50, "ha": "left", "rotation_mode": "anchor", "family": "DejaVu Sans Mono"}
        axes.imshow([cells[part] for cells in rows.values()], aspect="auto")
        axes.set_xticks(range(len(shown[part])), shown[part], **look)
        axes.set_yticks(range(len(rows)), list(rows), fontsize=8)
        axes.tick_params(top=True, labeltop=True, bottom=False, labelbottom=False, length=0)
        axes.grid(False)
    used = dict.fromkeys(name for layer in trace.layers for name in layer.operators)
    patches = [Patch(color=operator_colour(name), label=NAMES.get(name, f"light: {name}")) for name in used]
    patches.append(Patch(color="none", label="stronger: H farther from τ"))
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), handlelength=1)
    return figure


def draw_uncertainty(trace: "RoutingTrace", pieces: list[str], heading: str, per_line: int = 72) -> "Figure":
    """Before a dark stack: each token's entropy as a bar, its uncertainty as the colour; dark tokens are underlined."""
    from matplotlib.patches import Patch

    layer, lines = trace.coloured_by, -(-len(pieces) // per_line)
    assert layer is not None and layer.entropy_BT is not None
    stack = next(part for part in trace.parts if layer.index in part)
    entropies, cut = layer.entropy_BT[0].tolist(), layer.thresholds[0] if layer.thresholds else None
    low, high = min(0.0, *entropies, cut or 0.0), max(0.0, *entropies, cut or 0.0)
    ends = min(entropies), max(entropies)
    shares = [uncertainty(entropy, cut, *ends) for entropy in entropies]
    step, per_line = (high - low) / 4 or 1.0, -(-len(pieces) // lines)
    figure = new_figure(f"{layer.entropy_name.capitalize()} of a text by {heading}", 10.0, 1.15 * lines + 1.0)
    for line, (axes,) in enumerate(figure.subplots(lines, squeeze=False)):
        part = slice(line * per_line, (line + 1) * per_line)
        colours, columns = [entropy_colours(share)[0] for share in shares[part]], range(len(shares[part]))
        axes.bar(columns, entropies[part], 0.9, color=colours, edgecolor="#777777")
        axes.bar(columns, [-1.5 * step] * len(columns), 1.0, low, color=colours)
        for column, piece, share, dark in zip(
            columns, pieces[part], shares[part], layer.choice_BT[0, part].tolist(), strict=True
        ):
            look: dict[str, Any] = {"family": "DejaVu Sans Mono", "ha": "center", "va": "center", "fontsize": 9}
            shown = shorten(symbols(piece), 4)
            axes.text(column, low - 0.75 * step, shown, color=entropy_colours(share)[1], **look)
            if dark:
                axes.plot([column - 0.42, column + 0.42], [low - 1.7 * step] * 2, color=COLOURS[2], linewidth=2.5)
        if cut is not None:
            axes.axhline(cut, color="#444444", dashes=(2, 4), linewidth=1)
        axes.set(xlim=(-0.6, per_line - 0.4), ylim=(low - 2 * step, high * 1.03), xticks=[])
        axes.set_yticks([low, high], [f"{low:.2f}", f"{high:.2f}"])
        axes.grid(False)
    dark = f"{trace.attention_fraction(layer.index):.0%}"
    marks = {f"least, {ends[0]:.2f}": min(shares), f"most, {ends[1]:.2f}": max(shares)}
    marks |= {} if cut is None else {"at τ": 0.5}
    ascending = sorted(marks.items(), key=lambda pair: pair[1])
    patches = [Patch(color=entropy_colours(share)[0], label=label) for label, share in ascending]
    patches.append(Patch(color="none", label=f"underlined: {dark} pass layers {layer_numbers(stack)}"))
    patches += [Patch(color="none", label=f"dashed: τ = {cut:.3f}")] if cut is not None else []
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), handlelength=1)
    return figure


def draw_routes(sources: Sequence[str], prompt: str = "", tokenizer: Path | None = None, seed: int = 0) -> "Figure":
    from chiar.routing.tables import route_text

    require(prompt, "routing needs a text: give it with --prompt.")
    routed = route_text(sources[0], prompt, tokenizer, seed)
    return draw_routing(routed.trace, routed.pieces, routed.heading)
