"""Pictures with matplotlib, and `chiar plot`. Every `draw_…` returns a Figure; `svg_text` and `save` write it. Torch,
and matplotlib, which may be missing, are imported when something is drawn."""

import json
import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from io import BytesIO
from itertools import accumulate, cycle, groupby, pairwise
from pathlib import Path
from statistics import mean, median
from typing import TYPE_CHECKING, Annotated, Any

import typer

from chiar.errors import InputError, unknown_name
from chiar.files import check_file, check_new
from chiar.visible import visible

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from chiar.config import ChiarConfig
    from chiar.model.trace import LayerTrace, RoutingTrace

Points = list[tuple[float, float]]
Colour = tuple[int, int, int]
Box = tuple[str, str, str]  # what stands in a box of a diagram, a note below it, and the colour
# The one colour language. Yellow against blue stays apart under the common colour blindnesses, and in grey all light
# cells are paler than any dark one. Each pair goes from at the threshold to far from it.
LIGHT: tuple[Colour, Colour] = (255, 247, 205), (250, 205, 50)
RAMPS: dict[str, tuple[Colour, Colour]] = {
    "temporal": ((247, 250, 210), (205, 220, 60)),
    "rbf": ((221, 160, 195), (204, 121, 167)),
    "attention": ((120, 170, 215), (8, 40, 100)),
}
NAMES = {"spectral": "light: spectral filter", "temporal": "light: temporal filter", "rbf": "between: RBF mixing"}
NAMES["attention"] = "dark: attention"
LINE_COLOURS, LIGHT_LINE = {"temporal": "#8f9c14", "rbf": "#cc79a7", "attention": "#082864"}, "#d9a400"  # on white
# Okabe and Ito's colours, for what is not an operator; yellow is too pale for a line. Seven and eight marks: 56 pairs.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
MARKERS = "osD^vPXp"
DASHES: tuple[Any, ...] = ("-", (0, (7, 3)), (0, (2, 2)), (0, (9, 3, 2, 3)))
PLAIN, ROUTER, GATE = "#999999", COLOURS[2], COLOURS[4]
UNIT = (-0.02, 1.02)
# Text stays text and a $ in it is a dollar; a fixed salt makes equal pictures equal files.
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none", "svg.hashsalt": "chiar", "text.parse_math": False, "font.family": "DejaVu Sans",
    "font.size": 9, "axes.titlesize": 9.5, "axes.titleweight": "bold", "axes.titlelocation": "left",
    "figure.titlesize": 12, "figure.titleweight": "bold", "legend.frameon": False, "legend.fontsize": 8.5,
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "axes.grid.axis": "y",
    "grid.color": "#dddddd", "axes.axisbelow": True, "lines.markersize": 4, "lines.linewidth": 1.6,
    "legend.handlelength": 3,
}  # fmt: skip


@contextmanager
def style() -> Iterator[None]:
    try:
        import matplotlib
    except ImportError:
        raise InputError("pictures are drawn with matplotlib, which is missing: pip install 'chiar[plots]'") from None
    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # an SVG is shown with the reader's fonts
        yield


@style()
def render(figure: "Figure", kind: str) -> bytes:
    from matplotlib.text import Text

    for text in figure.findobj(Text):
        assert isinstance(text, Text)
        text.set_text(visible(text.get_text(), keep="\n"))
    out = BytesIO()
    undated = {"svg": {"Date": None, "Creator": None}, "pdf": {"CreationDate": None}}
    figure.savefig(out, format=kind, dpi=150, metadata=undated.get(kind, {}))
    return out.getvalue()


def svg_text(figure: "Figure") -> str:
    """Equal for equal pictures. A page whose policy forbids inline styles shows it as an image."""
    _, tag, rest = render(figure, "svg").decode().partition("<svg ")
    return f'{tag}role="img" aria-label="{escape(visible(str(figure.get_label()), keep=""))}" {rest}'


def check_picture(out: Path, overwrite: bool = False) -> None:
    if out.suffix not in (".svg", ".png", ".pdf"):
        raise InputError(f"pictures are SVG, PNG or PDF: name the file {out.with_suffix('.svg').name}.")
    check_new(out, overwrite)


