"""Corpora as memory-mapped token shards: made once by `chiar data prepare`, opened by `Corpus.open`."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from chiar.data.shards import Corpus, Split
    from chiar.data.tokenizers import Tokenizer

__all__ = ["Corpus", "Split", "Tokenizer"]


def __getattr__(name: str) -> Any:
    # Loaded on first use: the command line imports this package to answer --help.
    if name not in __all__:
        raise AttributeError(f"module 'chiar.data' has no attribute {name!r}")
    return getattr(import_module("chiar.data.shards"), name)  # which imports Tokenizer too
