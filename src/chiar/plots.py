"""Pictures with matplotlib. Every `draw_…` returns a Figure; `svg_text` and `save` write it.

Matplotlib is imported when a figure is made: importing this module costs nothing, and it may be missing.
"""

import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from io import BytesIO
from itertools import cycle, pairwise
from pathlib import Path
from statistics import mean, median
from typing import TYPE_CHECKING, Any

from chiar.config import ChiarConfig
from chiar.errors import InputError, unknown_name
from chiar.evaluation.compare import differences, read_entry, read_measured_on, short_names
from chiar.evaluation.report import EvaluationReport, LanguageScores
from chiar.files import check_new
from chiar.model.load import count_parameters, load_config
from chiar.routing.flops import Savings
from chiar.training.run_folder import RUN, RunFolder, read_records, told
from chiar.visible import visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Points = list[tuple[float, float]]
Colour = tuple[int, int, int]
# The one colour language. Yellow against blue stays apart under the common colour blindnesses, and in grey all light
# cells are paler than any dark one. Each pair goes from at the threshold to far from it.
LIGHT: tuple[Colour, Colour] = (255, 247, 205), (250, 205, 50)
RAMPS: dict[str, tuple[Colour, Colour]] = {
    "temporal": ((247, 250, 210), (205, 220, 60)),
    "rbf": ((221, 160, 195), (204, 121, 167)),
    "attention": ((120, 170, 215), (8, 40, 100)),
}
NAMES = {
    "spectral": "light: spectral filter",
    "temporal": "light: temporal filter",
    "rbf": "between: RBF mixing",
    "attention": "dark: attention",
}
# The same on white, for lines.
LINE_COLOURS = {"temporal": "#8f9c14", "rbf": "#cc79a7", "attention": "#082864"}
LIGHT_LINE = "#d9a400"
# Okabe and Ito's colours, for what is not an operator; yellow is too pale for a line.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
DASHES: tuple[Any, ...] = ("-", (0, (7, 3)), (0, (2, 2)), (0, (9, 3, 2, 3)))
# Text stays text and a $ in it is a dollar; a fixed salt makes equal pictures equal files.
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none", "svg.hashsalt": "chiar", "text.parse_math": False, "font.family": "DejaVu Sans",
    "font.size": 9, "axes.titlesize": 9.5, "axes.titleweight": "bold", "axes.titlelocation": "left",
    "figure.titlesize": 12, "figure.titleweight": "bold", "legend.frameon": False, "legend.fontsize": 8.5,
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "axes.grid.axis": "y",
    "grid.color": "#dddddd", "axes.axisbelow": True, "lines.markersize": 4, "lines.linewidth": 1.6,
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
    if not overwrite:
        check_new(out)


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
        self.points, self.label, self.look = points, label, look


LABEL = 40
"""Letters of a legend's entry."""


@dataclass
class Panel:
    title: str
    lines: list[Line]
    level: tuple[float, str] | None = None
    """A height to mark across the panel, and its name in the legend."""
    bounds: tuple[float, float] | None = None
    axis: str = ""
    """What is across, where panels differ in it."""
    ticks: Sequence[float] | None = None


@style()
def draw_panels(
    title: str, panels: Sequence[Panel], axis: str, up: str = "", columns: int = 1, sizes: bool = False
) -> "Figure":
    """One column has legends beside its panels, several share one. `sizes`: across is logarithmic, with short names."""
    from matplotlib.figure import Figure

    rows, wide = -(-len(panels) // columns), 9.0 if columns == 1 else 3.5 * columns + 0.4
    entries = [sum(bool(line.label) for line in panel.lines) + (panel.level is not None) for panel in panels]
    heights = [1.75 if columns > 1 else max(1.75, 0.175 * count + 0.1) for count in entries[:rows]]
    named = {shorten(line.label, LABEL) for panel in panels for line in panel.lines if line.label}
    across = max(1, min(len(named), int(wide / (0.7 + 0.075 * max(map(len, named), default=1)))))
    below = 0.9 if columns == 1 else 0.9 + 0.19 * -(-len(named) // across)
    figure = Figure((wide, sum(heights) + 0.5 * rows + below), layout="constrained", label=title)
    figure.suptitle(shorten(title, int(wide * 9)))
    grid = figure.subplots(rows, columns, squeeze=False, gridspec_kw={"height_ratios": heights})
    handles: dict[str, Any] = {}
    for number, (axes, panel) in enumerate(zip(grid.flat, panels, strict=False)):
        fill(axes, panel, sizes)
        axes.set_title(shorten(panel.title, 80 if columns == 1 else 44))
        axes.set_xlabel(panel.axis or (axis if number + columns >= len(panels) else ""))
        if columns == 1 and entries[number]:
            axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.04), borderaxespad=0, handlelength=3)
        handles |= {name: handle for handle, name in zip(*axes.get_legend_handles_labels(), strict=True)}
    for axes in grid.flat[len(panels) :]:
        axes.remove()
    if columns > 1:
        figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=across, handlelength=3)
        figure.supylabel(up, fontsize=9)
    return figure


