"""What the commands print and write: counted FLOPs next to the paper's claims, calibrations, routed texts."""

import csv
import io
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from chiar.colours import entropy_colours, layer_numbers, operator_colour, uncertainty
from chiar.config import ChiarConfig
from chiar.errors import require
from chiar.registry import is_light
from chiar.routing.flops import compare_flops, counted_parts, operator_shares, route_costs
from chiar.visible import visible

if TYPE_CHECKING:  # `chiar flops` starts fast because it does not import the model
    from chiar.model.trace import RoutingTrace
    from chiar.routing.calibration import Calibration

PAPER_TOTAL, PAPER_ATTENTION = "35–40%", "62.5%"
TOKENS_PER_LINE = 67  # with the label 80 columns
MARKS = {"rbf": "▒", "attention": "█"}  # readable without colour; ░ marks light operators
TOKEN = ("position", "token_id", "piece", "layer", "kind")
COLUMNS = (*TOKEN, "operator", "attention_weight", "entropy", "thresholds", "gate")


def titled_table(title: str, *columns: str) -> Table:
    return Table(*columns, title=title, title_justify="left", box=None)


def describe_fraction(config: ChiarConfig, fraction: float | None) -> str:
    if has_fixed_shares(config):
        return "soft routing" if config.routing == "soft" else "fixed layers"
    fractions = [share["attention"] for share in operator_shares(config, fraction)]
    low, high = min(fractions), max(fractions)
    return f"f = {low:g}" if low == high else f"f = {low:g}–{high:g} by layer"


def has_fixed_shares(config: ChiarConfig) -> bool:
    """Whether f cannot be chosen: routing is soft, a router assigns whole layers, or no layer is routed."""
    return config.routing == "soft" or config.router_kind.decides_by_layer or not config.routed_layers


def flop_records(config: ChiarConfig, lengths: list[int], fraction: float | None = None) -> list[dict[str, Any]]:
    """The counts at each length, as --json writes them, with the transform as executed, as a matrix and free."""
    shares, records = operator_shares(config, fraction), []
    for length in lengths:
        executed, matrix, free = (compare_flops(config, length, shares, cost) for cost in ("even_odd", "gemm", "free"))
        record: dict[str, Any] = {"length": length, "fraction": fraction}
        record |= {"keys": config.keys, "light_ffn": config.light_ffn}
        for name, count in (("chiar", executed.chiar), ("baseline", executed.baseline)):
            record |= {name: {part: count.part(part) for part in counted_parts()}, f"{name}_total": count.total}
        record |= {"saved": executed.total, "saved_matrix_transform": matrix.total, "saved_free_transform": free.total}
        record |= {"attention_saved_in_routed_layers": executed.attention_in_routed_layers}
        records.append(record | {"attention_share_of_baseline": executed.attention_share_of_baseline})
    return records


def flop_tables(name: str, config: ChiarConfig, records: list[dict[str, Any]]) -> list[Table]:
    """FLOPs by part, and totals by length. The paper's claims and the DCT's cost are shown for routed layers only."""
    first, fraction, T = records[0], records[0]["fraction"], records[0]["length"]
    stacks = [layer_numbers(layers) for layers in config.stacks.values()]
    setting = describe_fraction(config, fraction)
    setting += f" of the tokens pass layers {' and '.join(stacks)}" if stacks else f", keys {config.keys}"
    setting += "" if stacks else f", light FFN {('off', 'on')[config.light_ffn]}"
    parts = titled_table(f"{name}, T = {T}, {setting}: counted MFLOPs per token, forward", "part", "CHIAR", "baseline")
    chiar, baseline = ({**first[model], "total": first[f"{model}_total"]} for model in ("chiar", "baseline"))
    for part in chiar:
        if chiar[part] or baseline[part]:
            parts.add_row(part, f"{chiar[part] / 1e6:,.2f}", f"{baseline[part] / 1e6:,.2f}")
    if not has_fixed_shares(config):
        where = f"layers {stacks[0]} and their router" if stacks else "one routed layer"
        for operator, flops in route_costs(config, T, operator_shares(config, fraction)).items():
            token = f"a token to {operator}" if not stacks else f"a {'light' if is_light(operator) else 'dark'} token"
            parts.add_row(f"{token}, {where}", f"{flops / 1e6:,.3f}")
    rows = [{"T": f"{record['length']:,}"} | comparison(record, bool(stacks)) for record in records]
    same = "depth" if stacks else "size"
    lengths = titled_table(
        f"against the dense baseline of the same {same} (norms, softmax, activations not counted)", *rows[0]
    )
    for row in rows:
        lengths.add_row(*row.values())
    return [parts, lengths]


