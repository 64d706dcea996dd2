"""Writing folders so that a failure leaves nothing behind and nothing is overwritten."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from chiar.errors import InputError


def check_file(path: Path) -> None:
    """Raise InputError unless there is a file to read."""
    if path.is_dir():
        raise InputError(f"{path} is a folder, expected a file.")
    if not path.is_file():
        raise InputError(f"there is no file {path}.")


def check_new(out: Path) -> None:
    """Raise InputError if something is there already."""
    if out.is_dir() and not any(out.iterdir()):
        return
    if out.exists():
        raise InputError(f"{out} exists already and is left as it is: choose another name or remove it first.")


def write_new(out: Path, text: str, overwrite: bool = False) -> None:
    """Write a text file, by default only where there is none."""
    if not overwrite:
        check_new(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(text, encoding="utf-8")


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A temporary folder beside `out` that becomes `out` when the block ends well."""
    check_new(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        yield aside
        aside.chmod(0o755)
        if out.exists():
            out.rmdir()
        os.replace(aside, out)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
