"""Loss and counted savings against model size: `python -m research.scaling loss|savings … --out FILE`."""

import math
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from chiar.colours import operator_colour
from chiar.config_checks import check
from chiar.console import Overwrite, guarded
from chiar.errors import InputError, unknown_name
from chiar.evaluation.report import differences, read_entry
from chiar.model.load import count_parameters, load_config
from chiar.plots.figure import COLOURS, DASHES, Line, Panel, Points, check_figure_path, save
from chiar.routing.flops import compare_flops, operator_shares
from chiar.routing.tables import PAPER_ATTENTION, PAPER_TOTAL, describe_fraction
from research.grid import draw_grid

if TYPE_CHECKING:
    from matplotlib.figure import Figure

AGAINST = {"parameters": "trainable parameters", "flops": "counted FLOPs per token, forward"}
MODELS = ["v3-16m", "v3-400m", "v3-1b"]
Out = Annotated[Path, typer.Option(metavar="FILE", help="New .svg, .png or .pdf file.")]
Reports = Annotated[
    list[str], typer.Argument(metavar="[LINE=]PATH...", help="Reports of chiar eval, or run folders that hold one.")
]
Models = Annotated[list[str], typer.Argument(metavar="MODEL...", help="Presets or model folders.")]
app = typer.Typer(no_args_is_help=True)


def draw_scaling(sources: list[str], against: str = "parameters") -> "Figure":
    """Loss against size; each source is `[LINE=]PATH`, the path a report or a run folder that holds one."""
    if against not in AGAINST:
        raise unknown_name("size", against, AGAINST)
    reports, points_by_line = [], dict[str, Points]()
    for source in sources:
        line, _, path = ("", "", source) if Path(source).exists() else source.rpartition("=")
        report = read_entry(Path(path), path).report
        if report is None:
            raise InputError(f"{path} is not evaluated: chiar eval {path} --data CORPUS --json {path}/evaluation.json")
        reports.append(report)
        other = ["kind than language"] if report.scores.kind != "language" else differences(report, reports[0])
        if other:
            raise InputError(f"{path} is not comparable with {sources[0]}: another {' and '.join(other)}.")
        size = report.flops if against == "flops" else float(count_parameters(load_config(report.model)))
        dense = not report.routing.layers and math.isclose(report.flops, report.baseline_flops)
        points_by_line.setdefault(line or ("dense" if dense else "CHIAR"), []).append((size, report.scores.loss))
    styled = zip(points_by_line.items(), cycle(COLOURS), strict=False)
    own_colour = {"dense": operator_colour("attention")}
    lines = [Line(sorted(points), name, color=own_colour.get(name, c), marker="o") for (name, points), c in styled]
    title = f"{reports[0].corpus} {reports[0].split}, T = {reports[0].length}: {', '.join(points_by_line)}"
    return draw_grid(title, [Panel("loss, nats per token", lines)], AGAINST[against], 1, 3.0)


def draw_savings(
    names: list[str], length: int = 256, fraction: float | None = None, keys: str = "", light_ffn: bool | None = None
) -> "Figure":
    """Counted FLOPs saved against size: in total, in the layers, in attention; the paper's claims are marked."""
    costs = {"free": "DCT for free", "even_odd": "DCT split by parity", "gemm": "DCT as one matrix product"}
    parts = {"all FLOPs": PAPER_TOTAL, "FLOPs of the layers": "", "attention of routed layers": PAPER_ATTENTION}
    panels = []
    for title, paper in parts.items():
        level = (float(paper.rstrip("%").split("–")[0]), f"the paper, {title}: {paper}") if paper else None
        styles = zip(costs.values(), COLOURS, DASHES, strict=False)
        lines = [Line([], name, color=colour, linestyle=dash, marker="o") for name, colour, dash in styles]
        panels.append(Panel(f"{title} saved, %", lines, level))
    for config in sorted((load_config(name) for name in names), key=count_parameters):
        config.keys, config.light_ffn = keys or config.keys, config.light_ffn if light_ffn is None else light_ffn
        check(config)
        if not config.routed_layers:
            raise InputError("a model without routed layers saves nothing: name CHIAR models.")
        for number, cost in enumerate(costs):
            saved = compare_flops(config, length, operator_shares(config, fraction), cost)
            chiar, baseline = (count.total - count.part("logits") for count in (saved.chiar, saved.baseline))
            shares = saved.total, 1 - chiar / baseline, saved.attention_in_routed_layers or 0.0
            for panel, share in zip(panels, shares, strict=True):
                panel.lines[number].points.append((float(count_parameters(config)), 100 * share))
    ffn = "" if config.light_ffn else ", no light FFN"
    setting = f"T {length}, {describe_fraction(config, fraction)}, keys {config.keys}{ffn}"
    return draw_grid(f"counted savings of {', '.join(names)}: {setting}", panels, AGAINST["parameters"], 3, 2.6)


@app.command()
def loss(
    reports: Reports,
    out: Out,
    against: Annotated[str, typer.Option(metavar="|".join(AGAINST), help="What size means.")] = "parameters",
    overwrite: Overwrite = False,
) -> None:
    """Draw the loss of evaluated models against their size; reports with the same LINE share a line."""
    check_figure_path(out, overwrite)
    save(draw_scaling(reports, against), out, overwrite)
    typer.echo(f"wrote {out}")


@app.command()
def savings(
    out: Out,
    models: Models = MODELS,
    length: Annotated[int, typer.Option(min=1, help="Sequence length T.")] = 256,
    fraction: Annotated[float | None, typer.Option(help="f; default: the model's own, else ½.")] = None,
    keys: Annotated[str, typer.Option(metavar="all|routed", help="Which tokens are keys; default: the model's.")] = "",
    light_ffn: Annotated[bool | None, typer.Option(help="Whether light tokens run the FFN.")] = None,
    overwrite: Overwrite = False,
) -> None:
    """Draw the counted FLOPs that models save against their size, with the paper's claims."""
    check_figure_path(out, overwrite)
    save(draw_savings(models, length, fraction, keys, light_ffn), out, overwrite)
    typer.echo(f"wrote {out}")


if __name__ == "__main__":
    guarded(app)
