"""Evaluations and training runs side by side, against a baseline among them."""

import json
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.table import Table

from chiar.errors import InputError, first_line, unknown_name
from chiar.evaluation.report import ClassScores, EvaluationReport, LanguageScores, perplexity, shown
from chiar.training.run_folder import METRICS, RUN, read_records

REPORT = "evaluation.json"
MUST_AGREE = ("kind", "fingerprint", "split", "length", "stride", "rows")
ROWS_MUST_AGREE = ("length", "evaluate_rows")


@dataclass(frozen=True)
class Training:
    """What a run's metrics say: validation losses of the last evaluation, the middle of all tokens/s."""

    validation: dict[str, float]
    tokens_per_second: float | None
    measured_on: dict[str, Any]
    """What decides which rows a validation loss is of, as run.json says."""


@dataclass(frozen=True)
class Entry:
    name: str
    report: EvaluationReport | None
    training: Training | None


def read_entry(argument: Path, name: str) -> Entry:
    """A saved report, or a run folder: its metrics, and the evaluation.json somebody saved there."""
    if not argument.is_dir():
        report = EvaluationReport.read(argument)
        metrics = Path(report.run) / METRICS if report.run else None
        return Entry(name, report, read_training(metrics) if metrics and metrics.is_file() else None)
    metrics, saved = argument / METRICS, argument / REPORT
    if not metrics.is_file() and not saved.is_file():
        raise InputError(f"{argument} is neither a training run ({METRICS}) nor does it hold an {REPORT}.")
    report_or_none = EvaluationReport.read(saved) if saved.is_file() else None
    return Entry(name, report_or_none, read_training(metrics) if metrics.is_file() else None)


def read_training(path: Path) -> Training:
    records = read_records(path)
    validations = [record["validation"] for record in records if record.get("validation")]
    speeds = [record["tokens_per_second"] for record in records if record.get("tokens_per_second")]
    return Training(
        dict(validations[-1]) if validations else {}, median(speeds) if speeds else None, read_measured_on(path.parent)
    )


def read_measured_on(run: Path) -> dict[str, Any]:
    """Fingerprints of the corpora, and how their validation rows are cut; empty where run.json is not there."""
    path = run / RUN
    if not path.is_file():
        return {}
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        return {"data": record["data"]} | {name: record["settings"][name] for name in ROWS_MUST_AGREE}
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path} is damaged: {first_line(error)}") from error


def short_names(arguments: list[Path]) -> list[str]:
    """Folder or file names; whole paths where two would be called the same."""
    short = [path.resolve().name if path.is_dir() else path.stem for path in arguments]
    return [name if short.count(name) == 1 else str(path) for name, path in zip(short, arguments, strict=True)]


def compare(arguments: list[Path], baseline: str | None = None, anyway: bool = False) -> list[Table | str]:
    """One row an argument; gaps and ratios are against `baseline`, the first that was evaluated unless named."""
    names = short_names(arguments)
    if len(set(names)) < len(names):
        raise InputError(f"{next(name for name in names if names.count(name) > 1)} is named twice.")
    entries = [read_entry(argument, name) for argument, name in zip(arguments, names, strict=True)]
    first = choose_baseline(entries, arguments, baseline)
    reports = [entry for entry in entries if entry.report is not None]
    if not reports:
        return compare_runs(entries, first, anyway)
    reference = first.report if first.report is not None else reports[0].report
    assert reference is not None
    differing = {entry.name: differences(entry.report, reference) for entry in reports if entry.report is not None}
    marks = refuse_or_mark(differing, first, anyway)
    table = report_table(entries, first, reference, differing)
    remarks = dict.fromkeys(remark for entry in reports if entry.report for remark in entry.report.remarks)
    least = getattr(reference.scores, "unigram_entropy", None)
    if least is not None:
        marks.append(f"note: without any context no model gets below {least:.4f} nats (unigram entropy).")
    return [table, *marks, *(f"note: {remark}" for remark in remarks)]


def compare_runs(entries: list[Entry], first: Entry, anyway: bool) -> list[Table | str]:
    """Runs nobody evaluated, by the validation losses of training: those are of the same rows, or marked."""
    assert first.training is not None
    reference = first.training.measured_on
    differing = {}
    for entry in entries:
        assert entry.training is not None
        ours = entry.training.measured_on
        # A run without its run.json is compared with nothing, itself aside.
        names = ours.keys() | reference.keys() or ({"data"} if entry is not first else set())
        differing[entry.name] = sorted(name for name in names if name not in ours or ours[name] != reference.get(name))
    marks = refuse_or_mark(differing, first, anyway)
    note = "note: losses are those of training's own evaluations, not of a test."
    return [training_table(entries, first, differing), *marks, note]


