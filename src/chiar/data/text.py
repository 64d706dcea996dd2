"""The user's own text: .txt (and anything else that is UTF-8 text), .jsonl and .parquet, compressed or not.

Files whose names say train, valid or test make those splits; otherwise documents are sent to splits by hash.
"""

import json
from collections.abc import Iterator
from pathlib import Path

from chiar.data.documents import DEFAULT_FRACTIONS, Document, Source, carve_all, carve_valid, check_choice
from chiar.data.files import COMPRESSIONS, plain_name, read_lines, split_of_file, total_bytes
from chiar.data.optional import optional_module
from chiar.errors import InputError

UNITS = ("paragraphs", "lines", "files")
ENDINGS = (".txt", ".md", ".rst", ".text", ".jsonl", ".parquet")


class Text(Source):
    """`unit`: what a document is in plain text. `field`: where the text lies in JSON lines and parquet."""

    def __init__(
        self,
        paths: list[Path],
        name: str = "text",
        unit: str = "paragraphs",
        field: str = "text",
        fractions: tuple[float, float, float] = DEFAULT_FRACTIONS,
    ) -> None:
        self.unit = check_choice("--documents", unit, UNITS)
        self.field = field
        files = [file for path in paths for file in text_files(path)]
        if not files:
            raise InputError("name at least one text file or folder: chiar data prepare FILE… --out DIR.")
        splits = [split_of_file(file) for file in files]
        named = "train" in splits and None not in splits
        self.groups: dict[str, list[Path]] = {}
        for file, split in zip(files, splits, strict=True):
            self.groups.setdefault(split if named and split is not None else "train", []).append(file)
        carve = carve_valid(self.groups, fractions) if named else carve_all(fractions)
        super().__init__(name, self.groups, {"documents": unit, "field": field}, files, carve)

    def read(self, given: str) -> Iterator[Document]:
        for path in self.groups[given]:
            if plain_name(path).endswith(".parquet"):
                texts = parquet_texts(path, self.field)
            elif plain_name(path).endswith((".jsonl", ".ndjson")):
                texts = json_texts(path, self.field)
            else:
                texts = plain_texts(path, self.unit)
            yield from (Document(text) for text in texts if text.strip())

    def expected_bytes(self, split: str) -> int | None:
        if self.carve is not None and split in self.carve.splits:
            total = total_bytes(self.groups["train"])
            return None if total is None else int(total * self.carve.fractions[split])
        return total_bytes(self.groups[split])


def text_files(path: Path) -> list[Path]:
    """The file itself, or the text files anywhere below a folder, by name."""
    if path.is_file():
        if plain_name(path).endswith((".csv", ".tsv")):
            raise InputError(f'{path} is a table: write its text column as .jsonl, one object with a "text" a line.')
        return [path]
    if not path.is_dir():
        raise InputError(f"there is no file or folder {path}.")
    found = sorted(file for file in path.rglob("*") if file.is_file() and plain_name(file).endswith(ENDINGS))
    if not found:
        raise InputError(f"{path} holds no text file ({', '.join(ENDINGS)}, also as {', '.join(COMPRESSIONS)}).")
    return found


def plain_texts(path: Path, unit: str) -> Iterator[str]:
    """Paragraphs end at blank lines, which are left out, so that memory holds one paragraph at a time."""
    if unit == "files":
        yield "".join(read_lines(path))
        return
    paragraph: list[str] = []
    for line in read_lines(path):
        if unit == "lines":
            yield line
        elif line.isspace():
            yield "".join(paragraph)
            paragraph.clear()
        else:
            paragraph.append(line)
    yield "".join(paragraph)


def json_texts(path: Path, field: str) -> Iterator[str]:
    for number, line in enumerate(read_lines(path), start=1):
        if line.isspace():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise InputError(f"{path}, line {number} is not JSON: {error}.") from error
        if not isinstance(row, dict) or field not in row:
            names = ", ".join(row) if isinstance(row, dict) else type(row).__name__
            raise InputError(f"{path}, line {number} has no field {field!r} (it has {names}): choose another --field.")
        yield checked(row[field], f"{path}, line {number}, field {field!r}")


def parquet_texts(path: Path, field: str) -> Iterator[str]:
    parquet = optional_module("pyarrow.parquet", "parquet", str(path))
    try:
        table = parquet.ParquetFile(path)
    except (ValueError, OSError) as error:  # pyarrow's own errors are kinds of these
        raise InputError(f"{path} is not a readable parquet file: {error}") from error
    with table:
        if field not in table.schema_arrow.names:
            names = ", ".join(table.schema_arrow.names)
            raise InputError(f"{path} has no column {field!r} (it has {names}): choose another --field.")
        number = 0
        for batch in table.iter_batches(batch_size=1024, columns=[field]):
            for text in batch.column(0).to_pylist():
                number += 1
                yield checked(text, f"{path}, row {number}, column {field!r}")


def checked(text: object, where: str) -> str:
    """JSON can spell what no text file holds: other types, NUL, and halves of characters."""
    if not isinstance(text, str):
        raise InputError(f"{where} is {type(text).__name__}, expected text.")
    if "\0" in text:
        raise InputError(f"{where} holds a NUL character: is it binary?")
    if any("\ud800" <= character <= "\udfff" for character in text if character > "\ud7ff"):
        raise InputError(f"{where} holds half of a surrogate pair, which is no character.")
    return text