def fill(axes: "Axes", panel: Panel, sizes: bool = False) -> None:
    for line in panel.lines:
        look = {"marker": "o"} | line.look if len(line.points) == 1 else line.look
        axes.plot(*zip(*line.points, strict=True), label=shorten(line.label, LABEL) or None, **look)
    if panel.level is not None:
        height, name = panel.level
        axes.axhline(height, color="#444444", linestyle=(0, (2, 4)), linewidth=1, label=shorten(name, LABEL) or None)
    if panel.bounds is not None:
        axes.set_ylim(*panel.bounds)
    if panel.ticks is not None:
        axes.set_xticks(panel.ticks)
    if sizes:
        from matplotlib.ticker import LogLocator, NullFormatter

        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter(lambda value, _: size_name(value))
        axes.xaxis.set_minor_formatter(NullFormatter())


def size_name(value: float) -> str:
    for power, letter in ((12, "T"), (9, "G"), (6, "M"), (3, "k")):
        if value >= 0.9995 * 10**power:
            return f"{value / 10**power:.4g}{letter}"
    return f"{value:.4g}"


def frontier(points: Points) -> Points:
    """From left to right, every point lower than all before it."""
    found: Points = []
    for x, y in sorted(points):
        if not found or y < found[-1][1]:
            found.append((x, y))
    return found


@dataclass(frozen=True)
class Mark:
    """A variant of a study: its mean, and its seeds."""

    number: int
    name: str
    control: bool
    x: float
    y: float
    seeds: Points


@style()
def draw_pareto(rows: list[dict[str, Any]], title: str = "", device: str = "") -> "Figure":
    """A study's variants: loss against counted FLOPs, and against step time where it was measured (on `device`).

    The times of `chiar study time` count; else those of training, if every variant was trained alone.
    """
    from matplotlib.figure import Figure

    paired = all(row["paired_loss"] is not None for row in rows)
    unequal = paired and len({tuple(sorted(row["seeds"])) for row in rows}) > 1
    loss = "test loss, nats per token" + (" (baseline's mean + paired Δ)" if unequal else "")
    panels = [("counted MFLOPs a token, forward", [row["flops_per_token"]["forward"] / 1e6 for row in rows])]
    timed = any(row["step_ms"] for row in rows)
    if timed or all(row["step_ms_in_training"] for row in rows):
        how = "" if timed else " (median in training)"
        times = [row["step_ms" if timed else "step_ms_in_training"] for row in rows]
        panels.append((f"measured training step, ms{how}, {device}", times))
    heights = [max(3.6, 0.178 * (sum(x is not None for x in places) + 5) + 0.7) for _, places in panels]
    figure = Figure((9.6, sum(heights) + 0.4), layout="constrained", label=title)
    figure.suptitle(shorten(title, 90))
    grid = figure.subplots(len(panels), squeeze=False, gridspec_kw={"height_ratios": heights})
    for axes, (axis, places) in zip(grid.flat, panels, strict=True):
        axes.set(title=loss, xlabel=axis)
        placed = [(number, row, x) for number, (row, x) in enumerate(zip(rows, places, strict=True)) if x is not None]
        draw_marks(axes, [mark_of(number + 1, row, x, paired, places is not panels[0][1]) for number, row, x in placed])
    return figure


