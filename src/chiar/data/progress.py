"""What a person sees while a corpus is prepared: bars in a terminal, single lines elsewhere."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from chiar.data.writer import Counts


class Display(Protocol):
    def begin(self, task: str, expected_bytes: int | None = None) -> None:
        """A split, or the training of a tokenizer."""

    def at(self, counts: Counts) -> None:
        """The split has come this far."""

    def end(self) -> None:
        """The task is complete."""

    def note(self, sentence: str) -> None:
        """Something the person should know."""


class Silent:
    def begin(self, task: str, expected_bytes: int | None = None) -> None: ...

    def at(self, counts: Counts) -> None: ...

    def end(self) -> None: ...

    def note(self, sentence: str) -> None: ...


class Lines(Silent):
    def note(self, sentence: str) -> None:
        print(f"note: {sentence}", file=sys.stderr)


class Bars:
    def __init__(self, progress: Any) -> None:
        self.progress = progress
        self.task: Any = None

    def begin(self, task: str, expected_bytes: int | None = None) -> None:
        self.task = self.progress.add_task(task, total=expected_bytes, note="")

    def at(self, counts: Counts) -> None:
        note = f"{counts.tokens:,} tokens"
        self.progress.update(self.task, completed=counts.bytes, note=note)

    def end(self) -> None:
        done = max(self.progress.tasks[self.task].completed, 1)
        self.progress.update(self.task, completed=done, total=done)

    def note(self, sentence: str) -> None:
        self.progress.console.print(f"note: {sentence}", markup=False, highlight=False)


@contextmanager
def terminal_display() -> Iterator[Display]:
    if not sys.stderr.isatty():
        yield Lines()
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}"), BarColumn(bar_width=16), DownloadColumn(), TransferSpeedColumn(),
        TimeRemainingColumn(), TextColumn("{task.fields[note]}"),
    )  # fmt: skip
    with Progress(*columns, console=Console(stderr=True)) as progress:
        yield Bars(progress)