def save(figure: "Figure", path: Path, overwrite: bool = False) -> None:
    check_picture(path, overwrite)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(svg_text(figure).encode() if path.suffix == ".svg" else render(figure, path.suffix[1:]))


def shorten(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def operator_colour(operator: str, strength: float = 1.0) -> str:
    near, far = RAMPS.get(operator, LIGHT)
    return "#" + "".join(f"{round(a + (b - a) * min(strength, 1.0)):02x}" for a, b in zip(near, far, strict=True))


class Line:
    """Points, and how matplotlib draws them; without a label it is not in the legend."""

    def __init__(self, points: Points, label: str = "", **look: Any) -> None:
        self.points, self.label, self.look = points, shorten(label, 44), look


@dataclass
class Panel:
    title: str
    lines: list[Line]
    level: tuple[float, str] | None = None  # a height to mark across the panel, and its name in the legend
    bounds: tuple[float, float] | None = None
    axis: str = ""


def new_figure(title: str, wide: float, high: float) -> "Figure":
    from matplotlib.figure import Figure

    figure = Figure((wide, high), layout="constrained", label=title)
    figure.suptitle(shorten(title, int(wide * 9)))
    return figure


@style()
def draw_panels(
    title: str, panels: list[Panel], axis: str, up: str = "", columns: int = 1, sizes: bool = False, high: float = 1.75
) -> "Figure":
    """One column has legends beside its panels; several (0: as many as look well) share one. `sizes`: logarithmic."""
    from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter

    columns = columns or (2 if len(panels) in (2, 4) else min(len(panels), 3))
    rows, wide = -(-len(panels) // columns), 9.6 if columns == 1 else 3.5 * columns + 0.4
    named = [{line.label for line in panel.lines if line.label} for panel in panels]
    heights = [max(high, 0.18 * len(names) + 0.3 if columns == 1 else 0.0) for names in named[:rows]]
    across = max(1, int(wide / (0.7 + 0.075 * max((len(name) for names in named for name in names), default=1))))
    below = 0.9 + (0.19 * -(-len(set().union(*named)) // across) if columns > 1 else 0.0)
    figure, handles = new_figure(title, wide, sum(heights) + 0.5 * rows + below), dict[str, Any]()
    grid = figure.add_gridspec(rows, columns, height_ratios=heights)
    for number, panel in enumerate(panels):
        axes = figure.add_subplot(grid[number])
        for line in panel.lines:
            look = {"marker": "o"} | line.look if len(line.points) == 1 else line.look
            axes.plot([x for x, _ in line.points], [y for _, y in line.points], label=line.label or None, **look)
        if panel.level is not None:
            axes.axhline(panel.level[0], color="#444444", dashes=(2, 4), linewidth=1, label=panel.level[1] or None)
        axes.set(title=panel.title, xlabel=panel.axis or (axis if number + columns >= len(panels) else ""))
        axes.set_ylim(panel.bounds)
        if sizes:
            axes.set_xscale("log")
            axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.xaxis.set_minor_formatter(NullFormatter())
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        handles |= {name: handle for handle, name in zip(*axes.get_legend_handles_labels(), strict=True)}
        if columns == 1 and (named[number] or panel.level):
            axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.04), borderaxespad=0)
    if columns > 1:
        figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=across)
        figure.supylabel(up, fontsize=9)
    return figure


def draw_pareto(rows: list[dict[str, Any]], title: str = "", device: str = "") -> "Figure":
    """A study's variants: loss against counted FLOPs, and against step time on `device` where `chiar study time`
    measured it, or every variant was trained alone."""
    paired = all(row["paired_loss"] is not None for row in rows)
    loss, seeds = ("paired_loss", "paired_losses") if paired else ("test_loss", "losses")
    unequal = paired and len({tuple(sorted(row["seeds"])) for row in rows}) > 1
    heading = "test loss, nats per token" + (" (baseline's mean + paired Δ)" if unequal else "")
    costs = {"counted MFLOPs a token, forward": [row["flops_per_token"]["forward"] / 1e6 for row in rows]}
    timed = any(row["step_ms"] for row in rows)
    if timed or all(row["step_ms_in_training"] for row in rows):
        part, how = ("step_ms", "") if timed else ("step_ms_in_training", " (median in training)")
        costs[f"measured training step, ms{how}, {device}"] = [row[part] for row in rows]
    panels = []
    for axis, places in costs.items():
        marks = [(x, row[loss]) for x, row in zip(places, rows, strict=True) if x is not None]
        least, middle = min(y for _, y in marks), median(y for _, y in marks)
        # Of many, a few that lost by far would press the others into one line: they stand at the upper edge.
        lid = 4 * middle - 3 * least if len(marks) >= 9 and middle > least else math.inf
        inside = [y for x, row in zip(places, rows, strict=True) for y in (row[loss], *row[seeds]) if x and y <= lid]
        air = (max(inside) - min(inside)) * 0.06 or 0.1
        top = max(inside) + air
        best = sorted((x, min(y, top)) for x, y in marks if y == min(b for a, b in marks if a <= x))
        lines = [Line(best, "frontier", color=COLOURS[1])]
        for x, row, marker, colour in zip(places, rows, cycle(MARKERS), cycle(COLOURS), strict=False):
            face = "#ffffff" if row["role"] == "control" else colour
            look = {"marker": marker, "color": colour, "markerfacecolor": face, "markersize": 7, "clip_on": False}
            name = shorten(row["variant"], 32) + (f" ↑{row[loss]:.2f}" if row[loss] > lid else "")
            if x is not None:
                lines.append(Line([(x, y) for y in row[seeds]], color="#777777", linewidth=0.8, marker=""))
                lines.append(Line([(x, min(row[loss], top))], name, ls="", zorder=3, **look))
        panels.append(Panel(heading, lines, None, (min(inside) - air, top), axis))
    return draw_panels(f"{title} (hollow: controls, thin: between seeds)", panels, "", high=3.6)


def draw_study(sources: Sequence[str]) -> "Figure":
    path = Path(sources[0], "results.json") if Path(sources[0]).is_dir() else Path(sources[0])
    check_file(path)
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
        assert results["format"] == "chiar-study-results/1"
    except (ValueError, TypeError, KeyError, AssertionError):
        raise InputError(f"{path} holds no results of a study: write them with chiar study table.") from None
    return draw_pareto(results["variants"], results["title"], (results["times"] or results["runs"][0])["device"])


OVER = {"steps": "steps", "tokens": "training tokens", "time": "seconds of training, without evaluations"}


class Run:
    """One training run's records; `places` is where each lies: steps, tokens, or seconds since the first record."""

    def __init__(self, path: Path, name: str, colour: str, over: str) -> None:
        from chiar.training.run_folder import RunFolder

        self.name, self.path, self.colour = name, path, colour
        stored, self.records = RunFolder(path).read(), RunFolder(path).read_metrics()
        if not self.records:
            raise InputError(f"{path} has no measurements yet: let it train a few steps.")
        config, settings = stored.get("config", {}), stored.get("settings", {})
        self.routed = [layer for layer, kind in enumerate(config.get("layer_types") or []) if kind == "routed"]
        self.operators: list[str] = config.get("operators") or []
        self.places = [float(record["step"]) for record in self.records]
        if over == "steps":
            return
        added = settings.get("mixing") == "added" and len(settings.get("data", [])) > 1
        if not {"batch", "length"} <= settings.keys() or added or any("accuracy" in one for one in self.records):
            raise InputError(f"{path} does not say how many tokens a step has: draw it over steps.")
        self.places = [step * settings["batch"] * settings["length"] for step in self.places]
        if over == "time":
            # A speed is that of the steps since the record before, without evaluations. The first step compiles.
            speeds = [record.get("tokens_per_second") or 0.0 for record in self.records[1:]]
            if not all(speeds):
                raise InputError(f"{path} has records without tokens_per_second: draw it over steps.")
            spent = [(b - a) / speed for (a, b), speed in zip(pairwise(self.places), speeds, strict=True)]
            self.places = [0.0, *accumulate(spent)]

    def points(self, values: Iterable[Any]) -> Points:
        """A value for each record, where it is something finite."""
        found = zip(self.places, values, strict=True)
        return [(place, float(value)) for place, value in found if value is not None and math.isfinite(value)]

    def by_corpus(self, part: str, called: str) -> dict[str, Points]:
        """What was measured for each of several corpora."""
        parts = [record.get(part) or {} for record in self.records]
        names = dict.fromkeys(name for one in parts for name in one)
        return {f"{called} {name}": self.points([one.get(name) for one in parts]) for name in names}

    def use(self, operator: int, row: int | None = None) -> Points:
        """Share of the tokens this operator got in the row-th routed layer, or in the mean of them."""
        wanted = slice(None) if row is None else slice(row, row + 1)
        shares = [[layer[operator] for layer in (record.get("use") or [])[wanted]] for record in self.records]
        return self.points(mean(found) if found else None for found in shares)

    def lines(self, found: dict[str, Points], **look: Any) -> list[Line]:
        """Of what was measured, told apart by dashes."""
        named = zip(found.items(), cycle(DASHES), strict=False)
        return [Line(p, f"{self.name}: {n}", color=self.colour, linestyle=d, **look) for (n, p), d in named if p]


def read_runs(sources: Sequence[Path | str], over: str = "steps") -> list[Run]:
    from chiar.evaluation.report import short_names

    if over not in OVER:
        raise unknown_name("axis", over, OVER)
    paths = [Path(source) for source in sources]
    return [Run(*known, over) for known in zip(paths, short_names(paths), cycle(COLOURS), strict=False)]


def draw_curves(sources: Sequence[Path | str], data: Path | None = None, over: str = "steps") -> "Figure":
    """Run folders: losses, learning rate, f by layer and g. With a corpus, its validation split's unigram entropy."""
    runs = read_runs(sources, over)
    first = {record["step"]: record.get("loss") for record in runs[0].records}
    panels = [Panel("loss, nats per token", []), Panel(f"loss minus that of {runs[0].name}", [])]
    shares = ("f: share of tokens sent to attention", "g: gate of layer 1")
    panels += [Panel("learning rate", []), *(Panel(title, [], None, UNIT) for title in shares)]
    for run in runs:
        losses = [(record.get("loss"), first.get(record["step"])) for record in run.records]
        gaps = run.points([None if own is None or other is None else own - other for own, other in losses])
        layers = {f"layer {layer + 1}": run.use(-1, row) for row, layer in enumerate(run.routed)}
        layers = layers if len(layers) <= len(DASHES) else {f"mean of {len(layers)} layers": run.use(-1)}
        panels[0].lines += run.lines({"train": run.points([own for own, _ in losses])}, linewidth=1, alpha=0.55)
        panels[0].lines += run.lines(run.by_corpus("validation", "validation"), marker="o")
        panels[1].lines += run.lines({"train": gaps}, linewidth=1) if run is not runs[0] else []
        panels[2].lines += run.lines({"rate": run.points([record.get("rate") for record in run.records])})
        panels[3].lines += run.lines(layers)
        panels[4].lines += run.lines(run.by_corpus("gate", "g on"))
    if not panels[0].lines:
        raise InputError("no finite loss was measured in these runs: there is nothing to draw.")
    if data is not None:
        from chiar.data.shards import Corpus
        from chiar.evaluation.harness import unigram_entropy

        corpus = Corpus.open(data)
        entropy = unigram_entropy(corpus.split("valid"), corpus.vocab_size)
        panels[0].level = entropy, shorten(f"unigram entropy of {corpus.name} valid, {entropy:.2f}", 40)
    return draw_panels(" and ".join(run.name for run in runs), [panel for panel in panels if panel.lines], OVER[over])


def draw_gate(sources: Sequence[Path | str]) -> "Figure":
    """The MetaRouter's g over training and how often it took which value, for every run and corpus."""
    runs = read_runs(sources)
    courses, shares = Panel("g over training (0: layer 1 bypassed)", [], None, UNIT, "steps"), []
    for run in runs:
        if not (found := run.by_corpus("gate", "g on")):
            raise InputError(f"{run.path} has no MetaRouter: there is no g to draw.")
        courses.lines += run.lines(found)
    for line in courses.lines:
        counts = Counter(min(int(50 * g), 49) for _, g in line.points)
        outline = [(bar / 50, counts[bar] / len(line.points)) for bar in range(51)]
        shares.append(Line(outline, line.label, drawstyle="steps-post", **line.look))
    panels = [courses, Panel("share of all logged steps, by g", shares, axis="g")]
    return draw_panels(f"g: {', '.join(run.name for run in runs)}", panels, "", columns=2)


def draw_operators(sources: Sequence[Path | str], over: str = "steps") -> "Figure":
    """The share of tokens each operator got in training: the mean of the routed layers, then each of them."""
    runs, panels = read_runs(sources, over), []
    for run in runs:
        if not run.routed or not any(record.get("use") for record in run.records):
            raise InputError(f"{run.path} has no routed layers: operators are chosen in those only.")
        titles = [(None, "mean of the routed layers")] if len(run.routed) > 1 else []
        for row, title in [*titles, *((row, f"layer {layer + 1}") for row, layer in enumerate(run.routed))]:
            shares = [(name, run.use(number, row)) for number, name in enumerate(run.operators)]
            lines = [Line(points, name, color=LINE_COLOURS.get(name, LIGHT_LINE)) for name, points in shares if points]
            panels.append(Panel(f"{run.name}, {title}" if len(runs) > 1 else title, lines, None, UNIT))
    title, up = f"{', '.join(run.name for run in runs)}: operators in training", "share of the tokens of a logged step"
    return draw_panels(title, panels, OVER[over], up, columns=0)


AGAINST = {"parameters": "trainable parameters", "flops": "counted FLOPs a token, forward"}


def draw_scaling(sources: Sequence[str], against: str = "parameters") -> "Figure":
    """Loss against size of `[LINE=]PATH`s, reports or runs with one."""
    from chiar.evaluation.report import differences, read_entry
    from chiar.model.load import count_parameters, load_config

    if against not in AGAINST:
        raise unknown_name("size", against, AGAINST)
    reports, drawn = [], dict[str, Points]()
    for source in sources:
        series, _, path = ("", "", source) if Path(source).exists() else source.rpartition("=")
        report = read_entry(Path(path), path).report
        if report is None:
            raise InputError(f"{path} was not evaluated: chiar eval {path} --data CORPUS --json {path}/evaluation.json")
        reports.append(report)
        other = ["kind than language"] if report.kind != "language" else differences(report, reports[0])
        if other:
            raise InputError(f"{path} does not compare with {sources[0]}: another {' and '.join(other)}.")
        size = report.flops if against == "flops" else float(count_parameters(load_config(report.model)))
        dense = not report.routing.layers and math.isclose(report.flops, report.baseline_flops)
        drawn.setdefault(series or ("dense" if dense else "CHIAR"), []).append((size, report.scores.loss))
    looks = zip(drawn.items(), cycle(COLOURS), strict=False)
    lines = [Line(sorted(points), series, color=colour, marker="o") for (series, points), colour in looks]
    title = f"{reports[0].corpus} {reports[0].split}, T = {reports[0].length}: {', '.join(drawn)}"
    return draw_panels(title, [Panel("loss, nats per token", lines)], AGAINST[against], sizes=True, high=3.0)


def draw_savings(
    names: Sequence[str], length: int = 256, fraction: float | None = None, keys: str | None = None,
    light_ffn: bool | None = None,
) -> "Figure":  # fmt: skip
    """Counted FLOPs saved against size, in all, in the layers and in attention; the paper's claims are marked."""
    from chiar.model.load import count_parameters, load_config
    from chiar.routing.tables import PAPER_ATTENTION, PAPER_TOTAL, describe_fraction, savings_by_length

    costs = {"free": "with a free DCT", "even_odd": "with the DCT by halves", "gemm": "with the DCT as a matrix"}
    parts = {"all FLOPs": PAPER_TOTAL, "FLOPs of the layers": "", "attention of routed layers": PAPER_ATTENTION}
    panels = []
    for title, paper in parts.items():
        level = (float(paper.rstrip("%").split("–")[0]), f"the paper: {paper}") if paper else None
        looks = zip(costs.values(), COLOURS, DASHES, strict=False)
        lines = [Line([], name, color=colour, linestyle=dash, marker="o") for name, colour, dash in looks]
        panels.append(Panel(f"{title} saved, %", lines, level))
    for config in sorted((load_config(name) for name in names), key=count_parameters):
        if not config.routed_layers:
            raise InputError("a model that routes nothing has nothing to save: name CHIAR models.")
        counted = savings_by_length(config, [length], fraction, keys, light_ffn)[0]
        for number, saved in enumerate(counted[cost] for cost in costs):
            chiar, baseline = (count.total - count.part("logits") for count in (saved.chiar, saved.baseline))
            shares = saved.total, 1 - chiar / baseline, saved.attention_in_routed_layers or 0.0
            for panel, share in zip(panels, shares, strict=True):
                panel.lines[number].points.append((float(count_parameters(config)), 100 * share))
    ffn = "" if (config.light_ffn if light_ffn is None else light_ffn) else ", no light FFN"
    setting = f"T {length}, {describe_fraction(config, fraction)}, keys {keys or config.keys}{ffn}"
    return draw_panels(f"counted savings of {', '.join(names)}: {setting}", panels, AGAINST["parameters"], sizes=True)


def distance(layer: "LayerTrace", token: int) -> float | None:
    """H − τ, from the nearest of several thresholds; None where the layer compares no entropy."""
    if layer.entropy_BT is None or not layer.thresholds:
        return None
    return min((float(layer.entropy_BT[0, token]) - threshold for threshold in layer.thresholds), key=abs)


@style()
def draw_routing(trace: "RoutingTrace", pieces: list[str], heading: str, most: int = 32) -> "Figure":
    """The first row of a batch: tokens across, `most` a line; layers down; the stronger, the farther H is from τ."""
    from matplotlib.colors import to_rgb
    from matplotlib.patches import Patch

    shown = [piece.replace("\n", "⏎").replace("\t", "⇥").replace(" ", "·") or "∅" for piece in pieces]
    shown = [shorten(visible(piece, keep=""), 16) for piece in shown]
    gaps = [[distance(layer, token) for token in range(len(pieces))] for layer in trace.layers]
    farthest = max((abs(gap) for row in gaps for gap in row if gap), default=1.0)
    rows: dict[str, list[Any]] = {}
    for layer, row in zip(trace.layers, gaps, strict=True):
        cut = "".join(f", τ {threshold:.3f}" for threshold in layer.thresholds or [])
        cut += "" if layer.gate_BT is None else f", g {float(layer.gate_BT[0].mean()):.2f}"
        chosen = [layer.operators[choice] for choice in layer.choice_BT[0].tolist()]
        strengths = [0.5 if gap is None else abs(gap) / farthest for gap in row]
        cells = [to_rgb(operator_colour(*cell)) for cell in zip(chosen, strengths, strict=True)]
        empty = [(1.0, 1.0, 1.0)] * (-len(cells) % most if len(cells) > most else 0)
        rows[f"layer {layer.index + 1}: f {trace.attention_fraction(layer.index):.2f}{cut}"] = cells + empty
    lines, high = -(-len(pieces) // most), 0.2 * len(rows) + 0.12 * max(map(len, shown)) + 0.3
    figure = new_figure(f"Routing of a text by {heading}", 10.0, high * lines + 0.8)
    for line, (axes,) in enumerate(figure.subplots(lines, squeeze=False)):
        part = slice(line * most, (line + 1) * most)
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


# By router, in the configuration's words; and where each operator's tokens lie.
RULES = {"entropy": "spectral entropy H(x), cut at τ", "random": "hash of the {random_key}, f = {random_fraction:g}"}
RULES |= {"learned": "linear map of x, {routing}", "static": "one operator a layer"}
CUTS = {("entropy", 2): ("H ≤ τ", "H > τ"), ("entropy", 3): ("H ≤ τ_low", "τ_low < H ≤ τ_high", "H > τ_high")}


@style()
def draw_model(sources: Sequence[str], config: "ChiarConfig | None" = None) -> "Figure":
    """The architecture: equal neighbouring layers, and layers that alternate, are drawn once."""
    from chiar.model.load import load_config

    config = config or load_config(sources[0])
    norm, keys = config.norm.replace("norm", " norm"), f", keys {config.keys}" if config.routed_layers else ""
    shape = f"D {config.hidden_size}, {config.num_hidden_layers} layers, {config.num_attention_heads} heads"
    note = "learned positions added" if config.positions == "learned" else "RoPE turns queries and keys instead"
    note += "; then RMS norm" if config.embedding_norm else ""
    rows: list[tuple[str, list[Box]]] = [("", [("token embedding", note, PLAIN)])]
    layers = [(kind, bool(config.meta_router) and n == 0) for n, kind in enumerate(config.layer_types or [])]
    groups = [(layer, [n for n, _ in own]) for layer, own in groupby(enumerate(layers, 1), lambda pair: pair[1])]
    if len(groups) > 6:
        groups = [(one, [n for n, layer in enumerate(layers, 1) if layer == one]) for one in dict.fromkeys(layers)]
    for (kind, gated), numbers in groups:
        first, last, count = numbers[0], numbers[-1], len(numbers)
        between = f"{first}–{last}" if last - first == count - 1 else f"{first}, {numbers[1]}, … {last}"
        boxes = layer_rows(config, kind, gated)
        names = [f"layer {first}" if count == 1 else f"layers {between} (×{count})"] + [""] * (len(boxes) - 1)
        rows += zip(names, boxes, strict=True)
    tied = "tied to the embedding" if config.tie_word_embeddings else "weights of its own"
    rows.append(("output", [("final norm, output projection", tied, PLAIN)]))
    figure = new_figure(Path(sources[0]).name, 8.6, 0.75 * len(rows) + 0.6)
    axes = figure.add_subplot(xlim=(0, 1), ylim=(0.5 - len(rows), 0.5))
    axes.set_title(f"{shape}, {config.norm_position}-{norm}{keys}", weight="normal")
    axes.axis("off")
    above: list[float] = []
    for number, (name, row) in enumerate(rows):
        centres = [0.6 + (place - (len(row) - 1) / 2) * 0.28 for place in range(len(row))]
        axes.text(0, -number, name, weight="bold", va="center")
        if name:
            axes.axhline(0.5 - number, color="#bbbbbb", linewidth=0.8, linestyle=DASHES[2])
        for x, (label, note, colour) in zip(centres, row, strict=True):
            box = {"boxstyle": "round,pad=0.5", "facecolor": (colour, 0.22), "edgecolor": colour, "linewidth": 1.5}
            axes.text(x, -number, f"{label}\n{note}", ha="center", va="center", bbox=box)
            for before in above:
                arrow = {"arrowstyle": "-|>", "color": "#444444", "shrinkA": 0, "shrinkB": 0, "mutation_scale": 9}
                axes.annotate("", (x, 0.31 - number), (before, 0.69 - number), arrowprops=arrow)
        above = centres
    return figure


def layer_rows(config: "ChiarConfig", kind: str, gated: bool) -> list[list[Box]]:
    """A layer from above, operators side by side."""
    routed, operators = kind == "routed", list(config.operators or []) if kind == "routed" else [kind]
    cuts = CUTS.get((config.router or "", len(operators)), ("",) * len(operators)) if routed else ("",)
    rows: list[list[Box]] = []
    if gated:
        rows.append([("MetaRouter", f"g = σ(w·x̄ + b), x̄ the mean ({config.gate_pool})", GATE)])
    if config.temporal_everywhere:
        over = f"every token, over the last {config.temporal_window}"
        rows.append([("temporal filter", over, operator_colour("temporal"))])
    if routed:
        rule = RULES.get(config.router or "", "a router of your own").format(**config.to_dict())
        rows.append([(f"{config.router} router", rule, ROUTER)])
    side: list[Box] = []
    for operator, cut in zip(operators, cuts, strict=True):
        shade, _, name = NAMES.get(operator, f"light: {operator}").partition(": ")
        side.append((name, f"{shade}: {cut}" if cut else shade, operator_colour(operator)))
    hidden = "4D" if config.intermediate_size == 4 * config.hidden_size else str(config.intermediate_size)
    skipped = "; light tokens skip it" if routed and not config.light_ffn else ""
    rows += [side, [("feed-forward", f"D → {hidden} → D, GELU{skipped}", PLAIN)]]
    return rows + ([[("MetaRouter", "g × the layer + (1 − g) × its input", GATE)]] if gated else [])


def draw_routes(sources: Sequence[str], prompt: str = "", tokenizer: Path | None = None, seed: int = 0) -> "Figure":
    from chiar.routing.tables import route_text

    if not prompt:
        raise InputError("routing shows the routes of a text: give it with --prompt.")
    routed = route_text(sources[0], prompt, tokenizer, seed)
    return draw_routing(routed.trace, routed.pieces, routed.heading)


# What is drawn from what, by which function, and the options it takes.
KINDS: "dict[str, tuple[str, Callable[..., Figure], tuple[str, ...]]]" = {
    "curves": ("training runs: losses, learning rate, f by layer, g", draw_curves, ("data", "over")),
    "gate": ("training runs: the MetaRouter's g over steps, and its histogram", draw_gate, ()),
    "operators": ("training runs: each operator's share of tokens by layer", draw_operators, ("over",)),
    "scaling": ("[LINE=]reports, or runs with one: loss against size", draw_scaling, ("against",)),
    "savings": ("models: counted FLOPs saved, by size", draw_savings, ("length", "fraction", "keys", "light_ffn")),
    "pareto": ("a study's folder or results.json: loss against FLOPs and step time", draw_study, ()),
    "model": ("a preset or model folder: its architecture", draw_model, ()),
    "routing": ("a model: the route of each token of a text", draw_routes, ("prompt", "tokenizer", "seed")),
}
SINGLE = ("pareto", "model", "routing")


def plot(
    kind: Annotated[str, typer.Argument(metavar="KIND", help="|".join(KINDS))],
    out: Annotated[Path, typer.Option(metavar="FILE", help="New .svg, .png or .pdf file.")],
    sources: Annotated[list[str] | None, typer.Argument(metavar="[SOURCE...]", help="What is drawn.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file if it exists.")] = False,
    data: Annotated[Path | None, typer.Option(metavar="CORPUS", help="curves: mark its unigram entropy.")] = None,
    over: Annotated[str | None, typer.Option(metavar="|".join(OVER), help="curves, operators: across.")] = None,
    against: Annotated[str | None, typer.Option(metavar="|".join(AGAINST), help="scaling: the size.")] = None,
    length: Annotated[int | None, typer.Option(min=1, help="savings: sequence length T, 256.")] = None,
    fraction: Annotated[float | None, typer.Option(help="savings: f; the model's own, or ½.")] = None,
    keys: Annotated[str | None, typer.Option(metavar="all|routed", help="savings: keys; as the model.")] = None,
    light_ffn: Annotated[bool | None, typer.Option(help="savings: whether light tokens run the FFN.")] = None,
    prompt: Annotated[str | None, typer.Option(help="routing: the text.")] = None,
    tokenizer: Annotated[Path | None, typer.Option(help="routing: tokenizer folder, if the model has none.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, max=2**63 - 1, help="routing: of a preset's weights.")] = None,
) -> None:
    options = {"data": data, "over": over, "against": against, "length": length, "fraction": fraction, "keys": keys}
    options |= {"light_ffn": light_ffn, "prompt": prompt, "tokenizer": tokenizer, "seed": seed}
    given = {name: value for name, value in options.items() if value is not None}
    if kind not in KINDS:
        raise unknown_name("kind of picture", kind, KINDS)
    what, draw, taken = KINDS[kind]
    sources = sources or (["v3-16m", "v3-400m", "v3-1b"] if kind == "savings" else [])
    for name in given.keys() - set(taken):
        raise InputError(f"--{name.replace('_', '-')} says nothing about {kind}: leave it out.")
    if not sources or (kind in SINGLE and len(sources) > 1):
        wrong = f"{kind} draws one thing, got {len(sources)}" if sources else "name what to draw"
        raise InputError(f"{wrong}: it is drawn from {what}.")
    check_picture(out, overwrite)
    save(draw(sources, **given), out, overwrite)
    typer.echo(f"wrote {out}")


HEADING = "Draw recorded runs, reports, studies and models."
plot.__doc__ = "\n\n".join([HEADING, *(f"{name}: {what}." for name, (what, *_) in KINDS.items())])
