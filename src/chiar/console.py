"""What every command does alike: print tables in full, write JSON, end on a user's mistake with one sentence."""

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
    str, typer.Argument(metavar="MODEL", help="A model folder, a run (its best), or a preset (random weights).")
]
Json = Annotated[Path | None, typer.Option(metavar="FILE", help="Write the numbers as JSON to a file, - to print.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what this command wrote there before.")]
SplitName = Annotated[str, typer.Option(metavar="train|valid|test", help="Split of the corpus.")]


def show(renderable: Any) -> None:
    """Print in full: a table fits the terminal, or 100 columns where there is none, and loses no digit."""
    from rich.console import Console
    from rich.table import Table

    console, wide = Console(width=400, markup=False, emoji=False), get_terminal_size((100, 24)).columns
    if not isinstance(renderable, Table):
        return console.print(renderable)
    if renderable.title:
        console.print(renderable.title, width=wide, highlight=False)
    for part in fitted(renderable, wide):
        console.print(part)


def has_colour() -> bool:
    from rich.console import Console

    console = Console()
    return console.color_system is not None and not console.no_color


def fitted(table: "Table", wide: int) -> "list[Table]":
    """Headings and long cells fold between words; what does not fit then goes below, behind the first column again."""
    from rich.cells import cell_len
    from rich.table import Table

    columns = [[str(column.header), *map(str, column.cells)] for column in table.columns]
    natural = [max(map(cell_len, column)) + 2 for column in columns]  # with a space on both sides
    least = [
        max([*map(cell_len, head.split()), *(min(cell_len(c), 24) for c in cells)]) + 2 for head, *cells in columns
    ]
    parts = [[0]]
    for number in range(1, len(columns)):
        if sum(least[n] for n in parts[-1]) + least[number] > wide and len(parts[-1]) > 1:
            parts.append([0])
        parts[-1].append(number)
    found = []
    for part in parts:
        widths = {number: natural[number] for number in part}
        while sum(widths.values()) > wide and (loose := [n for n in part if widths[n] > least[n]]):
            widths[max(loose, key=lambda n: widths[n])] -= 1
        found.append(Table(box=None))
        for number, width in widths.items():
            found[-1].add_column(columns[number][0], width=width - 2, overflow="fold")
        for row in zip(*(columns[number][1:] for number in part), strict=True):
            found[-1].add_row(*row)
    return found


def write_json(out: Path, text: str, overwrite: bool = False) -> None:
    """To a file, or printed where the file is called -."""
    if str(out) == "-":
        typer.echo(text)
    else:
        write_new(out, text, overwrite)
        typer.echo(f"wrote {out}", err=True)  # what is printed may be another file's content, for another program


def guarded(command: Callable[[], Any]) -> None:
    """Run a command; what the user can mend becomes one sentence and exit code 2."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without Unicode shows ? instead of failing
    try:
        load_plugins()
        command()
    except (InputError, OSError) as error:
        said, system = str(error), isinstance(error, OSError)
        if isinstance(error, OSError) and error.strerror:
            said = f"{error.strerror} ({error.filename})" if error.filename else error.strerror
        if system or os.environ.get("RANK", "0") == "0":  # of several processes that refuse one speaks
            typer.echo(f"error: {said}", err=True)
        sys.exit(2)
    except (RuntimeError, MemoryError) as error:
        if (size := failed_allocation(error)) is None:
            raise
        what = f"a tensor of {gigabytes(size)}" if size else "a tensor"
        way = "give it less at a time, a smaller --batch or --length, or a shorter --prompt"
        typer.echo(f"error: {what} did not fit into memory any more: {way}.", err=True)
        sys.exit(2)
