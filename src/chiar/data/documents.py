"""What every corpus gives, documents in an order that never changes, and how their files are read."""

import bz2
import csv
import gzip
import hashlib
import lzma
import re
import zlib
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

from chiar.errors import InputError

SPLITS = ("train", "valid", "test")
# Other people's names for the three splits, in file names.
SPLIT_ALIASES = {name: name for name in SPLITS} | dict.fromkeys(("validation", "val", "dev"), "valid")
Fractions = tuple[float, float, float]
DEFAULT_FRACTIONS: Fractions = (0.9, 0.05, 0.05)
COMPRESSIONS: dict[str, Any] = {".xz": lzma.open, ".gz": gzip.open, ".bz2": bz2.open}
# Published sizes, so that a figure measured on part of a set can say so: documents, and of WikiText, words and
# newlines, as the literature counts tokens. The raw form has the same words, spelled out.
PUBLISHED = {
    "wikitext-103": {"train": 103_227_021, "valid": 217_646, "test": 245_569},
    "wikitext-2": {"train": 2_088_628, "valid": 217_646, "test": 245_569},
    "imdb": {"train": 25_000, "test": 25_000},
    "sst-2": {"train": 67_349, "valid": 872},
    "cola": {"train": 8_551, "valid": 1_043},
    "mrpc": {"train": 3_668, "valid": 408},
    "rte": {"train": 2_490, "valid": 277},
}
# Columns of tables by their names in lower case; a pair becomes one text with a newline between.
TEXT_COLUMNS = (
    ("text",),
    ("review",),
    ("sentence",),
    ("source",),
    ("sentence1", "sentence2"),
    ("#1 string", "#2 string"),
)
LABEL_COLUMNS = ("label", "sentiment", "target", "quality")


class Document(NamedTuple):
    text: str
    label: int | None = None


class Source:
    """A corpus before tokenisation: give it a `read`, or files by split (`given`) and a `read_file`.

    `given` are the splits it comes with; with `carve`, those named there are made out of the given train. `options`
    decide the content besides the files, and go into the manifest. `files` are what is read: a preparation that was
    interrupted continues only if they are unchanged.
    """

    kind = "language"
    labels: tuple[str, ...] = ()

    def __init__(
        self, name: str, given: Collection[str] | dict[str, list[Path]], options: dict[str, Any],
        files: list[Path] | None = None, carve: dict[str, float] | None = None,
    ) -> None:  # fmt: skip
        self.name, self.carve = name, carve or {}
        self.splits = tuple(split for split in SPLITS if split in given or split in self.carve)
        self.options = options | ({"hash_split": carve} if carve else {})
        self.paths = given if isinstance(given, dict) else {}
        self.files = [path for paths in self.paths.values() for path in paths] if files is None else files

    def read(self, given: str) -> Iterator[Document]:
        """The documents of one of the splits the corpus comes with, in the same order each time."""
        return (document for path in self.paths[given] for document in self.read_file(path))

    def read_file(self, path: Path) -> Iterator[Document]:
        raise NotImplementedError

    def documents(self, split: str) -> Iterator[Document]:
        if split not in self.carve:
            return self.read(split)
        return (document for document in self.read("train") if split_by_hash(document.text, self.carve) == split)

    def remarks(self, entries: dict[str, Any]) -> list[str]:
        """What sets the corpus apart from the published one of its name, given the splits' manifest entries."""
        words = self.name.startswith("wikitext")
        found = {name: e["words"] + e["lines"] if words else e["documents"] for name, e in entries.items()}
        if self.carve:
            found["train"] = found.get("train", 0) + found.pop("valid", 0)
        remarks = []
        for split, size in PUBLISHED.get(self.name.removesuffix("-raw"), {}).items():
            what = "train and valid together hold" if self.carve and split == "train" else f"{split} holds"
            if split not in found:
                remarks.append(f"{self.name} has no {split} split here.")
            elif found[split] != size:
                counted = f"{found[split]:,} {'word tokens' if words else 'documents'}"
                remarks.append(f"{what} {counted}, the published {self.name} {size:,}: not the same set.")
        return remarks

    def expected_bytes(self, split: str) -> int | None:
        """About how much text the split holds, where the sizes of its files say so; for the progress bar only."""
        files = self.paths.get("train" if split in self.carve else split, [])
        plain = files and not any(path.suffix in COMPRESSIONS for path in files)
        return int(sum(path.stat().st_size for path in files) * self.carve.get(split, 1.0)) if plain else None


