"""Corpora as memory-mapped token shards: made once by `chiar data prepare`, opened by `Corpus.open`."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from chiar.data.shards import Corpus as Corpus


def __getattr__(name: str) -> Any:
    # Loaded on first use: the command line imports this package to answer --help.
    if name != "Corpus":
        raise AttributeError(f"module 'chiar.data' has no attribute {name!r}")
    return import_module("chiar.data.shards").Corpus