def mark_of(number: int, row: dict[str, Any], x: float, paired: bool, timed: bool) -> Mark:
    mean, losses = ("paired_loss", "paired_losses") if paired else ("test_loss", "losses")
    by_seed = zip(row["seeds"], row["flops_by_seed"], strict=True)
    flops = [count / 1e6 for seed, count in by_seed if not paired or seed in row["gap_seeds"]]
    seeds = [(x if timed else count, y) for count, y in zip(flops, row[losses], strict=True)]
    return Mark(number, row["variant"], row["role"] == "control", x, row[mean], seeds if len(seeds) > 1 else [])


def lid(heights: list[float]) -> float:
    """Up to here marks are drawn to scale: of many, a few that lost by far would press the others into one line."""
    distance = median(heights) - min(heights)
    return min(heights) + 4 * distance if len(heights) >= 9 and distance else math.inf


def draw_marks(axes: "Axes", marks: list[Mark]) -> None:
    """Controls are hollow squares, candidates filled circles: told apart without colour. Numbers name them."""
    highest, best = lid([mark.y for mark in marks]), frontier([(mark.x, mark.y) for mark in marks])
    inside = [y for mark in marks for y in (mark.y, *(y for _, y in mark.seeds)) if y <= highest]
    air = (max(inside) - min(inside)) * 0.06 or 0.1
    top = max(inside) + air
    axes.set_ylim(min(inside) - air, top)
    for mark in marks:
        look: dict[str, Any] = {"marker": "s" if mark.control else "o", "linestyle": ""}
        look |= {"color": "#000000" if mark.control else COLOURS[0]}
        look |= {"markerfacecolor": "#ffffff" if mark.control else COLOURS[0]}
        name = f"{mark.number} {shorten(mark.name, 34)}" + (f" ↑{mark.y:.2f}" if mark.y > highest else "")
        axes.plot(mark.x, min(mark.y, top), markersize=6.5, clip_on=False, zorder=3, label=name, **look)
        axes.plot([x for x, _ in mark.seeds], [y for _, y in mark.seeds], markersize=3, markeredgewidth=0.7, **look)
    axes.plot([x for x, _ in best], [min(y, top) for _, y in best], color=COLOURS[1], label="frontier, names in bold")
    for note in ("square: control, circle: candidate", "small marks: single seeds", "↑ above the picture"):
        if "↑" not in note or max(mark.y for mark in marks) > highest:
            axes.plot([], [], " ", label=note)
    legend = axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.02), handlelength=1.2)
    for mark, text in zip(marks, legend.get_texts(), strict=False):
        text.set_fontweight("bold" if (mark.x, mark.y) in best else "normal")
    figure = axes.get_figure(root=True)
    assert figure is not None
    figure.draw_without_rendering()  # places in points are known from here on
    scale = 72 / figure.dpi
    taken: Points = []
    for x, y in [*((mark.x, min(mark.y, top)) for mark in marks), *(seed for mark in marks for seed in mark.seeds)]:
        taken.append(tuple(axes.transData.transform((x, y)) * scale))
    for mark, (x, y) in zip(marks, list(taken), strict=False):
        dx, dy = free_place(x, y, taken, axes.bbox.y0 * scale + 4, axes.bbox.y1 * scale)
        thread = {"arrowstyle": "-", "color": "#999999", "linewidth": 0.5} if abs(dy) > 11 else None
        spot, look = (mark.x, min(mark.y, top)), {"ha": "center", "va": "center", "size": 7}
        axes.annotate(str(mark.number), spot, (dx, dy), "data", "offset points", thread, **look)


def free_place(x: float, y: float, taken: Points, low: float, high: float) -> tuple[float, float]:
    """Where a number stands from its mark, clear of marks and earlier numbers: beside it, else above or below."""
    lines = [sign * 8.0 * n for n in range(30) for sign in (1, -1) if low <= y + sign * 8 * n <= high]
    places = [(side, line) for line in lines or [0.0] for side in (9.5, -9.5)]
    free = [p for p in places if all(abs(x + p[0] - a) > 11 or abs(y + p[1] - b) > 7.5 for a, b in taken)]
    dx, dy = (free or places)[0]
    taken.append((x + dx, y + dy))
    return dx, dy


OVER = {
    "steps": ((1.0, "steps"),),
    "tokens": ((1.0, "training tokens"), (1e3, "thousand training tokens"), (1e6, "million training tokens")),
    "time": ((1.0, "seconds"), (60.0, "minutes"), (3600.0, "hours")),
}


