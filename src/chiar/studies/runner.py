"""The runs of a study, each in a process of its own: what crashes costs one run, what is finished is never repeated."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from chiar.errors import InputError
from chiar.studies.folder import StudyFolder
from chiar.studies.plan import Plan, PlannedRun
from chiar.training import checkpoint
from chiar.training.run_folder import RunFolder

POLL = 0.1


@dataclass
class Outcome:
    """Names of runs."""

    done: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    """… and the last line each one said."""
    left: list[str] = field(default_factory=list)
    """Not begun, because they would probably not have ended in time."""


def run_study(
    plan: Plan,
    out: Path,
    *,
    jobs: int = 1,
    device: str = "auto",
    limit_minutes: float | None = None,
    say: Callable[[str], None] = print,
    finished: Callable[[], None] = lambda: None,
) -> Outcome:
    """Do what is left of the plan in `out`, `jobs` runs at a time. `finished` is called after each finished run."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise InputError("chiar study starts its own processes: start it without torchrun.")
    folder = StudyFolder(out)
    folder.check_free()
    with folder.held():
        folder.open(plan)
        return Pool(plan, folder, jobs, device, limit_minutes, say, finished).go()


class Pool:
    """The processes at work."""

    def __init__(
        self,
        plan: Plan,
        folder: StudyFolder,
        jobs: int,
        device: str,
        limit_minutes: float | None,
        say: Callable[[str], None],
        finished: Callable[[], None],
    ) -> None:
        self.plan, self.folder, self.jobs, self.device = plan, folder, jobs, device
        self.say, self.finished = say, finished
        self.ends = None if limit_minutes is None else time.monotonic() + 60 * limit_minutes
        self.working: dict[str, subprocess.Popen[bytes]] = {}
        self.outcome = Outcome()

    def go(self) -> Outcome:
        waiting = []
        for run in self.plan.runs:
            if self.folder.finished(run.name):
                self.say(f"{run.name}: done before")
                self.outcome.done.append(run.name)
            else:
                waiting.append(run)
        if self.outcome.done:
            self.finished()
        try:
            while waiting or self.working:
                while waiting and len(self.working) < self.jobs:
                    self.begin_or_leave(waiting.pop(0))
                self.collect()
                time.sleep(POLL if self.working else 0)
        finally:
            for process in self.working.values():
                assert process.stdin is not None
                process.stdin.close()
            for process in self.working.values():
                process.wait()
        return self.outcome

    def begin_or_leave(self, run: PlannedRun) -> None:
        expected = self.expected_seconds(run)
        if self.ends is not None and expected is not None and time.monotonic() + expected > self.ends:
            self.say(f"{run.name}: not begun, it would take about {expected:,.0f} s")
            self.outcome.left.append(run.name)
            return
        self.folder.declare(run, self.plan, self.device)
        command = [sys.executable, "-m", "chiar.studies.worker", str(self.folder.path), run.name, str(self.jobs)]
        with self.folder.log(run.name).open("ab") as log:
            self.working[run.name] = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=environment(self.jobs)
            )
        self.say(f"{run.name}: begun" + (f", about {expected:,.0f} s" if expected is not None else ""))

    def collect(self) -> None:
        for name, process in list(self.working.items()):
            if process.poll() is None:
                continue
            del self.working[name]
            assert process.stdin is not None
            process.stdin.close()
            if process.returncode == 0 and self.folder.finished(name):
                self.outcome.done.append(name)
                self.say(f"{name}: done in {self.folder.seconds(name)['wall_seconds']:,.0f} s")
                self.finished()
            else:
                why = self.outcome.failed[name] = reason(self.folder.log(name), process.returncode)
                self.folder.note_failure(name, why)
                self.say(f"{name}: failed: {why}")

    def expected_seconds(self, run: PlannedRun) -> float | None:
        """As long as the longest finished run of this study, preferably of those with as many at once; None before one
        has finished. Steps done before do not count."""
        known = [self.folder.seconds(one["name"]) for one in self.folder.finished_runs()]
        known = [one for one in known if one["wall_seconds"] is not None and one["attempts"] == 1]
        alike = [one for one in known if one["jobs"] == self.jobs] or known
        if not alike:
            return None
        saved = checkpoint.steps(RunFolder(self.folder.run(run.name)).checkpoints)
        done = int(saved[0].name.split("-")[-1]) if saved else 0
        return max(one["wall_seconds"] for one in alike) * max(0.0, 1.0 - done / self.plan.steps)


def environment(jobs: int) -> dict[str, str]:
    """Processes at the same time share the cores."""
    shared = {} if jobs == 1 else {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // jobs))}
    return {**shared, **os.environ}


def reason(log: Path, code: int) -> str:
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return f"{lines[-1].strip() if lines else 'it said nothing'} (exit code {code}, {log.name})"