def comparison(record: dict[str, Any], has_stacks: bool) -> dict[str, str]:
    """CHIAR against the baseline at one length, by column."""
    attention, ratio = record["attention_saved_in_routed_layers"], record["chiar_total"] / record["baseline_total"]
    row = {"CHIAR ÷ baseline": f"{ratio:.3f}", "saved": f"{record['saved']:.1%}"}
    if not has_stacks:
        row |= {"saved, DCT as matrix": f"{record['saved_matrix_transform']:.1%}"}
        row |= {"saved, DCT free": f"{record['saved_free_transform']:.1%}", "paper, total": PAPER_TOTAL}
    row[f"attention saved in {'dark' if has_stacks else 'routed'} layers"] = (
        "–" if attention is None else f"{attention:.1%}"
    )
    row |= {} if has_stacks else {"paper, attention": PAPER_ATTENTION}
    return row | {"attention's share of the baseline": f"{record['attention_share_of_baseline']:.1%}"}


def calibration_table(calibration: "Calibration", name: str, config: ChiarConfig) -> Table:
    noise, noise_columns = "", list[str]()
    if calibration.noise_mean is not None:
        noise = f"; white noise of this width {calibration.noise_mean:.4f} ± {calibration.noise_deviation:.4f}"
        noise_columns = ["KS from noise", "shift (σ of noise)"]
    passes = f"{calibration.passes} pass{'es' * (calibration.passes > 1)}"
    table = titled_table(
        f"{name}: {calibration.score} by rule '{calibration.rule}', {passes} over the text{noise}",
        *("layer", "tokens", *(f"p{p}" for p in calibration.layers[0].percentiles)),
        *("τ", "split (light … dark)", *noise_columns),
    )
    for row in calibration.layers:
        layer = "embedding" if row.layer is None else layer_numbers(config.stacks.get(row.layer, [row.layer]))
        percentiles = [f"{value:.4f}" for value in row.percentiles.values()]
        taus, split = ", ".join(f"{t:.4f}" for t in row.thresholds), " / ".join(f"{share:.1%}" for share in row.split)
        from_noise = (
            [] if row.shift_from_noise is None else [f"{row.distance_from_noise:.3f}", f"{row.shift_from_noise:+.2f}"]
        )
        table.add_row(layer, f"{row.tokens:,}", *percentiles, taus, split, *from_noise)
    return table


@dataclass
class RoutedText:
    heading: str
    pieces: list[str]
    trace: "RoutingTrace"


def route_text(name: str, text: str, tokenizer: Path | None, seed: int) -> RoutedText:
    from chiar.data.tokens import TextCodec
    from chiar.model.load import load_model

    model, folder = load_model(name, seed)
    codec = TextCodec.open(model.config, folder, tokenizer)
    ids = codec.encode(text)
    require(ids, "the text is empty: there is nothing to route.")
    with torch.no_grad():
        trace = model(torch.tensor([ids]), output_routing=True).routing
    note = "" if folder else f", random weights (seed {seed}): the routes only show the mechanism"
    layer = trace.coloured_by
    if layer is not None and layer.thresholds == [0.0]:
        note += "; τ is 0 until a model is trained or calibrated"
        note += ", so every token is dark" if layer.choice_BT.all() else ""
    return RoutedText(f"{name}{note}", codec.labels(ids), trace)


