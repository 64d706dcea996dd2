"""Errors a user can act on. The command line prints them as one sentence and exits with code 2."""

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from importlib import import_module
from typing import Any

MANY = 24  # more names than one wants to read
UNITS = {"bytes": 1.0, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30, "TiB": 2.0**40, "PiB": 2.0**50, "EiB": 2.0**60}
ASKED = re.compile(r"(?:tried|unable) to allocate ([\d.]+) (\w+)", re.IGNORECASE)  # torch's words, and NumPy's


class InputError(ValueError):
    """Something the user gave cannot be used; the message says what was wrong and what to do."""


def require(right: object, otherwise: str) -> None:
    if not right:
        raise InputError(otherwise)


def first_line(error: BaseException) -> str:
    """A library's error in one line, which is not endless; its type where it says nothing."""
    said = f"{error} is missing" if isinstance(error, KeyError) else str(error)
    return said.strip().split("\n")[0][:400] or type(error).__name__


def gigabytes(size: float) -> str:
    return f"{size / 1e9:,.1f} GB"


def failed_allocation(error: BaseException) -> float | None:
    """The bytes that were not to be had, 0 where it does not say how many; None where the error is another one."""
    if asked := ASKED.search(str(error)):
        return float(asked[1]) * UNITS.get(asked[2], 1.0)
    return 0.0 if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError" else None


@contextmanager
def errors_as(sentence: str, *kinds: type[Exception]) -> Iterator[None]:
    """What a library raises of these kinds becomes an InputError that begins with this sentence."""
    try:
        yield
    except InputError:
        raise
    except kinds as error:
        raise InputError(f"{sentence}: {first_line(error)}") from error


def refuse_misspelt(kind: str, received: Iterable[str], allowed: Iterable[str]) -> None:
    """Where unknown keywords must be let through, still catch those that are nearly a known one."""
    names = list(allowed)
    for name in received:
        close = get_close_matches(name, names, n=1, cutoff=0.85)
        if close and name not in names:
            raise InputError(f"unknown {kind} {name!r}. Did you mean {close[0]!r}?")


def unknown_name(kind: str, received: object, allowed: Iterable[str], more: str = "") -> InputError:
    """The nearest valid name, then all of them; of many a handful that are near. Then what else may be wrong."""
    names = list(allowed)
    near, many = get_close_matches(str(received), names, n=1, cutoff=0.8), len(names) > MANY
    nearest = near or get_close_matches(str(received), names, n=4 if many else 1, cutoff=0.5 if many else 0.4)
    hint = f" Did you mean {' or '.join(map(repr, nearest))}?" if nearest else ""
    listed = "" if many and (nearest or more) else f" Allowed: {', '.join(names)}."
    return InputError(f"unknown {kind} {received!r}.{hint}{listed}{more and ' ' + more}")


def optional_module(name: str, extra: str, what: str) -> Any:
    """The module, or a sentence that says how to install it. `what` is the thing that needs it."""
    try:
        return import_module(name)
    except ImportError:
        package = name.split(".")[0]
        raise InputError(f"{what} needs the package {package}: pip install 'chiar[{extra}]'.") from None
