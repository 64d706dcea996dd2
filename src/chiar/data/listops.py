"""ListOps: nested expressions over digits. `[MAX 2 9 [MIN 4 7 ] 0 ]` is 9.

Operators are MIN, MAX, MED (the median; of two middle values the mean, rounded down) and SM (the sum modulo 10). The
published data also writes a binary tree in round brackets around it, one pair a step: `( ( ( [MIN 4 ) 7 ) ] )`. They
carry no meaning and are ignored here.
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

from chiar.data.documents import SPLITS, Document, Fractions, Source, Table, carve_valid, split_of_file
from chiar.errors import InputError

OPERATORS: dict[str, Callable[[list[int]], int]] = {
    "[MIN": min,
    "[MAX": max,
    "[MED": lambda values: int(median(values)),
    "[SM": lambda values: sum(values) % 10,
}
NAMES = tuple(OPERATORS)
DIGITS = tuple("0123456789")
END = "]"
ROUND = ("(", ")")
# How likely a place in the tree holds an operator rather than a digit, as in the original generator.
OPERATOR_SHARE = 0.25
# A shape that almost no tree has would otherwise be searched for ever.
PATIENCE = 1_000_000


@dataclass(frozen=True)
class Shape:
    """What generated expressions look like. Lengths count tokens without round brackets, both ends included."""

    depth: int = 20
    arguments: int = 5
    min_length: int = 1
    max_length: int = 100_000
    brackets: bool = True
    seed: int = 0
    examples: tuple[int, int, int] = (85_000, 5_000, 10_000)

    def __post_init__(self) -> None:
        if self.depth < 2 or self.arguments < 2:
            raise InputError(f"--depth and --arguments must be at least 2, got {self.depth} and {self.arguments}.")
        if not 1 <= self.min_length <= self.max_length:
            raise InputError(f"--min-length must be from 1 to --max-length, got {self.min_length}, {self.max_length}.")
        if min(self.examples) < 0 or self.examples[0] == 0:
            raise InputError(f"--examples counts train (at least 1), valid and test expressions, got {self.examples}.")


PRESETS = {
    "listops": Shape(),  # Nangia and Bowman 2018
    # The long-range arena, whose readers drop the round brackets.
    "listops-lra": Shape(10, 10, 501, 1999, brackets=False, examples=(96_000, 2_000, 2_000)),
}


class GeneratedListOps(Source):
    """Generated as the original generator does, in one of its two published shapes or another."""

    kind = "classification"
    labels = DIGITS

    def __init__(self, name: str, **changes: Any) -> None:
        self.shape = replace(PRESETS[name], **changes)
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
        shape, seen = self.shape, set(taken)
        rng = Random(f"listops {shape.seed} {split}")
        for wanted in range(self.counts[split]):
            for _ in range(PATIENCE):
                tokens = generate(rng, shape.depth, shape.arguments, shape.min_length > 1, shape.max_length)
                if tokens is not None and len(tokens) >= shape.min_length:
                    key = sha256(" ".join(tokens).encode()).digest()[:12]
                    if key not in seen:
                        break
            else:
                raise InputError(
                    f"no new expression of {shape.min_length} to {shape.max_length} tokens in {PATIENCE:,} tries after "
                    f"{wanted:,} in {split}: ask for fewer --examples, or a larger --depth or length range."
                )
            seen.add(key)
            yield tokens, key


class ListOpsFiles(Table):
    """Tables of value and expression, as first published, or Source and Target with a header, as in the arena."""

    labels = DIGITS
    spellings = {digit: int(digit) for digit in DIGITS}  # noqa: RUF012

    def __init__(
        self, paths: list[Path], name: str, fractions: Fractions | None = None, brackets: bool | None = None
    ) -> None:
        self.brackets = brackets
        given: dict[str, list[Path]] = {}
        for file in [file for path in paths for file in (sorted(path.glob("*.tsv*")) if path.is_dir() else [path])]:
            split = split_of_file(file)
            if split is None or split in given:
                raise InputError(f"{file}: one file a split, with train, valid or test in its name, is expected.")
            given[split] = [file]
        if not given:
            raise InputError(f"{', '.join(map(str, paths))}: no .tsv file there.")
        options = {"brackets": "as given" if brackets is None else brackets}
        super().__init__(name, given, options, carve=carve_valid(given, fractions))

    def columns(self, head: list[str]) -> tuple[bool, tuple[int, ...], int]:
        return (True, (0,), 1) if head == ["source", "target"] else (False, (1,), 0)

    def checked(self, text: str, label: int) -> str:
        if evaluate(text) != label:
            raise ValueError(f"the expression is {evaluate(text)}, but the row says {label}")
        if self.brackets is None:
            return text.strip()
        return with_brackets(without_brackets(text)) if self.brackets else " ".join(without_brackets(text))


def evaluate(expression: str) -> int:
    """The digit an expression stands for; ValueError if it is not well formed."""
    stack: list[tuple[str, list[int]]] = [("", [])]
    for token in expression.split():
        if token in DIGITS:
            stack[-1][1].append(int(token))
        elif token in OPERATORS:
            stack.append((token, []))
        elif token == END:
            operator, values = stack.pop()
            if not stack or not values:
                raise ValueError("a ] closes nothing" if not stack else f"{operator} has no arguments")
            stack[-1][1].append(OPERATORS[operator](values))
        elif token not in ROUND:
            raise ValueError(f"{token!r} is neither an operator ({', '.join(NAMES)}), a digit nor a bracket")
    if len(stack) != 1:
        raise ValueError(f"{stack[-1][0]} is never closed")
    if len(stack[0][1]) != 1:
        raise ValueError(f"it holds {len(stack[0][1])} expressions, expected one")
    return stack[0][1][0]


def generate(rng: Random, depth: int, arguments: int, operator_at_root: bool, max_length: int) -> list[str] | None:
    """One random tree as tokens without round brackets, or None if it grew beyond `max_length`.

    As in the original: a place above the deepest level is an operator with probability 0.25, with 2 to `arguments`
    arguments, so at most `depth` - 1 operators are nested.
    """
    tokens: list[str] = []
    missing: list[int] = []  # arguments still to come, of each open operator
    random = rng.random
    draw = 0.0 if operator_at_root else random()
    while True:
        if draw < OPERATOR_SHARE and len(missing) + 1 < depth:
            tokens.append(NAMES[int(random() * len(NAMES))])
            missing.append(2 + int(random() * (arguments - 1)))
            if len(tokens) + len(missing) > max_length:
                return None
        else:
            tokens.append(DIGITS[int(random() * 10)])
            while missing:
                missing[-1] -= 1
                if missing[-1]:
                    break
                missing.pop()
                tokens.append(END)
            else:
                return tokens if len(tokens) <= max_length else None
        draw = random()


def without_brackets(expression: str) -> list[str]:
    return [token for token in expression.split() if token not in ROUND]


def with_brackets(tokens: list[str]) -> str:
    """As published: every argument and the closing ] add one pair of round brackets."""
    stack: list[list[str]] = [[]]
    for token in tokens:
        if token in OPERATORS:
            stack.append([token])
        elif token == END:
            text, *arguments = stack.pop()
            for argument in (*arguments, END):
                text = f"( {text} {argument} )"
            stack[-1].append(text)
        else:
            stack[-1].append(token)
    return stack[0][0]
