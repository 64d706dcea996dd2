"""The user's own files: text, and tables of labelled texts."""

import csv
import json
import re
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from chiar.data.corpora import (
    LABEL_COLUMNS,
    NO_CHARACTER,
    TEXT_COLUMNS,
    Document,
    Fractions,
    Source,
    by_split,
    carve_all,
    carve_valid,
    plain_name,
    read_lines,
    read_table,
    split_of_file,
)
from chiar.errors import InputError, errors_as, optional_module, require, unknown_name

TEXT_ENDINGS = (".txt", ".md", ".rst", ".text", ".jsonl", ".parquet")
TABLE_ENDINGS = (".tsv", ".csv", ".jsonl", ".ndjson", ".parquet")
MOST_LABELS = 1000  # more are hardly classes: another column was meant


class Text(Source):
    """.jsonl, .parquet (the text in `field`) or plain UTF-8 (a document a `unit`), split by file name or by hash."""

    def __init__(
        self, paths: list[Path], name: str = "text", unit: str = "paragraphs", field: str = "text",
        fractions: Fractions = None,
    ) -> None:  # fmt: skip
        if unit not in (units := ("paragraphs", "lines", "files")):
            raise unknown_name("--documents", unit, units)
        self.unit, self.field = unit, field
        files = found_files(paths, TEXT_ENDINGS)
        for table in [file for file in files if plain_name(file).endswith((".csv", ".tsv"))]:
            kind = f"chiar data prepare labelled {table} takes texts with labels"
            raise InputError(f'{table} is a table: {kind}; for text alone write a {{"text": …}} a line, as .jsonl.')
        given = by_split(files)
        named = "train" in given and "" not in given
        carve = carve_valid(given, fractions) if named else carve_all(fractions)
        super().__init__(name, given if named else {"train": files}, {"documents": unit, "field": field}, files, carve)

    def read_file(self, path: Path) -> Iterator[Document]:
        fields = plain_name(path).endswith((".parquet", ".jsonl", ".ndjson"))
        return (Document(text) for text in (self._fields if fields else self._plain)(path) if text.strip())

    def _plain(self, path: Path) -> Iterator[str]:
        """Paragraphs end at blank lines, which are left out, so that memory holds one paragraph at a time."""
        text: list[str] = []
        for line in read_lines(path):
            blank = self.unit == "paragraphs" and line.isspace()
            text += [] if blank else [line]
            if blank or self.unit == "lines":
                yield "".join(text)
                text.clear()
        yield "".join(text)

    def _fields(self, path: Path) -> Iterator[str]:
        for where, row in rows(path, [self.field]):
            yield text_of(where, row, self.field, "--field")


class LabelledFiles(Source):
    """Labelled texts, one a row of the files; several text columns become one text with newlines between."""

    kind = "classification"

    def __init__(
        self, paths: list[Path], name: str = "labelled", text_column: list[str] | None = None,
        label_column: str | None = None, fractions: Fractions = None,
    ) -> None:  # fmt: skip
        files = found_files(paths, TABLE_ENDINGS)
        for file in files:
            if not plain_name(file).endswith(TABLE_ENDINGS):
                raise InputError(f"{file} is none of {', '.join(TABLE_ENDINGS)}, which labelled texts are read from.")
        given = by_split(files)
        named = "train" in given and "" not in given
        carve = carve_valid(given, fractions) if named else carve_all(fractions)
        self._choose_columns(files[0], text_column, label_column)
        labels, other = set[str](), "is it the right --label-column?"
        for _, label in chain.from_iterable(map(self._labelled, files)):
            labels.add(label)
            require(len(labels) <= MOST_LABELS, f"{self.label!r} holds more than {MOST_LABELS:,} labels: {other}")
        require(len(labels) > 1, f"{self.label!r} holds one label only, {''.join(labels)!r}: {other}")
        numbers = all(re.fullmatch(r"-?\d{1,18}", label) for label in labels)
        self.labels = tuple(sorted(labels, key=int if numbers else str))
        options = {"text_columns": self.texts, "label_column": self.label}
        super().__init__(name, given if named else {"train": files}, options, files, carve)
        if name == "labelled":  # named after the file, or the folder of train.csv and test.csv
            own, folder = files[0].name.split(".")[0], files[0].absolute().parent.name
            self.name = re.sub(r"[^\w-]+", "-", folder if split_of_file(files[0]) else own) or name

    def _choose_columns(self, path: Path, texts: list[str] | None, label: str | None) -> None:
        """The given ones, or those with a usual name; from the first row of the first file."""
        first = next(rows(path), None)
        if first is None or not isinstance(first[1], dict):
            raise InputError(f"{path} is empty." if first is None else f"{first[0]} is no object with named fields.")
        head = {name.strip().lower(): name for name in first[1]}
        usual = next((names for names in TEXT_COLUMNS if {*names} <= head.keys()), None)
        chosen = label or next((name for name in LABEL_COLUMNS if name in head), None)
        if not (texts or usual) or not chosen:
            what = "--label-column" if texts or usual else "--text-column"
            raise InputError(f"{path} has the columns {', '.join(first[1])}: say with {what} which one to take.")
        self.texts = [head.get(name.lower(), name) for name in texts or usual or []]
        self.label = head.get(chosen.lower(), chosen)

    def _labelled(self, path: Path) -> Iterator[tuple[str, str]]:
        for where, row in rows(path, (*self.texts, self.label)):
            text = "\n".join(text_of(where, row, name, "--text-column") for name in self.texts)
            value = value_of(where, row, self.label, "--label-column")
            label = text_of(where, {self.label: "" if value is None else str(value).strip()}, self.label, "")
            lacking = "text" if not text.strip() else "" if label else "label"
            require(not lacking, f"{where} has no {lacking}: fill it in or remove it.")
            yield text, label

    def read_file(self, path: Path) -> Iterator[Document]:
        numbers = {label: number for number, label in enumerate(self.labels)}
        return (Document(text, numbers[label]) for text, label in self._labelled(path))


