"""What every command does alike: print tables in full, write JSON, end on a user's mistake with one sentence."""

import io
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from chiar.errors import InputError
from chiar.files import write_new
from chiar.registry import load_plugins

ModelName = Annotated[str, typer.Argument(metavar="MODEL", help="A model folder, or a preset (random weights).")]
Json = Annotated[Path | None, typer.Option(metavar="FILE", help="Write the numbers as JSON to a file, - to print.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what this command wrote there before.")]
SplitName = Annotated[str, typer.Option(metavar="train|valid|test", help="Split of the corpus.")]


def show(renderable: Any) -> None:
    """Print in full: a table wider than the terminal runs over rather than losing digits."""
    from rich.console import Console
    from rich.table import Table

    console = Console(width=400, markup=False)  # a label may be called [red]
    if isinstance(renderable, Table) and renderable.title:  # rich would fold a title to the width of its table
        console.print(renderable.title, soft_wrap=True, highlight=False)
        renderable.title = None
    console.print(renderable)


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