class Run:
    """One training run's records; `places` is where each lies: steps, tokens, or seconds since the first record."""

    def __init__(self, path: Path, name: str, number: int, over: str) -> None:
        folder = RunFolder(path)
        self.name, self.number, self.path = name, number, path
        self.stored = folder.read()
        self.records = read_records(folder.metrics_path) if folder.metrics_path.is_file() else []
        if not self.records:
            raise InputError(f"{path} has no measurements yet: let it train a few steps.")
        config = self.stored.get("config", {})
        self.routed = [layer for layer, kind in enumerate(config.get("layer_types") or []) if kind == "routed"]
        self.operators: list[str] = config.get("operators") or []
        steps = [float(record["step"]) for record in self.records]
        self.places = steps if over == "steps" else [step * self.tokens_per_step() for step in steps]
        if over == "time":
            self.places = self.seconds()

    def tokens_per_step(self) -> int:
        settings = self.stored.get("settings", {})
        if "batch" not in settings or "length" not in settings:
            raise InputError(f"{self.path} does not say its batch and length in run.json: draw it over steps.")
        added = settings.get("mixing") == "added" and len(settings.get("data", [])) > 1
        if added or any("accuracy" in record for record in self.records):
            raise InputError(
                f"{self.path} read batches of unequal lengths, not recorded in tokens: draw it over steps."
            )
        return settings["batch"] * settings["length"]

    def seconds(self) -> list[float]:
        """A record's speed is that of the steps since the one before, without evaluations. The first step compiles."""
        found = [0.0]
        for (before, here), record in zip(pairwise(self.places), self.records[1:], strict=True):
            if not record.get("tokens_per_second"):
                step = record["step"]
                raise InputError(f"{self.path} has no tokens_per_second at step {step}: draw it over steps or tokens.")
            found.append(found[-1] + (here - before) / record["tokens_per_second"])
        return found

    def points(self, read: Callable[[dict[str, Any]], Any]) -> Points:
        """What `read` finds in the records, where it finds something finite."""
        found = [(place, read(record)) for place, record in zip(self.places, self.records, strict=True)]
        return [(place, float(value)) for place, value in found if value is not None and math.isfinite(value)]

    def by_corpus(self, part: str) -> dict[str, Points]:
        """What was measured for each of several corpora."""

        def reader(name: str) -> Callable[[dict[str, Any]], Any]:
            return lambda record: (record.get(part) or {}).get(name)

        names = dict.fromkeys(name for record in self.records for name in record.get(part) or {})
        return {name: self.points(reader(name)) for name in names}

    def use(self, operator: int, row: int | None = None) -> Points:
        """Share of the tokens this operator got in the row-th routed layer, or in the mean of them."""

        def read(record: dict[str, Any]) -> float | None:
            shares = [layer[operator] for layer in record.get("use") or []]
            if row is None:
                return sum(shares) / len(shares) if shares else None
            return shares[row] if len(shares) > row else None

        return self.points(read)

    def line(self, name: str, points: Points, **look: Any) -> list[Line]:
        """A list of one line, or of none where nothing was measured."""
        look = {"color": COLOURS[self.number % len(COLOURS)], **look}
        return [Line(points, f"{self.name}: {name}" if name else "", **look)] if points else []

    def validations(self, first: float = 0.0) -> list[Line]:
        found = self.by_corpus("validation")
        lines = []
        for (name, points), dashes in zip(found.items(), cycle(DASHES), strict=False):
            kept = [point for point in points if point[0] >= first]
            called = "validation" if len(found) == 1 else f"validation {name}"
            lines += self.line(called, kept, linestyle=dashes, marker="o")
        return lines

    def fractions(self) -> list[Line]:
        if len(self.routed) <= 4:
            named = zip(self.routed, DASHES, strict=False)
            lines = [self.line(f"layer {n + 1}", self.use(-1, row), linestyle=d) for row, (n, d) in enumerate(named)]
        else:
            lines = [self.line("", self.use(-1, row), linewidth=0.7, alpha=0.3) for row in range(len(self.routed))]
            lines.append(self.line(f"mean of {len(self.routed)} layers", self.use(-1)))
        return [line for one in lines for line in one]


