"""What every corpus gives: documents, split by split, in an order that never changes."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from chiar.data.official import differences
from chiar.errors import InputError, unknown_name

SPLITS = ("train", "valid", "test")
DEFAULT_FRACTIONS = (0.9, 0.05, 0.05)
# Other people's names for the three splits, in file names.
SPLIT_ALIASES = {name: name for name in SPLITS} | dict.fromkeys(("validation", "val", "dev"), "valid")


class Document(NamedTuple):
    text: str
    label: int | None = None


class HashSplit:
    """Sends each document to a split by a hash of its text.

    Nothing but the document itself decides, so adding documents moves none of the others, and copies of one document
    never lie on both sides of the fence.
    """

    def __init__(self, fractions: dict[str, float]) -> None:
        self.fractions = {name: fractions[name] for name in SPLITS if fractions.get(name, 0.0) > 0.0}
        self.splits = tuple(self.fractions)
        self.bounds = list(zip(accumulate(self.fractions.values()), self.splits, strict=True))

    def split_of(self, text: str) -> str:
        digest = hashlib.sha256(text.encode()).digest()
        share = int.from_bytes(digest[:8], "big") / 2**64
        return next((name for bound, name in self.bounds if share < bound), self.splits[-1])

    def select(self, documents: Iterator[Document], split: str) -> Iterator[Document]:
        return (document for document in documents if self.split_of(document.text) == split)


class Source(ABC):
    """A corpus before tokenisation.

    `given` are the splits it comes with; where `carve` is set, its splits are made out of the given train. `options`
    decide the content besides the files, and go into the manifest. `files` are what is read: a preparation that was
    interrupted continues only if they are unchanged.
    """

    kind = "language"
    labels: tuple[str, ...] = ()

    def __init__(
        self,
        name: str,
        given: Iterable[str],
        options: dict[str, Any],
        files: list[Path],
        carve: HashSplit | None = None,
    ) -> None:
        splits = {*given, *(carve.splits if carve else ())}
        self.name = name
        self.splits = tuple(split for split in SPLITS if split in splits)
        self.options = options | ({"hash_split": carve.fractions} if carve else {})
        self.files = files
        self.carve = carve

    @abstractmethod
    def read(self, given: str) -> Iterator[Document]:
        """The documents of one of the splits the corpus comes with, in the same order each time."""

    def documents(self, split: str) -> Iterator[Document]:
        if self.carve is not None and split in self.carve.splits:
            return self.carve.select(self.read("train"), split)
        return self.read(split)

    def remarks(self, entries: dict[str, Any]) -> list[str]:
        """What sets the corpus apart from the published one of its name, given the splits' manifest entries."""
        return differences(self.name, entries, self.carve is not None)

    def expected_bytes(self, split: str) -> int | None:
        """How much text the split holds, if that is known without reading it; for the progress bar only."""
        return None


def parse_fractions(text: str) -> tuple[float, float, float]:
    """ "0.9,0.05,0.05" as the shares of train, valid and test."""
    try:
        train, valid, test = (float(part) for part in text.split(","))
    except ValueError:
        raise InputError(
            f"--split-fractions takes three numbers (train, valid, test) such as 0.9,0.05,0.05; got {text!r}."
        ) from None
    return check_fractions((train, valid, test))


def check_fractions(fractions: tuple[float, float, float]) -> tuple[float, float, float]:
    if not all(0.0 <= f <= 1.0 for f in fractions) or abs(sum(fractions) - 1.0) > 1e-6 or fractions[0] == 0.0:
        raise InputError(
            f"split fractions must lie between 0 and 1, add up to 1 and leave some for train: {fractions}."
        )
    return fractions


def carve_all(fractions: tuple[float, float, float]) -> HashSplit:
    """For a corpus that comes as one piece."""
    return HashSplit(dict(zip(SPLITS, check_fractions(fractions), strict=True)))


def carve_valid(given: Iterable[str], fractions: tuple[float, float, float]) -> HashSplit | None:
    """For a corpus that may lack a validation set: its share is taken out of train."""
    check_fractions(fractions)
    if "train" not in given or "valid" in given or fractions[1] == 0.0:
        return None
    return HashSplit({"train": 1.0 - fractions[1], "valid": fractions[1]})


def check_choice(option: str, received: str, allowed: tuple[str, ...]) -> str:
    if received not in allowed:
        raise unknown_name(option, received, allowed)
    return received
