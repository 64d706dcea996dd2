"""Pictures with matplotlib, and `chiar plot`. Every `draw_…` returns a Figure; `svg_text` and `save` write it. Torch,
and matplotlib, which may be missing, are imported when something is drawn."""

import json
import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from html import escape
from io import BytesIO
from itertools import accumulate, cycle, groupby, pairwise, product
from pathlib import Path
from statistics import mean, median
from typing import TYPE_CHECKING, Annotated, Any

import typer

from chiar.colours import NAMES, entropy_colours, layer_numbers, operator_colour, uncertainty
from chiar.errors import InputError, optional_module, require, unknown_name
from chiar.files import check_file, check_new
from chiar.visible import visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from chiar.config import ChiarConfig
    from chiar.model.trace import RoutingTrace

Points = list[tuple[float, float]]
Box = tuple[str, str, str]  # what stands in a box of a diagram, a note below it, and the colour
# For what is not an operator: none of the language's colours, so that blue is always attention.
COLOURS = ("#d55e00", "#6a3d9a", "#111111", "#9c7a1a", "#8a1538", "#7f7f7f")
DASHES: tuple[Any, ...] = ("-", (0, (7, 3)), (0, (2, 2)), (0, (9, 3, 2, 3)))
PLAIN, ROUTER, GATE = "#999999", COLOURS[2], COLOURS[1]
UNIT = (-0.02, 1.02)
# Text stays text and a $ in it is a dollar; a fixed salt makes equal pictures equal files.
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none", "svg.hashsalt": "chiar", "text.parse_math": False, "font.family": "DejaVu Sans",
    "font.size": 9, "axes.titlesize": 9.5, "axes.titleweight": "bold", "axes.titlelocation": "left",
    "figure.titlesize": 12, "figure.titleweight": "bold", "legend.frameon": False, "legend.fontsize": 8.5,
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "axes.grid.axis": "y",
    "grid.color": "#dddddd", "axes.axisbelow": True, "lines.markersize": 4, "lines.linewidth": 1.6,
    "legend.handlelength": 3, "legend.borderaxespad": 0, "savefig.dpi": 150,
    "figure.constrained_layout.use": True,
}  # fmt: skip


@contextmanager
def style() -> Iterator[None]:
    matplotlib = optional_module("matplotlib", "plots", "a picture")
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
    figure.savefig(out, format=kind, metadata=undated.get(kind, {}))
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


class Line:
    """Points, and how matplotlib draws them; without a label it is not in the legend."""

    def __init__(self, points: Points, label: str = "", **look: Any) -> None:
        self.points, self.label, self.look = points, shorten(label, 44), look


@dataclass
class Panel:
    title: str
    lines: list[Line] = field(default_factory=list)
    level: tuple[float, str] | None = None  # a height to mark across the panel, and its name in the legend
    bounds: tuple[float, float] | None = None
    axis: str = ""
    operator: str = ""  # whose colour its left edge has
    high: float = 1.75


def new_figure(title: str, wide: float, high: float) -> "Figure":
    from matplotlib.figure import Figure

    figure = Figure((wide, high), label=title)
    figure.suptitle(shorten(title, int(wide * 9)))
    return figure


def fill(axes: "Axes", panel: Panel) -> None:
    for line in panel.lines:
        look = {"marker": "o"} | line.look if len(line.points) == 1 else line.look
        axes.plot([x for x, _ in line.points], [y for _, y in line.points], label=line.label or None, **look)
    if panel.level is not None:
        axes.axhline(panel.level[0], color="#444444", dashes=(2, 4), linewidth=1, label=panel.level[1] or None)
    if panel.operator:
        axes.spines["left"].set(color=operator_colour(panel.operator), linewidth=5)
    axes.set(title=panel.title, xlabel=panel.axis)
    axes.set_ylim(panel.bounds)


@style()
def draw_panels(title: str, panels: list[Panel]) -> "Figure":
    """One below the other, their legends beside them."""
    from matplotlib.ticker import EngFormatter

    heights = [max(panel.high, 0.18 * len([line for line in panel.lines if line.label]) + 0.3) for panel in panels]
    figure = new_figure(title, 9.6, sum(heights) + 0.5 * len(panels) + 0.9)
    for panel, (axes,) in zip(panels, figure.subplots(len(panels), squeeze=False, height_ratios=heights), strict=True):
        fill(axes, panel)
        axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.04))
        if axes.get_xlim()[1] >= 1000:
            axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    return figure


