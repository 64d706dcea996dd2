"""An evaluation as data: what was measured, on what, and how; saved as JSON, shown as a table."""

import json
import math
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar

from rich.table import Table

from chiar.errors import InputError, first_line
from chiar.files import check_file

FORMAT = "chiar-evaluation/1"
SCORES = (
    ("documents", "documents", ","), ("… longer, and cut", "cut", ","), ("tokens", "tokens", ","),
    ("loss, nats", "loss", ".4f"), ("unigram entropy of the same tokens, nats", "unigram_entropy", ".4f"),
    ("token perplexity", "perplexity", ",.6g"), ("word perplexity (words + lines)", "word_perplexity", ",.6g"),
    ("bits per byte", "bits_per_byte", ".4f"), ("accuracy", "accuracy", ".2%"), ("F1 of {second}", "f1", ".4f"),
    ("Matthews correlation", "matthews", ".4f"),
)  # fmt: skip
"""What is shown of scores, as what, in which format."""


@dataclass(frozen=True)
class LanguageScores:
    """Next-token losses over `tokens` targets (all but a split's first), and the size of the text they make up."""

    kind: ClassVar[str] = "language"
    tokens: int
    nll: float  # mean loss, nats per token
    words: int
    lines: int
    bytes: int  # ends of text are targets and no text
    unigram_entropy: float | None = None  # of these very targets, nats per token: the least loss without any context

    @property
    def loss(self) -> float:
        return self.nll

    def derived(self) -> dict[str, float | None]:
        """Perplexity by word counts the end of each line as a word, as WikiText's literature does."""
        total, words = self.nll * self.tokens, self.words + self.lines
        by_word = finite(exponential(total / words)) if words else None
        by_byte = total / math.log(2) / self.bytes if self.bytes else None
        return {"perplexity": finite(exponential(self.nll)), "word_perplexity": by_word, "bits_per_byte": by_byte}


@dataclass(frozen=True)
class ClassScores:
    """`confusion[i][j]`: documents of class i taken for class j."""

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
        """With the recognised share of each class (None: no documents); of two classes also GLUE's other metrics: F1 of
        the second (0 if nobody names it) and Matthews correlation (0 if either side knows one class only)."""
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
    gate: float | None  # mean g of the MetaRouter
    gate_pool: str | None

    @property
    def fraction(self) -> float | None:
        """Mean f over the routed layers."""
        return sum(layer.fraction for layer in self.layers) / len(self.layers) if self.layers else None


@dataclass(frozen=True)
class EvaluationReport:
    model: str
    run: str | None  # the training run the model is the best of, if it was named by that
    corpus: str
    fingerprint: str
    split: str
    length: int
    stride: int | None  # None: blocks side by side, as the paper's
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

    @property
    def kind(self) -> str:
        return self.scores.kind

    def to_dict(self) -> dict[str, Any]:
        record = asdict(self)
        record["scores"] |= self.scores.derived()  # for readers of the file
        return {"format": FORMAT, "kind": self.kind, **record}

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=1, allow_nan=False, ensure_ascii=False)

    @classmethod
    def read(cls, path: Path) -> "EvaluationReport":
        check_file(path)
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            if data["format"] != FORMAT:
                raise ValueError(f"it does not say format {FORMAT!r}.")
            kind = LanguageScores if data["kind"] == LanguageScores.kind else ClassScores
            names = {known.name for known in fields(kind)}  # derived figures lie beside them
            scores = kind(**{name: value for name, value in data["scores"].items() if name in names})
            layers = [LayerUse(**layer) for layer in data["routing"]["layers"]]
            parts = {"scores": scores, "routing": RoutingUse(**{**data["routing"], "layers": layers})}
            return cls(**{known.name: data[known.name] for known in fields(cls)} | parts)
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f"{path} is not an evaluation report, or damaged: {first_line(error)}") from error


def exponential(nats: float) -> float:
    return math.exp(nats) if nats < 700 else math.inf


def finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def shown(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def side_by_side(title: str, columns: dict[str, dict[str, str]]) -> Table:
    """A line for each figure that any of the columns has."""
    table = Table("", *columns, box=None, title=title, title_justify="left")
    for name in dict.fromkeys(name for column in columns.values() for name in column):
        table.add_row(name, *(column.get(name, "–") for column in columns.values()))
    return table


def score_rows(scores: LanguageScores | ClassScores) -> list[tuple[str, str]]:
    """Without what this kind of corpus, or this one, does not have."""
    known: dict[str, Any] = {**asdict(scores), "loss": scores.loss, **scores.derived()}
    found = [(name, known[key], form) for name, key, form in SCORES if known.get(key) is not None]
    rows = [(name.format(second=known.get("labels", [""])[-1]), shown(value, form)) for name, value, form in found]
    classes = known.get("class_accuracy", {}).items()
    return rows + [(f"accuracy on {name}", shown(share, ".2%")) for name, share in classes]


def cost_rows(report: EvaluationReport) -> list[tuple[str, str]]:
    gate, pool = report.routing.gate, report.routing.gate_pool
    return [
        ("f, mean of the routed layers", shown(report.routing.fraction, ".4f")),
        ("g, mean of the gate", "–" if gate is None else f"{gate:.4f} (pool: {pool})"),
        (f"counted MFLOPs per token at T = {report.flops_length}", f"{report.flops / 1e6:,.3f}"),
        ("… ÷ attention in every layer", f"{report.flops / report.baseline_flops:.4f}"),
    ]
