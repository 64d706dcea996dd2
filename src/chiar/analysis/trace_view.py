"""A routing trace as text: one line a layer, one column a token, light or dark."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from rich.text import Text

from chiar.data.tokens import encode
from chiar.errors import InputError
from chiar.model.load import load_model, resolve_model
from chiar.routing.trace import LayerTrace, RoutingTrace

# Readable without colour (the marks differ) and with either common colour blindness (blue against yellow).
PALE = ("░", "black on bright_yellow")
MARKS = {"rbf": ("▒", "magenta"), "attention": ("█", "blue")}
COLUMNS = 68


@dataclass
class RoutedText:
    """A text, the pieces its tokens stand for, and what the model did with them."""

    heading: str
    pieces: list[str]
    trace: RoutingTrace


def route_text(name: str, text: str, tokenizer: Path | None, seed: int) -> RoutedText:
    model, folder = load_model(resolve_model(name)[0], seed)
    ids, pieces = encode(text, model.config, folder, tokenizer)
    if not ids:
        raise InputError("the text is empty: there is nothing to route.")
    with torch.no_grad():
        trace = model(torch.tensor([ids]), output_routing=True).routing
    note = "" if folder else f", random weights (seed {seed}): the routes show the mechanism, not a skill"
    return RoutedText(f"{name}{note}", pieces, trace)


def views(routed: RoutedText) -> list[Any]:
    marks = {name: mark_of(name) for name in operators_of(routed.trace)}
    legend = Text("  ").join(Text(f"{mark} {name}", style) for name, (mark, style) in marks.items())
    hint = Text("a column is a token, shown by its first character; --csv and chiar plot routing have the whole", "dim")
    long = any(len(piece.strip()) > 1 for piece in routed.pieces)
    return [
        Text(routed.heading),
        legend,
        *([hint] if long else []),
        *grid(routed.trace, routed.pieces),
        summary(routed.trace),
    ]


def operators_of(trace: RoutingTrace) -> list[str]:
    """All that the model has, from light to dark."""
    used = dict.fromkeys(name for layer in trace.layers for name in layer.operators)
    return sorted(used, key=lambda name: [*MARKS].index(name) if name in MARKS else -1)


def mark_of(operator: str) -> tuple[str, str]:
    """All light operators look alike: a model has one."""
    return MARKS.get(operator, PALE)


def grid(trace: RoutingTrace, pieces: list[str]) -> list[Text]:
    """The first row of the batch; a token is shown by its first character."""
    columns = [column(piece) for piece in pieces]
    lines = []
    for start in range(0, len(columns), COLUMNS):
        part = slice(start, start + COLUMNS)
        lines.append(Text(" " * 10 + "".join(columns[part])))
        for layer in trace.layers:
            line = Text(f"layer {layer.index + 1:<3} ")
            for choice in layer.choice_BT[0, part].tolist():
                line.append(*mark_of(layer.operators[choice]))
            lines.append(line)
    return lines


def column(piece: str) -> str:
    first = (piece.strip() or " ")[0]
    return first if first.isprintable() else "·"


def summary(trace: RoutingTrace) -> Table:
    table = Table("layer", "kind", "f", "H", "τ", "g", box=None)
    for layer in trace.layers:
        table.add_row(str(layer.index + 1), layer.kind, *numbers(trace, layer))
    return table


def numbers(trace: RoutingTrace, layer: LayerTrace) -> tuple[str, str, str, str]:
    entropy = threshold = gate = "–"
    if layer.entropy_BT is not None:
        seen = layer.entropy_BT[trace.real_BT]
        entropy = f"{seen.min():.3f}–{seen.max():.3f}"
    if layer.thresholds is not None:
        threshold = ", ".join(f"{t:.4f}" for t in layer.thresholds)
    if layer.gate_BT is not None:
        gate = f"{layer.gate_BT[trace.real_BT].mean():.3f} (pool: {trace.gate_pool})"
    return f"{trace.attention_fraction(layer.index):.2f}", entropy, threshold, gate
