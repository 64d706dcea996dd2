"""Packages that only some corpora need."""

from importlib import import_module
from typing import Any

from chiar.errors import InputError


def optional_module(name: str, extra: str, what: str) -> Any:
    """The module, or a sentence that says how to install it. `what` is the thing that cannot be read without it."""
    try:
        return import_module(name)
    except ImportError:
        package = name.split(".")[0]
        raise InputError(f"{what} needs the package {package}: pip install 'chiar[{extra}]'.") from None
