"""Sources of the user's own files: text, and tables of labelled texts."""

import codecs
import csv
import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate, chain
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
    open_bytes,
    plain_name,
    read_lines,
    read_table,
    split_by_hash,
    split_of_file,
)
from chiar.errors import InputError, errors_as, optional_module, require, unknown_name

TABLE_ENDINGS = (".tsv", ".csv", ".jsonl", ".ndjson", ".parquet")
LARGEST = 1 << 22  # characters of a document; a larger file becomes several, so that one fits in memory
MOST_LABELS = 1000  # more are hardly classes: the wrong column was chosen


class Text(Source):
    """Text of .jsonl and .parquet files (their `field`), with rows split by hash; or of plain UTF-8 files, with one
    document per `unit`. Of these each split gets whole files, or contiguous parts if there is only one text. The
    documents of a plain file, concatenated, are the file."""

    def __init__(
        self, paths: list[Path], name: str = "text", unit: str = "files", field: str = "text",
        fractions: Fractions = None,
    ) -> None:  # fmt: skip
        if unit not in (units := ("files", "paragraphs", "lines")):
            raise unknown_name("--documents", unit, units)
        self.unit, self.field = unit, field
        files, self.left_out = find_files(paths, is_text)
        for table in [file for file in files if plain_name(file).endswith((".csv", ".tsv"))]:
            kind = f"chiar data prepare labelled {table} takes texts with labels"
            raise InputError(f'{table} is a table: {kind}; for text alone write a {{"text": …}} a line, as .jsonl.')
        given = by_split(files)
        self.split_by_name = "train" in given and "" not in given
        given = given if self.split_by_name else {"train": files}
        carve = carve_valid(given, fractions) if self.split_by_name else carve_all(fractions)
        plain = [file for file in given["train"] if not has_rows(file)]
        self.split_of = whole_files(plain, carve) if min(len(carve), len(plain)) > 1 else {}
        kept = {split: share for split, share in carve.items() if split in self.split_of.values()}
        self.missing = [split for split in carve if split not in kept] if kept and plain == given["train"] else []
        super().__init__(name, given, {"documents": unit, "field": field}, files, kept if self.missing else carve)
        if carve and plain:
            self.options["split_of_text"] = "whole files" if self.split_of else "contiguous parts"

    @property
    def notes(self) -> list[str]:
        notes = [f"splits by file names: {', '.join(self.paths)}."] if self.split_by_name else []
        plain = [file.name for file in self.paths["train"] if not has_rows(file)]
        if len(self.carve) > 1 and len(plain) < len(self.paths["train"]):
            notes += [line.replace("document", "row") for line in super().notes]
        if self.split_of:
            counts = ", ".join(f"{split} {[*self.split_of.values()].count(split)}" for split in self.splits)
            notes += [f"splits by whole files: {counts}."]
        elif len(self.carve) > 1 and plain:
            shares = ", ".join(f"{split} {share:.1%}" for split, share in self.carve.items())
            notes += [f"splits by contiguous parts of {', '.join(plain)}: {shares}."]
        notes += [f"too few files for a {split} split: add files to get one." for split in self.missing]
        names, count = ", ".join(file.name for file in self.left_out[:3]), len(self.left_out)
        notes += [f"{count} files left out, tables or no text: {names}{' …' if count > 3 else ''}."] if count else []
        return notes

    def documents(self, split: str) -> Iterator[Document]:
        if split not in self.carve:
            return self.read(split)
        return chain.from_iterable(self._part(path, split) for path in self.paths["train"])

    def _part(self, path: Path, split: str) -> Iterator[Document]:
        """The documents of a split in one of the files that are divided."""
        if has_rows(path):
            return (row for row in self.read_file(path) if split_by_hash(row.text, self.carve) == split)
        if self.split_of or len(self.carve) == 1:
            return self.read_file(path) if self.split_of.get(path, split) == split else iter(())
        size, part = sum(map(len, read_lines(path))), [*self.carve].index(split)
        bounds = [0.0, *(share * size for share in accumulate(self.carve.values()))]
        bounds[-1] = math.inf
        return self._plain(between(short_lines(path), bounds[part], bounds[part + 1], longest=size // 100))

    def read_file(self, path: Path) -> Iterator[Document]:
        if not has_rows(path):
            return self._plain(short_lines(path))
        texts = (text_of(where, row, self.field, "--field") for where, row in rows(path, [self.field]))
        return (Document(text) for text in texts if text.strip())

    def _plain(self, lines: Iterable[str]) -> Iterator[Document]:
        """Blank lines are kept, at the end of a document: only the first document may begin with one."""
        text, size = list[str](), 0  # size without blanks around lines
        for line in lines:
            paragraph = self.unit == "paragraphs" and size and text[-1].isspace()
            if size and not line.isspace() and (paragraph or self.unit == "lines" or size >= LARGEST):
                yield Document("".join(text))
                text, size = [], 0
            text.append(line)
            size += len(line.strip())
        if size:
            yield Document("".join(text))


def has_rows(path: Path) -> bool:
    return plain_name(path).endswith((".parquet", ".jsonl", ".ndjson"))


def is_text(path: Path) -> bool:
    """Whether a file in a folder is read: rows always, tables never, others if their first bytes are text."""
    if has_rows(path) or plain_name(path).endswith((".csv", ".tsv")):
        return has_rows(path)
    with open_bytes(path) as handle:
        head = handle.read(4096)
    try:
        return "\0" not in codecs.getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError:
        return False


def whole_files(files: list[Path], shares: dict[str, float]) -> dict[Path, str]:
    """The split of each file, decided by the texts alone. Copies stay together, and every split gets a text while there
    are enough. Empty if there are not two different texts."""
    copies, sizes = dict[str, list[Path]](), dict[str, int]()
    for file in files:
        digest, size = hashlib.sha256(), 0
        with open_bytes(file) as handle:
            for line in handle:
                digest.update(line)
                size += len(line.strip())
        if size:
            copies.setdefault(digest.hexdigest(), []).append(file)
            sizes[digest.hexdigest()] = size
    if len(sizes) < 2:
        return {}
    split_of, left = dict.fromkeys(files, "train"), sorted(sizes)
    for split in [split for split in shares if split != "train"]:
        room, taken = shares[split] * sum(sizes.values()), list[str]()
        for text in left:
            if sizes[text] <= room:
                taken.append(text)
                room -= sizes[text]
        if not taken and len(left) > 1:
            taken = [min(left, key=sizes.__getitem__)]
        split_of |= {file: split for text in taken for file in copies[text]}
        left = [text for text in left if text not in taken]
    return split_of


def short_lines(path: Path) -> Iterator[str]:
    """Lines; those of many megabytes in pieces that begin with a space."""
    for line in read_lines(path):
        while (space := line.find(" ", LARGEST)) > 0:
            yield line[:space]
            line = line[space:]
        yield line


def between(lines: Iterable[str], begin: float, end: float, longest: int) -> Iterator[str]:
    """The lines between two offsets, in characters. An offset inside a line moves to its end or, if the line is longer
    than `longest`, to the next space. So the parts of a text, concatenated, are the text."""
    at = 0
    for line in lines:
        first, last = (cut(line, place - at, longest) for place in (begin, end))
        if first < last:
            yield line[first:last]
        if (at := at + len(line)) >= end:
            return


def cut(line: str, place: float, longest: int) -> int:
    if place <= 0 or place >= len(line):
        return 0 if place <= 0 else len(line)
    space = line.find(" ", math.ceil(place)) if len(line) > longest else -1
    return len(line) if space < 0 else space


class LabelledFiles(Source):
    """Labelled texts, one per row; the texts of several columns are joined by newlines."""

    kind = "classification"

    def __init__(
        self, paths: list[Path], name: str = "labelled", text_column: list[str] | None = None,
        label_column: str | None = None, fractions: Fractions = None,
    ) -> None:  # fmt: skip
        files, _ = find_files(paths, lambda file: plain_name(file).endswith(TABLE_ENDINGS))
        for file in files:
            if not plain_name(file).endswith(TABLE_ENDINGS):
                raise InputError(f"{file} is none of {', '.join(TABLE_ENDINGS)}, the formats of labelled texts.")
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
        if name == "labelled":  # named after the file, or after the folder of train.csv and test.csv
            own, folder = files[0].name.split(".")[0], files[0].absolute().parent.name
            self.name = re.sub(r"[^\w-]+", "-", folder if split_of_file(files[0]) else own) or name

    def _choose_columns(self, path: Path, texts: list[str] | None, label: str | None) -> None:
        """The given columns, or those with a usual name in the first row of the first file."""
        first = next(rows(path), None)
        if first is None or not isinstance(first[1], dict):
            raise InputError(f"{path} is empty." if first is None else f"{first[0]} is no object with named fields.")
        head = {name.strip().lower(): name for name in first[1]}
        usual = next((names for names in TEXT_COLUMNS if {*names} <= head.keys()), None)
        chosen = label or next((name for name in LABEL_COLUMNS if name in head), None)
        if not (texts or usual) or not chosen:
            what = "--label-column" if texts or usual else "--text-column"
            raise InputError(f"{path} has the columns {', '.join(first[1])}: choose one with {what}.")
        self.texts = [head.get(name.lower(), name) for name in texts or usual or []]
        self.label = head.get(chosen.lower(), chosen)

    def _labelled(self, path: Path) -> Iterator[tuple[str, str]]:
        for where, row in rows(path, (*self.texts, self.label)):
            text = "\n".join(text_of(where, row, name, "--text-column") for name in self.texts)
            value = value_of(where, row, self.label, "--label-column")
            label = text_of(where, {self.label: "" if value is None else str(value).strip()}, self.label, "")
            missing = "text" if not text.strip() else "" if label else "label"
            require(not missing, f"{where} has no {missing}: fill it in or remove it.")
            yield text, label

    def read_file(self, path: Path) -> Iterator[Document]:
        numbers = {label: number for number, label in enumerate(self.labels)}
        return (Document(text, numbers[label]) for text, label in self._labelled(path))


def find_files(paths: list[Path], taken: Callable[[Path], bool]) -> tuple[list[Path], list[Path]]:
    """The given files, and those in given folders that are `taken`, by name; and those left out. Skips hidden ones."""
    files, left_out = list[Path](), list[Path]()
    for path in paths:
        require(path.exists(), f"there is no file or folder {path}.")
        inside = sorted(file for file in path.rglob("*") if file.is_file())
        for file in [path] if path.is_file() else inside:
            if file == path or not any(part.startswith(".") for part in file.relative_to(path).parts):
                (files if file == path or taken(file) else left_out).append(file)
    require(files, f"{', '.join(map(str, paths)) or 'nothing'} holds no file that can be read: name at least one.")
    return files, left_out


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
    """Rows of a table, JSON lines or parquet, and where each is; of parquet only the `wanted` columns, if all exist."""
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
    with errors_as(f"{path} is not a readable parquet file", ValueError, OSError):  # bases of pyarrow's errors
        table = parquet.ParquetFile(path)
    with table:
        known = wanted and {*wanted} <= {*table.schema_arrow.names}
        batches = table.iter_batches(1024, columns=[*wanted] if known else None)
        for number, row in enumerate((row for batch in batches for row in batch.to_pylist()), start=1):
            yield f"{path}, row {number}", row
