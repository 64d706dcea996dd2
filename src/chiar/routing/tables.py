"""What the commands print and write: counted FLOPs beside the paper's claims, calibrations, routed texts."""

import csv
import io
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.table import Table
from rich.text import Text

from chiar.colours import entropy_colours, layer_numbers, operator_colour, uncertainty
from chiar.config import ChiarConfig
from chiar.errors import require
from chiar.registry import is_light
from chiar.routing.flops import compare_flops, counted_parts, operator_shares, route_costs
from chiar.visible import visible

if TYPE_CHECKING:  # counting is quick because no model's classes are imported
    from chiar.model.trace import RoutingTrace
    from chiar.routing.calibration import Calibration

PAPER_TOTAL, PAPER_ATTENTION, TOKENS_A_LINE = "35–40%", "62.5%", 68
MARKS = {"rbf": "▒", "attention": "█"}  # readable without colour; a model has one light operator
TOKEN = ("position", "token_id", "piece", "layer", "kind")
COLUMNS = (*TOKEN, "operator", "attention_weight", "entropy", "thresholds", "gate")


def titled(title: str, *columns: str) -> Table:
    return Table(*columns, title=title, title_justify="left", box=None)


def describe_fraction(config: ChiarConfig, fraction: float | None) -> str:
    if has_fixed_shares(config):
        return "soft routing" if config.routing == "soft" else "fixed layers"
    fractions = [share["attention"] for share in operator_shares(config, fraction)]
    low, high = min(fractions), max(fractions)
    return f"f = {low:g}" if low == high else f"f = {low:g}–{high:g} by layer"


def has_fixed_shares(config: ChiarConfig) -> bool:
    """Whether no token chooses: all run everything, or whole layers decide."""
    return config.routing == "soft" or config.router_kind.decides_by_layer or not config.routed_layers


def flop_records(config: ChiarConfig, lengths: list[int], fraction: float | None = None) -> list[dict[str, Any]]:
    """What was counted at each length, as --json writes it; the transform costs what it costs as it runs."""
    shares, records = operator_shares(config, fraction), []
    for length in lengths:
        found, matrix, free = (compare_flops(config, length, shares, cost) for cost in ("even_odd", "gemm", "free"))
        record: dict[str, Any] = {"length": length, "fraction": fraction}
        record |= {"keys": config.keys, "light_ffn": config.light_ffn}
        for name, count in (("chiar", found.chiar), ("baseline", found.baseline)):
            record |= {name: {part: count.part(part) for part in counted_parts()}, f"{name}_total": count.total}
        record |= {"saved": found.total, "saved_matrix_transform": matrix.total, "saved_free_transform": free.total}
        record |= {"attention_saved_in_routed_layers": found.attention_in_routed_layers}
        records.append(record | {"attention_share_of_baseline": found.attention_share_of_baseline})
    return records


def flop_tables(name: str, config: ChiarConfig, records: list[dict[str, Any]]) -> list[Table]:
    """The paper's claims, and what a DCT may cost, stand beside routed layers; a dark stack has neither."""
    first, fraction, T = records[0], records[0]["fraction"], records[0]["length"]
    stacks = [layer_numbers(layers) for layers in config.stacks.values()]
    setting = describe_fraction(config, fraction)
    setting += f" of the tokens pass layers {' and '.join(stacks)}" if stacks else f", keys {config.keys}"
    setting += "" if stacks else f", light FFN {('off', 'on')[config.light_ffn]}"
    parts = titled(f"{name}, T = {T}, {setting}: counted MFLOPs per token, forward", "part", "CHIAR", "baseline")
    ours, theirs = ({**first[whose], "total": first[f"{whose}_total"]} for whose in ("chiar", "baseline"))
    for part in ours:
        if ours[part] or theirs[part]:
            parts.add_row(part, f"{ours[part] / 1e6:,.2f}", f"{theirs[part] / 1e6:,.2f}")
    if not has_fixed_shares(config):
        where = f"layers {stacks[0]} and their router" if stacks else "one routed layer"
        for operator, flops in route_costs(config, T, operator_shares(config, fraction)).items():
            token = f"a token to {operator}" if not stacks else f"a {'light' if is_light(operator) else 'dark'} token"
            parts.add_row(f"{token}, {where}", f"{flops / 1e6:,.3f}")
    cells = [{"T": f"{one['length']:,}"} | compared(one, bool(stacks)) for one in records]
    same = "depth" if stacks else "size"
    lengths = titled(
        f"against the dense baseline of the same {same} (norms, softmax, activations not counted)", *cells[0]
    )
    for row in cells:
        lengths.add_row(*row.values())
    return [parts, lengths]