def read_runs(paths: Sequence[Path], over: str = "steps") -> tuple[list[Run], str]:
    """The runs in a common unit, and the name of the horizontal axis."""
    if over not in OVER:
        raise unknown_name("axis", over, OVER)
    names = short_names(list(paths))
    if len(set(names)) < len(names):
        raise InputError(f"{next(name for name in names if names.count(name) > 1)} is named twice.")
    runs = [Run(path, name, number, over) for number, (path, name) in enumerate(zip(paths, names, strict=True))]
    longest = max(run.places[-1] for run in runs)
    factor, axis = next((unit for unit in reversed(OVER[over]) if longest >= 2 * unit[0]), OVER[over][0])
    for run in runs:
        run.places = [place / factor for place in run.places]
    return runs, axis + (" of training, after the first step and without evaluations" if over == "time" else "")


def draw_curves(runs: Sequence[Path], corpus: Path | None = None, over: str = "steps") -> "Figure":
    """Run folders: losses, learning rate, f by layer and g. With the corpus, its validation split's unigram entropy."""
    found, axis = read_runs(runs, over)
    half = max(run.places[-1] for run in found) / 2
    late = [line for run in found for line in run.validations(half)]
    losses, gaps, rates, gates = [], [], [], []
    reference = {record["step"]: record.get("loss") for record in found[0].records}
    for run, dashes in zip(found, cycle(DASHES), strict=False):
        losses += run.line("train", run.points(lambda r: r.get("loss")), linewidth=1, alpha=0.55) + run.validations()
        rates += run.line("rate", run.points(lambda r: r.get("rate")), linestyle=dashes)
        if run.number:
            gaps += run.line("train", run.points(lambda r: gap(r.get("loss"), reference.get(r["step"]))), linewidth=1)
        for (name, points), dash in zip(run.by_corpus("gate").items(), cycle(DASHES), strict=False):
            gates += run.line(f"g on {name}", points, linestyle=dash)
    if not losses:
        raise InputError("no finite loss was measured in these runs: there is nothing to draw.")
    panels = [
        Panel("loss, nats per token", losses, unigram_level(corpus)),
        # Beside the first steps' losses the last ones all look alike.
        Panel("validation loss in the second half", late if any(len(line.points) > 2 for line in late) else []),
        Panel(f"loss minus that of {found[0].name}", gaps),
        Panel("learning rate", rates),
        Panel("f: share of tokens sent to attention", [line for run in found for line in run.fractions()], None, UNIT),
        Panel("g: gate of layer 1", gates, None, UNIT),
    ]
    return draw_panels(" and ".join(run.name for run in found), [panel for panel in panels if panel.lines], axis)


UNIT = (-0.02, 1.02)


def gap(loss: float | None, other: float | None) -> float | None:
    return None if loss is None or other is None else loss - other


def unigram_level(corpus: Path | None) -> tuple[float, str] | None:
    if corpus is None:
        return None
    from chiar.data.shards import Corpus
    from chiar.evaluation.harness import unigram_entropy

    opened = Corpus.open(corpus)
    entropy = unigram_entropy(opened.split("valid"), opened.vocab_size)
    return entropy, f"unigram entropy of {opened.name} valid, {entropy:.2f}"


def reaching(paths: Sequence[Path], over: str) -> list[str]:
    """When each run's validation loss first was at most the least of the first run, on its first corpus."""
    runs, axis = read_runs(paths, over)
    found = [next(iter(run.by_corpus("validation").items()), ("", [])) for run in runs]
    if len(runs) < 2 or not found[0][1]:
        return []
    goal, said = min(loss for _, loss in found[0][1]), []
    for run, (corpus, points) in zip(runs, found, strict=True):
        if corpus != found[0][0] or read_measured_on(run.path) != read_measured_on(paths[0]):
            said.append(f"{run.name} was validated on other rows than {runs[0].name}: their losses do not compare.")
            continue
        place = next((x for x, loss in points if loss <= goal), None)
        when = "not at all" if place is None else f"at {place:,.4g} {axis.split(' of training')[0]}"
        said.append(f"{run.name} reaches the validation loss {goal:.4f}, {runs[0].name}'s least, {when}.")
    return said


