"""A study on disk. Each run is a process of its own (`python -m chiar.studies.runner FOLDER NAME DEVICE`), so a crash
costs only that run. Finished runs are never repeated.

FOLDER/study.json   shared declaration, variants, runs and their attempts, results from elsewhere, step times
FOLDER/runs/NAME/   a training run, with evaluation.json (test split, final weights); its output is in NAME.log
"""

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from subprocess import PIPE, Popen
from tempfile import TemporaryDirectory
from typing import Any

import torch
from typer import echo

from chiar.config_checks import LAST_COMMIT
from chiar.console import guarded
from chiar.data.shards import Corpus
from chiar.data.tokens import batches
from chiar.errors import InputError, errors_as, optional_module, require
from chiar.evaluation.harness import describe_device, evaluate
from chiar.evaluation.report import REPORT
from chiar.files import acquire_lock, temporary_path, write_atomic
from chiar.model.load import choose_device, load_config, load_model
from chiar.routing.calibration import calibrate
from chiar.studies.study import Plan, Run
from chiar.training import checkpoint
from chiar.training.compiling import clear_device
from chiar.training.loop import train
from chiar.training.run_folder import MAY_CHANGE, RUN, RunFolder, versions
from chiar.training.settings import TrainSettings

FORMAT, STUDY, LOCK, VALIDATION = "chiar-study/2", "study.json", ".lock", "validation.json"
CALIBRATION_ROWS = 200
WARM_UP = 8  # untimed steps, in which compiling, first allocations and recording of CUDA graphs happen


class StudyFolder:
    """study.json in memory. Only a process that holds the lock of `locked_study` may change it."""

    def __init__(self, path: Path) -> None:
        self.path, exists = path, (path / STUDY).is_file()
        new: dict[str, Any] = {"variants": [], "added": {}, "times": None}
        self.record = read_json(path / STUDY, FORMAT) if exists else new
        self.runs = {name: Run(**run) for name, run in self.record.pop("runs", {}).items()}

    def save(self) -> None:
        record = {"format": FORMAT, **self.record, "runs": {name: asdict(run) for name, run in self.runs.items()}}
        write_atomic(self.path / STUDY, json.dumps(record, indent=1, ensure_ascii=False, allow_nan=False))

    def declare(self, study: dict[str, Any], runs: list[Run]) -> None:
        """Write the study, or check that it is the one already written; new variants are added."""
        require_same(self.record.get("common", study["common"]), study["common"], str(self.path))
        stored = {name: run["declaration"] for name, run in self.record["added"].items()}
        stored |= {name: run.declaration() for name, run in self.runs.items() if self.run(name).exists()}
        for run in runs:
            require_same(stored.get(run.name, run.declaration()), run.declaration(), f"run {run.name} in {self.path}")
        variants = {variant["name"]: variant for variant in (*self.record["variants"], *study["variants"])}
        self.record |= {**study, "variants": list(variants.values())}
        self.save()

    def run(self, name: str) -> Path:
        return self.path / "runs" / name

    def finished(self, name: str) -> bool:
        return (self.run(name) / REPORT).is_file()


@contextmanager
def locked_study(path: Path, plan: Plan | None = None, device: str = "cpu") -> Iterator[StudyFolder]:
    """The folder of a study, locked against other processes; with a plan it is created, or checked against it."""
    choose_device(device)
    optional_module("matplotlib", "plots", "the picture of a study")  # fail now rather than after hours of training
    require(os.environ.get("WORLD_SIZE", "1") == "1", "chiar study starts processes itself: start it without torchrun.")
    names = {entry.name for entry in path.glob("*")} - {LOCK, temporary_path(path / STUDY).name}
    free = not names and (path.is_dir() or not path.exists())
    require(free or STUDY in names, f"{path} exists already and is no study: choose another folder.")
    path.mkdir(parents=True, exist_ok=True)
    with (path / LOCK).open("w") as lock:
        acquire_lock(lock, f"another process is running the study in {path} right now.")
        folder = StudyFolder(path)
        if plan is not None:
            study, corpus = asdict(plan.study), " + ".join(corpus.name for corpus in plan.corpora)
            common = {part: study[part] for part in ("name", "preset", "baseline", "config", "settings", "test_rows")}
            common |= {"steps": plan.steps, "data": plan.corpora[0].fingerprint}
            about = {"title": study["title"] or study["name"], "corpus": corpus, "caption": study["notes"]}
            folder.declare({**about, "common": common, "variants": list(study["variants"].values())}, plan.runs)
        yield folder


