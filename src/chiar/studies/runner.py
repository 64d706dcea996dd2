"""A study on disk, and its runs, each a process of its own (`python -m chiar.studies.runner FOLDER NAME JOBS DEVICE`):
what crashes costs one run, what is finished is never repeated.

FOLDER/study.json               what all runs share, and the variants seen so far
FOLDER/runs/NAME/               a training run, with evaluation.json (test split, final weights)
FOLDER/records/NAME.json        what the run was told; .attempts.jsonl: when it was tried; .log: what it said
FOLDER/added.json, times.json   results of runs that were done elsewhere; step times
FOLDER/table.md, table.csv, results.json, pareto.svg    rewritten after each run
"""

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any

from chiar.errors import InputError
from chiar.evaluation.compare import REPORT
from chiar.files import aside_of, hold, write_whole
from chiar.studies.study import Plan, Run, require
from chiar.training import checkpoint
from chiar.training.run_folder import MAY_CHANGE, RUN, RunFolder, read_records

FORMAT = "chiar-study/1"
STUDY, ADDED, TIMES, LOCK, VALIDATION = "study.json", "added.json", "times.json", ".lock", "validation.json"
CALIBRATION_ROWS = 200


class StudyFolder:
    def __init__(self, path: Path) -> None:
        self.path, self.records = path, path / "records"

    @contextmanager
    def held(self) -> Iterator[None]:
        """No other process runs this study meanwhile. InputError where something else is in the folder."""
        require(self.path.is_dir() or not self.path.exists(), f"{self.path} is not a folder: choose another one.")
        ours, there = {LOCK, aside_of(self.path / STUDY).name}, {found.name for found in self.path.glob("*")}
        require(STUDY in there or there <= ours, f"{self.path} exists already and is no study: choose another folder.")
        self.path.mkdir(parents=True, exist_ok=True)
        with (self.path / LOCK).open("w") as lock:
            hold(lock, f"another process is running the study in {self.path} right now.")
            yield

    def open(self, plan: Plan) -> None:
        """Begin the folder, or check that it was begun with the same; new variants are added."""
        study, stored = plan.study, {name: run["declaration"] for name, run in self.added().items()}
        stored |= {told.name: told.declaration() for told in self.told_runs() if self.run(told.name).exists()}
        for run in plan.runs:
            complain(stored.get(run.name, run.declaration()), run.declaration(), f"run {run.name} in {self.path}")
        common = {part: getattr(study, part) for part in ("name", "preset", "baseline", "config", "settings")}
        common |= {"test_rows": study.test_rows, "steps": plan.steps, "data": plan.corpora[0].fingerprint}
        kept = ("name", "role", "title", "paper")
        ours = [{part: getattr(variant, part) for part in kept} for variant in study.variants]
        corpus = " + ".join(corpus.name for corpus in plan.corpora)
        about = {"title": study.title, "corpus": corpus, "common": common, "caption": study.notes}
        self.begin({**about, "variants": ours})

    def begin(self, study: dict[str, Any]) -> None:
        variants = {variant["name"]: variant for variant in study["variants"]}
        if (self.path / STUDY).is_file():
            complain(self.read()["common"], study["common"], str(self.path))
            variants |= {one["name"]: one for one in self.read()["variants"] if one["name"] not in variants}
        self.records.mkdir(exist_ok=True)
        record = {"format": FORMAT, **{part: study[part] for part in ("title", "corpus", "common", "caption")}}
        self.save(STUDY, {**record, "variants": list(variants.values())})

    def save(self, name: str, record: dict[str, Any]) -> None:
        write_whole(self.path / name, json.dumps(record, indent=1, ensure_ascii=False, allow_nan=False))

    def read(self) -> dict[str, Any]:
        stored = read_json(self.path / STUDY)
        require(stored.get("format") == FORMAT, f"{self.path} is not a study: {STUDY} does not say {FORMAT!r}.")
        return {"caption": [], **stored}

    def run(self, name: str) -> Path:
        return self.path / "runs" / name

    def finished(self, name: str) -> bool:
        return (self.run(name) / REPORT).is_file()

    def told(self, name: str) -> Run:
        record = read_json(self.records / f"{name}.json")
        record.pop("device", None)  # in folders of earlier versions
        return Run(**record)

    def told_runs(self, finished: bool = False) -> list[Run]:
        names = [path.stem for path in sorted(self.records.glob("*.json"))]
        return [self.told(name) for name in names if self.finished(name) or not finished]

    def added(self) -> dict[str, dict[str, Any]]:
        """Results of runs done elsewhere, by name."""
        return read_json(self.path / ADDED) if (self.path / ADDED).is_file() else {}

    def note(self, name: str, **what: Any) -> None:
        with (self.records / f"{name}.attempts.jsonl").open("a", encoding="utf-8") as attempts:
            attempts.write(json.dumps(what) + "\n")

    def tried(self, name: str) -> list[dict[str, Any]]:
        path = self.records / f"{name}.attempts.jsonl"
        return read_records(path) if path.is_file() else []

    def failures(self) -> dict[str, str]:
        """Runs whose last attempt failed, and why."""
        last = {told.name: (self.tried(told.name) or [{}])[-1] for told in self.told_runs()}
        return {name: tried["failed"] for name, tried in last.items() if "failed" in tried}

    def seconds(self, name: str) -> dict[str, Any]:
        """How long the attempt took that finished the run, how many there were, and how many runs went on at once."""
        jobs, ended = ([one[part] for one in self.tried(name) if part in one] for part in ("jobs", "seconds"))
        return {"wall_seconds": ended[-1] if ended else None, "attempts": len(jobs), "jobs": max(jobs, default=None)}


