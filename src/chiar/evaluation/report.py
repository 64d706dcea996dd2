"""An evaluation as data: what was measured, on what, and how; saved as JSON, shown as a table."""

import json
import math
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar

from rich.table import Table

from chiar.errors import InputError, first_line
from chiar.files import check_file

FORMAT = "chiar-evaluation/1"


@dataclass(frozen=True)
class LanguageScores:
    """Next-token losses over `tokens` targets; `words`, `lines` and `bytes` are of the text those targets make up.

    The first token of a split has nothing before it and is no target; ends of text are targets and no text.
    """

    kind: ClassVar[str] = "language"
    tokens: int
    nll: float
    """Mean loss, nats per token."""
    words: int
    lines: int
    bytes: int
    unigram_entropy: float | None = None
    """Nats per token: entropy of the frequencies of these very targets, the least loss without any context."""

    @property
    def perplexity(self) -> float:
        return exponential(self.nll)

    @property
    def word_perplexity(self) -> float | None:
        """exp(total loss / (words + lines)): WikiText's literature counts the end of each line as a word."""
        count = self.words + self.lines
        return exponential(self.nll * self.tokens / count) if count else None

    @property
    def bits_per_byte(self) -> float | None:
        return self.nll * self.tokens / math.log(2) / self.bytes if self.bytes else None

    @property
    def loss(self) -> float:
        return self.nll

    def derived(self) -> dict[str, float | None]:
        names = ("perplexity", "word_perplexity", "bits_per_byte")
        return {name: finite(getattr(self, name)) for name in names}


@dataclass(frozen=True)
class ClassScores:
    """`confusion[i][j]`: documents of class i taken for class j."""

    kind: ClassVar[str] = "classification"
    documents: int
    tokens: int
    cut: int
    """Documents longer than the length they were cut to."""
    loss: float
    """Mean cross-entropy, nats per document."""
    labels: list[str]
    confusion: list[list[int]]

    @property
    def accuracy(self) -> float:
        return sum(row[i] for i, row in enumerate(self.confusion)) / self.documents

    @property
    def class_accuracy(self) -> dict[str, float | None]:
        """For each class the share of its documents that were recognised (None: there are none)."""
        rows = zip(self.labels, self.confusion, strict=True)
        return {name: row[i] / sum(row) if sum(row) else None for i, (name, row) in enumerate(rows)}

    @property
    def f1(self) -> float | None:
        """Of the second of two classes, as GLUE's; 0 where it is neither there nor guessed."""
        if len(self.labels) != 2:
            return None
        (_, false_positive), (false_negative, hits) = self.confusion
        return 2 * hits / max(2 * hits + false_positive + false_negative, 1)

    @property
    def matthews(self) -> float | None:
        """Matthews correlation of two classes (CoLA's metric); 0 where either side knows one class only."""
        if len(self.labels) != 2:
            return None
        (a, b), (c, d) = self.confusion
        spread = math.sqrt((a + b) * (c + d) * (a + c) * (b + d))
        return (a * d - b * c) / spread if spread else 0.0

    def derived(self) -> dict[str, Any]:
        names = ("accuracy", "class_accuracy", "f1", "matthews")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class LayerUse:
    """Which share of tokens each operator of a routed layer got; layers count from 0."""

    layer: int
    use: dict[str, float]

    @property
    def fraction(self) -> float:
        """f: the share sent to attention."""
        return self.use["attention"]


@dataclass(frozen=True)
class RoutingUse:
    layers: list[LayerUse]
    gate: float | None
    """Mean g of the MetaRouter."""
    gate_pool: str | None

    @property
    def fraction(self) -> float | None:
        """Mean f over the routed layers."""
        return sum(layer.fraction for layer in self.layers) / len(self.layers) if self.layers else None


