"""Write files and folders: a failure leaves nothing half-written, and nothing is overwritten unless requested."""

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
    """Raise InputError if `out` exists, unless it is an empty folder or may be overwritten. That is a file, or a folder
    that holds the file `ours`, so that no user loses a folder we did not write."""
    if any(out.iterdir()) if out.is_dir() else out.exists():
        replaceable = not out.is_dir() or (ours != "" and (out / ours).is_file() and not out.is_symlink())
        if not (overwrite and replaceable):
            option = ", or add --overwrite" if replaceable else " or remove it first"
            raise InputError(f"{out} exists already and is not overwritten: choose another name{option}.")


def temporary_path(path: Path) -> Path:
    return path.with_name(f".{path.name}.new")


def write_atomic(path: Path, text: str) -> None:
    """Write under a temporary name, then rename: nobody ever reads half a file, even if the process is killed."""
    temporary = temporary_path(path)
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_new(out: Path, text: str, overwrite: bool = False) -> None:
    """Write a text file, which must not exist unless `overwrite`."""
    check_new(out, overwrite)
    out.parent.mkdir(parents=True, exist_ok=True)
    if out.exists() and not out.is_file():  # a pipe or a terminal
        out.write_text(text, encoding="utf-8")
    else:
        write_atomic(out.resolve(), text)  # the target of a link, not the link


def acquire_lock(file: IO[str], busy: str) -> None:
    """Lock an open file, or raise InputError(busy). The lock ends with the process, even if that is killed."""
    with suppress(ImportError):  # Windows has no fcntl: there the user must avoid concurrent processes
        import fcntl

        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(busy) from None


def put_in_place(folder: Path, out: Path) -> None:
    """Rename a folder to `out`, and only then remove a former `out`."""
    former = folder.with_name(f"{folder.name}.before")
    if out.exists():
        os.replace(out, former)
    os.replace(folder, out)
    shutil.rmtree(former, ignore_errors=True)


@contextmanager
def new_folder(out: Path, overwrite: bool = False, ours: str = "") -> Iterator[Path]:
    """A temporary folder next to `out`, renamed to `out` if the block succeeds."""
    check_new(out, overwrite, ours)
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        yield temporary
        temporary.chmod(0o755)
        put_in_place(temporary, out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
