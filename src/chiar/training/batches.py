"""Batches as a pure function of (seed, step, row): nothing to save, nothing to restore, the same on any world size.

A step has batch / micro_batch slots. Slot k of a step belongs to process k mod W, so processes slice one global order.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from chiar.data import Corpus
from chiar.errors import InputError
from chiar.evaluation.harness import choose_documents
from chiar.training.settings import TrainSettings


@lru_cache(maxsize=8)
def shuffled(seed: int, epoch: int, count: int) -> np.ndarray:
    """A permutation of `count` rows for one epoch."""
    return np.random.Generator(np.random.Philox(key=[seed, epoch])).permutation(count)


def seed_of(*parts: int) -> int:
    """A seed of 63 bits: of dropout for (seed, step, slot), whatever process runs it; of the weights of one module."""
    return int(np.random.SeedSequence(parts).generate_state(1, np.uint64)[0] >> np.uint64(1))


@dataclass
class Batch:
    """One micro-batch. Language: `targets` (B, T) are the next tokens. Classification: `targets` (B,) are classes."""

    corpus: int
    ids: Tensor
    targets: Tensor
    mask: Tensor | None = None

    def each(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        mask = None if self.mask is None else change(self.mask)
        return Batch(self.corpus, change(self.ids), change(self.targets), mask)

    def to(self, device: torch.device) -> "Batch":
        return self.each(lambda value: value.to(device, non_blocking=True))


class Rows:
    """Blocks of `length` tokens with the token after each; or labelled documents, cut to `length` and padded."""

    def __init__(self, corpus: Corpus, split: str, length: int) -> None:
        self.split, self.length, self.labelled = corpus.split(split), length, corpus.kind == "classification"
        self.count = self.split.documents if self.labelled else (self.split.tokens - 1) // length
        if self.count < 1:
            raise InputError(f"the corpus has {self.split.tokens} tokens: too few for one row of {length}.")

    def evaluated(self, limit: int) -> list[int]:
        if self.labelled:
            return choose_documents(self.split, limit or None)
        return list(range(min(limit or self.count, self.count)))

    def batch(self, corpus: int, rows: list[int]) -> Batch:
        if not self.labelled:
            ids = torch.from_numpy(self.split.rows(np.array(rows) * self.length, self.length + 1))
            return Batch(corpus, ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
        documents = [torch.from_numpy(self.split.document(row)[: self.length].astype(np.int64)) for row in rows]
        ids = torch.nn.utils.rnn.pad_sequence(documents, batch_first=True)
        lengths = torch.tensor([len(document) for document in documents])
        mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
        assert self.split.labels is not None
        return Batch(corpus, ids, torch.from_numpy(self.split.labels[rows].astype(np.int64)), mask)


class Schedule:
    """Which corpora each slot of each step reads, and which of their rows: each once an epoch, in the epoch's order.
    The draws of slot s are the s-th of a fixed stream, so a longer run only continues a shorter one."""

    def __init__(self, settings: TrainSettings, corpora: list[Rows]) -> None:
        self.settings, self.corpora = settings, corpora
        self.slots = settings.batch // settings.micro_batch
        total, count = settings.steps * self.slots, len(corpora)
        weights = np.array(settings.weights or [1.0] * count, dtype=np.float64)
        draws = np.random.Generator(np.random.Philox(key=[settings.seed, 1 << 40])).random((total, 2))
        self.uses = np.zeros((total, count), dtype=bool)
        first = int(settings.mixing == "added" and count > 1)
        edges = np.cumsum(weights[first:] / weights[first:].sum())
        drawn = first + np.minimum(np.searchsorted(edges, draws[:, 0], side="right"), count - first - 1)
        used = draws[:, 1] < settings.added_share if first else np.ones(total, dtype=bool)
        self.uses[np.flatnonzero(used), drawn[used]] = True
        self.uses[:, :first] = True
        self.before = np.cumsum(self.uses, axis=0) - self.uses

    def batches(self, step: int, slot: int) -> list[Batch]:
        """The micro-batches of one slot: one, or two where another corpus is added."""
        place, size, found = step * self.slots + slot, self.settings.micro_batch, []
        for corpus in np.flatnonzero(self.uses[place]).tolist():
            rows, first = self.corpora[corpus], int(self.before[place, corpus]) * size
            seed, turns = self.settings.seed * 1_000_003 + corpus, range(first, first + size)
            numbers = [int(shuffled(seed, turn // rows.count, rows.count)[turn % rows.count]) for turn in turns]
            found.append(rows.batch(corpus, numbers))
        return found


class Prefetch:
    """Batches of a step by slot, the next step's made while the device works; a pure function, so early is the same."""

    def __init__(self, schedule: Schedule, slots: list[int], device: torch.device) -> None:
        self.schedule, self.slots, self.pins = schedule, slots, device.type == "cuda"
        # A thread has a current GPU of its own.
        self.thread = ThreadPoolExecutor(1, "batches", *((torch.cuda.set_device, (device,)) if self.pins else ()))
        self.next: tuple[int, Future[list[list[Batch]]]] | None = None

    def batches(self, step: int) -> list[list[Batch]]:
        """The micro-batches of each slot of `step`; asks for those of the step after."""
        ready = self.next[1].result() if self.next and self.next[0] == step else self.make(step)
        more = step + 1 < self.schedule.settings.steps
        self.next = (step + 1, self.thread.submit(self.make, step + 1)) if more else None
        return ready

    def make(self, step: int) -> list[list[Batch]]:
        made = [self.schedule.batches(step, slot) for slot in self.slots]
        # A GPU copies from pinned memory while the program goes on.
        return [[batch.each(Tensor.pin_memory) for batch in batches] for batches in made] if self.pins else made