def complain(stored: dict[str, Any], asked: dict[str, Any], where: str) -> None:
    """InputError naming the first difference that matters."""
    before, now = (dict(flat(part)) for part in (stored, json.loads(json.dumps(asked))))
    for name in dict.fromkeys([*now, *before]):
        was, asks = (json.dumps(part.get(name), ensure_ascii=False) for part in (before, now))
        then = "declare it as it was, give it another name, or choose another folder"
        require(was == asks, f"{where} was started with {name} = {was}, not {asks}: {then}.")


def flat(declared: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Without what changes no token read and no weight learned."""
    for key, value in declared.items():
        for name, part in value.items() if isinstance(value, dict) else [("", value)]:
            if name not in MAY_CHANGE or name == "steps":
                yield f"{key} {name}".strip(), part


def read_json(path: Path) -> dict[str, Any]:
    require(path.is_file(), f"{path.parent} is not a study: it has no {path.name}.")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"{path} is damaged: {error}") from error


@dataclass
class Runner:
    """Does what is left of a plan in a folder, `jobs` runs at a time; `finished` is called after each."""

    plan: Plan
    folder: StudyFolder
    jobs: int = 1
    device: str = "auto"
    limit_minutes: float | None = None  # begin no run that would probably not end within so many
    say: Callable[[str], None] = print
    finished: Callable[[], object] = lambda: None
    failed: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)  # not begun, because they would probably not have ended in time
    working: dict[str, Popen[bytes]] = field(default_factory=dict)
    began: float = field(default_factory=time.monotonic)
    one_by_one: threading.Lock = field(default_factory=threading.Lock)

    def go(self) -> None:
        futures: dict[str, Future[None]] = {}
        pool, added = ThreadPoolExecutor(self.jobs), self.folder.added()
        done = [run.name for run in self.plan.runs if run.name in added or self.folder.finished(run.name)]
        for name in done:
            self.say(f"{name}: done before")
        if done:
            self.finished()
        try:
            for run in self.plan.runs:
                if run.name not in done:
                    earlier = [futures[name] for name in run.after.values() if name in futures]
                    futures[run.name] = pool.submit(self.do, run, earlier)
            for future in futures.values():
                future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            interrupted, self.working = self.working, {}
            for process in interrupted.values():
                process.communicate()  # closes its standard input, with which it ends

    def do(self, run: Run, earlier: "list[Future[None]]") -> None:
        for future in earlier:
            future.result()
        missing = [name for name in run.after.values() if not self.folder.finished(name)]
        expected, passed = self.expected_seconds(run), time.monotonic() - self.began
        about = "" if expected is None else f" about {expected:,.0f} s"
        if missing:
            self.failed.append(run.name)
            return self.say(f"{run.name}: not begun, the weights of {missing[0]} are not here")
        if self.limit_minutes is not None and expected and passed + expected > 60 * self.limit_minutes:
            self.left.append(run.name)
            return self.say(f"{run.name}: not begun, it would take{about}")
        self.folder.save(f"records/{run.name}.json", {**run.declaration(), "data": run.data})
        threads = {} if self.jobs == 1 else {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // self.jobs))}
        command = [sys.executable, "-m", __name__, str(self.folder.path), run.name, str(self.jobs), self.device]
        path = self.folder.records / f"{run.name}.log"
        with path.open("ab") as log:
            process = Popen(command, env={**threads, **os.environ}, stdin=PIPE, stdout=log, stderr=log)
        self.working[run.name] = process
        self.say(f"{run.name}: begun{about and ',' + about}")
        code = process.wait()
        with self.one_by_one:
            if self.working.pop(run.name, None) is None:
                return None  # interrupted
            process.communicate()
            if code == 0 and self.folder.finished(run.name):
                self.say(f"{run.name}: done in {self.folder.seconds(run.name)['wall_seconds']:,.0f} s")
                self.finished()
                return None
            last = path.read_text(encoding="utf-8", errors="replace").strip().split("\n")[-1].strip()
            why = f"{last or 'it said nothing'} (exit code {code}, {path.name})"
            self.failed.append(run.name)
            self.folder.note(run.name, failed=why)
            self.say(f"{run.name}: failed: {why}")

    def expected_seconds(self, run: Run) -> float | None:
        """As long as the longest finished run of this study, preferably of those with as many at once; None before one
        has finished. Steps done before do not count."""
        known = [self.folder.seconds(one.name) for one in self.folder.told_runs(finished=True)]
        known = [one for one in known if one["wall_seconds"] is not None and one["attempts"] == 1]
        alike = [one for one in known if one["jobs"] == self.jobs] or known
        saved = checkpoint.steps(RunFolder(self.folder.run(run.name)).checkpoints)
        done = int(saved[0].name.split("-")[-1]) if saved else 0
        return max(one["wall_seconds"] for one in alike) * max(0.0, 1.0 - done / self.plan.steps) if alike else None


def work(folder: StudyFolder, name: str, jobs: int, device: str) -> None:
    """Train what is left of it, then measure its best weights on validation, if asked to, and its final on test."""
    import torch

    from chiar.evaluation.harness import evaluate
    from chiar.training.loop import TrainingStopped, train

    began, told, run = time.time(), folder.told(name), folder.run(name)
    folder.note(name, started=round(began, 1), jobs=jobs)
    config, settings = told.model_config(**thresholds(folder, told)), told.train_settings()
    if "weights" in told.after:
        settings = replace(settings, initial=str((folder.run(told.after["weights"]) / "final").resolve()))
    aside_of(run / RUN).unlink(missing_ok=True)  # of a process killed before the run began
    try:
        train(config, settings, run, resume=(run / RUN).is_file(), device=device)
    except TrainingStopped as stopped:
        raise InputError(str(stopped)) from stopped
    torch.set_float32_matmul_precision("highest")
    # In micro-batches, over which the paper's gate pools in training too. The test comes last, for it ends the run.
    how: dict[str, Any] = {"length": settings.length, "batch_size": settings.micro_batch, "device": device}
    if told.validate:
        write_whole(run / VALIDATION, evaluate(str(run / "best"), settings.data[0], "valid", **how).to_json())
    report = evaluate(str(run / "final"), settings.data[0], "test", rows=told.test_rows, **how)
    folder.note(name, seconds=round(time.time() - began, 1))
    write_whole(run / REPORT, report.to_json())


def thresholds(folder: StudyFolder, run: Run) -> dict[str, float]:
    """The paper's τ: one for all layers, from the embedding entropies of another run's best weights on validation."""
    from chiar.data.shards import Corpus
    from chiar.data.tokens import batches
    from chiar.model.load import load_model
    from chiar.routing.calibration import calibrate

    if "thresholds" not in run.after:
        return {}
    if (folder.run(run.name) / RUN).is_file():  # measured again, it might round otherwise
        return {"thresholds": RunFolder(folder.run(run.name)).read()["config"]["thresholds"]}
    source, _ = load_model(str(folder.run(run.after["thresholds"]) / "best"))
    valid, length = Corpus.open(run.data[0]).split("valid"), run.train_settings().length
    ids = valid.read(0, min(valid.tokens, CALIBRATION_ROWS * length))
    return {
        "thresholds": calibrate(source, batches(ids, CALIBRATION_ROWS, length, 8), rule="embeddings").thresholds(1)[0]
    }


def end_with_the_study() -> None:
    """The study holds the other end of the standard input."""
    while os.read(0, 1):
        pass
    os._exit(1)


if __name__ == "__main__":
    from chiar.registry import load_plugins

    threading.Thread(target=end_with_the_study, daemon=True).start()
    try:
        load_plugins()
        work(StudyFolder(Path(sys.argv[1])), sys.argv[2], int(sys.argv[3]), sys.argv[4])
    except (InputError, OSError) as error:
        sys.exit(f"error: {error}")
