"""Labelled rows from tables: the common part of IMDB, GLUE and ListOps files."""

from collections.abc import Callable, Iterator
from pathlib import Path

from chiar.data.documents import Document
from chiar.data.files import read_rows
from chiar.errors import InputError


def labelled_rows(
    path: Path,
    header: bool,
    columns: int,
    read: Callable[[list[str]], tuple[str, int]],
) -> Iterator[Document]:
    """Each row as `read` understands it; what it cannot read is refused with the line's number.

    `read` raises ValueError or LookupError for a row that makes no sense.
    """
    for number, row in read_rows(path):
        if (header and number == 1) or row in ([], [""]):
            continue
        if len(row) < columns:
            raise InputError(f"{path}, line {number} has {len(row)} columns, expected {columns}.")
        try:
            text, label = read(row)
        except (ValueError, LookupError) as error:
            raise InputError(f"{path}, line {number} cannot be read: {error}.") from error
        if not text.strip():
            raise InputError(f"{path}, line {number} has a label but no text.")
        yield Document(text, label)


def first_row(path: Path) -> list[str]:
    for _, row in read_rows(path):
        return row
    raise InputError(f"{path} is empty.")


def whole_number(text: str, bound: int) -> int:
    """A label from 0 up to but not including `bound`."""
    value = int(text)
    if not 0 <= value < bound:
        raise ValueError(f"label {value} is not between 0 and {bound - 1}")
    return value
