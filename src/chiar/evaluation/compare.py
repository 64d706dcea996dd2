"""Evaluations and training runs side by side; the first that was evaluated is the baseline."""

import json
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.table import Table

from chiar.errors import InputError, first_line
from chiar.evaluation.report import EvaluationReport, cost_rows, score_rows, shown, side_by_side
from chiar.training.run_folder import METRICS, RUN, read_records

REPORT = "evaluation.json"
MUST_AGREE = {"fingerprint": "corpus"} | {name: name for name in ("split", "length", "stride", "rows")}


@dataclass(frozen=True)
class Training:
    """What a run's metrics say: validation losses of the last evaluation, the middle of all tokens/s."""

    validation: dict[str, float]
    tokens_per_second: float | None
    measured_on: dict[str, Any]  # what decides which rows a validation loss is of


@dataclass(frozen=True)
class Entry:
    name: str
    report: EvaluationReport | None
    training: Training | None


def is_report(argument: Path) -> bool:
    return argument.is_file() or argument.suffix == ".json"


def read_entry(argument: Path, name: str, report: EvaluationReport | None = None) -> Entry:
    """A report just measured or saved, or a run folder with the evaluation.json somebody saved there; and what the
    run's metrics say, if that is here."""
    saved = argument if is_report(argument) else argument / REPORT
    if report is None and (saved == argument or saved.is_file()):
        report = EvaluationReport.read(saved)
    metrics = (Path(report.run) if report and report.run else argument) / METRICS
    if report is None and not metrics.is_file():
        raise InputError(f"{argument} is neither a training run nor holds an {REPORT}: give --data or --harness.")
    return Entry(name, report, read_training(metrics) if metrics.is_file() else None)


def read_training(path: Path) -> Training:
    records = read_records(path)
    validations = [record["validation"] for record in records if record.get("validation")]
    speeds = [record["tokens_per_second"] for record in records if record.get("tokens_per_second")]
    # A run that does not say its data is compared with nothing but itself.
    measured_on: dict[str, Any] = {"data": str(path)}
    if (told := path.with_name(RUN)).is_file():
        try:
            record = json.loads(told.read_text(encoding="utf-8"))
            measured_on = {name: record["settings"][name] for name in ("length", "evaluate_rows")}
            measured_on["data"] = record["data"]
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f"{told} is damaged: {first_line(error)}") from error
    return Training(dict(validations[-1]) if validations else {}, median(speeds) if speeds else None, measured_on)


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


def compare(entries: list[Entry], anyway: bool = False) -> list[Table | str]:
    """A column an entry; runs nobody evaluated are compared by the validation losses of training."""
    first = next((entry for entry in entries if entry.report), entries[0])
    columns: dict[str, dict[str, str]] = {}
    differing: dict[str, list[str]] = {}
    shared, losses = first.report, first.training.validation if first.training else {}
    for name, report, training in ((entry.name, entry.report, entry.training) for entry in entries):
        found: dict[str, str] = {}
        if report and shared:
            differing[name] = differences(report, shared)
            found = dict((*score_rows(report.scores), *cost_rows(report)))
            found["gap to the baseline, nats"] = f"{report.scores.loss - shared.scores.loss:+.4f}"
            found["FLOPs ÷ baseline"] = f"{report.flops / shared.flops:.4f}"
            for layer in report.routing.layers if len(entries) == 1 else ():
                shares = ", ".join(f"{operator} {share:.4f}" for operator, share in layer.use.items())
                found[f"tokens of layer {layer.layer + 1}"] = shares
        if training:
            for corpus, loss in training.validation.items():
                found[f"validation loss on {corpus}"] = f"{loss:.4f}"
                found[f"… gap, {corpus}"] = shown(loss - losses[corpus] if corpus in losses else None, "+.4f")
            found["train tokens/s"] = shown(training.tokens_per_second, ",.0f")
        if training and first.training and not shared:
            ours, theirs = training.measured_on, first.training.measured_on
            differing[name] = sorted(key for key in ours | theirs if ours.get(key) != theirs.get(key))
        columns[name] = found
    strange = next((name for name, fields in differing.items() if fields), None)
    if strange is not None and not anyway:
        what = f"{strange} was evaluated with another {' and '.join(differing[strange])} than {first.name}"
        raise InputError(f"{what}: evaluate them alike, or add --anyway to see it marked.")
    title = f"baseline {first.name} (FLOPs counted, tokens/s measured in training)"
    notes = ["losses are those of training's own evaluations, not of a test."]
    if shared:
        how = f"T = {shared.length}" + (f", stride {shared.stride}" if shared.stride else "")
        title = f"{shared.corpus} {shared.split}, {how}, {title}"
        notes = list(dict.fromkeys(remark for entry in entries if entry.report for remark in entry.report.remarks))
    if strange is not None:
        for name, fields in differing.items():
            columns[name]["evaluated"] = "≠ " + ", ".join(fields) if fields else "alike"
        notes.insert(0, "what is marked ≠ was evaluated otherwise: its gaps and ratios mean little.")
    return [side_by_side(title, columns), *(f"note: {note}" for note in notes)]