def found_files(paths: list[Path], endings: tuple[str, ...]) -> list[Path]:
    """The files, and those with one of these endings in the folders, in order of their names."""
    files: list[Path] = []
    for path in paths:
        require(path.exists(), f"there is no file or folder {path}.")
        inside = [file for file in path.rglob("*") if file.is_file() and plain_name(file).endswith(endings)]
        files += [path] if path.is_file() else sorted(inside)
    where = ", ".join(map(str, paths)) or "nothing"
    require(files, f"{where} holds no file to read ({', '.join(endings)}): name at least one.")
    return files


def value_of(where: str, row: Any, field: str, option: str) -> Any:
    if not isinstance(row, dict) or field not in row:
        names = ", ".join(row) if isinstance(row, dict) else type(row).__name__
        raise InputError(f"{where} has no field {field!r} (it has {names}): choose another {option}.")
    return row[field]


def text_of(where: str, row: Any, field: str, option: str) -> str:
    text = value_of(where, row, field, option)
    if not isinstance(text, str):
        raise InputError(f"{where}, field {field!r} is {type(text).__name__}, expected text.")
    if NO_CHARACTER.search(text):
        raise InputError(f"{where}, field {field!r} holds NUL or half a surrogate pair: is it binary?")
    return text


def rows(path: Path, wanted: Iterable[str] = ()) -> Iterator[tuple[str, Any]]:
    """Of a table, JSON lines or parquet, with where each lies; of parquet only the wanted columns, if all are there."""
    if plain_name(path).endswith((".csv", ".tsv")):
        lines = read_table(path)
        try:
            head: list[str] = next(lines, [])
            for row in filter(any, lines):
                where = f"{path}, line {lines.line_num}"
                if len(row) != len(head):
                    raise InputError(f"{where} has {len(row)} columns, but the first line names {len(head)}.")
                yield where, dict(zip(head, row, strict=True))
        except csv.Error as error:
            raise InputError(f"{path}, line {lines.line_num} cannot be read: {error}.") from error
        return
    if not plain_name(path).endswith(".parquet"):
        for number, line in enumerate(read_lines(path), start=1):
            if line.strip():
                with errors_as(f"{path}, line {number} is not JSON", ValueError):
                    row = json.loads(line)
                yield f"{path}, line {number}", row
        return
    parquet = optional_module("pyarrow.parquet", "parquet", str(path))
    with errors_as(f"{path} is not a readable parquet file", ValueError, OSError):  # pyarrow's own are kinds of these
        table = parquet.ParquetFile(path)
    with table:
        known = wanted and {*wanted} <= {*table.schema_arrow.names}
        batches = table.iter_batches(1024, columns=[*wanted] if known else None)
        for number, row in enumerate((row for batch in batches for row in batch.to_pylist()), start=1):
            yield f"{path}, row {number}", row
