"""Writing files and folders so that a failure leaves nothing behind and nothing is overwritten unasked."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from chiar.errors import InputError, require


def check_file(path: Path) -> None:
    require(path.is_file(), f"there is no file {path}.")


def check_new(out: Path, overwrite: bool = False, ours: str = "") -> None:
    """Raise InputError if something is there already, other than an empty folder or what may be replaced: a file, or a
    folder that holds the file `ours`, so that nobody loses a folder of their own."""
    if any(out.iterdir()) if out.is_dir() else out.exists():
        replaceable = not out.is_dir() or (ours != "" and (out / ours).is_file() and not out.is_symlink())
        if not (overwrite and replaceable):
            way = ", or add --overwrite" if replaceable else " or remove it first"
            raise InputError(f"{out} exists already and is left as it is: choose another name{way}.")


def aside_of(path: Path) -> Path:
    return path.with_name(f".{path.name}.new")


def write_whole(path: Path, text: str) -> None:
    """At once: a reader or a killed process never leaves half a file under this name."""
    aside = aside_of(path)
    try:
        with aside.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


def write_new(out: Path, text: str, overwrite: bool = False) -> None:
    """Write a text file, by default only where there is none."""
    check_new(out, overwrite)
    out.parent.mkdir(parents=True, exist_ok=True)
    if out.exists() and not out.is_file():  # a pipe or a terminal
        out.write_text(text, encoding="utf-8")
    else:
        write_whole(out.resolve(), text)  # the file a link leads to, not the link


def hold(lock: IO[str], busy: str) -> None:
    """Take the lock, or raise InputError. It is held by the process, not by the file: a killed one holds it no more."""
    with suppress(ImportError):  # Windows: two processes at a time are the user's to avoid
        import fcntl

        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(busy) from None


def put_in_place(folder: Path, out: Path) -> None:
    """Give a folder its name; only then is one removed that had it."""
    before = folder.with_name(f"{folder.name}.before")
    if out.exists():
        os.replace(out, before)
    os.replace(folder, out)
    shutil.rmtree(before, ignore_errors=True)


@contextmanager
def new_folder(out: Path, overwrite: bool = False, ours: str = "") -> Iterator[Path]:
    """A temporary folder beside `out` that becomes `out` when the block ends well."""
    check_new(out, overwrite, ours)
    out.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        yield aside
        aside.chmod(0o755)
        put_in_place(aside, out)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
