"""Evaluation reports: what was measured, on what, and how; saved as JSON, and compared with others and with runs."""

import json
import math
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from statistics import median
from typing import Any, ClassVar, NamedTuple

from rich.table import Table

from chiar.colours import layer_numbers
from chiar.errors import InputError, errors_as, require
from chiar.files import check_file
from chiar.training.run_folder import METRICS, RUN, RunFolder

FORMAT = "chiar-evaluation/1"
SCORES = (
    ("documents", "documents", ","), ("… longer, and cut", "cut", ","), ("tokens", "tokens", ","),
    ("loss, nats", "loss", ".4f"), ("unigram entropy of the same tokens, nats", "unigram_entropy", ".4f"),
    ("token perplexity", "perplexity", ",.6g"), ("word perplexity (words + lines)", "word_perplexity", ",.6g"),
    ("bits per byte", "bits_per_byte", ".4f"), ("accuracy", "accuracy", ".2%"), ("F1 of {second}", "f1", ".4f"),
    ("Matthews correlation", "matthews", ".4f"),
)  # fmt: skip
"""The scores that are shown: label, key and format."""
REPORT = "evaluation.json"
MUST_AGREE = {"fingerprint": "corpus"} | {name: name for name in ("split", "length", "stride", "rows")}


@dataclass(frozen=True)
class LanguageScores:
    """Next-token losses over `tokens` targets (all but a split's first), and the size of their text."""

    kind: ClassVar[str] = "language"
    tokens: int
    nll: float  # mean loss, nats per token
    words: int
    lines: int
    bytes: int  # ends of text are targets but no text
    unigram_entropy: float | None = None  # of these targets, nats per token: the least loss without context

    @property
    def loss(self) -> float:
        return self.nll

    def derived(self) -> dict[str, float | None]:
        """Word perplexity counts the end of each line as a word, as the literature on WikiText does."""
        total, words = self.nll * self.tokens, self.words + self.lines
        by_word = perplexity(total / words) if words else None
        by_byte = total / math.log(2) / self.bytes if self.bytes else None
        return {"perplexity": perplexity(self.nll), "word_perplexity": by_word, "bits_per_byte": by_byte}


@dataclass(frozen=True)
class ClassScores:
    """`confusion[i][j]`: documents of class i predicted as class j."""

    kind: ClassVar[str] = "classification"
    documents: int
    tokens: int
    cut: int  # documents longer than the length they were cut to
    loss: float  # mean cross-entropy, nats per document
    labels: list[str]
    confusion: list[list[int]]

    @property
    def accuracy(self) -> float:
        return sum(row[i] for i, row in enumerate(self.confusion)) / self.documents

    def derived(self) -> dict[str, Any]:
        """Accuracy, also of each class (None: no documents). For two classes GLUE's other metrics too: F1 of the second
        class, and Matthews correlation (0 if all labels or all predictions are of one class)."""
        rows = zip(self.labels, self.confusion, strict=True)
        shares = {name: row[i] / sum(row) if sum(row) else None for i, (name, row) in enumerate(rows)}
        f1 = matthews = None
        if len(self.labels) == 2:
            (a, b), (c, d) = self.confusion
            f1 = 2 * d / max(2 * d + b + c, 1)
            spread = math.sqrt((a + b) * (c + d) * (a + c) * (b + d))
            matthews = (a * d - b * c) / spread if spread else 0.0
        return {"accuracy": self.accuracy, "class_accuracy": shares, "f1": f1, "matthews": matthews}


@dataclass(frozen=True)
class LayerUse:
    """The share of tokens of each operator, in a routed layer or the dark stack that begins there. Counted from 0."""

    layer: int
    use: dict[str, float]
    layers: int = 1  # number of layers in the stack


@dataclass(frozen=True)
class RoutingUse:
    layers: list[LayerUse]
    gate: float | None  # mean g of the MetaRouter
    gate_pool: str | None

    @property
    def fraction(self) -> float | None:
        """Mean f, the share sent to attention, over the routed layers."""
        return sum(layer.use["attention"] for layer in self.layers) / len(self.layers) if self.layers else None