def require_same(stored: dict[str, Any], declared: dict[str, Any], where: str) -> None:
    """InputError naming the first difference, other than what a resumed run may change; steps and data may not."""
    remedy = "declare it as it was, give it another name, or choose another folder"
    for name in dict.fromkeys([*declared, *stored]):
        old, new = stored.get(name), json.loads(json.dumps(declared.get(name)))
        if isinstance(old, dict) and isinstance(new, dict):
            require_same({f"{name} {key}": old[key] for key in old}, {f"{name} {key}": new[key] for key in new}, where)
        elif old != new and name.split()[-1] not in set().union(*MAY_CHANGE.values()) - {"steps", "data"}:
            old, new = (json.dumps(value, ensure_ascii=False) for value in (old, new))
            raise InputError(f"{where} was started with {name} = {old}, not {new}: {remedy}.")


def read_json(path: Path, kind: str) -> dict[str, Any]:
    with errors_as(f"{path.parent} is not a study, or damaged: {path.name}", OSError, ValueError):
        record = json.loads(path.read_text(encoding="utf-8"))
    found_kind = record.pop("format", None) if isinstance(record, dict) else None
    require(found_kind != "chiar-study/1", f"{path} is of an earlier format: commit {LAST_COMMIT} reads it.")
    require(found_kind == kind, f"{path} does not say format {kind!r}.")
    return record