def routing_views(routed: RoutedText, colour: bool = True) -> list[Any]:
    """The text, one character per token, above a line of light and dark marks per layer; then a summary of the layers.
    Without `colour` the text is plain and its legend is left out."""
    trace = routed.trace
    # Half-way to the deepest colour, which a black terminal would hide.
    operators = dict.fromkeys(name for layer in trace.layers for name in layer.operators)
    marks = {
        name: (MARKS.get(name, "░"), f"{'' if name in MARKS else 'black on '}{operator_colour(name, 0.5)}")
        for name in operators
    }
    views: list[Any] = [Text(routed.heading)]
    views.append(Text("  ").join(Text(f"{mark} {name}", style) for name, (mark, style) in marks.items()))
    letters = [first if (first := (piece.strip() or " ")[0]).isprintable() else "·" for piece in routed.pieces]
    text, legend = list(zip(letters, entropy_styles(trace), strict=True)), entropy_legend(trace)
    views += [legend] if legend and colour else []
    for start in range(0, len(letters), TOKENS_PER_LINE):
        part = slice(start, start + TOKENS_PER_LINE)
        views.append(Text.assemble(" " * 13, *text[part]))
        for layers in rows_of(trace):
            layer = trace.layers[layers[0]]
            line = Text(f"layer {layer_numbers(layers):<6} ")
            for letter, choice in zip(letters[part], layer.choice_BT[0, part].tolist(), strict=True):
                mark, style = marks[layer.operators[choice]]
                line.append(mark * cell_len(letter), style)
            views.append(line)
    table = Table("layer", "kind", "f", "entropy", "τ", "g", box=None)
    mixed = len({layer.entropy_name for layer in trace.layers}) > 1
    for layers in trace.parts:
        layer = trace.layers[layers[0]]
        gate, named = layer.gate_BT, f" ({layer.entropy_name})" if mixed else ""
        # Beside the score of a stack's router, the spectral entropy of layers that do not route only confuses.
        entropy = None if mixed and len(layer.operators) == 1 else layer.entropy_BT
        table.add_row(
            *(layer_numbers(layers), layer.kind, f"{trace.attention_fraction(layer.index):.2f}"),
            "–" if entropy is None else f"{entropy.min():.3f} to {entropy.max():.3f}{named}",
            ", ".join(f"{t:.4f}" for t in layer.thresholds or []) or "–",
            "–" if gate is None else f"{gate.mean():.3f} (pool: {trace.gate_pool})",
        )
    return [*views, table]


def rows_of(trace: "RoutingTrace") -> list[list[int]]:
    """The layers of each line; only dark stacks if there are any, for outside of them every token takes attention."""
    stacks = [part for part in trace.parts if trace.layers[part[0]].kind == "dark"]
    return stacks or trace.parts


def entropy_styles(trace: "RoutingTrace") -> list[str]:
    """The style of each token of the first row: a background from light to dark by its score, and dark underlined."""
    layer = trace.coloured_by
    if layer is None or layer.entropy_BT is None:
        return [""] * trace.real_BT.shape[1]
    entropy_T, tau = layer.entropy_BT[0].float(), layer.thresholds[0] if layer.thresholds else None
    ends, styles = (float(entropy_T.min()), float(entropy_T.max())), []
    for entropy, choice in zip(entropy_T.tolist(), layer.choice_BT[0].tolist(), strict=True):
        back, letter = entropy_colours(uncertainty(entropy, tau, *ends))
        styles.append(f"{'bold underline ' if choice else ''}{letter} on {back}")
    return styles


def entropy_legend(trace: "RoutingTrace") -> Text | None:
    layer = trace.coloured_by
    if layer is None or layer.entropy_BT is None:
        return None
    low, high = float(layer.entropy_BT[0].min()), float(layer.entropy_BT[0].max())
    label, tau = f"text coloured by {layer.entropy_name}", layer.thresholds[0] if layer.thresholds else None
    if tau is not None:
        where = "half-way" if low < tau < high else f"at or {'above' if tau >= high else 'below'} all values"
        label += f", τ = {tau:.2f} {where}"
    first, last = (uncertainty(end, tau, low, high) for end in (low, high))
    steps = [("  ", f"on {entropy_colours(first + (last - first) * step / 8)[0]}") for step in range(9)]
    return Text.assemble(f"{label}: {low:.2f} ", *steps, f" {high:.2f}; underlined: dark")


def routing_csv(routed: RoutedText) -> str:
    """A line per token and layer, numbered from 1. What a layer does not have is left empty."""
    trace, out = routed.trace, io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    assert trace.token_ids_BT is not None
    for t, (token, piece) in enumerate(zip(trace.token_ids_BT[0].tolist(), routed.pieces, strict=True)):
        for layer in trace.layers:
            operator, weights = layer.operators[int(layer.choice_BT[0, t])], layer.weights_BTK[0, t].tolist()
            attention = dict(zip(layer.operators, weights, strict=True)).get("attention", 0.0)
            entropy, gate = ("" if v is None else float(v[0, t]) for v in (layer.entropy_BT, layer.gate_BT))
            where, taus = (layer.index + 1, layer.kind), " ".join(map(str, layer.thresholds or []))
            writer.writerow((t, token, visible(piece, keep=""), *where, operator, attention, entropy, taus, gate))
    return out.getvalue()
