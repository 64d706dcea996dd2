"""ListOps: nested expressions over digits, generated here as the original generator does, or read from its files.

Presets: `listops` is the original (Nangia and Bowman 2018: depth 20, at most 5 arguments, written with round
brackets); `listops-lra` is the long-range arena (depth 10, at most 10 arguments, more than 500 and fewer than 2,000
tokens, no round brackets, which its readers drop).
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path
from random import Random
from typing import Any

from chiar.data.documents import DEFAULT_FRACTIONS, SPLITS, Document, Source, carve_valid
from chiar.data.expressions import evaluate, generate, with_brackets, without_brackets
from chiar.data.files import split_of_file
from chiar.data.tables import first_row, labelled_rows, whole_number
from chiar.errors import InputError

DIGITS = tuple(str(digit) for digit in range(10))
# An option that almost no tree meets would otherwise search for ever.
PATIENCE = 1_000_000


@dataclass(frozen=True)
class Shape:
    """What the generated expressions look like. Lengths count tokens without round brackets, both ends included."""

    depth: int = 20
    arguments: int = 5
    min_length: int = 1
    max_length: int = 100_000
    brackets: bool = True
    seed: int = 0
    examples: tuple[int, int, int] = (85_000, 5_000, 10_000)

    def check(self) -> None:
        if self.depth < 2 or self.arguments < 2:
            raise InputError(f"--depth and --arguments must be at least 2, got {self.depth} and {self.arguments}.")
        if not 1 <= self.min_length <= self.max_length:
            raise InputError(f"--min-length must be from 1 to --max-length, got {self.min_length}, {self.max_length}.")
        if min(self.examples) < 0 or self.examples[0] == 0:
            raise InputError(f"--examples counts train (at least 1), valid and test expressions, got {self.examples}.")


PRESETS = {
    "listops": Shape(),
    "listops-lra": Shape(
        depth=10, arguments=10, min_length=501, max_length=1999, brackets=False, examples=(96_000, 2_000, 2_000)
    ),
}


class GeneratedListOps(Source):
    kind = "classification"
    labels = DIGITS

    def __init__(self, name: str, **changes: Any) -> None:
        self.shape = replace(PRESETS[name], **changes)
        self.shape.check()
        self.counts = dict(zip(SPLITS, self.shape.examples, strict=True))
        self._used: dict[str, set[bytes]] = {}
        options = {**asdict(self.shape), "examples": list(self.shape.examples)}
        super().__init__(name, [split for split in SPLITS if self.counts[split]], options, [])

    def read(self, given: str) -> Iterator[Document]:
        """No expression comes twice: train avoids what valid and test hold, valid what test holds."""
        taken: set[bytes] = set()
        for other in reversed(SPLITS[SPLITS.index(given) + 1 :]):
            if other not in self._used:
                self._used[other] = {key for _, key in self._generate(other, taken)}
            taken |= self._used[other]
        for tokens, _ in self._generate(given, taken):
            text = " ".join(tokens)
            yield Document(with_brackets(tokens) if self.shape.brackets else text, evaluate(text))

    def _generate(self, split: str, taken: set[bytes]) -> Iterator[tuple[list[str], bytes]]:
        shape = self.shape
        rng = Random(f"listops {shape.seed} {split}")
        seen = set(taken)
        tries = wanted = 0
        while wanted < self.counts[split]:
            tries += 1
            if tries > PATIENCE:
                raise InputError(
                    f"no new expression of {shape.min_length} to {shape.max_length} tokens in {PATIENCE:,} tries after "
                    f"{wanted:,} in {split}: ask for fewer --examples, or a larger --depth or length range."
                )
            tokens = generate(rng, shape.depth, shape.arguments, shape.min_length > 1, shape.max_length)
            if tokens is None or len(tokens) < shape.min_length:
                continue
            key = sha256(" ".join(tokens).encode()).digest()[:12]
            if key in seen:
                continue
            seen.add(key)
            tries = 0
            wanted += 1
            yield tokens, key


class ListOpsFiles(Source):
    """Tables of value and expression, as first published, or Source and Target with a header, as in the arena."""

    kind = "classification"
    labels = DIGITS

    def __init__(
        self,
        name: str,
        paths: list[Path],
        fractions: tuple[float, float, float] = DEFAULT_FRACTIONS,
        brackets: bool | None = None,
    ) -> None:
        files = [file for path in paths for file in (sorted(path.glob("*.tsv*")) if path.is_dir() else [path])]
        self.paths: dict[str, Path] = {}
        for file in files:
            split = split_of_file(file)
            if split is None or split in self.paths:
                raise InputError(f"{file}: one file a split, with train, valid or test in its name, is expected.")
            self.paths[split] = file
        if not self.paths:
            raise InputError(f"{', '.join(map(str, paths))}: no .tsv file there.")
        self.brackets = brackets
        options = {"brackets": "as given" if brackets is None else brackets}
        super().__init__(name, self.paths, options, files, carve_valid(self.paths, fractions))

    def read(self, given: str) -> Iterator[Document]:
        path = self.paths[given]
        header = [cell.lower() for cell in first_row(path)] == ["source", "target"]
        text_at, label_at = (0, 1) if header else (1, 0)

        def read(row: list[str]) -> tuple[str, int]:
            text, label = row[text_at].strip(), whole_number(row[label_at], 10)
            if evaluate(text) != label:
                raise ValueError(f"the expression is {evaluate(text)}, but the row says {label}")
            if self.brackets is not None:
                tokens = without_brackets(text)
                text = with_brackets(tokens) if self.brackets else " ".join(tokens)
            return text, label

        return labelled_rows(path, header, 2, read)