class Table(Source):
    """Labelled texts, one a row: .csv with quotes as usual, anything else tab-separated without them."""

    kind = "classification"
    spellings: dict[str, int]  # how files write the labels
    columns: tuple[list[int], int] = ([1], 0)  # of the text and the label, where no header names them

    def checked(self, text: str, label: int) -> str:
        """The text as it is kept, or a ValueError."""
        return text

    def read_file(self, path: Path) -> Iterator[Document]:
        csv.field_size_limit(2**30)  # a review can be longer than the usual 128 KiB
        style: Any = {} if plain_name(path).endswith(".csv") else {"delimiter": "\t", "quoting": csv.QUOTE_NONE}
        rows = csv.reader(read_lines(path), **style)
        try:
            first = next(rows, None)
            if first is None:
                raise InputError(f"{path} is empty.")
            head = [cell.strip().lower() for cell in first]
            texts = next(([head.index(name) for name in names] for names in TEXT_COLUMNS if {*names} <= {*head}), None)
            label_at = next((head.index(name) for name in LABEL_COLUMNS if name in head), None)
            if texts is None or label_at is None:
                texts, label_at = self.columns
                rows = csv.reader(read_lines(path), **style)
            for row in rows:
                if not any(row):
                    continue
                if len(row) <= max(*texts, label_at):
                    raise ValueError(f"it has {len(row)} columns, expected {max(*texts, label_at) + 1}")
                label, text = self.spellings.get(row[label_at].strip().lower()), "\n".join(row[at] for at in texts)
                if label is None:
                    raise ValueError(f"label {row[label_at]!r} is none of {', '.join(self.spellings)}")
                if not text.strip():
                    raise ValueError("it has a label but no text")
                yield Document(self.checked(text, label), label)
        except InputError:
            raise
        except (csv.Error, ValueError) as error:
            raise InputError(f"{path}, line {rows.line_num} cannot be read: {error}.") from error


def split_by_hash(text: str, fractions: dict[str, float]) -> str:
    """Nothing but the document itself decides: adding documents moves no other, and copies stay in one split."""
    share = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") / 2**64
    bounds = zip(fractions, accumulate(fractions.values()), strict=True)
    return next((name for name, bound in bounds if share < bound), list(fractions)[-1])


def carve_all(fractions: Fractions | None = None) -> dict[str, float]:
    """For a corpus that comes as one piece: the share of each split that has one."""
    fractions = fractions or DEFAULT_FRACTIONS
    if min(fractions) < 0.0 or abs(sum(fractions) - 1.0) > 1e-6 or fractions[0] == 0.0:
        raise InputError(
            f"split fractions must lie between 0 and 1, add up to 1 and leave some for train: {fractions}."
        )
    return {name: fraction for name, fraction in zip(SPLITS, fractions, strict=True) if fraction}


def carve_valid(given: Collection[str], fractions: Fractions | None = None) -> dict[str, float] | None:
    """For a corpus that may lack a validation set: its share is taken out of train."""
    valid = carve_all(fractions).get("valid")
    return {"train": 1.0 - valid, "valid": valid} if valid and "train" in given and "valid" not in given else None


def spelling(option: str) -> str:
    """An option as the command line spells it."""
    return {"fractions": "--split-fractions", "unit": "--documents"}.get(option, f"--{option.replace('_', '-')}")


def plain_name(path: Path) -> str:
    """The file's name without the ending of a compression."""
    return path.stem if path.suffix in COMPRESSIONS else path.name


def split_of_file(path: Path) -> str | None:
    """The split a file's name speaks of: train.txt, test_d20s.tsv, basic_val.tsv; None if it names none or several."""
    named = {SPLIT_ALIASES[part] for part in re.split(r"[_.\-]", path.name.lower()) if part in SPLIT_ALIASES}
    return named.pop() if len(named) == 1 else None


def find_files(folder: Path, names: dict[str, list[str]]) -> dict[str, list[Path]]:
    """By split, the first of its names that lies in the folder, compressed or not."""
    tried = {
        split: [folder / f"{name}{end}" for name in names[split] for end in ("", *COMPRESSIONS)] for split in names
    }
    found = {split: [path for path in paths if path.is_file()][:1] for split, paths in tried.items()}
    return {split: paths for split, paths in found.items() if paths}


def one_folder(name: str, paths: list[Path], layout: str, inner: str = "") -> Path:
    """The folder of a corpus that is read from one, or the `inner` one there."""
    if len(paths) != 1:
        raise InputError(f"{name} is read from one folder with {layout}: chiar data prepare {name} FOLDER --out DIR.")
    if not paths[0].is_dir():
        raise InputError(f"{paths[0]} is not a folder: {name} is read from a folder with {layout}.")
    return paths[0] / inner if (paths[0] / inner).is_dir() else paths[0]


@contextmanager
def open_bytes(path: Path) -> Iterator[IO[bytes]]:
    try:
        with COMPRESSIONS.get(path.suffix, open)(path, "rb") as handle:
            yield cast(IO[bytes], handle)
    except (OSError, lzma.LZMAError, zlib.error, EOFError) as error:
        raise InputError(f"{path} is damaged or not a {path.suffix} file: {error}") from error


def read_lines(path: Path) -> Iterator[str]:
    """Lines with their newlines, exactly as they are; only a byte order mark at the start is dropped."""
    position = 0
    with open_bytes(path) as handle:
        for raw in handle:
            try:
                line = raw.decode("utf-8")
            except UnicodeDecodeError as error:
                raise InputError(f"{path} is not UTF-8 text (byte {position + error.start}): is it binary?") from error
            if "\0" in line:
                raise InputError(f"{path} holds a NUL character (byte {position + raw.index(0)}): is it binary?")
            yield line if position else line.removeprefix("\ufeff")
            position += len(raw)