def compared(one: dict[str, Any], stacks: bool) -> dict[str, str]:
    """What was counted at one length beside the baseline."""
    attention = one["attention_saved_in_routed_layers"]
    row = {"CHIAR ÷ baseline": f"{one['chiar_total'] / one['baseline_total']:.3f}", "saved": f"{one['saved']:.1%}"}
    if not stacks:
        row |= {"saved, DCT a matrix": f"{one['saved_matrix_transform']:.1%}"}
        row |= {"saved, DCT free": f"{one['saved_free_transform']:.1%}", "paper, total": PAPER_TOTAL}
    row[f"attention saved in {'dark' if stacks else 'routed'} layers"] = (
        "–" if attention is None else f"{attention:.1%}"
    )
    row |= {} if stacks else {"paper, attention": PAPER_ATTENTION}
    return row | {"attention's share of the baseline": f"{one['attention_share_of_baseline']:.1%}"}


def calibration_table(found: "Calibration", name: str, config: ChiarConfig) -> Table:
    noise, noise_columns = "", list[str]()
    if found.noise_mean is not None:
        noise = f"; white noise of this width {found.noise_mean:.4f} ± {found.noise_deviation:.4f}"
        noise_columns = ["KS from noise", "shift (σ of noise)"]
    table = titled(
        f"{name}: {found.score} by rule '{found.rule}', read {found.passes} time(s){noise}",
        *("layer", "tokens", *(f"p{p}" for p in found.layers[0].percentiles)),
        *("τ", "split (light … dark)", *noise_columns),
    )
    for row in found.layers:
        layer = "embedding" if row.layer is None else layer_numbers(config.stacks.get(row.layer, [row.layer]))
        percentiles = [f"{value:.4f}" for value in row.percentiles.values()]
        cuts, split = ", ".join(f"{t:.4f}" for t in row.thresholds), " / ".join(f"{share:.1%}" for share in row.split)
        apart = (
            [] if row.shift_from_noise is None else [f"{row.distance_from_noise:.3f}", f"{row.shift_from_noise:+.2f}"]
        )
        table.add_row(layer, f"{row.tokens:,}", *percentiles, cuts, split, *apart)
    return table


@dataclass
class RoutedText:
    heading: str
    pieces: list[str]
    trace: "RoutingTrace"


def route_text(name: str, text: str, tokenizer: Path | None, seed: int) -> RoutedText:
    from chiar.data.tokens import encode
    from chiar.model.load import load_model

    model, folder = load_model(name, seed)
    ids, pieces = encode(text, model.config, folder, tokenizer)
    require(ids, "the text is empty: there is nothing to route.")
    with torch.no_grad():
        trace = model(torch.tensor([ids]), output_routing=True).routing
    note = "" if folder else f", random weights (seed {seed}): the routes show the mechanism, not a skill"
    layer = trace.coloured_by
    if layer is not None and layer.thresholds == [0.0]:
        note += "; τ is 0 until a model is trained or calibrated"
        note += ", so every token is dark" if layer.choice_BT.all() else ""
    return RoutedText(f"{name}{note}", pieces, trace)


