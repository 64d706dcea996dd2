"""ListOps expressions: `[MAX 2 9 [MIN 4 7 ] 0 ]` evaluates to 9.

Operators are MIN, MAX, MED (the median; of two middle values the mean, rounded down) and SM (the sum modulo 10);
values are the digits. The published data also writes a binary tree in round brackets around it, one pair a step:
`( ( ( [MIN 4 ) 7 ) ] )`. They carry no meaning and are ignored here.
"""

from collections.abc import Callable, Sequence
from random import Random

OPERATORS: dict[str, Callable[[list[int]], int]] = {
    "[MIN": min,
    "[MAX": max,
    "[MED": lambda values: _median(sorted(values)),
    "[SM": lambda values: sum(values) % 10,
}
NAMES = tuple(OPERATORS)
VALUES = {str(digit): digit for digit in range(10)}
DIGITS = tuple(VALUES)
END = "]"
ROUND = ("(", ")")
# How likely a place in the tree holds an operator rather than a digit, as in the original generator.
OPERATOR_SHARE = 0.25


def _median(values: Sequence[int]) -> int:
    middle = len(values) // 2
    return values[middle] if len(values) % 2 else (values[middle - 1] + values[middle]) // 2


def evaluate(expression: str) -> int:
    """The digit an expression stands for; ValueError if it is not well formed."""
    stack: list[tuple[str, list[int]]] = [("", [])]
    for token in expression.split():
        if token in VALUES:
            stack[-1][1].append(VALUES[token])
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
    counts: dict[int, int] = {}
    open_at: list[int] = []
    for place, token in enumerate(tokens):
        if token == END:
            open_at.pop()
        if token != END and open_at:
            counts[open_at[-1]] += 1
        if token in OPERATORS:
            open_at.append(place)
            counts[place] = 0
    written: list[str] = []
    depth = 0
    for place, token in enumerate(tokens):
        if token in OPERATORS:
            written += ["("] * (counts[place] + 1)
            depth += 1
        written.append(token)
        if token == END:
            written.append(")")
            depth -= 1
        if token not in OPERATORS and depth:
            written.append(")")
    return " ".join(written)
