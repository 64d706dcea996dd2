"""A routing trace as text: one line a layer, one column a token, light or dark."""

from pathlib import Path
from typing import Any

import torch
from rich.text import Text

from chiar.errors import InputError
from chiar.load import load_model
from chiar.routing.trace import LayerTrace, RoutingTrace
from chiar.tokens import encode

# Readable without colour (the marks differ) and with either common colour blindness (blue against orange).
MARKS = {"spectral": ("░", "bold black on bright_yellow"), "rbf": ("▒", "magenta"), "attention": ("█", "blue")}
COLUMNS = 72


def run_trace(name: str, text: str, tokenizer: Path | None, json: Path | None, seed: int) -> list[Any]:
    if json is not None and json.exists():
        raise InputError(f"{json} exists already and is left as it is: choose another name.")
    model, folder = load_model(name, seed)
    ids, pieces = encode(text, model.config, folder, tokenizer)
    if not ids:
        raise InputError("the text is empty: there is nothing to route.")
    with torch.no_grad():
        routing = model(torch.tensor([ids]), output_routing=True).routing
    if json is not None:
        json.write_text(routing.to_json())
    note = "" if folder else f" (preset with random weights, seed {seed}: the routes show the mechanism, not a skill)"
    legend = Text.assemble(f"{name}{note}: ", *(Text(f"{m} {op}  ", style=s) for op, (m, s) in MARKS.items()))
    return [legend, *view(routing, pieces)]


def view(routing: RoutingTrace, pieces: list[str]) -> list[Text]:
    """The first row of the batch; a token is shown by its first character."""
    columns = [(piece.strip() or " ")[0] for piece in pieces]
    lines = []
    for start in range(0, len(columns), COLUMNS):
        part = slice(start, start + COLUMNS)
        lines.append(Text(" " * 10 + "".join(columns[part])))
        for layer in routing.layers:
            line = Text(f"layer {layer.index + 1:<3} ")
            for choice in layer.choice_BT[0, part].tolist():
                mark, style = MARKS[layer.operators[choice]]
                line.append(mark, style=style)
            if start == 0:
                line.append("  " + summary(routing, layer))
            lines.append(line)
    return lines


def summary(routing: RoutingTrace, layer: LayerTrace) -> str:
    parts = [layer.kind, f"f = {routing.attention_fraction(layer.index):.2f}"]
    if layer.entropy_BT is not None:
        seen = layer.entropy_BT[routing.real_BT]
        parts.append(f"H {seen.min():.3f}–{seen.max():.3f}")
    if layer.thresholds is not None:
        parts.append("τ " + ", ".join(f"{t:.4f}" for t in layer.thresholds))
    if layer.gate_BT is not None:
        parts.append(f"g {layer.gate_BT[routing.real_BT].mean():.3f} (pool: {routing.gate_pool})")
    return "  ".join(parts)
