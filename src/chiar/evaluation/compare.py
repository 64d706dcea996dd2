"""Evaluations and training runs side by side, against a baseline among them."""

import json
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.table import Table

from chiar.errors import InputError, first_line, unknown_name
from chiar.evaluation.report import EvaluationReport, cost_rows, score_rows, shown, side_by_side
from chiar.training.run_folder import METRICS, RUN, read_records

REPORT = "evaluation.json"
MUST_AGREE = {"fingerprint": "corpus"} | {name: name for name in ("kind", "split", "length", "stride", "rows")}
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


def is_report(argument: Path) -> bool:
    return argument.is_file() or argument.suffix == ".json"


def entry_of(name: str, report: EvaluationReport) -> Entry:
    """A report, with what the run it names says if that is here."""
    metrics = Path(report.run) / METRICS if report.run else None
    return Entry(name, report, read_training(metrics) if metrics and metrics.is_file() else None)


def read_entry(argument: Path, name: str) -> Entry:
    """A saved report, or a run folder: its metrics, and the evaluation.json somebody saved there."""
    if is_report(argument):
        return entry_of(name, EvaluationReport.read(argument))
    metrics, saved = argument / METRICS, argument / REPORT
    if not metrics.is_file() and not saved.is_file():
        raise InputError(
            f"{argument} is neither a training run ({METRICS}) nor does it hold an {REPORT}: say what to measure on: "
            "--data CORPUS, or --harness TASKS."
        )
    report = EvaluationReport.read(saved) if saved.is_file() else None
    return Entry(name, report, read_training(metrics) if metrics.is_file() else None)


def read_training(path: Path) -> Training:
    records = read_records(path)
    validations = [record["validation"] for record in records if record.get("validation")]
    speeds = [record["tokens_per_second"] for record in records if record.get("tokens_per_second")]
    last = dict(validations[-1]) if validations else {}
    return Training(last, median(speeds) if speeds else None, read_measured_on(path.parent))


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
    names = [name if short.count(name) == 1 else str(path) for name, path in zip(short, arguments, strict=True)]
    if twice := [name for name in names if names.count(name) > 1]:
        raise InputError(f"{twice[0]} is named twice.")
    return names


def differences(report: EvaluationReport, reference: EvaluationReport) -> list[str]:
    """What keeps two reports from being compared."""
    return [said for name, said in MUST_AGREE.items() if getattr(report, name) != getattr(reference, name)]


def training_differences(training: Training, reference: Training) -> list[str]:
    """The same for validation losses; a run without its run.json is compared with nothing but itself."""
    ours, theirs = training.measured_on, reference.measured_on
    names = ours.keys() | theirs.keys() or ({"data"} if training is not reference else set())
    return sorted(name for name in names if name not in ours or ours[name] != theirs.get(name))


def compare(entries: list[Entry], baseline: str | None = None, anyway: bool = False) -> list[Table | str]:
    """A column an entry; gaps and ratios are against `baseline`, the first that was evaluated unless named. Runs nobody
    evaluated are compared by the validation losses of training."""
    named = {entry.name: entry for entry in entries}
    if baseline is not None and baseline not in named:
        baseline = short_names([Path(baseline)])[0]  # a path
        if baseline not in named:
            raise unknown_name("baseline", baseline, named)
    first = named[baseline] if baseline else next((entry for entry in entries if entry.report), entries[0])
    reports = [entry.report for entry in entries if entry.report is not None]
    differing: dict[str, list[str]] = {}
    for entry in entries:
        if entry.report is not None:
            differing[entry.name] = differences(entry.report, first.report or reports[0])
        elif not reports:
            assert entry.training is not None and first.training is not None
            differing[entry.name] = training_differences(entry.training, first.training)
    strange = next((name for name, fields in differing.items() if fields), None)
    if strange is not None and not anyway:
        raise InputError(
            f"{strange} was evaluated with another {' and '.join(differing[strange])} than {first.name}: evaluate them "
            "alike, or add --anyway to see it marked."
        )
    columns = {entry.name: figures(entry, first) for entry in entries}
    title = f"baseline {first.name} (FLOPs counted, tokens/s measured in training)"
    notes = ["losses are those of training's own evaluations, not of a test."]
    if reports:
        shared = first.report or reports[0]
        stride = f", stride {shared.stride}" if shared.stride else ""
        title = f"{shared.corpus} {shared.split}, T = {shared.length}{stride}, {title}"
        notes = list(dict.fromkeys(remark for report in reports for remark in report.remarks))
        if (least := getattr(shared.scores, "unigram_entropy", None)) is not None:
            notes.insert(0, f"without any context no model gets below {least:.4f} nats (unigram entropy).")
    if strange is not None:
        for name, fields in differing.items():
            columns[name]["evaluated"] = "≠ " + ", ".join(fields) if fields else "alike"
        notes.insert(0, "what is marked ≠ was evaluated otherwise: its gaps and ratios mean little.")
    return [side_by_side(title, columns), *(f"note: {note}" for note in notes)]


def figures(entry: Entry, first: Entry) -> dict[str, str]:
    """What is known of an entry, by the name of its line."""
    found: dict[str, str] = {}
    if entry.report is not None:
        found = dict((*score_rows(entry.report.scores), *cost_rows(entry.report)))
        if first.report is not None:
            found["gap to the baseline, nats"] = f"{entry.report.scores.loss - first.report.scores.loss:+.4f}"
            found["FLOPs ÷ baseline"] = f"{entry.report.flops / first.report.flops:.4f}"
    if entry.training is not None:
        known = first.training.validation if first.training else {}
        for name, loss in entry.training.validation.items():
            found[f"validation loss on {name}"] = f"{loss:.4f}"
            found[f"… gap, {name}"] = shown(loss - known[name] if name in known else None, "+.4f")
        found["train tokens/s"] = shown(entry.training.tokens_per_second, ",.0f")
    return found
