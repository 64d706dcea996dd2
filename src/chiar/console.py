"""Shared by all commands: common options, printing of tables, writing of JSON, and errors as one sentence."""

import io
import os
import sys
from collections.abc import Callable
from pathlib import Path
from shutil import get_terminal_size
from typing import TYPE_CHECKING, Annotated, Any

import typer

from chiar.errors import InputError, failed_allocation, gigabytes
from chiar.files import write_new
from chiar.registry import load_plugins

if TYPE_CHECKING:
    from rich.table import Table

ModelName = Annotated[
    str, typer.Argument(metavar="MODEL", help="A model folder, a run (its best weights) or a preset (random weights).")
]
Json = Annotated[Path | None, typer.Option(metavar="FILE", help="Write the numbers as JSON to a file; - prints them.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an earlier output of this command.")]
SplitName = Annotated[str, typer.Option(metavar="train|valid|test", help="Split of the corpus.")]


def show(renderable: Any) -> None:
    """Print without truncation. Tables are fitted to the terminal, or to 100 columns without one."""
    from rich.console import Console
    from rich.table import Table

    console, width = Console(width=400, markup=False, emoji=False), get_terminal_size((100, 24)).columns
    if not isinstance(renderable, Table):
        return console.print(renderable)
    if renderable.title:
        console.print(renderable.title, width=width, highlight=False)
    for part in fit_to_width(renderable, width):
        console.print(part)


def has_colour() -> bool:
    from rich.console import Console

    console = Console()
    return console.color_system is not None and not console.no_color


def fit_to_width(table: "Table", width: int) -> "list[Table]":
    """Fold headings and long cells. Columns that still do not fit go to further tables that repeat the first column."""
    from rich.cells import cell_len
    from rich.table import Table

    columns = [[str(column.header), *map(str, column.cells)] for column in table.columns]
    natural = [max(map(cell_len, column)) + 2 for column in columns]  # with a space on each side
    minimum = [
        max([*map(cell_len, head.split()), *(min(cell_len(c), 24) for c in cells)]) + 2 for head, *cells in columns
    ]
    parts = [[0]]
    for number in range(1, len(columns)):
        if sum(minimum[n] for n in parts[-1]) + minimum[number] > width and len(parts[-1]) > 1:
            parts.append([0])
        parts[-1].append(number)
    tables = []
    for part in parts:
        widths = {number: natural[number] for number in part}
        while sum(widths.values()) > width and (wider := [n for n in part if widths[n] > minimum[n]]):
            widths[max(wider, key=lambda n: widths[n])] -= 1
        tables.append(Table(box=None))
        for number, column_width in widths.items():
            tables[-1].add_column(columns[number][0], width=column_width - 2, overflow="fold")
        for row in zip(*(columns[number][1:] for number in part), strict=True):
            tables[-1].add_row(*row)
    return tables


def write_json(out: Path, text: str, overwrite: bool = False) -> None:
    """Write to a file, or print if its name is -."""
    if str(out) == "-":
        typer.echo(text)
    else:
        write_new(out, text, overwrite)
        typer.echo(f"wrote {out}", err=True)  # stdout may be another output, piped to a program


def let_threads_sleep() -> None:
    """Let idle OpenMP threads spin for microseconds, then sleep. By default they spin for milliseconds, and stall each
    other if another job runs on the same cores. OpenMP reads this when torch is imported."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def guarded(command: Callable[[], Any]) -> None:
    """Run a command. Errors that the user can fix become one sentence and exit code 2."""
    let_threads_sleep()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without Unicode shows ? instead of failing
    try:
        load_plugins()
        command()
    except (InputError, OSError) as error:
        message, system = str(error), isinstance(error, OSError)
        if isinstance(error, OSError) and error.strerror:
            message = f"{error.strerror} ({error.filename})" if error.filename else error.strerror
        if system or os.environ.get("RANK", "0") == "0":  # of several processes with the same error one prints it
            typer.echo(f"error: {message}", err=True)
        sys.exit(2)
    except (RuntimeError, MemoryError) as error:
        if (size := failed_allocation(error)) is None:
            raise
        what = f"a tensor of {gigabytes(size)}" if size else "a tensor"
        remedy = "use a smaller --batch or --length, or a shorter --prompt"
        typer.echo(f"error: {what} did not fit in memory: {remedy}.", err=True)
        sys.exit(2)
