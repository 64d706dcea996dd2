"""Batches as a pure function of (seed, step, row): nothing to save, nothing to restore, the same on any world size.

A step has batch / micro_batch slots. Slot k of a step belongs to process k mod W, so processes slice one global order.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from chiar.errors import InputError
from chiar.evaluation.harness import choose_documents
from chiar.training.settings import TrainSettings


@lru_cache(maxsize=8)
def shuffled(seed: int, epoch: int, count: int) -> np.ndarray:
    """A permutation of `count` rows for one epoch."""
    return np.random.Generator(np.random.Philox(key=[seed, epoch])).permutation(count)


def row_numbers(seed: int, first: int, size: int, count: int) -> list[int]:
    """Which of `count` rows are the `first`-th to be read and those after: each once an epoch, in its own order."""
    epochs, places = np.divmod(np.arange(first, first + size), count)
    numbers = np.empty_like(places)
    for epoch in range(int(epochs[0]), int(epochs[-1]) + 1):
        numbers[epochs == epoch] = shuffled(seed, epoch, count)[places[epochs == epoch]]
    return numbers.tolist()


@dataclass
class Batch:
    """One micro-batch. Language: `targets` (B, T) are the next tokens. Classification: `targets` (B,) are classes."""

    corpus: int
    ids: Tensor
    targets: Tensor
    mask: Tensor | None = None

    @property
    def tokens(self) -> int:
        """Real ones; asked before the batch moves to a device."""
        return self.ids.numel() if self.mask is None else int(self.mask.sum())

    def to(self, device: torch.device) -> "Batch":
        return self._each(lambda value: value.to(device, non_blocking=True))

    def pinned(self) -> "Batch":
        """In memory a GPU copies from while the program goes on."""
        return self._each(Tensor.pin_memory)

    def _each(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        mask = None if self.mask is None else change(self.mask)
        return Batch(self.corpus, change(self.ids), change(self.targets), mask)


class LanguageRows:
    """Consecutive blocks of `length` tokens and the token after each."""

    task = "language"

    def __init__(self, split: Any, length: int) -> None:
        self.split, self.length = split, length
        self.count = (split.tokens - 1) // length
        if self.count < 1:
            raise InputError(f"the corpus has {split.tokens} tokens: too few for one row of {length}.")

    def evaluated(self, limit: int) -> list[int]:
        return list(range(min(limit or self.count, self.count)))

    def batch(self, corpus: int, rows: list[int]) -> Batch:
        T = self.length
        ids = torch.from_numpy(self.split.rows(np.array(rows) * T, T + 1))
        return Batch(corpus, ids[:, :-1].contiguous(), ids[:, 1:].contiguous())


class ClassificationRows:
    """Whole documents, cut to `length` tokens and padded on the right, with their labels."""

    task = "classification"

    def __init__(self, split: Any, length: int) -> None:
        self.split, self.length = split, length
        self.count = split.documents

    def evaluated(self, limit: int) -> list[int]:
        return choose_documents(self.split, limit or None)

    def batch(self, corpus: int, rows: list[int]) -> Batch:
        documents = [self.split.document(row)[: self.length] for row in rows]
        longest = max(len(document) for document in documents)
        ids = torch.zeros(len(rows), longest, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for i, document in enumerate(documents):
            ids[i, : len(document)] = torch.from_numpy(document.astype(np.int64))
            mask[i, : len(document)] = 1
        return Batch(corpus, ids, torch.from_numpy(self.split.labels[rows].astype(np.int64)), mask)


Rows = LanguageRows | ClassificationRows


class Schedule:
    """Which corpora each slot of each step reads, and which of their rows.

    The draws of slot s are the s-th of a fixed stream, so a longer run only continues a shorter one; the rows a corpus
    has given out before a slot are counted from the same draws.
    """

    def __init__(self, settings: TrainSettings, corpora: list[Rows]) -> None:
        self.settings, self.corpora = settings, corpora
        self.slots = settings.batch // settings.micro_batch
        total = settings.steps * self.slots
        count = len(corpora)
        weights = np.array(settings.weights or [1.0] * count, dtype=np.float64)
        draws = np.random.Generator(np.random.Philox(key=[settings.seed, 1 << 40])).random((total, 2))
        uses = np.zeros((total, count), dtype=bool)
        if settings.mixing == "weights" or count == 1:
            edges = np.cumsum(weights / weights.sum())
            uses[np.arange(total), np.minimum(np.searchsorted(edges, draws[:, 0], side="right"), count - 1)] = True
        else:
            uses[:, 0] = True
            edges = np.cumsum(weights[1:] / weights[1:].sum())
            other = 1 + np.minimum(np.searchsorted(edges, draws[:, 0], side="right"), count - 2)
            added = draws[:, 1] < settings.added_share
            uses[np.flatnonzero(added), other[added]] = True
        self.uses = uses
        self.before = np.cumsum(uses, axis=0) - uses

    def passes(self, step: int, slot: int) -> int:
        """How many micro-batches a slot has."""
        return int(self.uses[step * self.slots + slot].sum())

    def batches(self, step: int, slot: int) -> list[Batch]:
        """The micro-batches of one slot: one, or two where another corpus is added."""
        place = step * self.slots + slot
        used = [int(corpus) for corpus in np.flatnonzero(self.uses[place])]
        return [self._batch(corpus, int(self.before[place, corpus])) for corpus in used]

    def _batch(self, corpus: int, used: int) -> Batch:
        rows, size = self.corpora[corpus], self.settings.micro_batch
        seed = self.settings.seed * 1_000_003 + corpus
        return rows.batch(corpus, row_numbers(seed, used * size, size, rows.count))


def slot_seed(seed: int, step: int, slot: int) -> int:
    """Seed of dropout for one slot, whatever process runs it."""
    return int(np.random.SeedSequence([seed, step, slot]).generate_state(1, np.uint64)[0] >> np.uint64(1))
