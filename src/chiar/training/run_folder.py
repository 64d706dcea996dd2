"""A run on disk: its configuration, settings, metrics, checkpoints and exports; and whether it may be resumed so."""

import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import Any

import torch
import transformers

import chiar
from chiar.config import ChiarConfig
from chiar.data.shards import Corpus
from chiar.errors import errors_as, require
from chiar.files import new_folder, write_atomic
from chiar.model.heads import export_model
from chiar.registry import plugin_names
from chiar.training import checkpoint
from chiar.training.settings import TrainSettings
from chiar.training.tasks import TaskModel

RUN, METRICS = "run.json", "metrics.jsonl"
# What may change when a run is resumed: its length, how it is executed and logged, where its data lies.
MAY_CHANGE = {"config": {"execution", "transformers_version"}, "data": set[str]()}
MAY_CHANGE["settings"] = {"steps", "compile", "compile_layers", "cuda_graphs", "parallel", "keep", "log_every"}
MAY_CHANGE["settings"] |= {"tensorboard", "peak_tflops", "data"}  # its folder only: the content has a fingerprint


def versions() -> dict[str, str]:
    names = {module.__name__: module.__version__ for module in (chiar, torch, transformers)}
    names |= {"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}
    return names | {"python": platform.python_version(), "system": platform.platform()}


def commit() -> str | None:
    """The commit of the source tree chiar runs from, with a + if it was changed; None outside a repository."""
    words, here = ["git", "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+"], Path(__file__).parent
    try:
        return subprocess.run(words, cwd=here, capture_output=True, text=True, timeout=10).stdout.strip() or None
    except (OSError, subprocess.TimeoutExpired):
        return None


def launch() -> str | None:
    """A name that all restarts by one torchrun share; None without torchrun."""
    name = os.environ.get("TORCHELASTIC_RUN_ID")
    return f"{name}-{os.getppid()}" if name else None


def recorded_settings(settings: TrainSettings) -> dict[str, Any]:
    """The settings with absolute paths, so that a run can be resumed from any folder."""
    initial = os.path.abspath(settings.initial) if settings.initial else ""
    return asdict(settings) | {"data": [os.path.abspath(path) for path in settings.data], "initial": initial}


def describe(
    config: ChiarConfig, settings: TrainSettings, corpora: list[Corpus], processes: int, device: str
) -> dict[str, Any]:
    run: dict[str, Any] = {"config": config.to_dict(), "settings": recorded_settings(settings), "device": device}
    run |= {"data": {c.name: c.fingerprint for c in corpora}, "launch": launch(), "processes": processes}
    run |= {"command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])}
    return run | {"versions": versions(), "commit": commit(), "remarks": {c.name: c.remarks for c in corpora}}


class RunFolder:
    """RUN/run.json, metrics.jsonl, checkpoints/step-*, best → exports/best-step-*, and final likewise."""

    def __init__(self, path: Path) -> None:
        self.path, self.metrics_path = path, path / METRICS
        self.checkpoints, self.exports = path / "checkpoints", path / "exports"
        self.best, self.final = path / "best", path / "final"

    def write(self, record: dict[str, Any]) -> None:
        write_atomic(self.path / RUN, json.dumps(record, indent=1))

    def read(self) -> dict[str, Any]:
        require(self.path.is_dir(), f"there is no folder {self.path}.")
        require((self.path / RUN).is_file(), f"{self.path} is not a training run: it has no {RUN}.")
        with errors_as(f"{self.path / RUN} is damaged", ValueError):
            return json.loads((self.path / RUN).read_text(encoding="utf-8"))

    def read_part(self, part: str) -> Any:
        run = self.read()
        require(part in run, f"{RUN} of {self.path.name} has no {part}: it is incomplete.")
        return run[part]

    def config_and_settings(self) -> tuple[ChiarConfig, TrainSettings]:
        """The run's configuration, and its settings as changed when it was last resumed."""
        with errors_as(f"{self.path / RUN} is damaged", ValueError, TypeError, AttributeError, LookupError):
            changed = self.read().get("resumed", [{}])[-1].get("settings", {})
            settings = TrainSettings.from_dict({**self.read_part("settings"), **changed})
            return ChiarConfig.from_dict(self.read_part("config")), settings

    @property
    def command(self) -> str:
        """The command that continues this run, whichever command began it."""
        if int(os.environ.get("WORLD_SIZE", 1)) > 1:
            count = os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"])
            return f"torchrun --nproc-per-node {count} -m chiar.train --resume {shlex.quote(str(self.path))}"
        plugins = [word for name in plugin_names() for word in ("--plugin", name)]
        return shlex.join(["chiar", *plugins, "train", "--resume", str(self.path)])

    def read_lines(self) -> list[tuple[str, dict[str, Any] | None]]:
        """The lines of its metrics, each with its record, or None if the line is damaged."""
        require(self.metrics_path.is_file(), f"{self.path} has no {METRICS}.")
        lines = list[tuple[str, dict[str, Any] | None]]()
        for line in self.metrics_path.read_bytes().splitlines():
            try:
                record = json.loads(line)
                lines.append((line.decode("utf-8"), record if isinstance(record["step"], int) else None))
            except (ValueError, TypeError, LookupError, RecursionError):
                lines.append(("", None))
        return lines

    def read_metrics(self) -> list[dict[str, Any]]:
        """Its records. The last line may be incomplete, as a running process may be writing it."""
        lines = self.read_lines()
        for number, (_, record) in enumerate(lines[:-1], start=1):
            remedy = f"chiar train --resume {self.path} drops it and goes on"
            require(record is not None, f"{self.metrics_path}, line {number} is damaged: {remedy}.")
        return [record for _, record in lines if record is not None]

    def trim_metrics(self, step: int) -> list[str]:
        """Keep only undamaged records up to `step`, from which a run resumes. Returns a warning if any were damaged."""
        lines = self.read_lines() if self.metrics_path.is_file() else []
        damaged = [str(number) for number, (_, record) in enumerate(lines, start=1) if record is None]
        kept = [line for line, record in lines if record is not None and record["step"] <= step]
        write_atomic(self.metrics_path, "".join(f"{line}\n" for line in kept))
        which = f"line{'s' if damaged[1:] else ''} {', '.join(damaged[:5])}{' …' if damaged[5:] else ''}"
        return [f"{METRICS} is damaged: {which} dropped, {len(kept)} records kept."] if damaged else []

    def should_resume(self, resume: bool) -> bool:
        """Whether the run is continued: on request, or if torchrun restarted it. Otherwise the folder must be free."""
        restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
        if not resume and restarted and (self.path / RUN).is_file():
            resume = self.read().get("launch") == launch()
        free = not self.path.exists() or (self.path.is_dir() and not any(self.path.iterdir()))
        way = f"{self.command} continues it, or" if (self.path / RUN).is_file() else "it is no run:"
        require(resume or free, f"{self.path} exists already: {way} choose another --out.")
        return resume

    def open(self, record: dict[str, Any], resume: bool) -> checkpoint.FoundCheckpoint | None:
        """Create the folder, or check that it holds the same run and find its newest valid checkpoint."""
        if not resume:
            self.path.mkdir(parents=True, exist_ok=True)
            self.write(record)
            return None
        # Parsed: fields that were added since have their default, and removed ones are gone.
        config, settings = self.config_and_settings()
        before = {"config": config.to_dict(), "settings": recorded_settings(settings), "data": self.read_part("data")}
        for part in before:
            was, asked = (json.loads(json.dumps(fields[part])) for fields in (before, record))
            for key in sorted((was.keys() | asked.keys()) - MAY_CHANGE[part]):
                old, new = was.get(key), asked.get(key)
                require(old == new, f"{self.path} was begun with {part} {key} = {old!r}, not {new!r}: leave that out.")
            order = ", ".join(was)
            require(
                part != "data" or list(was) == list(asked),
                f"{self.path} was begun with --data {order}: keep that order.",
            )
        for leftover in self.checkpoints.glob(".step-*.partial"):
            shutil.rmtree(leftover)
        stored, latest = self.read(), checkpoint.find(self.checkpoints)
        now = {part: record[part] for part in ("command", "launch", "versions", "commit", "processes")}
        now["settings"] = {key: value for key, value in record["settings"].items() if key in MAY_CHANGE["settings"]}
        resumed = [*stored.get("resumed", []), {"step": latest.state["step"] if latest else 0, **now}]
        self.write({**stored, "launch": record["launch"], "resumed": resumed})
        return latest

    def export(self, model: TaskModel, corpus: Corpus, link: Path, step: int) -> None:
        """Write what from_pretrained opens, with tokenizer and thresholds; then point `link`, best or final, to it."""
        name = f"{link.name}-{checkpoint.step_name(step)}"
        # A step repeated after a resume may be exported already. That export stays until the link has moved.
        names = (self.exports / (f"{name}-again-{number}" if number else name) for number in count())
        target = next(path for path in names if not path.exists())
        with new_folder(target) as aside:
            export_model(model, corpus, aside)
        checkpoint.replace_link(link, target)
        for other in {*self.exports.glob(f"*{link.name}-*")} - {target}:  # also what a killed process left behind
            shutil.rmtree(other, ignore_errors=True)