def run_study(
    plan: Plan, folder: StudyFolder, jobs: int, device: str, limit_minutes: float | None, finished: Callable[[], object]
) -> tuple[list[str], list[str]]:
    """Run what is left, calling `finished` after each run. Returns failed runs, and those left for lack of time."""
    failed, left, futures = list[str](), list[str](), dict[str, Future[None]]()
    started, lock, pool = time.monotonic(), threading.Lock(), ThreadPoolExecutor(jobs)
    threads = {} if jobs == 1 else {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // jobs))}
    (folder.path / "runs").mkdir(exist_ok=True)

    def run_one(run: Run) -> None:
        wait([futures[name] for name in run.after.values() if name in futures])
        if missing := [name for name in run.after.values() if not folder.finished(name)]:
            failed.append(run.name)
            return echo(f"{run.name}: not begun, the weights of {missing[0]} are not here")
        # As long as the longest run with a single attempt, less the share of steps already saved.
        known = [other.attempts[0].get("seconds", 0) for other in [*folder.runs.values()] if len(other.attempts) == 1]
        saved = checkpoint.steps(folder.run(run.name) / "checkpoints")
        expected = max(known, default=0) * (1 - (int(saved[0].name.split("-")[-1]) / plan.steps if saved else 0))
        begin = time.monotonic()
        if limit_minutes is not None and expected and begin - started + expected > 60 * limit_minutes:
            left.append(run.name)
            return echo(f"{run.name}: not begun, it would take about {expected:,.0f} s")
        attempt: dict[str, Any] = {"jobs": jobs}
        with lock:
            run.attempts.extend([*(folder.runs[run.name].attempts if run.name in folder.runs else []), attempt])
            folder.runs[run.name] = run
            folder.save()
        echo(f"{run.name}: begun")
        log, arguments = folder.path / "runs" / f"{run.name}.log", [folder.path, run.name, device]
        what: dict[str, Any] = {"args": [sys.executable, "-m", __name__, *arguments], "env": {**threads, **os.environ}}
        with log.open("ab") as output, Popen(**what, stdin=PIPE, stdout=output, stderr=output) as process:
            code = process.wait()
        with lock:
            if code == 0 and folder.finished(run.name):
                attempt["seconds"] = round(time.monotonic() - begin, 1)
                echo(f"{run.name}: done in {attempt['seconds']:,.0f} s")
                folder.save()
                finished()
            else:
                last_line = log.read_text(encoding="utf-8", errors="replace").strip().split("\n")[-1].strip()
                attempt["failed"] = f"{last_line or 'no output'} (exit code {code}, {log.name})"
                failed.append(run.name)
                echo(f"{run.name}: failed: {attempt['failed']}")
                folder.save()

    for run in plan.runs:
        if run.name in folder.record["added"] or folder.finished(run.name):
            echo(f"{run.name}: done before")
        else:
            futures[run.name] = pool.submit(run_one, run)
    try:
        for future in futures.values():
            future.result()
    finally:
        pool.shutdown(cancel_futures=True)
    return failed, left


def work(path: Path, name: str, device: str) -> None:
    """Train a run to its end, then evaluate its best weights on validation, if declared, and its final ones on test."""
    folder = StudyFolder(path)
    run, out = folder.runs[name], folder.run(name)
    config, settings, resume = run.model_config(), run.train_settings(), (out / RUN).is_file()
    if "weights" in run.after:
        settings = replace(settings, initial=str((folder.run(run.after["weights"]) / "final").resolve()))
    if "thresholds" in run.after and resume:  # calibrating again might round differently
        config = run.model_config(thresholds=RunFolder(out).read()["config"]["thresholds"])
    elif "thresholds" in run.after:
        source, _ = load_model(str(folder.run(run.after["thresholds"]) / "best"))
        valid = Corpus.open(run.data[0]).split("valid")
        ids = valid.read(0, min(valid.tokens, CALIBRATION_ROWS * settings.length))
        calibration = calibrate(source, batches(ids, CALIBRATION_ROWS, settings.length, 8), rule="embeddings")
        config = run.model_config(thresholds=calibration.thresholds(1)[0])
    temporary_path(out / RUN).unlink(missing_ok=True)  # left by a process killed before the run began
    try:
        train(config, settings, out, resume=resume, device=device)
    except checkpoint.TrainingStopped as stopped:
        raise InputError(str(stopped)) from stopped
    torch.set_float32_matmul_precision("highest")
    # In micro-batches, as in training, where the paper's gate pools over them. The test report marks a finished run.
    how: dict[str, Any] = {"length": settings.length, "batch_size": settings.micro_batch, "device": device}
    if run.validate:
        write_atomic(out / VALIDATION, evaluate(str(out / "best"), run.data[0], "valid", **how).to_json())
    write_atomic(out / REPORT, evaluate(str(out / "final"), run.data[0], "test", rows=run.test_rows, **how).to_json())


def time_study(plan: Plan, folder: StudyFolder, steps: int, device: str) -> None:
    """Time the training step of every planned variant, one after another in one process."""
    settings, first = plan.runs[0].train_settings(), {run.variant: run for run in reversed(plan.runs)}
    setup = {"device": describe_device(choose_device(device)), "batch": settings.batch, "length": settings.length}
    setup |= {"versions": {name: versions().get(name) for name in ("chiar", "torch", "gpu")}}
    stored = folder.record["times"] = folder.record["times"] or {**setup, "variants": {}}
    require({**stored, **setup} == stored, f"step times in {folder.path} are of another machine: choose another --out.")
    every, total = max(1, steps // 4), WARM_UP + steps
    schedule = {"evaluate_every": total, "save_every": total, "evaluate_rows": 1, "log_every": every, "steps": total}
    for name, run in first.items():
        # Trained weights route as in the finished run; a learning rate of 0 keeps them as they are.
        trained = str(folder.run(run.name) / "final") if folder.finished(run.name) else ""
        config = load_config(trained) if trained else run.model_config()
        config.execution = run.model_config().execution  # exports hold the execution they were last run with
        frozen = {"learning_rate": 0.0, "final_learning_rate": 0.0, "recalibrate_every": 0, "initial": trained}
        clear_device()
        with TemporaryDirectory() as aside:
            timed = TrainSettings.from_dict({**run.settings, "data": run.data, **frozen, **schedule})
            train(config, timed, Path(aside) / "run", device=device, quiet=True)
            records = RunFolder(Path(aside) / "run").read_metrics()
        speed = median(record["tokens_per_second"] for record in records if record["step"] - every >= WARM_UP)
        timing = {"step_ms": round(1e3 * settings.batch * settings.length / speed, 4), "tokens_per_second": speed}
        timing |= {"weights": "trained" if trained else "first", "execution": config.execution}
        timing |= {part: records[-1].get(part) for part in ("use", "compiled", "peak_memory_gb")}
        stored["variants"][name] = timing
        folder.save()
        echo(f"{name}: {timing['step_ms']:,.2f} ms a step, {timing['weights']} weights")


def exit_with_study() -> None:
    """Exits when the study's process does, which holds the other end of the standard input."""
    while os.read(0, 1):
        pass
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=exit_with_study, daemon=True).start()
    guarded(lambda: work(Path(sys.argv[1]), *sys.argv[2:]))