@dataclass(frozen=True)
class EvaluationReport:
    model: str
    run: str | None  # the training run, if one was named: `model` is its best
    corpus: str
    fingerprint: str
    split: str
    length: int
    stride: int | None  # None: adjacent blocks, as in the paper
    rows: int | None  # limit on blocks or documents; None: all of the split
    batch_size: int
    precision: str
    device: str
    scores: LanguageScores | ClassScores
    routing: RoutingUse
    flops: float  # counted, forward, per token, from the measured shares
    baseline_flops: float  # the same for attention in every layer
    flops_length: int
    remarks: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        record = asdict(self)
        record["scores"] |= self.scores.derived()  # for readers of the file
        return {"format": FORMAT, "kind": self.scores.kind, **record}

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=1, allow_nan=False, ensure_ascii=False)

    @classmethod
    def read(cls, path: Path) -> "EvaluationReport":
        check_file(path)
        with errors_as(f"{path} is not an evaluation report, or damaged", ValueError, KeyError, TypeError):
            data = json.loads(path.read_text(encoding="utf-8"))
            if data["format"] != FORMAT:
                raise ValueError(f"it does not say format {FORMAT!r}.")
            kind = LanguageScores if data["kind"] == LanguageScores.kind else ClassScores
            names = {known.name for known in fields(kind)}  # the file has derived figures too
            scores = kind(**{name: value for name, value in data["scores"].items() if name in names})
            layers = [LayerUse(**layer) for layer in data["routing"]["layers"]]
            parts = {"scores": scores, "routing": RoutingUse(**{**data["routing"], "layers": layers})}
            return cls(**{known.name: data[known.name] for known in fields(cls)} | parts)


def perplexity(nats: float) -> float | None:
    """None where it would overflow."""
    return math.exp(nats) if nats < 700 else None