@dataclass(frozen=True)
class EvaluationReport:
    model: str
    run: str | None
    """The training run the model is the best of, if it was named by that."""
    corpus: str
    fingerprint: str
    split: str
    length: int
    stride: int | None
    """None: blocks side by side, as the paper's."""
    rows: int | None
    """Limit on blocks or documents; None: all of the split."""
    batch_size: int
    precision: str
    device: str
    scores: LanguageScores | ClassScores
    routing: RoutingUse
    flops: float
    """Counted, forward, per token, from the measured shares."""
    baseline_flops: float
    """The same for attention in every layer."""
    flops_length: int
    remarks: list[str] = field(default_factory=list)

    @property
    def kind(self) -> str:
        return self.scores.kind

    def to_dict(self) -> dict[str, Any]:
        record = asdict(self)
        # Derived figures are for readers of the file; from_dict computes them again.
        record["scores"] |= self.scores.derived()
        return {"format": FORMAT, "kind": self.kind, **record}

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=1, allow_nan=False, ensure_ascii=False)

    @classmethod
    def from_dict(cls, data: Any) -> "EvaluationReport":
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise InputError(f"this is not an evaluation report: it does not say format {FORMAT!r}.")
        try:
            record = {known.name: data[known.name] for known in fields(cls)}
            scores = LanguageScores if data["kind"] == LanguageScores.kind else ClassScores
            stored = data["scores"]
            needed = [known.name for known in fields(scores) if known.default is MISSING or known.name in stored]
            record["scores"] = scores(**{name: stored[name] for name in needed})
            layers = [LayerUse(**layer) for layer in data["routing"]["layers"]]
            record["routing"] = RoutingUse(**{**data["routing"], "layers": layers})
            return cls(**record)
        except KeyError as error:
            raise InputError(f"this evaluation report is damaged: it has no {first_line(error)}.") from error
        except TypeError as error:
            raise InputError(f"this evaluation report is damaged: {first_line(error)}") from error

    @classmethod
    def read(cls, path: Path) -> "EvaluationReport":
        check_file(path)
        try:
            return cls.from_dict(json.loads(path.read_text(encoding="utf-8")))
        except InputError as error:
            raise InputError(f"{path}: {error}") from error
        except ValueError as error:
            raise InputError(f"{path} is not an evaluation report: {first_line(error)}") from error


def exponential(nats: float) -> float:
    return math.exp(nats) if nats < 700 else math.inf


def finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def report_tables(report: EvaluationReport) -> list[Table | str]:
    """The figures, the routing of each layer, and every remark."""
    return [figures_table(report), *routing_tables(report), *(f"note: {remark}" for remark in report.remarks)]


def figures_table(report: EvaluationReport) -> Table:
    if report.kind == ClassScores.kind:
        how = f"documents cut to {report.length} tokens"
    elif report.stride is None:
        how = f"blocks of {report.length}"
    else:
        how = f"windows of {report.length}, stride {report.stride}"
    title = f"{report.model} on {report.corpus} {report.split}, {how}, {report.precision} on {report.device}"
    table = Table("figure", "value", box=None, title=title, title_justify="left")
    for name, value in (*score_rows(report.scores), *cost_rows(report)):
        table.add_row(name, value)
    return table


def score_rows(scores: LanguageScores | ClassScores) -> list[tuple[str, str]]:
    if isinstance(scores, LanguageScores):
        return [
            ("tokens predicted", f"{scores.tokens:,}"),
            ("loss, nats per token", f"{scores.nll:.4f}"),
            ("unigram entropy of the same tokens, nats", shown(scores.unigram_entropy, ".4f")),
            ("token perplexity", perplexity(scores.perplexity)),
            ("word perplexity (words + lines)", perplexity(scores.word_perplexity)),
            ("bits per byte", shown(scores.bits_per_byte, ".4f")),
        ]
    rows = [
        ("documents", f"{scores.documents:,} ({scores.cut:,} cut)"),
        ("tokens", f"{scores.tokens:,}"),
        ("accuracy", f"{scores.accuracy:.2%}"),
        ("loss, nats per document", f"{scores.loss:.4f}"),
    ]
    rows += [(f"accuracy on {name}", shown(value, ".2%")) for name, value in scores.class_accuracy.items()]
    if len(scores.labels) == 2:
        rows += [(f"F1 of {scores.labels[1]}", shown(scores.f1, ".4f"))]
        rows += [("Matthews correlation", shown(scores.matthews, ".4f"))]
    return rows


def cost_rows(report: EvaluationReport) -> list[tuple[str, str]]:
    ratio = report.flops / report.baseline_flops
    routing = report.routing
    gate = "–" if routing.gate is None else f"{routing.gate:.4f} (pool: {routing.gate_pool})"
    return [
        ("f, mean of the routed layers", shown(routing.fraction, ".4f")),
        ("g, mean of the gate", gate),
        (f"counted MFLOPs per token at T = {report.flops_length}", f"{report.flops / 1e6:,.3f}"),
        ("… ÷ attention in every layer", f"{ratio:.4f}"),
    ]


def routing_tables(report: EvaluationReport) -> list[Table]:
    layers = report.routing.layers
    if not layers:
        return []
    table = Table("layer", *layers[0].use, box=None, title="share of tokens each operator got", title_justify="left")
    for layer in layers:
        table.add_row(str(layer.layer + 1), *(f"{share:.4f}" for share in layer.use.values()))
    return [table]


def shown(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def perplexity(value: float | None) -> str:
    """By word, an untrained model's runs into the quadrillions."""
    return shown(value, ",.3f" if value is None or value < 1e6 else ".3g")
