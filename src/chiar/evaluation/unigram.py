"""What is left to a model that sees no context."""

import numpy as np

from chiar.data.shards import Split

CHUNK = 1 << 22


def token_counts(split: Split, start: int, count: int, vocab_size: int) -> np.ndarray:
    """How often each id occurs among `count` ids from `start` on, read piece by piece from the memory-mapped shards."""
    counts = np.zeros(vocab_size, np.int64)
    for first in range(start, start + count, CHUNK):
        counts += np.bincount(split.read(first, min(CHUNK, start + count - first)), minlength=vocab_size)
    return counts


def unigram_entropy(split: Split, vocab_size: int, targets: int | None = None) -> float:
    """−Σ p ln p in nats, p the frequencies of the split's own first `targets` targets (all but its first token).

    The least loss a model without context can have on them: it would have to know these frequencies beforehand. Nothing
    is smoothed, and no other split is read.
    """
    counts = token_counts(split, 1, split.tokens - 1 if targets is None else targets, vocab_size)
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())
