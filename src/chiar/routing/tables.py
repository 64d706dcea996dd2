"""What the commands print and write: counted FLOPs beside the paper's claims, calibrations, routed texts."""

import csv
import io
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.table import Table
from rich.text import Text

from chiar.config import ChiarConfig
from chiar.errors import InputError
from chiar.routing.flops import TRANSFORMS, Savings, compare_flops, counted_parts, operator_shares, route_costs
from chiar.visible import visible

if TYPE_CHECKING:  # counting is quick because no model's classes are imported
    from chiar.model.trace import RoutingTrace
    from chiar.routing.calibration import Calibration

PAPER_TOTAL, PAPER_ATTENTION = "35–40%", "62.5%"
# Readable without colour (the marks differ) and with either common colour blindness (blue against yellow). All light
# operators look alike: a model has one.
PALE = ("░", "black on bright_yellow")
MARKS = {"rbf": ("▒", "magenta"), "attention": ("█", "blue")}
TOKENS_A_LINE = 68
COLUMNS = (
    *("position", "token_id", "piece", "layer", "kind"),
    *("operator", "attention_weight", "entropy", "thresholds", "gate"),
)


def titled(title: str, *columns: str) -> Table:
    return Table(*columns, title=title, title_justify="left", box=None)


def savings_by_length(
    config: ChiarConfig, lengths: list[int], fraction: float | None, keys: str | None, light_ffn: bool | None
) -> list[dict[str, Savings]]:
    """For each length, by what the transform costs."""
    shares = operator_shares(config, fraction)
    return [{cost: compare_flops(config, T, shares, keys, light_ffn, cost) for cost in TRANSFORMS} for T in lengths]


def has_fixed_shares(config: ChiarConfig) -> bool:
    """Whether no token chooses: all run everything, or whole layers decide."""
    return config.routing == "soft" or config.router == "static" or not config.routed_layers


def describe_fraction(config: ChiarConfig, fraction: float | None) -> str:
    if has_fixed_shares(config):
        return "soft routing" if config.routing == "soft" else "fixed layers"
    fractions = [share["attention"] for share in operator_shares(config, fraction)]
    low, high = min(fractions), max(fractions)
    return f"f = {low:g}" if low == high else f"f = {low:g}–{high:g} by layer"


def is_light(config: ChiarConfig, light_ffn: bool | None) -> bool:
    return config.light_ffn if light_ffn is None else light_ffn


def flop_records(
    config: ChiarConfig, lengths: list[int], fraction: float | None, keys: str | None, light_ffn: bool | None
) -> list[dict[str, Any]]:
    """What was counted at each length, as --json writes it; the transform costs what it costs as it runs."""
    return [
        {
            "length": row["even_odd"].chiar.length,
            "fraction": fraction,
            "keys": keys or config.keys,
            "light_ffn": is_light(config, light_ffn),
            "chiar": {part: row["even_odd"].chiar.part(part) for part in counted_parts()},
            "baseline": {part: row["even_odd"].baseline.part(part) for part in counted_parts()},
            "chiar_total": row["even_odd"].chiar.total,
            "baseline_total": row["even_odd"].baseline.total,
            "saved": row["even_odd"].total,
            "saved_matrix_transform": row["gemm"].total,
            "saved_free_transform": row["free"].total,
            "attention_saved_in_routed_layers": row["even_odd"].attention_in_routed_layers,
            "attention_share_of_baseline": row["even_odd"].attention_share_of_baseline,
        }
        for row in savings_by_length(config, lengths, fraction, keys, light_ffn)
    ]


def flop_tables(name: str, config: ChiarConfig, records: list[dict[str, Any]]) -> list[Table]:
    first, percent = records[0], "{:.1%}".format
    fraction, T, keys, light_ffn = (first[field] for field in ("fraction", "length", "keys", "light_ffn"))
    setting = f"{describe_fraction(config, fraction)}, keys {keys}, light FFN {'on' if light_ffn else 'off'}"
    title = f"{name}, T = {T}, {setting}: counted MFLOPs per token, forward"
    parts = titled(title, "part", "CHIAR", "baseline")
    ours, theirs = ({**first[whose], "total": first[f"{whose}_total"]} for whose in ("chiar", "baseline"))
    for part in ours:
        if ours[part] or theirs[part]:
            parts.add_row(part, f"{ours[part] / 1e6:,.2f}", f"{theirs[part] / 1e6:,.2f}")
    routes = titled(f"one token in a routed layer, T = {T}", "route", "MFLOPs")
    if not has_fixed_shares(config):
        for operator, flops in route_costs(config, T, operator_shares(config, fraction), keys, light_ffn).items():
            label = {"rbf": "rbf", "attention": "dark (attention)"}.get(operator, f"light ({operator})")
            routes.add_row(label, f"{flops / 1e6:,.3f}")
    lengths = titled(
        "against the dense baseline of the same size (norms, softmax, activations not counted)",
        *("T", "CHIAR ÷ baseline", "saved", "saved, DCT a matrix", "saved, DCT free", "paper, total"),
        *("attention saved in routed layers", "paper, attention", "attention's share of the baseline"),
    )
    for record in records:
        attention = record["attention_saved_in_routed_layers"]
        lengths.add_row(
            f"{record['length']:,}",
            f"{record['chiar_total'] / record['baseline_total']:.3f}",
            *(percent(record[f"saved{cost}"]) for cost in ("", "_matrix_transform", "_free_transform")),
            PAPER_TOTAL,
            "–" if attention is None else percent(attention),
            PAPER_ATTENTION,
            percent(record["attention_share_of_baseline"]),
        )
    return [parts, routes, lengths] if routes.row_count else [parts, lengths]


