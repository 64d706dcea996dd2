"""A run as the command line that trains it by hand."""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

from chiar.training.settings import TrainSettings


def train_arguments(model: str, changes: dict[str, Any], settings: TrainSettings, out: Path) -> list[str]:
    """`train MODEL …`: what differs from the defaults, and the configuration fields changed in MODEL."""
    parts = ["train", model]
    for path in settings.data:
        parts += ["--data", path]
    default = TrainSettings(precision="auto")  # as the command has it
    given = {field.name: getattr(settings, field.name) for field in fields(settings) if field.name != "data"}
    changed = {name: value for name, value in given.items() if value != getattr(default, name)} | changes
    for name, value in changed.items():
        parts += ["--set", f"{name}={value if isinstance(value, str) else json.dumps(value)}"]
    return [*parts, "--out", str(out)]