def routing_views(routed: RoutedText, colour: bool = True) -> list[Any]:
    """A line a layer and a column a token (by its first character), light or dark, and a summary of each layer. Without
    colours the text is plain: what its colours say is left out."""
    trace = routed.trace
    # Half-way to the deepest colour, which a black terminal would swallow.
    known = dict.fromkeys(name for layer in trace.layers for name in layer.operators)
    marks = {
        name: (MARKS.get(name, "░"), f"{'' if name in MARKS else 'black on '}{operator_colour(name, 0.5)}")
        for name in known
    }
    views: list[Any] = [Text(routed.heading)]
    views.append(Text("  ").join(Text(f"{mark} {name}", style) for name, (mark, style) in marks.items()))
    firsts = [first if (first := (piece.strip() or " ")[0]).isprintable() else "·" for piece in routed.pieces]
    shown, legend = list(zip(firsts, entropy_styles(trace), strict=True)), entropy_legend(trace)
    views += [legend] if legend and colour else []
    for start in range(0, len(firsts), TOKENS_A_LINE):
        part = slice(start, start + TOKENS_A_LINE)
        views.append(Text.assemble(" " * 13, *shown[part]))
        for layers in rows_of(trace):
            layer = trace.layers[layers[0]]
            chosen = [marks[layer.operators[choice]] for choice in layer.choice_BT[0, part].tolist()]
            views.append(Text.assemble(f"layer {layer_numbers(layers):<6} ", *chosen))
    table = Table("layer", "kind", "f", "entropy", "τ", "g", box=None)
    mixed = len({layer.entropy_name for layer in trace.layers}) > 1
    for layers in trace.parts:
        layer = trace.layers[layers[0]]
        entropy, gate, named = layer.entropy_BT, layer.gate_BT, f" ({layer.entropy_name})" if mixed else ""
        table.add_row(
            *(layer_numbers(layers), layer.kind, f"{trace.attention_fraction(layer.index):.2f}"),
            "–" if entropy is None else f"{entropy.min():.3f}–{entropy.max():.3f}{named}",
            ", ".join(f"{t:.4f}" for t in layer.thresholds or []) or "–",
            "–" if gate is None else f"{gate.mean():.3f} (pool: {trace.gate_pool})",
        )
    return [*views, table]


def rows_of(trace: "RoutingTrace") -> list[list[int]]:
    """Around a dark stack every token takes attention: only the stack has something to show."""
    stacks = [part for part in trace.parts if trace.layers[part[0]].kind == "dark"]
    return stacks or trace.parts


def entropy_styles(trace: "RoutingTrace") -> list[str]:
    """Of each token of the first row: a background between light and dark by its score; dark tokens are underlined."""
    layer = trace.coloured_by
    if layer is None or layer.entropy_BT is None:
        return [""] * trace.real_BT.shape[1]
    entropy_T, cut = layer.entropy_BT[0].float(), layer.thresholds[0] if layer.thresholds else None
    ends, styles = (float(entropy_T.min()), float(entropy_T.max())), []
    for entropy, choice in zip(entropy_T.tolist(), layer.choice_BT[0].tolist(), strict=True):
        share, line = uncertainty(entropy, cut, *ends), "bold underline " if choice else ""
        back, letter = entropy_colours(share)
        styles.append(f"{line}{letter} on {back}")
    return styles


def entropy_legend(trace: "RoutingTrace") -> Text | None:
    layer = trace.coloured_by
    if layer is None or layer.entropy_BT is None:
        return None
    low, high = float(layer.entropy_BT[0].min()), float(layer.entropy_BT[0].max())
    said, cut = f"the text by its {layer.entropy_name}", layer.thresholds[0] if layer.thresholds else None
    if cut is not None:
        where = "half-way" if low < cut < high else f"at or {'above' if cut >= high else 'below'} all of it"
        said += f", τ = {cut:.2f} {where}"
    first, last = (uncertainty(end, cut, low, high) for end in (low, high))
    steps = [("  ", f"on {entropy_colours(first + (last - first) * step / 8)[0]}") for step in range(9)]
    return Text.assemble(f"{said}: {low:.2f} ", *steps, f" {high:.2f}; underlined: dark")


def routing_csv(routed: RoutedText) -> str:
    """A line for each token in each layer, which count from 1; what a layer does not have is left empty."""
    trace, out = routed.trace, io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    assert trace.token_ids_BT is not None
    for t, (token, piece) in enumerate(zip(trace.token_ids_BT[0].tolist(), routed.pieces, strict=True)):
        for layer in trace.layers:
            operator, weights = layer.operators[int(layer.choice_BT[0, t])], layer.weights_BTK[0, t].tolist()
            attention = dict(zip(layer.operators, weights, strict=True)).get("attention", 0.0)
            entropy, gate = ("" if v is None else float(v[0, t]) for v in (layer.entropy_BT, layer.gate_BT))
            where, cuts = (layer.index + 1, layer.kind), " ".join(map(str, layer.thresholds or []))
            writer.writerow((t, token, visible(piece, keep=""), *where, operator, attention, entropy, cuts, gate))
    return out.getvalue()
