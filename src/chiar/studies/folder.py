"""A study on disk.

FOLDER/study.json               what all runs share, and the variants seen so far
FOLDER/runs/NAME/               a training run, with evaluation.json (test split, final weights)
FOLDER/records/NAME.json        what the run was told; .attempts.jsonl: when it was tried; .log: what it said
FOLDER/added.json               results of runs that were done elsewhere, of `chiar study add`
FOLDER/times.json               step times, of `chiar study time`
FOLDER/table.md, table.csv, results.json, pareto.svg    rewritten after each run
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from chiar.errors import InputError
from chiar.evaluation.compare import REPORT
from chiar.files import aside_of, hold, write_whole
from chiar.studies.plan import COSMETIC, Plan, PlannedRun
from chiar.training.run_folder import read_records

FORMAT = "chiar-study/1"
STUDY, ADDED, TIMES, LOCK = "study.json", "added.json", "times.json", ".lock"


class StudyFolder:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.runs, self.records = path / "runs", path / "records"

    @contextmanager
    def held(self) -> Iterator[None]:
        """No other process runs this study meanwhile."""
        self.path.mkdir(parents=True, exist_ok=True)
        with (self.path / LOCK).open("w") as lock:
            hold(lock, f"another process is running the study in {self.path} right now.")
            yield

    def check_free(self) -> None:
        """InputError where something else is in the folder."""
        path = self.path / STUDY
        if self.path.exists() and not self.path.is_dir():
            raise InputError(f"{self.path} is not a folder: choose another one.")
        ours = (LOCK, aside_of(path).name)
        begun = path.is_file() or not self.path.is_dir()
        if not begun and any(found.name not in ours for found in self.path.iterdir()):
            raise InputError(f"{self.path} exists already and is no study: choose another folder.")

    def open(self, plan: Plan) -> None:
        """Begin the folder, or check that it was begun with the same; new variants are added."""
        self.check_free()
        identity, known = json.loads(json.dumps(plan.identity())), []
        if (self.path / STUDY).is_file():
            stored = self.read()
            complain(stored["common"], identity, str(self.path))
            known = stored["variants"]
        for run in plan.runs:
            self.check_declaration(run, plan)
        for folder in (self.runs, self.records):
            folder.mkdir(parents=True, exist_ok=True)
        ours = [describe(plan, variant.name) for variant in plan.study.variants]
        self.write(plan.study.title, plan.corpus.name, identity, ours, known)

    def write(self, title: str, corpus: str, common: dict[str, Any], ours: list[Any], known: list[Any]) -> None:
        names = {variant["name"] for variant in ours}
        variants = [*ours, *(variant for variant in known if variant["name"] not in names)]
        record = {"format": FORMAT, "title": title, "corpus": corpus, "common": common, "variants": variants}
        write_whole(self.path / STUDY, json.dumps(record, indent=1, ensure_ascii=False))

    def read(self) -> dict[str, Any]:
        path = self.path / STUDY
        if not path.is_file():
            raise InputError(f"{self.path} is not a study: it has no {STUDY}.")
        stored = read_json(path)
        if stored.get("format") != FORMAT:
            raise InputError(f"{path} is not a study of this version: it does not say format {FORMAT!r}.")
        return stored

    def check_declaration(self, run: PlannedRun, plan: Plan) -> None:
        """A run that was begun with another declaration is not continued."""
        asked, where = json.loads(json.dumps(declaration(run, plan))), f"run {run.name} in {self.path}"
        if run.name in self.added():
            complain(self.added()[run.name]["declaration"], asked, where)
        elif self.record(run.name).is_file() and self.run(run.name).exists():
            complain(read_json(self.record(run.name)), asked, where)

    def declare(self, run: PlannedRun, plan: Plan, device: str) -> None:
        told = declaration(run, plan) | {"data": run.given["data"], "device": device}
        write_whole(self.record(run.name), json.dumps(told, indent=1, ensure_ascii=False))

    def record(self, name: str) -> Path:
        return self.records / f"{name}.json"

    def log(self, name: str) -> Path:
        return self.records / f"{name}.log"

    def attempts(self, name: str) -> Path:
        return self.records / f"{name}.attempts.jsonl"

    def run(self, name: str) -> Path:
        return self.runs / name

    def finished_here(self, name: str) -> bool:
        return (self.run(name) / REPORT).is_file()

    def finished(self, name: str) -> bool:
        return self.finished_here(name) or name in self.added()

    def added(self) -> dict[str, dict[str, Any]]:
        """Results of runs done elsewhere, by name."""
        path = self.path / ADDED
        return read_json(path) if path.is_file() else {}

    def finished_runs(self) -> list[dict[str, Any]]:
        """What the runs finished here were told, in the order of the variants."""
        order = [variant["name"] for variant in self.read()["variants"]]
        told = [read_json(path) for path in sorted(self.records.glob("*.json"))]
        told = [one for one in told if self.finished_here(one["name"])]
        return sorted(told, key=lambda one: (order.index(one["variant"]), one["seed"]))

    def note_failure(self, name: str, why: str) -> None:
        with self.attempts(name).open("a", encoding="utf-8") as attempts:
            attempts.write(json.dumps({"failed": why}) + "\n")

    def failures(self) -> dict[str, str]:
        """Runs whose last attempt failed, and why."""
        last = {path.name.removesuffix(".attempts.jsonl"): read_records(path) for path in self.records.glob("*.jsonl")}
        return {name: tried[-1]["failed"] for name, tried in sorted(last.items()) if tried and "failed" in tried[-1]}

    def seconds(self, name: str) -> dict[str, Any]:
        """How long the attempt took that finished the run, how many there were, and how many runs went on at once."""
        path = self.attempts(name)
        tried = read_records(path) if path.is_file() else []
        started = [one for one in tried if "jobs" in one]
        ended = [one["seconds"] for one in tried if "seconds" in one]
        most = max((one["jobs"] for one in started), default=None)
        return {"wall_seconds": ended[-1] if ended else None, "attempts": len(started), "jobs": most}


def declaration(run: PlannedRun, plan: Plan) -> dict[str, Any]:
    """What makes a run what it is. The corpus is known by its fingerprint, wherever it lies."""
    return {
        "name": run.name,
        "variant": run.variant.name,
        "seed": run.seed,
        "preset": run.preset,
        "config": run.changes,
        "settings": {name: value for name, value in run.given.items() if name != "data"},
        "fingerprint": plan.corpus.fingerprint,
        "test_rows": plan.study.test_rows,
    }


def describe(plan: Plan, name: str) -> dict[str, Any]:
    variant = plan.study.variant(name)
    return {"name": name, "role": variant.role, "title": variant.title, "rank": variant.rank}


def complain(stored: dict[str, Any], asked: dict[str, Any], where: str) -> None:
    """InputError naming the first difference that matters."""
    for key, value in asked.items():
        before = stored.get(key)
        if isinstance(value, dict) and isinstance(before, dict):
            for name in sorted({*value, *before} - COSMETIC):
                if value.get(name) != before.get(name):
                    raise InputError(different(where, f"{key} {name}", before.get(name), value.get(name)))
        elif value != before:
            raise InputError(different(where, key, before, value))


def different(where: str, what: str, before: Any, now: Any) -> str:
    was, is_now = (json.dumps(part, ensure_ascii=False) for part in (before, now))
    shown = f"{what} = {was}, not {is_now}" if len(was + is_now) < 300 else f"other {what}"
    return f"{where} was started with {shown}: declare it as it was, give it another name, or choose another folder."


def read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"{path} is damaged: {error}") from error
