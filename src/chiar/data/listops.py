"""ListOps: nested expressions over digits. `[MAX 2 9 [MIN 4 7 ] 0 ]` is 9.

The published data adds round brackets that form a binary tree, one pair per step: `( ( ( [MIN 4 ) 7 ) ] )`. They carry
no meaning and are ignored here. A median between two middle values is their mean, rounded down.
"""

from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

from chiar.data.corpora import SPLITS, Document, Fractions, Source, Table, by_split, carve_valid
from chiar.errors import InputError, require

OPERATORS: dict[str, Any] = {"[MIN": min, "[MAX": max, "[MED": median, "[SM": lambda values: sum(values) % 10}
NAMES = tuple(OPERATORS)
DIGITS = tuple("0123456789")
PATIENCE = 1_000_000  # tries per expression, for settings that almost no tree fits
# Options of the generator, and their values for the two published sets: Nangia and Bowman 2018; the long-range arena,
# whose readers drop the round brackets. Lengths count tokens without these; both bounds are inclusive.
GENERATOR = ("depth", "arguments", "min_length", "max_length", "brackets", "seed", "examples")
SHAPES = {
    "listops": (20, 5, 1, 100_000, True, 0, (85_000, 5_000, 10_000)),
    "listops-lra": (10, 10, 501, 1999, False, 0, (96_000, 2_000, 2_000)),
}


class GeneratedListOps(Source):
    """Expressions generated as by the original generator, with the options of a published set or others."""

    kind = "classification"
    labels = DIGITS

    def __init__(self, paths: list[Path], name: str = "listops", **changes: Any) -> None:
        shape: dict[str, Any] = dict(zip(GENERATOR, SHAPES[name], strict=True)) | changes
        self.depth, self.arguments, self.shortest, self.longest, self.brackets, self.seed, examples = shape.values()
        if min(self.depth, self.arguments) < 2:
            raise InputError(f"--depth and --arguments must be at least 2, got {self.depth} and {self.arguments}.")
        if not 1 <= self.shortest <= self.longest:
            raise InputError(f"--min-length must be from 1 to --max-length, got {self.shortest}, {self.longest}.")
        if min(examples) < 0 or examples[0] == 0:
            raise InputError(f"--examples counts train (at least 1), valid and test expressions, got {examples}.")
        self.counts = dict(zip(SPLITS, examples, strict=True))
        self._used: dict[str, set[bytes]] = {}
        super().__init__(name, [*filter(self.counts.get, SPLITS)], shape | {"examples": list(examples)})

    def read(self, given: str) -> Iterator[Document]:
        """No expression occurs twice: train avoids those of valid and test, valid those of test."""
        taken: set[bytes] = set()
        for other in reversed(SPLITS[SPLITS.index(given) + 1 :]):
            if other not in self._used:
                self._used[other] = {key for _, key in self._generate(other, taken)}
            taken |= self._used[other]
        for tokens, _ in self._generate(given, taken):
            value, bracketed = evaluate(text := " ".join(tokens))
            yield Document(bracketed if self.brackets else text, value)

    def _generate(self, split: str, taken: set[bytes]) -> Iterator[tuple[list[str], bytes]]:
        seen, rng = set(taken), Random(f"listops {self.seed} {split}")
        for count in range(self.counts[split]):
            for _ in range(PATIENCE):
                tokens = generate(rng, self.depth, self.arguments, self.shortest > 1, self.longest)
                if tokens is not None and len(tokens) >= self.shortest:
                    key = sha256(" ".join(tokens).encode()).digest()[:12]
                    if key not in seen:
                        break
            else:
                what = f"of {self.shortest} to {self.longest} tokens in {PATIENCE:,} tries after {count:,} in {split}"
                raise InputError(f"no new expression {what}: ask for fewer --examples, more --depth or other lengths.")
            seen.add(key)
            yield tokens, key


class ListOpsFiles(Table):
    """Tables of value and expression, as first published, or with a header of Source and Target, as in the arena."""

    labels = DIGITS
    spellings = {digit: int(digit) for digit in DIGITS}  # noqa: RUF012

    def __init__(self, paths: list[Path], name: str, fractions: Fractions = None, brackets: bool | None = None) -> None:
        self.brackets = brackets
        given = by_split(file for path in paths for file in (sorted(path.glob("*.tsv*")) if path.is_dir() else [path]))
        for split, files in given.items():
            if not split or len(files) > 1:
                raise InputError(f"{files[-1]}: expected one file per split, with train, valid or test in its name.")
        require(given, f"{', '.join(map(str, paths))}: no .tsv file there.")
        options = {"brackets": "as given" if brackets is None else brackets}
        super().__init__(name, given, options, carve=carve_valid(given, fractions))

    def checked(self, text: str, label: int) -> str:
        value, bracketed = evaluate(text)
        if value != label:
            raise ValueError(f"the expression is {value}, but the row says {label}")
        plain = " ".join(token for token in text.split() if token not in "()")
        return text.strip() if self.brackets is None else bracketed if self.brackets else plain


def evaluate(expression: str) -> tuple[int, str]:
    """The value of an expression, and the expression with round brackets as published; ValueError if malformed."""
    stack: list[tuple[str, list[int], list[str]]] = [("", [], [])]
    for token in expression.split():
        value, text = token, token
        if token in OPERATORS:
            stack.append((token, [], []))
        elif token == "]":
            text, values, arguments = stack.pop()
            if not stack or not values:
                raise ValueError("a ] closes nothing" if not stack else f"{text} has no arguments")
            value = str(int(OPERATORS[text](values)))
            for argument in (*arguments, token):  # every argument and the closing ] add one pair
                text = f"( {text} {argument} )"
        elif token not in (*DIGITS, "(", ")"):
            raise ValueError(f"{token!r} is neither an operator ({', '.join(OPERATORS)}), a digit nor a bracket")
        if value in DIGITS:
            stack[-1][1].append(int(value))
            stack[-1][2].append(text)
    operator, values, texts = stack.pop()
    if stack:
        raise ValueError(f"{operator} is never closed")
    if len(values) != 1:
        raise ValueError(f"it holds {len(values)} expressions, expected one")
    return values[0], texts[0]


def generate(rng: Random, depth: int, arguments: int, operator_at_root: bool, max_length: int) -> list[str] | None:
    """One random tree as tokens without round brackets, or None if it grew beyond `max_length`, as in the original."""
    tokens: list[str] = []
    missing: list[int] = []  # arguments still to come, for each open operator
    random = rng.random
    while True:
        operator = (operator_at_root and not tokens) or random() < 0.25  # as in the original generator
        if operator and len(missing) + 1 < depth:
            tokens.append(NAMES[int(random() * len(NAMES))])
            missing.append(2 + int(random() * (arguments - 1)))
            if len(tokens) + len(missing) > max_length:
                return None
        else:
            tokens.append(DIGITS[int(random() * 10)])
            while missing and missing[-1] == 1:
                missing.pop()
                tokens.append("]")
            if not missing:
                return tokens if len(tokens) <= max_length else None
            missing[-1] -= 1
