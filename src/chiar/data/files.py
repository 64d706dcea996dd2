"""Reading text files, compressed or not, with errors that name the file."""

import bz2
import csv
import gzip
import lzma
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

from chiar.data.documents import SPLIT_ALIASES
from chiar.errors import InputError

COMPRESSIONS: dict[str, Any] = {".xz": lzma.open, ".gz": gzip.open, ".bz2": bz2.open}
# A review can be longer than the csv module's own limit of 128 KiB.
LONGEST_FIELD = 2**30


def plain_name(path: Path) -> str:
    """The file's name without the ending of a compression."""
    return path.stem if path.suffix in COMPRESSIONS else path.name


@contextmanager
def open_bytes(path: Path) -> Iterator[IO[bytes]]:
    if not path.is_file():
        raise InputError(f"there is no file {path}.")
    try:
        with COMPRESSIONS.get(path.suffix, open)(path, "rb") as handle:
            yield cast(IO[bytes], handle)
    except (lzma.LZMAError, gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise InputError(f"{path} is damaged or not a {path.suffix} file: {error}") from error


def read_lines(path: Path) -> Iterator[str]:
    """Lines with their newlines, exactly as they are; only a byte order mark at the start is dropped."""
    position = 0
    with open_bytes(path) as handle:
        for raw in handle:
            try:
                line = raw.decode("utf-8")
            except UnicodeDecodeError as error:
                where = position + error.start
                raise InputError(f"{path} is not UTF-8 text (byte {where}): is it binary?") from error
            if "\0" in line:
                where = position + raw.index(0)
                raise InputError(f"{path} holds a NUL character (byte {where}): is it binary?")
            yield line.removeprefix("\ufeff") if position == 0 else line
            position += len(raw)


def read_rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Rows of a table with their line numbers: .csv with quotes as usual, anything else tab-separated without them."""
    if plain_name(path).endswith(".csv"):
        csv.field_size_limit(LONGEST_FIELD)
        reader = csv.reader(read_lines(path))
        try:
            for row in reader:
                yield reader.line_num, row
        except csv.Error as error:
            raise InputError(f"{path}, line {reader.line_num}: {error}.") from error
        return
    for number, line in enumerate(read_lines(path), start=1):
        yield number, line.rstrip("\r\n").split("\t")


def find_file(folder: Path, *names: str) -> Path | None:
    """The first of `names` that lies in the folder, compressed or not."""
    for name in names:
        for ending in ("", *COMPRESSIONS):
            if (folder / f"{name}{ending}").is_file():
                return folder / f"{name}{ending}"
    return None


def split_of_file(path: Path) -> str | None:
    """The split a file's name speaks of: train.txt, test_d20s.tsv, basic_val.tsv; None if it names none or several."""
    named = {SPLIT_ALIASES[part] for part in re.split(r"[_.\-]", path.name.lower()) if part in SPLIT_ALIASES}
    return named.pop() if len(named) == 1 else None


def total_bytes(files: list[Path]) -> int | None:
    """The size of the text in the files, unless one is compressed."""
    if any(path.suffix in COMPRESSIONS for path in files):
        return None
    return sum(path.stat().st_size for path in files)


def one_folder(name: str, paths: list[Path], layout: str) -> Path:
    """The folder of a corpus that is read from one folder."""
    if len(paths) != 1:
        raise InputError(f"{name} is read from one folder with {layout}: chiar data prepare {name} FOLDER --out DIR.")
    if not paths[0].is_dir():
        raise InputError(f"{paths[0]} is not a folder: {name} is read from a folder with {layout}.")
    return paths[0]