def refuse_or_mark(differing: dict[str, list[str]], first: Entry, anyway: bool) -> list[str]:
    """InputError where something was measured otherwise, or the note that goes with its mark."""
    strange = next((name for name, fields in differing.items() if fields), None)
    if strange is None:
        return []
    if not anyway:
        raise InputError(
            f"{strange} was evaluated with another {' and '.join(differing[strange])} than {first.name}: evaluate them "
            "alike, or add --anyway to see it marked."
        )
    return ["note: rows marked ≠ were evaluated otherwise: their gaps and ratios mean little."]


def choose_baseline(entries: list[Entry], arguments: list[Path], name: str | None) -> Entry:
    if name is None:
        return next((entry for entry in entries if entry.report is not None), entries[0])
    for entry, argument in zip(entries, arguments, strict=True):
        if name == entry.name or Path(name) == argument:
            return entry
    raise unknown_name("baseline", name, [entry.name for entry in entries])


def differences(report: EvaluationReport, reference: EvaluationReport) -> list[str]:
    """What keeps two reports from being compared."""
    fields = [field for field in MUST_AGREE if getattr(report, field) != getattr(reference, field)]
    return ["corpus" if field == "fingerprint" else field for field in fields]


def report_table(
    entries: list[Entry], first: Entry, reference: EvaluationReport, differing: dict[str, list[str]]
) -> Table:
    classifies = reference.kind == ClassScores.kind
    scored = ("accuracy", "F1", "Matthews") if classifies else ("PPL", "word PPL", "bits/byte")
    marked = any(differing.values())
    table = Table(
        "name", *scored, "loss, nats", "gap, nats", "MFLOPs/token", "÷ baseline", "f", "g",
        "valid. loss", "train tokens/s", *(["evaluated"] if marked else []), box=None, title_justify="left",
        title=f"{reference.corpus} {reference.split}, T = {reference.length}"
        + (f", stride {reference.stride}" if reference.stride else "")
        + f", baseline {first.name} (FLOPs counted, tokens/s measured in training)",
    )  # fmt: skip
    for entry in entries:
        report, base = entry.report, first.report
        if report is None:
            cells = ["–"] * (len(scored) + 6)
        else:
            routing = report.routing
            gate = shown(routing.gate, ".3f") + (f" ({routing.gate_pool})" if routing.gate_pool else "")
            cells = [
                *score_cells(report.scores, classifies),
                f"{report.scores.loss:.4f}",
                "–" if base is None else f"{report.scores.loss - base.scores.loss:+.4f}",
                f"{report.flops / 1e6:,.3f}",
                "–" if base is None else f"{report.flops / base.flops:.4f}",
                shown(routing.fraction, ".3f"),
                gate,
            ]
        mark = [mark_of(differing[entry.name])] if marked and report is not None else []
        table.add_row(entry.name, *cells, *training_cells(entry.training), *mark)
    return table


def mark_of(fields: list[str]) -> str:
    return "≠ " + ", ".join(fields) if fields else "alike"


def score_cells(scores: LanguageScores | ClassScores, classifies: bool) -> list[str]:
    if isinstance(scores, LanguageScores):
        if classifies:
            return ["–"] * 3
        return [
            perplexity(scores.perplexity),
            perplexity(scores.word_perplexity),
            shown(scores.bits_per_byte, ".4f"),
        ]
    if not classifies:
        return ["–"] * 3
    return [f"{scores.accuracy:.2%}", shown(scores.f1, ".4f"), shown(scores.matthews, ".4f")]


def training_cells(training: Training | None) -> list[str]:
    if training is None:
        return ["–", "–"]
    losses = [
        f"{loss:.4f}" if len(training.validation) == 1 else f"{name} {loss:.4f}"
        for name, loss in training.validation.items()
    ]
    return [", ".join(losses) or "–", shown(training.tokens_per_second, ",.0f")]


def training_table(entries: list[Entry], first: Entry, differing: dict[str, list[str]]) -> Table:
    """Runs that were not evaluated: the validation losses of training, corpus by corpus."""
    base = first.training.validation if first.training else {}
    names = list(dict.fromkeys(name for entry in entries if entry.training for name in entry.training.validation))
    columns = [column for name in names for column in (f"{name}, nats", "gap")]
    title = f"last validation losses, baseline {first.name} (tokens/s measured in training)"
    marked = ["evaluated"] if any(differing.values()) else []
    table = Table("name", *columns, "train tokens/s", *marked, box=None, title=title, title_justify="left")
    for entry in entries:
        assert entry.training is not None
        cells = []
        for name in names:
            loss = entry.training.validation.get(name)
            gap = loss - base[name] if loss is not None and name in base else None
            cells += [shown(loss, ".4f"), shown(gap, "+.4f")]
        mark = [mark_of(differing[entry.name])] if marked else []
        table.add_row(entry.name, *cells, shown(entry.training.tokens_per_second, ",.0f"), *mark)
    return table
