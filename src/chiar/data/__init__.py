"""Corpora as memory-mapped token shards: made once by `chiar data prepare`, opened by `Corpus.open`."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

# Loaded on first use: the command line imports this package to answer --help.
_HOMES = {
    "Corpus": "chiar.data.shards",
    "Split": "chiar.data.shards",
    "Tokenizer": "chiar.data.tokenizers",
}
__all__ = ["Corpus", "Split", "Tokenizer"]

if TYPE_CHECKING:
    from chiar.data.shards import Corpus, Split
    from chiar.data.tokenizers import Tokenizer


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'chiar.data' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
