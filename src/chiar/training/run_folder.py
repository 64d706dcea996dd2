"""A run on disk: what it was told, what it measured, what it learned."""

import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

from chiar.errors import InputError, first_line

RUN, METRICS = "run.json", "metrics.jsonl"


def versions() -> dict[str, str]:
    import torch
    import transformers

    import chiar

    found = {"chiar": chiar.__version__, "torch": torch.__version__, "transformers": transformers.__version__}
    found |= {"python": platform.python_version(), "system": platform.platform()}
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    return found


def commit() -> str | None:
    """The commit of the source tree chiar runs from, with a + if it was changed; None outside a repository."""
    here = Path(__file__).parent
    try:
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, timeout=10)
        changed = subprocess.run(["git", "status", "--porcelain"], cwd=here, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return head.stdout.strip() + ("+" if changed.stdout.strip() else "") if head.returncode == 0 else None


def read_records(path: Path) -> list[dict[str, Any]]:
    """The records of a metrics file; a run that goes on may be in the middle of its last line."""
    lines = path.read_text(encoding="utf-8").splitlines()
    records: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            if not isinstance(record, dict):
                raise ValueError(f"expected an object, got {line[:40]!r}")
            records.append(record)
        except ValueError as error:
            if number < len(lines):
                raise InputError(f"{path}, line {number} is damaged: {first_line(error)}") from error
    return records


def told(run: dict[str, Any], part: str, name: str) -> Any:
    """A part of what run.json says."""
    if part not in run:
        raise InputError(f"run.json of {name} says nothing of its {part}: it is incomplete.")
    return run[part]


class RunFolder:
    """RUN/run.json, metrics.jsonl, checkpoints/step-*, best → exports/best-step-*, final alike."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.exports = path / "exports"
        self.best = path / "best"
        self.final = path / "final"
        self.metrics_path = path / METRICS

    def check_free(self) -> None:
        if self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir())):
            raise InputError(f"{self.path} exists already: add --resume to continue it, or choose another folder.")

    def create(self, record: dict[str, Any]) -> None:
        self.check_free()
        self.path.mkdir(parents=True, exist_ok=True)
        self.write(record)

    def write(self, record: dict[str, Any]) -> None:
        aside = self.path / f".{RUN}.new"
        aside.write_text(json.dumps(record, indent=1))
        os.replace(aside, self.path / RUN)

    def read(self) -> dict[str, Any]:
        try:
            return json.loads((self.path / RUN).read_text())
        except FileNotFoundError:
            raise InputError(f"{self.path} is not a training run: it has no {RUN}.") from None
        except ValueError as error:
            raise InputError(f"{self.path / RUN} is damaged: {error}") from error

    def read_metrics(self) -> list[dict[str, Any]]:
        if not self.metrics_path.is_file():
            raise InputError(f"{self.path} has no {METRICS}.")
        return read_records(self.metrics_path)


class Metrics:
    """Appends one JSON object a line; on resume what lies behind the checkpoint is cut off."""

    def __init__(self, path: Path, keep_bytes: int = 0, events: Any = None) -> None:
        path.touch()
        os.truncate(path, min(keep_bytes, path.stat().st_size))
        lines = path.read_text().splitlines()
        self.last: dict[str, Any] = json.loads(lines[-1]) if lines else {}
        """The newest record kept."""
        self.file, self.events = path.open("a"), events

    def write(self, record: dict[str, Any]) -> None:
        self.file.write(json.dumps(record) + "\n")
        self.file.flush()
        if self.events is not None:
            self.events.write(record)

    @property
    def bytes(self) -> int:
        """How much is written, for the checkpoint; synced so that it is really there."""
        self.file.flush()
        os.fsync(self.file.fileno())
        return self.file.tell()

    def close(self) -> None:
        self.file.close()
        if self.events is not None:
            self.events.close()


def command_line() -> str:
    return " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])