def draw_gate(paths: Sequence[Path]) -> "Figure":
    """The MetaRouter's g over training and how often it took which value, for every run and corpus."""
    runs, axis = read_runs(paths)
    courses: list[Line] = []
    shares: list[Line] = []
    for run in runs:
        if not (found := run.by_corpus("gate")):
            raise InputError(f"{run.path} has no MetaRouter: there is no g to draw.")
        for name, points in found.items():
            number = len(courses)
            look = {"color": COLOURS[number % 7], "linestyle": DASHES[number // 7 % 4]}
            counts = Counter(min(int(50 * g), 49) for _, g in points)
            outline = [(bar / 50, counts[bar] / len(points)) for bar in range(51)]
            courses.append(Line(points, f"{run.name}: g on {name}", **look))
            shares.append(Line(outline, f"{run.name}: g on {name}", drawstyle="steps-post", **look))
    panels = [Panel("g over training (0: layer 1 bypassed)", courses, None, UNIT, axis)]
    panels.append(Panel("share of all logged steps, by g", shares, axis="g"))
    return draw_panels(f"g: {', '.join(run.name for run in runs)}", panels, "", columns=2)


def draw_operators(paths: Sequence[Path], over: str = "steps") -> "Figure":
    """The share of tokens each operator got in training: the mean of the routed layers, then each of them."""
    runs, axis = read_runs(paths, over)
    panels = []
    for run in runs:
        if not run.routed or not any(record.get("use") for record in run.records):
            raise InputError(f"{run.path} has no routed layers: operators are chosen in those only.")
        before, rows = f"{run.name}, " if len(runs) > 1 else "", list(enumerate(run.routed))
        titles = [(None, "mean of the routed layers")] if len(rows) > 1 else []
        for row, title in [*titles, *((row, f"layer {layer + 1}") for row, layer in rows)]:
            shares = [(name, run.use(number, row)) for number, name in enumerate(run.operators)]
            lines = [Line(points, name, color=LINE_COLOURS.get(name, LIGHT_LINE)) for name, points in shares if points]
            panels.append(Panel(before + title, lines, None, UNIT))
    title = f"{', '.join(run.name for run in runs)}: operators in training"
    columns = 2 if len(panels) in (2, 4) else min(3, len(panels))
    return draw_panels(title, panels, axis, "share of the tokens of a logged step", columns)


AGAINST = {"parameters": "trainable parameters", "flops": "counted FLOPs a token, forward"}


@dataclass(frozen=True)
class Size:
    """An evaluation report on one line of a scaling picture."""

    series: str
    size: float
    dense: bool
    report: EvaluationReport


def read_sizes(arguments: Sequence[str], against: str) -> list[Size]:
    """From `[SERIES=]PATH`, a report or a run folder with one; without a name it is dense or CHIAR."""
    if against not in AGAINST:
        raise unknown_name("size", against, AGAINST)
    found: list[Size] = []
    for argument in arguments:
        series, _, path = argument.rpartition("=") if not Path(argument).exists() else ("", "", argument)
        report = read_entry(Path(path), path).report
        if report is None:
            raise InputError(f"{path} was not evaluated: chiar eval {path} --data CORPUS --json {path}/evaluation.json")
        if not isinstance(report.scores, LanguageScores):
            raise InputError(f"{path} is a report of a classifier: sizes are compared by the loss on running text.")
        if found and (other := differences(report, found[0].report)):
            raise InputError(f"{path} was evaluated with another {' and '.join(other)} than {arguments[0]}.")
        dense = not report.routing.layers and math.isclose(report.flops, report.baseline_flops)
        size = report.flops if against == "flops" else float(parameters(Path(path), report))
        found.append(Size(series or ("dense" if dense else "CHIAR"), size, dense, report))
    return found


def parameters(path: Path, report: EvaluationReport) -> int:
    """Of the run in the folder, or of the model the report is about."""
    if (path / RUN).is_file():
        return count_parameters(ChiarConfig.from_dict(told(RunFolder(path).read(), "config", str(path))))
    try:
        return count_parameters(load_config(report.model))
    except InputError:
        sentence = "so its parameters cannot be counted: name the run's folder, or take --against flops."
        raise InputError(f"{path} is about {report.model}, which is not here, {sentence}") from None


def draw_scaling(arguments: Sequence[str], against: str = "parameters") -> "Figure":
    """Loss against size, and what each model loses to the mean of the dense ones that cost what it would without
    routing. A line goes through the mean of each size; every report is a dot."""
    sizes = read_sizes(arguments, against)
    losses: list[Line] = []
    gaps: list[Line] = []
    for number, series in enumerate(dict.fromkeys(one.series for one in sizes)):
        own, colour = [one for one in sizes if one.series == series], COLOURS[number % len(COLOURS)]
        rivals = [dense_rivals(one, sizes) for one in own]
        heights = [(one.size, one.report.scores.loss) for one in own]
        lost = [(x, y - mean(dense)) for (x, y), dense in zip(heights, rivals, strict=True) if dense]
        for lines, points in ((losses, heights), (gaps, lost)):
            means = [(x, mean(y for place, y in points if place == x)) for x in sorted({x for x, _ in points})]
            if points:
                lines.append(Line(means, series, color=colour))
                lines.append(Line(points, "", color=colour, marker="o", linestyle=""))
    panels = [Panel("loss, nats per token", losses)]
    if gaps:
        panels.append(Panel("loss − that of the dense model of its shape, nats", gaps, (0.0, "no loss")))
    first = sizes[0].report
    names = ", ".join(dict.fromkeys(shorten(one.series, 24) for one in sizes))
    title = f"{first.corpus} {first.split}, T = {first.length}: {names}"
    return draw_panels(title, panels, AGAINST[against], sizes=True)


def dense_rivals(one: Size, sizes: list[Size]) -> list[float]:
    cost = one.report.baseline_flops
    dense = [other.report for other in sizes if other.dense and math.isclose(other.report.flops, cost)]
    return [] if one.dense else [report.scores.loss for report in dense]


def draw_savings(
    names: Sequence[str], length: int, fraction: float | None, keys: str | None, light_ffn: bool | None
) -> "Figure":
    """Counted FLOPs saved against size, in all, in the layers and in attention; the paper's claims are marked."""
    from chiar.routing.tables import PAPER_ATTENTION, PAPER_TOTAL, describe_fraction, savings_by_length

    counted = []
    for name in names:
        config = load_config(name)
        if not config.routed_layers:
            raise InputError(f"{name} routes nothing, so there is nothing to save: name a CHIAR model.")
        counted.append(
            (float(count_parameters(config)), savings_by_length(config, [length], fraction, keys, light_ffn)[0])
        )
    counted.sort(key=lambda pair: pair[0])
    parts: tuple[tuple[str, Callable[[Savings], float], str | None], ...] = (
        ("all FLOPs saved, %", lambda saved: saved.total, PAPER_TOTAL),
        ("FLOPs of the layers saved (no output projection), %", saved_in_layers, None),
        ("attention of routed layers saved, %", lambda saved: saved.attention_in_routed_layers or 0.0, PAPER_ATTENTION),
    )
    costs = {"free": "a free DCT", "even_odd": "the DCT by halves", "gemm": "the DCT as a matrix"}
    panels = []
    for title, share, paper in parts:
        found = {cost: [(size, 100 * share(saved[cost])) for size, saved in counted] for cost in costs}
        equal = len(set(map(tuple, found.values()))) == 1
        named = {"whatever the DCT costs": found["free"]} if equal else {f"with {costs[c]}": found[c] for c in costs}
        looks = zip(named.items(), COLOURS, DASHES, strict=False)
        lines = [Line(points, name, color=colour, linestyle=dash, marker="o") for (name, points), colour, dash in looks]
        level = None if paper is None else (float(paper.rstrip("%").split("–")[0]), f"the paper: {paper}")
        panels.append(Panel(title, lines, level))
    ffn = "" if (config.light_ffn if light_ffn is None else light_ffn) else ", no light FFN"
    setting = f"T {length}, {describe_fraction(config, fraction)}, keys {keys or config.keys}{ffn}"
    title = f"counted savings of {', '.join(names)}: {setting}"
    return draw_panels(title, panels, "trainable parameters", sizes=True)


def saved_in_layers(saved: Savings) -> float:
    chiar, baseline = (count.total - count.part("logits") for count in (saved.chiar, saved.baseline))
    return 1.0 - chiar / baseline
