"""The paper's procedure: baseline, calibration on it, every other row, each evaluated alike. Killed, it goes on.

FOLDER/procedure.json     what was asked for; a folder is continued with the same only
FOLDER/ROW/               a training run, with validation.json (its best weights) and evaluation.json (test, final)
FOLDER/calibration.json   the entropies of the trained baseline and τ
FOLDER/table.md, .json    rewritten after each row
"""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from chiar.data.tokens import batches
from chiar.errors import InputError
from chiar.evaluation.compare import REPORT, read_training
from chiar.evaluation.harness import choose_device, evaluate
from chiar.evaluation.report import EvaluationReport
from chiar.files import aside_of, write_whole
from chiar.model.load import count_parameters, load_model
from chiar.reproduce.plan import Plan, PlannedRow
from chiar.routing.calibration import calibrate, read_thresholds, to_json
from chiar.training.compiling import clear_device
from chiar.training.loop import train
from chiar.training.run_folder import METRICS, RUN, RunFolder

PROCEDURE, CALIBRATION, VALIDATION = "procedure.json", "calibration.json", "validation.json"
CALIBRATION_ROWS = 200


@dataclass(frozen=True)
class Result:
    """A finished row."""

    planned: PlannedRow
    tau: float | None
    parameters: int
    validation: EvaluationReport
    """Of the weights with the best validation in training, over the whole split."""
    test: EvaluationReport
    """Of the final weights."""
    best_step: int
    tokens_per_second: float | None
    gates: dict[str, float]
    """g at the last logged step that read each corpus."""
    run: dict[str, Any]
    """What the run folder says of itself: command, versions, commit."""
    command: str
    """The same row trained by hand."""


def reproduce(
    plan: Plan,
    out: Path,
    device: str = "auto",
    say: Callable[[str], None] = print,
    finished: Callable[[list[Result]], None] = lambda results: None,
    quiet: bool = False,
) -> list[Result]:
    """Do what is left of the plan in `out`. `finished` gets all results so far after each row."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise InputError("chiar reproduce runs in one process: start it without torchrun.")
    choose_device(device)
    open_folder(out, plan.identity())
    results: list[Result] = []
    for planned in plan.rows:
        run = out / planned.row.name
        tau = calibrated_threshold(plan, out) if planned.calibrated else None
        if (run / REPORT).is_file():
            say(f"{planned.row.name}: done before")
        else:
            say(f"{planned.row.name}: {planned.preset}" + (f", τ = {tau:.4f}" if tau is not None else ""))
            train_row(planned, run, tau, device, quiet)
            say(f"{planned.row.name}: evaluating")
            evaluate_row(planned, run, device)
        results.append(read_result(planned, run, tau))
        finished(results)
    return results


def open_folder(out: Path, identity: dict[str, Any]) -> None:
    """Begin a folder, or check that it was begun with the same."""
    path, asked = out / PROCEDURE, json.loads(json.dumps(identity))
    if not path.is_file():
        if out.exists() and (not out.is_dir() or any(found != aside_of(path) for found in out.iterdir())):
            raise InputError(f"{out} exists already and is no reproduction: choose another folder.")
        out.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(identity, indent=1, ensure_ascii=False))
        return
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"{path} is damaged: {error}") from error
    for key, value in asked.items():
        if stored.get(key) != value:
            was, now = (json.dumps(part, ensure_ascii=False) for part in (stored.get(key), value))
            shown = f"{key} = {was}, not {now}" if len(was + now) < 400 else f"other {key}"
            raise InputError(f"{out} was started with {shown}: continue it with the same, or choose another folder.")


def calibrated_threshold(plan: Plan, out: Path) -> float:
    """The paper's τ: one for all layers, from the embedding entropies of the trained baseline on validation text."""
    path = out / CALIBRATION
    if not path.is_file():
        baseline, _ = load_model(str(out / plan.rows[0].row.name / "best"))
        valid, length = plan.corpora[0].split("valid"), plan.settings.length
        ids = valid.read(0, min(valid.tokens, CALIBRATION_ROWS * length))
        found = calibrate(baseline, batches(ids, CALIBRATION_ROWS, length, 8), rule="embeddings")
        write_whole(path, to_json(found, baseline.config))
    routed = next(planned.config() for planned in plan.rows if planned.calibrated)
    return read_thresholds(path, routed)[0]


def train_row(planned: PlannedRow, run: Path, tau: float | None, device: str, quiet: bool) -> None:
    (run / f".{RUN}.new").unlink(missing_ok=True)  # of a process killed before the run began
    clear_device()
    train(planned.config(tau), planned.settings, run, resume=(run / RUN).is_file(), device=device, quiet=quiet)


def evaluate_row(planned: PlannedRow, run: Path, device: str) -> None:
    """Blocks of the trained length; batches of the micro-batch, over which the paper's gate pools in training too."""
    settings, folder = planned.settings, RunFolder(run)
    torch.set_float32_matmul_precision("highest")
    for model, split, name in ((folder.best, "valid", VALIDATION), (folder.final, "test", REPORT)):
        report = evaluate(
            str(model),
            settings.data[0],
            split,
            length=settings.length,
            batch_size=settings.micro_batch,
            device=device,
        )
        write_whole(run / name, report.to_json())


def read_result(planned: PlannedRow, run: Path, tau: float | None) -> Result:
    records = RunFolder(run).read_metrics()
    evaluated = [record for record in records if "validation" in record]
    corpus = next(iter(evaluated[-1]["validation"]))
    stored = RunFolder(run).read()
    gates: dict[str, float] = {}
    for record in records:
        gates |= record.get("gate", {})
    return Result(
        planned=planned,
        tau=tau,
        parameters=count_parameters(planned.config(tau)),
        validation=EvaluationReport.read(run / VALIDATION),
        test=EvaluationReport.read(run / REPORT),
        best_step=min(evaluated, key=lambda record: record["validation"][corpus])["step"],
        tokens_per_second=read_training(run / METRICS).tokens_per_second,
        gates=gates,
        run={name: stored[name] for name in ("command", "versions", "commit")},
        command=planned.command(run, tau),
    )