def calibration_table(found: "Calibration", name: str) -> Table:
    percentiles = found.layers[0].percentiles
    table = titled(
        f"{name}: spectral entropy by rule '{found.rule}', read {found.passes} time(s); "
        f"white noise of this width {found.noise_mean:.4f} ± {found.noise_deviation:.4f}",
        *("layer", "tokens", *(f"p{p}" for p in percentiles)),
        *("τ", "split (light … dark)", "KS from noise", "shift (σ of noise)"),
    )
    for row in found.layers:
        table.add_row(
            "embedding" if row.layer is None else str(row.layer + 1),
            f"{row.tokens:,}",
            *(f"{row.percentiles[p]:.4f}" for p in percentiles),
            ", ".join(f"{t:.4f}" for t in row.thresholds),
            " / ".join(f"{share:.1%}" for share in row.split),
            f"{row.distance_from_noise:.3f}",
            f"{row.shift_from_noise:+.2f}",
        )
    return table


@dataclass
class RoutedText:
    """A text, the pieces its tokens stand for, and what the model did with them."""

    heading: str
    pieces: list[str]
    trace: "RoutingTrace"


def route_text(name: str, text: str, tokenizer: Path | None, seed: int) -> RoutedText:
    from chiar.data.tokens import encode
    from chiar.model.load import load_model, resolve_model

    model, folder = load_model(resolve_model(name)[0], seed)
    ids, pieces = encode(text, model.config, folder, tokenizer)
    if not ids:
        raise InputError("the text is empty: there is nothing to route.")
    with torch.no_grad():
        trace = model(torch.tensor([ids]), output_routing=True).routing
    note = "" if folder else f", random weights (seed {seed}): the routes show the mechanism, not a skill"
    return RoutedText(f"{name}{note}", pieces, trace)


def operators_of(trace: "RoutingTrace") -> list[str]:
    """All that the model has, from light to dark."""
    used = dict.fromkeys(name for layer in trace.layers for name in layer.operators)
    return sorted(used, key=lambda name: [*MARKS].index(name) if name in MARKS else -1)


def routing_views(routed: RoutedText) -> list[Any]:
    """A line a layer and a column a token, light or dark, and a summary of each layer."""
    trace, marks = routed.trace, {name: MARKS.get(name, PALE) for name in operators_of(routed.trace)}
    views: list[Any] = [Text(routed.heading)]
    views.append(Text("  ").join(Text(f"{mark} {name}", style) for name, (mark, style) in marks.items()))
    if any(len(piece.strip()) > 1 for piece in routed.pieces):
        hint = "a column is a token, shown by its first character; --csv and chiar plot routing have the whole"
        views.append(Text(hint, "dim"))
    firsts = [(piece.strip() or " ")[0] for piece in routed.pieces]
    for start in range(0, len(firsts), TOKENS_A_LINE):
        part = slice(start, start + TOKENS_A_LINE)
        views.append(Text(" " * 10 + "".join(first if first.isprintable() else "·" for first in firsts[part])))
        for layer in trace.layers:
            line = Text(f"layer {layer.index + 1:<3} ")
            for choice in layer.choice_BT[0, part].tolist():
                line.append(*marks[layer.operators[choice]])
            views.append(line)
    return [*views, layer_summary(trace)]


def layer_summary(trace: "RoutingTrace") -> Table:
    table = Table("layer", "kind", "f", "H", "τ", "g", box=None)
    for layer in trace.layers:
        entropy = gate = "–"
        if layer.entropy_BT is not None:
            seen = layer.entropy_BT[trace.real_BT]
            entropy = f"{seen.min():.3f}–{seen.max():.3f}"
        if layer.gate_BT is not None:
            gate = f"{layer.gate_BT[trace.real_BT].mean():.3f} (pool: {trace.gate_pool})"
        threshold = "–" if layer.thresholds is None else ", ".join(f"{t:.4f}" for t in layer.thresholds)
        fraction = f"{trace.attention_fraction(layer.index):.2f}"
        table.add_row(str(layer.index + 1), layer.kind, fraction, entropy, threshold, gate)
    return table


def routing_csv(routed: RoutedText) -> str:
    """A line for each token in each layer. Layers count from 1, as in everything printed; what a layer does not have
    is left empty."""
    trace, out = routed.trace, io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    ids = [""] * len(routed.pieces) if trace.token_ids_BT is None else trace.token_ids_BT[0].tolist()
    for t, (token, piece) in enumerate(zip(ids, routed.pieces, strict=True)):
        for layer in trace.layers:
            weights = dict(zip(layer.operators, layer.weights_BTK[0, t].tolist(), strict=True))
            writer.writerow(
                [
                    *(t, token, visible(piece, keep=""), layer.index + 1, layer.kind),
                    layer.operators[int(layer.choice_BT[0, t])],
                    weights.get("attention", 0.0),
                    "" if layer.entropy_BT is None else float(layer.entropy_BT[0, t]),
                    " ".join(map(str, layer.thresholds or [])),
                    "" if layer.gate_BT is None else float(layer.gate_BT[0, t]),
                ]
            )
    return out.getvalue()