RIM = {"markeredgecolor": operator_colour("temporal"), "markeredgewidth": 1.8}
MARK: dict[str, Any] = {"marker": "o", "markersize": 9, "linestyle": "", "markeredgecolor": "#555555"}
SPREAD: dict[str, Any] = {"color": "#999999", "linewidth": 0.8, "marker": ""}
HOLLOW = MARK | {"markerfacecolor": "none"}


def variant_look(declared: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """What a variant is made of, and its mark: half light and half dark where tokens choose, or layers; rimmed where
    every token has the filter along time."""
    from chiar import presets
    from chiar.config_checks import LIGHT_LAYERS
    from chiar.registry import ROUTERS

    config = {**presets.get(declared["preset"]).to_dict(), **declared["config"]}
    kinds, dark = dict.fromkeys(config["layer_types"]), operator_colour("attention")
    routed, router = "routed" in kinds or "dark" in kinds, ROUTERS.get(config["router"])
    light = [config["operators"][0]] if routed else [kind for kind in kinds if kind in LIGHT_LAYERS]
    pale = operator_colour(light[0]) if light else dark
    if not light or (len(kinds) == len(light) and not routed):
        name, made = ("light layers only" if light else "dark: attention alone"), {"markerfacecolor": pale}
    else:
        tokens = routed and not (router and router.decides_by_layer)
        name, side = ("light or dark by token", "left") if tokens else ("light and dark layers", "bottom")
        made = {"markerfacecolor": dark, "markerfacecoloralt": pale, "fillstyle": side}
    name += ", light along time" if light == ["temporal"] else ""
    return name, MARK | made | (RIM if config.get("temporal_everywhere") else {})


def edge(values: Iterable[float]) -> float:
    """Of many, a few far above would press the others into one line: beyond this they stand at the axis's end."""
    known = sorted(values)
    far = 3 * median(known) - 2 * known[0]
    return far if len(known) >= 9 and far > known[0] else math.inf


@style()
def draw_pareto(results: dict[str, Any]) -> "Figure":
    """The results of a study: loss against counted FLOPs, and against step time where `chiar study time` measured it,
    or every variant was trained alone. Marks bear numbers, by rising FLOPs, which the legend names."""
    rows, device = results["variants"], (results["times"] or results["runs"][0])["device"]
    made = {run["variant"]: variant_look(run["declaration"]) for run in results["runs"]}
    paired = all(row["paired_loss"] is not None for row in rows)
    loss, seeds = ("paired_loss", "paired_losses") if paired else ("test_loss", "losses")
    unequal = paired and len({tuple(sorted(row["seeds"])) for row in rows}) > 1
    heading = "test loss, nats per token" + (" (baseline's mean + paired Δ)" if unequal else "")
    costs = {"counted MFLOPs a token, forward": [row["flops_per_token"]["forward"] / 1e6 for row in rows]}
    timed = any(row["step_ms"] for row in rows)
    if timed or all(row["step_ms_in_training"] for row in rows):
        part, how = ("step_ms", "") if timed else ("step_ms_in_training", " (median in training)")
        costs[f"measured training step, ms{how}, {device}"] = [row[part] for row in rows]
    panels, frames, numbers = list[Panel](), [], []
    for axis, places in costs.items():
        own = [(x, row, str(n)) for n, (x, row) in enumerate(zip(places, rows, strict=True), 1) if x is not None]
        far, lid = edge(x for x, *_ in own), edge(row[loss] for _, row, _ in own)
        spans = [y for _, row, _ in own for y in (row[loss], *row[seeds]) if y <= lid], [x for x, *_ in own if x <= far]
        airs = [(max(span) - min(span)) * 0.06 or 0.1 for span in spans]
        (low, top), (left, right) = ((min(s) - air, max(s) + air) for s, air in zip(spans, airs, strict=True))
        marks = [(min(x, right), min(row[loss], top), number) for x, row, number in own]
        best = [(x, y) for x, y, _ in sorted(marks) if y == min(b for a, b, _ in marks if a <= x)]
        lines = [Line(best, "" if panels else "frontier", color="#999999", linewidth=1)]
        for (x, row, number), (shown, y, _) in zip(own, marks, strict=True):
            beyond = (f" →{x:.4g}" if x > far else "") + (f" ↑{row[loss]:.2f}" if row[loss] > lid else "")
            name = f"{number}  {shorten(row['variant'], 32)}{beyond}" if not panels or beyond else ""
            look = made[row["variant"]][1] | {"marker": "s" if row["role"] == "control" else "o"}
            lines.append(Line([(shown, min(one, top)) for one in row[seeds]], **SPREAD))
            lines.append(Line([(shown, y)], name, zorder=3, clip_on=False, **look))
        panels.append(Panel(heading, lines, None, (low, top), axis, high=2.4 if panels else 3.6))
        frames.append((left, right))
        numbers.append([number for *_, number in own])
    key = [Line([], name, **look | {"markeredgecolor": "none"}) for name, look in dict(made.values()).items()]
    if any(RIM.items() <= look.items() for _, look in made.values()):
        key.append(Line([], "rim: filter along time", **HOLLOW | RIM))
    if {row["role"] for row in rows} == {"control", "candidate"}:
        key += [Line([], "candidate", **HOLLOW), Line([], "control", **HOLLOW | {"marker": "s"})]
    if any(len(row[seeds]) > 1 for row in rows):
        key.append(Line([], "between seeds", **SPREAD))
    panels[-1].lines += key
    figure = draw_panels(results["title"], panels)
    for axes, frame in zip(figure.axes, frames, strict=True):
        axes.set_xlim(frame)
    figure.draw_without_rendering()  # which settles where everything lies
    for axes, named in zip(figure.axes, numbers, strict=True):
        set_apart(axes, named)
    return figure


def set_apart(axes: "Axes", numbers: list[str]) -> None:
    """Moves a mark that would cover another one aside, a thin line leads back to its place; and writes each mark's
    number where it covers no mark, number or line. Boxes are in points."""
    from matplotlib.transforms import offset_copy

    figure: Any = axes.get_figure(root=True)
    points = 72 / figure.dpi
    left, low, right, high = axes.get_window_extent().padded(8).extents * points
    taken: list[tuple[float, ...]] = []

    def free(place: Any, wide: float, tall: float, distances: Iterable[float]) -> tuple[float, float]:
        for distance, angle in product(distances, range(45, 405, 15)):
            shift = distance * math.cos(math.radians(angle)), distance * math.sin(math.radians(angle))
            x, y = place + shift
            box = x - wide, y - tall, x + wide, y + tall
            inside = left < box[0] and low < box[1] and box[2] < right and box[3] < high
            if inside and not any(a < box[2] and box[0] < c and b < box[3] and box[1] < d for a, b, c, d in taken):
                break
        taken.append(box)
        return shift

    known: list[Any] = list(axes.lines)
    spreads, marks = (known[first : 2 * len(numbers) + 1 : 2] for first in (1, 2))
    places = [axes.transData.transform(mark.get_xydata()[0]) * points for mark in marks]
    shifts = [free(place, 6, 6, range(0, 60, 2)) for place in places]
    for line in (known[0], *spreads):  # the frontier too
        for begin, end in pairwise(axes.transData.transform(line.get_xydata()) * points):
            steps = 1 + int(math.hypot(*(end - begin)) / 2)
            dots = (begin + (end - begin) * step / steps for step in range(steps + 1))
            taken += [(x - 1, y - 1, x + 1, y + 1) for x, y in dots]
    look: dict[str, Any] = {"textcoords": "offset points", "ha": "center", "va": "center", "fontsize": 7.5, "zorder": 2}
    lead: dict[str, Any] = {"arrowstyle": "-", "color": "#777777", "linewidth": 0.6, "shrinkA": 0, "shrinkB": 0}
    for mark, place, shift, number in zip(marks, places, shifts, numbers, strict=True):
        true = mark.get_xydata()[0]
        if any(shift):
            axes.annotate("", true, shift, arrowprops=lead, **look)
            mark.set_transform(offset_copy(axes.transData, figure, *shift, units="points"))
        away = free(place + shift, 2.5 * len(number) + 0.5, 4, (12, 15, 20, 26, 33, 41))
        led = lead if math.hypot(*away) > 13 else None
        axes.annotate(number, true, away, xycoords=mark.get_transform(), arrowprops=led, **look)


def draw_study(sources: Sequence[str]) -> "Figure":
    path = Path(sources[0], "results.json") if Path(sources[0]).is_dir() else Path(sources[0])
    check_file(path)
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
        assert results["format"] == "chiar-study-results/1"
    except (ValueError, TypeError, KeyError, AssertionError):
        raise InputError(f"{path} holds no results of a study: write them with chiar study table.") from None
    return draw_pareto(results)


OVER = {"steps": "steps", "tokens": "training tokens", "time": "seconds of training, without evaluations"}


class Run:
    """One training run's records; `places` is where each lies: steps, tokens, or seconds since the first record."""

    def __init__(self, path: Path, name: str, colour: str, over: str) -> None:
        from chiar.training.run_folder import RunFolder

        self.name, self.path, self.colour = name, path, colour
        stored, self.records = RunFolder(path).read(), RunFolder(path).read_metrics()
        require(self.records, f"{path} has no measurements yet: let it train a few steps.")
        config, settings = stored.get("config", {}), stored.get("settings", {})
        kinds = groupby(enumerate(config.get("layer_types") or []), lambda pair: pair[1])
        runs = [(kind, [layer for layer, _ in own]) for kind, own in kinds]
        """Where tokens are routed: layers, and dark stacks."""
        self.routed = [[n] for kind, own in runs if kind == "routed" for n in own]
        self.routed += [own for kind, own in runs if kind == "dark"]
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
            require(all(speeds), f"{path} has records without tokens_per_second: draw it over steps.")
            spent = [(b - a) / speed for (a, b), speed in zip(pairwise(self.places), speeds, strict=True)]
            self.places = [0.0, *accumulate(spent)]

    def points(self, values: Iterable[Any]) -> Points:
        """A value for each record, where it is something finite."""
        found = zip(self.places, values, strict=True)
        return [(place, float(value)) for place, value in found if value is not None and math.isfinite(value)]

    def measured(self, part: str) -> Points:
        return self.points(record.get(part) for record in self.records)

    def by_corpus(self, part: str, called: str) -> dict[str, Points]:
        """What was measured for each of several corpora."""
        parts = [record.get(part) or {} for record in self.records]
        names = dict.fromkeys(name for one in parts for name in one)
        return {f"{called} {name}": self.points([one.get(name) for one in parts]) for name in names}

    def use(self, operator: str) -> list[Line]:
        """Share of the tokens this operator got in each routed layer; of many layers, in the mean of them."""
        number = self.operators.index(operator)
        shares = [[layer[number] for layer in record.get("use") or []] for record in self.records]

        def course(rows: slice) -> Points:
            return self.points(mean(share[rows]) if share else None for share in shares)

        layers = {f"layer {layer_numbers(own)}": course(slice(n, n + 1)) for n, own in enumerate(self.routed)}
        if len(layers) <= len(DASHES):
            return self.lines(layers)
        thin = [Line(points, color=self.colour, linewidth=0.5, alpha=0.6) for points in layers.values()]
        return [*self.lines({f"mean of {len(layers)} layers (thin: each)": course(slice(None))}), *thin]

    def lines(self, found: dict[str, Points], **look: Any) -> list[Line]:
        """Of what was measured, told apart by dashes."""
        named = zip(found.items(), cycle(DASHES), strict=False)
        return [Line(p, f"{self.name}: {n}", color=self.colour, linestyle=d, **look) for (n, p), d in named if p]


def draw_curves(sources: Sequence[Path | str], data: Path | None = None, over: str = "steps") -> "Figure":
    """Run folders: losses, learning rate, each operator's share of tokens by layer (the first one gets the rest), g and
    how often it took which value. With a corpus, its validation split's unigram entropy."""
    from chiar.evaluation.report import short_names

    if over not in OVER:
        raise unknown_name("axis", over, OVER)
    paths = [Path(source) for source in sources]
    runs = [Run(*known, over) for known in zip(paths, short_names(paths), cycle(COLOURS), strict=False)]
    first = {record["step"]: record.get("loss") or math.nan for record in runs[0].records}
    losses, gaps = Panel("loss, nats per token"), Panel(f"loss minus that of {runs[0].name}")
    rates, bars = Panel("learning rate"), Panel("share of the logged steps, by g", axis="g")
    chosen = dict.fromkeys(name for run in runs if run.routed for name in reversed(run.operators[1:]))
    shares = {name: Panel(f"share of tokens sent to {name}", bounds=UNIT, operator=name) for name in chosen}
    gates = Panel("g: gate of layer 1 (0: bypassed, 1: whole)", axis=OVER[over])
    for run in runs:
        losses.lines += run.lines({"train": run.measured("loss")}, linewidth=1, alpha=0.55)
        losses.lines += run.lines(run.by_corpus("validation", "validation"), marker="o")
        if run is not runs[0]:
            apart = [(one.get("loss") or math.nan) - first.get(one["step"], math.nan) for one in run.records]
            gaps.lines += run.lines({"train": run.points(apart)}, linewidth=1)
        rates.lines += run.lines({"rate": run.measured("rate")})
        for name in shares.keys() & {*run.operators}:
            shares[name].lines += run.use(name)
        gates.lines += run.lines(run.by_corpus("gate", "g on"))
    for line in gates.lines:
        counts = Counter(min(int(50 * g), 49) for _, g in line.points)
        outline = [(bar / 50, counts[bar] / len(line.points)) for bar in range(min(counts), max(counts) + 2)]
        bars.lines.append(Line(outline, line.label, drawstyle="steps-post", **line.look))
    require(losses.lines, "no finite loss was measured in these runs: there is nothing to draw.")
    if data is not None:
        from chiar.data.shards import Corpus
        from chiar.evaluation.harness import unigram_entropy

        corpus = Corpus.open(data)
        entropy = unigram_entropy(corpus.split("valid"), corpus.vocab_size)
        losses.level = entropy, shorten(f"unigram entropy of {corpus.name} valid, {entropy:.2f}", 40)
    panels = [panel for panel in (losses, gaps, rates, *shares.values(), gates, bars) if panel.lines]
    panels[-1].axis = panels[-1].axis or OVER[over]
    return draw_panels(" and ".join(run.name for run in runs), panels)


@style()
def draw_routing(trace: "RoutingTrace", pieces: list[str], heading: str, most: int = 32) -> "Figure":
    """The first row of a batch: tokens across, up to `most` a line; layers down; the stronger, the farther H from τ."""
    if trace.coloured_by is not None:
        return draw_uncertainty(trace, pieces, heading)
    from matplotlib.colors import to_rgb
    from matplotlib.patches import Patch

    lines = -(-len(pieces) // most)
    most = -(-len(pieces) // lines)  # lines of equal length
    shown = [piece.replace("\n", "⏎").replace("\t", "⇥").replace(" ", "·") or "∅" for piece in pieces]
    shown = [shorten(visible(piece, keep=""), 16) for piece in shown]
    apart = {}  # |H − τ|, from the nearest of several thresholds, where the layer compares an entropy
    for layer in trace.layers:
        if layer.entropy_BT is not None and layer.thresholds:
            gaps_TC = layer.entropy_BT[0, :, None] - layer.entropy_BT.new_tensor(layer.thresholds)
            apart[layer.index] = gaps_TC.abs().amin(1)
    farthest = max((float(gap_T.max()) for gap_T in apart.values()), default=1.0) or 1.0
    rows: dict[str, list[Any]] = {}
    for layer in trace.layers:
        cut = "".join(f", τ {threshold:.3f}" for threshold in layer.thresholds or [])
        cut += "" if layer.gate_BT is None else f", g {float(layer.gate_BT[0].mean()):.2f}"
        chosen = [layer.operators[choice] for choice in layer.choice_BT[0].tolist()]
        known = layer.index in apart
        strengths = (apart[layer.index] / farthest).tolist() if known else [0.5] * len(pieces)
        cells = [to_rgb(operator_colour(*cell)) for cell in zip(chosen, strengths, strict=True)]
        empty = [(1.0, 1.0, 1.0)] * (lines * most - len(cells))
        rows[f"layer {layer.index + 1}: f {trace.attention_fraction(layer.index):.2f}{cut}"] = cells + empty
    high = 0.2 * len(rows) + 0.12 * max(map(len, shown)) + 0.3
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


def draw_uncertainty(trace: "RoutingTrace", pieces: list[str], heading: str, most: int = 72) -> "Figure":
    """Before a dark stack: how uncertain each token is, H as a bar and as the colour of the token; dark ones are
    underlined."""
    from matplotlib.patches import Patch

    layer, lines = trace.coloured_by, -(-len(pieces) // most)
    assert layer is not None and layer.entropy_BT is not None
    own = next(part for part in trace.parts if layer.index in part)
    entropies, cut = layer.entropy_BT[0].tolist(), layer.thresholds[0] if layer.thresholds else None
    low, high = (0.0, max(*entropies, cut or 0.0)) if min(entropies) >= 0 else (min(entropies), max(entropies))
    shares = [uncertainty(entropy, cut, min(entropies), max(entropies)) for entropy in entropies]
    step, most = (high - low) / 4 or 1.0, -(-len(pieces) // lines)
    figure = new_figure(f"{layer.entropy_name.capitalize()} of a text by {heading}", 10.0, 1.15 * lines + 1.0)
    for line, (axes,) in enumerate(figure.subplots(lines, squeeze=False)):
        part = slice(line * most, (line + 1) * most)
        colours, places = [entropy_colours(share)[0] for share in shares[part]], range(len(shares[part]))
        axes.bar(places, [entropy - low for entropy in entropies[part]], 0.9, low, color=colours, edgecolor="#777777")
        axes.bar(places, [-1.5 * step] * len(places), 1.0, low, color=colours)
        for place, piece, share, dark in zip(
            places, pieces[part], shares[part], layer.choice_BT[0, part].tolist(), strict=True
        ):
            look: dict[str, Any] = {"family": "DejaVu Sans Mono", "ha": "center", "va": "center", "fontsize": 9}
            shown = shorten(visible(piece.replace("\n", "⏎"), keep=""), 4)
            axes.text(place, low - 0.75 * step, shown, color=entropy_colours(share)[1], **look)
            if dark:
                axes.plot([place - 0.42, place + 0.42], [low - 1.7 * step] * 2, color=ROUTER, linewidth=2.5)
        if cut is not None:
            axes.axhline(cut, color="#444444", dashes=(2, 4), linewidth=1)
        axes.set(xlim=(-0.6, most - 0.4), ylim=(low - 2 * step, high * 1.03), xticks=[], ylabel="H")
        axes.set_yticks([low, high], [f"{low:.1f}", f"{high:.2f}"])
        axes.grid(False)
    dark = f"{trace.attention_fraction(layer.index):.0%}"
    ends = {0.0: "sure of the next token", 0.5: "at τ", 1.0: "most uncertain"}
    patches = [Patch(color=entropy_colours(end)[0], label=label) for end, label in ends.items() if cut or end != 0.5]
    patches.append(Patch(color="none", label=f"underlined: {dark} pass layers {layer_numbers(own)}"))
    patches += [Patch(color="none", label=f"dashed: τ = {cut:.3f}")] if cut is not None else []
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), handlelength=1)
    return figure


# By router, in the configuration's words; and where each operator's tokens lie.
RULES = {"entropy": "spectral entropy H(x), cut at τ", "random": "hash of the {random_key}, f = {random_fraction:g}"}
RULES |= {"learned": "linear map of x, {routing}", "static": "one operator a layer"}
RULES |= {"predictive": "predictive entropy H, cut at τ", "forecast": "forecast of the final entropy, cut at τ"}
RULES |= {"spectral": RULES["entropy"], "boundary": "neighbours that differ: cosine below 0"}
RULES |= {"space": "the first space behind a word", "stride": "every so many tokens, f = {target_fraction}"}
CUTS = {("entropy", 2): ("H ≤ τ", "H > τ"), ("entropy", 3): ("H ≤ τ_low", "τ_low < H ≤ τ_high", "H > τ_high")}


@style()
def draw_model(sources: Sequence[str]) -> "Figure":
    """The architecture: equal neighbouring layers, and layers that alternate, are drawn once."""
    from chiar.model.load import load_config

    config = load_config(sources[0])
    layered = config.routed_layers and not config.stacks
    norm, keys = config.norm.replace("norm", " norm"), f", keys {config.keys}" if layered else ""
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
        rows += around_stack(config, names, boxes) if kind == "dark" else zip(names, boxes, strict=True)
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
        for column, (x, (label, note, colour)) in enumerate(zip(centres, row, strict=True)):
            # Side by side below side by side: each goes on by itself, past a place without a box.
            before = above if len(row) == 1 or len(above) == 1 else above[column : column + 1]
            if not label:
                axes.plot([x, x], [0.69 - number, -0.31 - number], color="#444444", linewidth=1)
                continue
            box = {"boxstyle": "round,pad=0.5", "facecolor": (colour, 0.22), "edgecolor": colour, "linewidth": 1.5}
            axes.text(x, -number, f"{label}\n{note}", ha="center", va="center", bbox=box)
            for start in before:
                arrow = {"arrowstyle": "-|>", "color": "#444444", "shrinkA": 0, "shrinkB": 0, "mutation_scale": 9}
                axes.annotate("", (x, 0.31 - number), (start, 0.69 - number), arrowprops=arrow)
        above = centres
    return figure


def layer_rows(config: "ChiarConfig", kind: str, gated: bool) -> list[list[Box]]:
    """A layer from above, operators side by side."""
    from chiar.registry import is_light

    routed, operators = kind == "routed", list(config.operators or []) if kind == "routed" else [kind]
    if kind == "dark":
        return stack_rows(config)
    cuts = CUTS.get((config.router or "", len(operators)), ("",) * len(operators)) if routed else ("",)
    hidden = "4D" if config.intermediate_size == 4 * config.hidden_size else str(config.intermediate_size)
    rows: list[list[Box]] = []
    if config.temporal_everywhere:
        over = f"every token, over the last {config.temporal_window}"
        rows.append([("filter along time", over, operator_colour("temporal"))])
    if routed:
        rule = RULES.get(config.router or "", "a router of your own").format(**config.to_dict())
        rows.append([(f"{config.router} router", rule, ROUTER)])
    side: list[Box] = []
    for operator, cut in zip(operators, cuts, strict=True):
        shade, _, name = NAMES.get(operator, f"light: {operator}").partition(": ")
        cut = cut or (f"the last {config.window:,} tokens" if kind == "attention" and config.window else "")
        side.append((name, f"{shade}: {cut}" if cut else shade, operator_colour(operator)))
    network = ("feed-forward", f"D → {hidden} → D, GELU", PLAIN)
    fed = [PAST if is_light(name) else network for name in operators] if routed and not config.light_ffn else [network]
    rows += [side, fed]
    if gated:
        before = ("MetaRouter", f"g = σ(w·x̄ + b), x̄ the mean ({config.gate_pool})", GATE)
        rows = [[before], *rows, [("MetaRouter", "g × the layer + (1 − g) × its input", GATE)]]
    return rows


PAST = ("", "", "")  # a line beside boxes
# What light tokens get behind a dark stack, and dark ones.
CARRIES = {
    "linear": ("W · what the stack changed last", "and the carry"),
    "smoothed": ("running mean of its changes", "in the same mean"),
    "none": ("nothing", "their own"),
}


def stack_rows(config: "ChiarConfig") -> list[list[Box]]:
    """A layer of a dark stack, beside which light tokens pass."""
    inner, hidden = config.inner_size, config.of_layer(config.routed_layers[0]).intermediate_size
    wide, much = ("D", "4D") if not inner and hidden == 4 * config.hidden_size else (str(inner or "D"), str(hidden))
    boxes: list[Box] = [("attention", "dark: among dark tokens", operator_colour("attention"))]
    boxes.append(("feed-forward", f"{wide} → {much} → {wide}, GELU", PLAIN))
    if config.temporal_everywhere:
        over = f"the last {config.temporal_window} dark tokens"
        boxes.insert(0, ("filter along time", over, operator_colour("temporal")))
    return [[PAST, box] for box in boxes]


def around_stack(config: "ChiarConfig", names: list[str], rows: list[list[Box]]) -> list[tuple[str, list[Box]]]:
    """What stands before and behind the layers of a dark stack."""
    kind, light, dark = config.router_kind, operator_colour("carry"), operator_colour("attention")
    rule = RULES.get(config.router or "", "a router of your own").format(**config.to_dict())
    below, above = ("H ≤ τ", "H > τ") if kind.score else ("pass by", "")
    if kind.can_follow or kind.has_gradient:
        above += f"{', ' if above else ''}f = {', '.join(f'{f:g}' for f in config.layer_fractions() or [])}"
    width = f" to width {config.inner_size}" if config.inner_size else ""
    before: list[list[Box]] = [[(f"{config.router} router", rule, ROUTER)]]
    before.append([("light tokens", below, light), (f"pack dark tokens{width}", above or "in order", dark)])
    if kind.reads_prediction:
        before.insert(0, [("early head", "predicts the next token, H is that prediction's entropy", PLAIN)])
    told, kept = CARRIES[config.carry]
    behind: list[Box] = [("carry", told, light), ("change", kept, dark)]
    starts = ["before the stack", *[""] * (len(before) - 1)]
    return [*zip(starts, before, strict=True), *zip(names, rows, strict=True), ("behind the stack", behind)]


def draw_routes(sources: Sequence[str], prompt: str = "", tokenizer: Path | None = None, seed: int = 0) -> "Figure":
    from chiar.routing.tables import route_text

    require(prompt, "routing shows the routes of a text: give it with --prompt.")
    routed = route_text(sources[0], prompt, tokenizer, seed)
    return draw_routing(routed.trace, routed.pieces, routed.heading)


# What is drawn from what, by which function, and the options it takes.
KINDS: "dict[str, tuple[str, Callable[..., Figure], tuple[str, ...]]]" = {
    "curves": (
        "training runs: losses, learning rate, operators by layer, g and its histogram",
        draw_curves,
        ("data", "over"),
    ),
    "pareto": ("a study's folder or results.json: loss against FLOPs and step time", draw_study, ()),
    "model": ("a preset, model folder or run: its architecture", draw_model, ()),
    "routing": ("a model: the route of each token of a text", draw_routes, ("prompt", "tokenizer", "seed")),
}


def plot(
    kind: Annotated[str, typer.Argument(metavar="KIND", help="|".join(KINDS))],
    out: Annotated[Path, typer.Option(metavar="FILE", help="New .svg, .png or .pdf file.")],
    sources: Annotated[list[str] | None, typer.Argument(metavar="[SOURCE...]", help="What is drawn.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file if it exists.")] = False,
    data: Annotated[Path | None, typer.Option(metavar="CORPUS", help="curves: mark its unigram entropy.")] = None,
    over: Annotated[str | None, typer.Option(metavar="|".join(OVER), help="curves: across. [default: steps]")] = None,
    prompt: Annotated[str | None, typer.Option(metavar="TEXT", help="routing: the text.")] = None,
    tokenizer: Annotated[Path | None, typer.Option(help="routing: tokenizer folder, if the model has none.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, max=2**63 - 1, help="routing: weights'. [default: 0]")] = None,
) -> None:
    options = {"data": data, "over": over, "prompt": prompt, "tokenizer": tokenizer, "seed": seed}
    given = {name: value for name, value in options.items() if value is not None}
    if kind not in KINDS:
        raise unknown_name("kind of picture", kind, KINDS)
    what, draw, taken = KINDS[kind]
    for name in given.keys() - set(taken):
        raise InputError(f"--{name.replace('_', '-')} says nothing about {kind}: leave it out.")
    if not sources or (kind != "curves" and len(sources) > 1):
        wrong = f"{kind} draws one thing, got {len(sources)}" if sources else "name what to draw"
        raise InputError(f"{wrong}: it is drawn from {what}.")
    check_picture(out, overwrite)
    save(draw(sources, **given), out, overwrite)
    typer.echo(f"wrote {out}")


plot.__doc__ = "\n\n".join(
    ["Draw recorded runs, studies and models.", *(f"{name}: {what}." for name, (what, *_) in KINDS.items())]
)
