"""From documents to ids, in one process or several; the result is the same for any number of them."""

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import chain, islice
from multiprocessing.connection import wait
from pathlib import Path

import numpy as np

from chiar.data.documents import Document
from chiar.data.tokenizers import Tokenizer
from chiar.errors import InputError

# Large enough to make the trip to another process cheap, small enough to hold dozens of them.
BATCH_CHARACTERS = 1 << 20
BATCH_DOCUMENTS = 4096
# Starting processes costs about a second; fewer batches than this are quicker without.
BATCHES_FOR_PROCESSES = 4


class WorkerDied(InputError):
    """The operating system ended a process: not the input's fault, so what was done is kept."""


@dataclass(frozen=True)
class Encoded:
    """Some documents' ids in a row, with what the manifest counts."""

    ids: np.ndarray
    lengths: np.ndarray
    labels: np.ndarray | None
    bytes: int
    words: int
    lines: int


def batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    characters = 0
    for document in documents:
        batch.append(document)
        characters += len(document.text)
        if characters >= BATCH_CHARACTERS or len(batch) >= BATCH_DOCUMENTS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def encode(tokenizer: Tokenizer, labelled: bool, documents: list[Document]) -> Encoded:
    """Language documents are followed by the end of text; labelled ones are not, the label is what comes next."""
    texts = [document.text for document in documents]
    rows = tokenizer.encode_batch(texts)
    if not labelled:
        end = np.array([tokenizer.end_of_text], tokenizer.dtype)
        pieces = [piece for row in rows for piece in (row, end)]
    else:
        pieces = rows
    return Encoded(
        ids=np.concatenate(pieces),
        lengths=np.array([len(row) + (not labelled) for row in rows], np.int64),
        labels=np.array([document.label for document in documents], np.int64) if labelled else None,
        bytes=sum(len(text.encode()) for text in texts),
        words=sum(len(text.split()) for text in texts),
        lines=sum(text.count("\n") for text in texts),
    )


def encode_all(
    documents: Iterable[Document], tokenizer: Tokenizer, folder: Path, labelled: bool, workers: int
) -> Iterator[Encoded]:
    """In the order of the documents. `folder` is where the tokenizer lies, for other processes to open."""
    stream = batches(documents)
    first = [] if workers == 1 else list(islice(stream, BATCHES_FOR_PROCESSES))
    if len(first) < BATCHES_FOR_PROCESSES:
        for batch in chain(first, stream):
            yield encode(tokenizer, labelled, batch)
        return
    # Not forked: threads of the tokenizers library, or of torch in the calling program, do not survive a fork.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_begin, initargs=(folder, labelled))
    waiting: deque[Future[Encoded]] = deque()
    try:
        for batch in chain(first, stream):
            waiting.append(pool.submit(_encode, batch))
            # A bounded queue bounds memory.
            if len(waiting) > 2 * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool as error:
        raise WorkerDied(
            "a tokenising process was ended from outside (out of memory?): run the same command again, perhaps with "
            "fewer --workers; it continues where it stopped."
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


_worker: tuple[Tokenizer, bool] | None = None


def _begin(folder: Path, labelled: bool) -> None:
    global _worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent reports an interruption, once
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _worker = (Tokenizer.open(folder), labelled)


def _end_with_parent() -> None:
    """A killed parent cannot stop its processes, and they would wait for work for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def _encode(batch: list[Document]) -> Encoded:
    assert _worker is not None
    return encode(*_worker, batch)
