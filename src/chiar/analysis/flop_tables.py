"""Counted FLOPs as tables, with the paper's claims beside them."""

import json

from rich.table import Table

from chiar.config import ChiarConfig
from chiar.routing.flops import TRANSFORMS, Savings, compare_flops, counted_parts, operator_shares, route_costs

PAPER_TOTAL = "35–40%"
PAPER_ATTENTION = "62.5%"


def savings_by_length(
    config: ChiarConfig, lengths: list[int], fraction: float | None, keys: str | None, light_ffn: bool | None
) -> list[dict[str, Savings]]:
    """For each length, by what the transform costs."""
    shares = operator_shares(config, fraction)
    return [
        {cost: compare_flops(config, length, shares, keys, light_ffn, cost) for cost in TRANSFORMS}
        for length in lengths
    ]


def flop_tables(
    name: str, config: ChiarConfig, lengths: list[int], fraction: float | None, keys: str | None, light_ffn: bool | None
) -> list[Table]:
    rows = savings_by_length(config, lengths, fraction, keys, light_ffn)
    ffn = "on" if is_light(config, light_ffn) else "off"
    setting = f"{describe_fraction(config, fraction)}, keys {keys or config.keys}, light FFN {ffn}"
    tables = [part_table(name, setting, rows[0]["even_odd"]), length_table(rows)]
    if not has_fixed_shares(config):
        costs = route_costs(config, lengths[0], operator_shares(config, fraction), keys, light_ffn)
        tables.insert(1, route_table(costs, lengths[0]))
    return tables


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


def part_table(name: str, setting: str, savings: Savings) -> Table:
    table = Table(
        "part",
        "CHIAR",
        "baseline",
        title=f"{name}, T = {savings.chiar.length}, {setting}: counted MFLOPs per token, forward",
        title_justify="left",
        box=None,
    )
    for part in counted_parts():
        ours, theirs = savings.chiar.part(part), savings.baseline.part(part)
        if ours or theirs:
            table.add_row(part, f"{ours / 1e6:,.2f}", f"{theirs / 1e6:,.2f}")
    table.add_row("total", f"{savings.chiar.total / 1e6:,.2f}", f"{savings.baseline.total / 1e6:,.2f}")
    return table


def route_table(costs: dict[str, float], length: int) -> Table:
    table = Table("route", "MFLOPs", box=None, title=f"one token in a routed layer, T = {length}", title_justify="left")
    for operator, flops in costs.items():
        label = {"rbf": "rbf", "attention": "dark (attention)"}.get(operator, f"light ({operator})")
        table.add_row(label, f"{flops / 1e6:,.3f}")
    return table


def length_table(rows: list[dict[str, Savings]]) -> Table:
    table = Table(
        "T",
        "CHIAR ÷ baseline",
        "saved",
        "saved, DCT a matrix",
        "saved, DCT free",
        "paper, total",
        "attention saved in routed layers",
        "paper, attention",
        "attention's share of the baseline",
        box=None,
        title="against the dense baseline of the same size (norms, softmax, activations not counted)",
        title_justify="left",
    )
    for row in rows:
        run = row["even_odd"]
        attention = run.attention_in_routed_layers
        table.add_row(
            f"{run.chiar.length:,}",
            f"{run.chiar.total / run.baseline.total:.3f}",
            f"{run.total:.1%}",
            f"{row['gemm'].total:.1%}",
            f"{row['free'].total:.1%}",
            PAPER_TOTAL,
            "–" if attention is None else f"{attention:.1%}",
            PAPER_ATTENTION,
            f"{run.attention_share_of_baseline:.1%}",
        )
    return table


def flop_json(
    config: ChiarConfig, lengths: list[int], fraction: float | None, keys: str | None, light_ffn: bool | None
) -> str:
    records = [
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
        }
        for row in savings_by_length(config, lengths, fraction, keys, light_ffn)
    ]
    return json.dumps(records, indent=2)
