"""The run's records as TensorBoard events; needs the extra `tensorboard`."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from chiar.config import ChiarConfig
from chiar.errors import optional_module


def require_tensorboard() -> None:
    optional_module("tensorboard", "tensorboard", "the setting tensorboard=true")


class Events:
    """Writes RUN/tensorboard. Events behind the step a run is resumed from are told to be dropped."""

    def __init__(self, folder: Path, step: int, config: ChiarConfig) -> None:
        from torch.utils.tensorboard import SummaryWriter

        assert config.operators is not None
        self.operators = config.operators
        self.writer = SummaryWriter(str(folder), purge_step=step + 1)

    def write(self, record: dict[str, Any]) -> None:
        """At once on disk, so that a killed run has lost nothing its checkpoint knows of."""
        for name, value in scalars(record, self.operators):
            self.writer.add_scalar(name, value, record["step"])
        if "sample" in record:
            self.writer.add_text("sample", record["sample"], record["step"])
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


def scalars(record: dict[str, Any], operators: list[str]) -> Iterator[tuple[str, float]]:
    """Every number of a record by a name with slashes; routed layers count from 1."""
    for name, value in record.items():
        if name == "use":
            for number, shares in enumerate(value, start=1):
                for operator, share in zip(operators, shares, strict=True):
                    yield f"use/routed {number} {operator}", share
        elif isinstance(value, dict):
            yield from ((f"{name}/{corpus}", number) for corpus, number in value.items())
        elif isinstance(value, int | float) and name != "step":
            yield name, float(value)
