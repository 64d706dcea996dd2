"""Errors that a user can fix. The command line prints them as one sentence and exits with code 2."""

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from importlib import import_module
from typing import Any

MANY = 24  # longer lists of names are not printed in full
UNITS = {"bytes": 1.0, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30, "TiB": 2.0**40, "PiB": 2.0**50, "EiB": 2.0**60}
ALLOCATION = re.compile(r"(?:tried|unable) to allocate ([\d.]+) (\w+)", re.IGNORECASE)  # of torch or NumPy


class InputError(ValueError):
    """Invalid input from the user. The message says what is wrong and what to do."""


def require(condition: object, message: str) -> None:
    if not condition:
        raise InputError(message)


def first_line(error: BaseException) -> str:
    """The first line of a library's error, cut to 400 characters; its type if the message is empty."""
    message = f"{error} is missing" if isinstance(error, KeyError) else str(error)
    return message.strip().split("\n")[0][:400] or type(error).__name__


def gigabytes(size: float) -> str:
    return f"{size / 1e9:,.1f} GB"


def failed_allocation(error: BaseException) -> float | None:
    """Size in bytes of the allocation that failed, 0 if unknown; None if this is another kind of error."""
    if size := ALLOCATION.search(str(error)):
        return float(size[1]) * UNITS.get(size[2], 1.0)
    return 0.0 if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError" else None


@contextmanager
def errors_as(sentence: str, *kinds: type[Exception]) -> Iterator[None]:
    """Turn errors of these kinds, raised by a library, into an InputError that begins with this sentence."""
    try:
        yield
    except InputError:
        raise
    except kinds as error:
        raise InputError(f"{sentence}: {first_line(error)}") from error


def refuse_misspelt(kind: str, received: Iterable[str], allowed: Iterable[str]) -> None:
    """Refuse names that are close to an allowed one, where other unknown names must be accepted."""
    names = list(allowed)
    for name in received:
        close = get_close_matches(name, names, n=1, cutoff=0.85)
        if close and name not in names:
            raise InputError(f"unknown {kind} {name!r}. Did you mean {close[0]!r}?")


def unknown_name(kind: str, received: object, allowed: Iterable[str], more: str = "") -> InputError:
    """The error for an unknown name: the closest names, the allowed ones unless they are many, and `more` advice."""
    names = list(allowed)
    close, many = get_close_matches(str(received), names, n=1, cutoff=0.8), len(names) > MANY
    nearest = close or get_close_matches(str(received), names, n=4 if many else 1, cutoff=0.5 if many else 0.4)
    hint = f" Did you mean {' or '.join(map(repr, nearest))}?" if nearest else ""
    listed = "" if many and (nearest or more) else f" Allowed: {', '.join(names)}."
    return InputError(f"unknown {kind} {received!r}.{hint}{listed}{more and ' ' + more}")


def optional_module(name: str, extra: str, what: str) -> Any:
    """The module, or an InputError that says how to install it. `what` is the feature that needs it."""
    try:
        return import_module(name)
    except ImportError:
        package = name.split(".")[0]
        raise InputError(f"{what} needs the package {package}: pip install 'chiar[{extra}]'.") from None