def shown(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def side_by_side(title: str, columns: dict[str, dict[str, str]]) -> Table:
    """A row for each figure that any of the columns has."""
    table = Table("", *columns, box=None, title=title, title_justify="left")
    for name in dict.fromkeys(name for column in columns.values() for name in column):
        table.add_row(name, *(column.get(name, "–") for column in columns.values()))
    return table


def figures(report: EvaluationReport) -> dict[str, str]:
    """Scores that the report has, routing and costs, as they are shown."""
    scores, gate, pool = report.scores, report.routing.gate, report.routing.gate_pool
    known: dict[str, Any] = {**asdict(scores), "loss": scores.loss, **scores.derived()}
    present = [(name, known[key], form) for name, key, form in SCORES if known.get(key) is not None]
    rows = {name.format(second=known.get("labels", [""])[-1]): shown(value, form) for name, value, form in present}
    rows |= {f"accuracy on {name}": shown(share, ".2%") for name, share in known.get("class_accuracy", {}).items()}
    return rows | {
        "f, mean of the routed layers": shown(report.routing.fraction, ".4f"),
        "g, mean of the gate": "–" if gate is None else f"{gate:.4f} (pool: {pool})",
        f"counted MFLOPs per token at T = {report.flops_length}": f"{report.flops / 1e6:,.3f}",
        "… ÷ attention in every layer": f"{report.flops / report.baseline_flops:.4f}",
    }


class Training(NamedTuple):
    """From a run's metrics: validation losses of the last evaluation, and the median of tokens/s."""

    validation: dict[str, float]
    tokens_per_second: float | None
    measured_on: dict[str, Any]  # what determines the rows of a validation loss


class Entry(NamedTuple):
    name: str
    report: EvaluationReport | None
    training: Training | None


def is_report(argument: Path) -> bool:
    return argument.is_file() or argument.suffix == ".json"


def read_entry(argument: Path, name: str, report: EvaluationReport | None = None) -> Entry:
    """A fresh `report`, or the one saved at `argument`, a file or run folder; and the run's metrics, if they exist."""
    saved = argument if is_report(argument) else argument / REPORT
    if report is None and (saved == argument or saved.is_file()):
        report = EvaluationReport.read(saved)
    run = Path(report.run) if report and report.run else argument
    trained = (run / METRICS).is_file()
    what = f"is neither a training run nor holds an {REPORT}" if argument.exists() else "is no file or folder here"
    require(report or trained, f"{argument} {what}: give --data or --harness.")
    return Entry(name, report, read_training(run) if trained else None)


def read_training(path: Path) -> Training:
    records = RunFolder(path).read_metrics()
    validations = [record["validation"] for record in records if record.get("validation")]
    speeds = [record["tokens_per_second"] for record in records if record.get("tokens_per_second")]
    # A run that does not record its data is comparable with itself only.
    measured_on: dict[str, Any] = {"data": str(path)}
    if (path / RUN).is_file():
        with errors_as(f"{path / RUN} is damaged", KeyError, TypeError):
            run = RunFolder(path).read()
            measured_on = {name: run["settings"][name] for name in ("length", "evaluate_rows")} | {"data": run["data"]}
    return Training(dict(validations[-1]) if validations else {}, median(speeds) if speeds else None, measured_on)


def training_data(run: Path) -> list[str]:
    """Fingerprints of the corpora a run was trained on; none if the folder is no run."""
    if not (run / RUN).is_file():
        return []
    with errors_as(f"{run / RUN} is damaged", KeyError, TypeError, AttributeError):
        return list(RunFolder(run).read()["data"].values())


def short_names(arguments: list[Path]) -> list[str]:
    """Folder or file names; full paths where these would be equal."""
    short = [path.resolve().name if path.is_dir() else path.stem for path in arguments]
    names = [name if short.count(name) == 1 else str(path) for name, path in zip(short, arguments, strict=True)]
    if twice := [name for name in names if names.count(name) > 1]:
        raise InputError(f"{twice[0]} is named twice.")
    return names


def differences(report: EvaluationReport, reference: EvaluationReport) -> list[str]:
    """Why two reports cannot be compared."""
    return [label for name, label in MUST_AGREE.items() if getattr(report, name) != getattr(reference, name)]


def compare(entries: list[Entry], anyway: bool = False) -> list[Table | str]:
    """One column per entry. Runs without a report are compared by the validation losses of training."""
    first, several = next((entry for entry in entries if entry.report), entries[0]), len(entries) > 1
    columns, differing = dict[str, dict[str, str]](), dict[str, list[str]]()
    shared, losses = first.report, first.training.validation if first.training else {}
    for name, report, training in entries:
        column: dict[str, str] = {}
        if report and shared:
            differing[name] = differences(report, shared)
            column = figures(report)
            if several:
                column["gap to the baseline, nats"] = f"{report.scores.loss - shared.scores.loss:+.4f}"
                bits, theirs = (one.scores.derived().get("bits_per_byte") for one in (report, shared))
                if bits is not None and theirs is not None:
                    column["… bits per byte"] = f"{bits - theirs:+.4f}"
                column["FLOPs ÷ baseline"] = f"{report.flops / shared.flops:.4f}"
            for layer in () if several else report.routing.layers:
                shares = ", ".join(f"{operator} {share:.4f}" for operator, share in layer.use.items())
                numbers = layer_numbers(range(layer.layer, layer.layer + layer.layers))
                column[f"tokens of layer {numbers}"] = shares
        if training:
            for corpus, loss in training.validation.items():
                column[f"last validation loss on {corpus}"] = f"{loss:.4f}"
                if several:
                    column[f"… gap, {corpus}"] = shown(loss - losses[corpus] if corpus in losses else None, "+.4f")
            column["train tokens/s"] = shown(training.tokens_per_second, ",.0f")
        if training and first.training and not shared:
            ours, theirs = training.measured_on, first.training.measured_on
            differing[name] = sorted(key for key in ours | theirs if ours.get(key) != theirs.get(key))
        columns[name] = column
    mismatch = next((name for name, fields in differing.items() if fields), None)
    if mismatch is not None and not anyway:
        what = f"{mismatch} was evaluated with another {' and '.join(differing[mismatch])} than {first.name}"
        raise InputError(f"{what}: evaluate them alike, or add --anyway to see it marked.")
    title = f"{'baseline ' * several}{first.name} (FLOPs counted, tokens/s measured in training)"
    notes = ["losses are those of training's own evaluations, not of a test."]
    if shared:
        how = f"T = {shared.length}" + (f", stride {shared.stride}" if shared.stride else "")
        title = f"{shared.corpus} {shared.split}, {how}, {title}"
        notes = list(dict.fromkeys(remark for entry in entries if entry.report for remark in entry.report.remarks))
        if rows := first.training.measured_on.get("evaluate_rows") if first.training else None:
            notes.append(f"the last validation loss was measured in training, on {rows} rows.")
    if mismatch is not None:
        for name, fields in differing.items():
            columns[name]["evaluated"] = "≠ " + ", ".join(fields) if fields else "alike"
        notes.insert(0, "what is marked ≠ was evaluated differently: its gaps and ratios mean little.")
    return [side_by_side(title, columns), *(f"note: {note}" for note in notes)]
