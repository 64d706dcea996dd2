"""From a source to a folder of shards: streaming, on several processes, resumable, the same bytes each time."""

import codecs
import json
import multiprocessing
import os
import shutil
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain, islice
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import numpy as np

from chiar import __version__
from chiar.data.corpora import TokensFile
from chiar.data.documents import Document, Source
from chiar.data.shards import FORMAT, Corpus, Encoded, SplitWriter, fingerprint
from chiar.data.tokenizers import Tokenizer, TokenizerChoice
from chiar.errors import InputError
from chiar.files import check_new, hold

SHARD_TOKENS = 1 << 26
# Large enough to make the trip to another process cheap, small enough to hold dozens of them.
BATCH_CHARACTERS = 1 << 20
BATCH_DOCUMENTS = 4096
# Starting processes costs about a second; fewer batches than this are quicker without.
BATCHES_FOR_PROCESSES = 4


class WorkerDied(InputError):
    """The operating system ended a process: not the input's fault, so what was done is kept."""


class Display:
    """What a person sees meanwhile; nothing, unless a subclass shows it."""

    def at(self, task: str, done: int, expected: int | None = None, note: str = "") -> None:
        """A split, or the training of a tokenizer, has come so many bytes far; all is done where that is expected."""

    def note(self, sentence: str) -> None:
        """Something the person should know."""


class Bars(Display):
    """Bars in a terminal, and notes anywhere, on standard error."""

    def __init__(self) -> None:
        from rich import progress as rich
        from rich.console import Console

        columns = (
            rich.TextColumn("{task.description}"), rich.BarColumn(bar_width=16), rich.DownloadColumn(),
            rich.TransferSpeedColumn(), rich.TimeRemainingColumn(), rich.TextColumn("{task.fields[note]}"),
        )  # fmt: skip
        self.progress = rich.Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty())
        self.tasks: dict[str, Any] = {}

    def at(self, task: str, done: int, expected: int | None = None, note: str = "") -> None:
        if task not in self.tasks:
            self.tasks[task] = self.progress.add_task(task, total=None, note="")
        self.progress.update(self.tasks[task], completed=done, total=expected, note=note)

    def note(self, sentence: str) -> None:
        self.progress.console.print(f"note: {sentence}", markup=False, highlight=False, soft_wrap=True)


def prepare(
    source: Source, out: Path, tokenizer: TokenizerChoice, *, workers: int | None = 1,
    shard_tokens: int = SHARD_TOKENS, display: Display | None = None,
) -> Corpus:  # fmt: skip
    """`workers=None` takes one a core, as far as there are documents for them."""
    display = display or Display()
    check_new(out)
    if shard_tokens < 1:
        raise InputError(f"--shard-tokens must be at least 1, got {shard_tokens}.")
    ready = tokenizer.ready()
    if ready is None and (isinstance(source, TokensFile) or "train" not in source.splits):
        what = "is tokenised already" if isinstance(source, TokensFile) else "has no train split to train a BPE on"
        raise InputError(f"{source.name} {what}: name its tokenizer, such as --tokenizer gpt2 --tokenizer-path FOLDER.")
    processes = 1 if isinstance(source, TokensFile) else check_documents(source, workers)
    inputs = {
        "chiar": __version__,
        "format": FORMAT,
        "name": source.name,
        "kind": source.kind,
        "options": source.options,
        "files": [[str(p.absolute()), p.stat().st_size, p.stat().st_mtime_ns] for p in source.files],
        "tokenizer": ready.describe() if ready else {"train": tokenizer.trained_size},
        "shard_tokens": shard_tokens,
    }
    with partial_folder(out, inputs, display.note) as folder:
        saved = folder / "tokenizer"
        used = Tokenizer.open(saved) if saved.is_dir() else ready  # an interrupted run may have left it
        if used is None:
            display.at("tokenizer", 0)
            used = Tokenizer.train((document.text for document in source.documents("train")), tokenizer.trained_size)
            display.at("tokenizer", 1, 1)
        if not saved.is_dir():
            used.save(saved.with_suffix(".new"))
            os.replace(saved.with_suffix(".new"), saved)
        writers = [SplitWriter(folder, split, used.dtype, shard_tokens, len(source.labels)) for split in source.splits]
        for writer in writers:
            if writer.entry is None:
                write_split(writer, source, used, processes, display)
        entries = {writer.split: writer.entry for writer in writers}
        manifest: dict[str, Any] = {
            "format": FORMAT,
            "name": source.name,
            "kind": source.kind,
            "labels": list(source.labels),
            "tokenizer": used.describe(),
            "dtype": used.dtype.newbyteorder("=").name,
            "shard_tokens": shard_tokens,
            "options": source.options,
            "remarks": source.remarks(entries),
            "inputs": {"files": len(source.files), "bytes": sum(path.stat().st_size for path in source.files)},
            "splits": entries,
        }
        manifest["fingerprint"] = fingerprint(manifest)
        text = json.dumps(manifest, indent=1, ensure_ascii=False) + "\n"
        (folder / "manifest.json").write_text(text, encoding="utf-8")
        for writer in writers:
            writer.remove_notes()
    return Corpus.open(out)


def check_documents(source: Source, workers: int | None) -> int:
    """No split may be empty; the number of processes to use."""
    for split in source.splits:
        if next(source.documents(split), None) is None:
            if split == "train" or not source.carve:
                raise InputError(f"{source.name} is empty: its {split} split has no text.")
            raise InputError(
                f"{source.name} has too few documents for a {split} split: give more text, another --split-fractions, "
                f"or for plain text another --documents."
            )
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    wanted = cores if workers is None else workers
    if wanted < 1:
        raise InputError(f"--workers must be at least 1, got {wanted}.")
    documents = sum(1 for _ in islice(source.documents(source.splits[0]), wanted))
    if documents < wanted and workers is not None:
        raise InputError(f"{workers} workers are more than the {documents} documents of {source.name}: ask for fewer.")
    return min(wanted, documents)


@contextmanager
def partial_folder(out: Path, inputs: dict[str, Any], note: Callable[[str], None]) -> Iterator[Path]:
    """`.NAME.partial` beside `out`, where work is kept until it is complete; becomes `out` when the block ends well.

    Work found there is kept if it was begun with equal `inputs` and cleared otherwise. It survives a kill, a full disk
    or an interruption; input that is refused leaves nothing behind.
    """
    out = Path(os.path.abspath(out))
    folder = out.with_name(f".{out.name}.partial")
    folder.mkdir(parents=True, exist_ok=True)
    recorded, canonical = folder / "inputs.json", json.dumps(inputs, sort_keys=True, indent=1)
    with (folder / "lock").open("w") as lock:
        hold(lock, f"another process is preparing {out} right now.")
        if recorded.is_file() and recorded.read_text(encoding="utf-8") == canonical:
            note(f"going on with the unfinished {out.name}.")
        else:
            if recorded.is_file():
                note(f"an unfinished {out.name} from other inputs or options was there; it is begun anew.")
            for path in folder.iterdir():
                if path.is_dir():
                    shutil.rmtree(path)
                elif path.name != "lock":
                    path.unlink()
            recorded.write_text(canonical, encoding="utf-8")
        try:
            yield folder
        except WorkerDied:
            raise
        except InputError:
            shutil.rmtree(folder)
            raise
        check_new(out)
        recorded.unlink()
        (folder / "lock").unlink()
        if out.exists():
            out.rmdir()
        os.replace(folder, out)


def write_split(writer: SplitWriter, source: Source, tokenizer: Tokenizer, processes: int, display: Display) -> None:
    if isinstance(source, TokensFile):
        expected, stream = None, read_ids(source, writer.split, tokenizer)
    else:
        expected = source.expected_bytes(writer.split)
        remaining = islice(source.documents(writer.split), writer.counts["documents"], None)
        stream = encode_all(remaining, tokenizer, source.kind == "classification", processes)
    for encoded in stream:
        # Words of ids are counted across blocks, so such a split is one piece of work.
        writer.append(encoded, note=not isinstance(source, TokensFile))
        display.at(writer.split, writer.counts["bytes"], expected, f"{writer.counts['tokens']:,} tokens")
    if not writer.counts["tokens"]:
        raise InputError(f"{source.name} is empty: its {writer.split} split has no ids.")
    writer.finish()
    display.at(writer.split, writer.counts["bytes"], writer.counts["bytes"], f"{writer.counts['tokens']:,} tokens")


def read_ids(source: TokensFile, split: str, tokenizer: Tokenizer) -> Iterator[Encoded]:
    """Counts bytes and words of the text the ids stand for, so that figures by byte and by word can be given."""
    # A space stands for the end of text, which parts words but is no text itself.
    spoken = [*tokenizer.token_bytes[:-1], b" "]
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    before_last_end, in_word = 0, False
    for ids in source.blocks(split):
        if int(ids.max(initial=0)) >= tokenizer.vocab_size:
            raise InputError(
                f"{split} of {source.name} holds id {ids.max()}, outside the {tokenizer.vocab_size} entries of the "
                f"{tokenizer.kind} tokenizer: is it the right one?"
            )
        ends = np.flatnonzero(ids == tokenizer.end_of_text) + 1
        data = b"".join(map(spoken.__getitem__, ids.tolist()))
        text = decoder.decode(data)
        words = len(text.split()) - (in_word and text[:1].strip() != "")
        in_word = text[-1:].strip() != "" if text else in_word
        lengths = np.diff(ends, prepend=-before_last_end)
        before_last_end = len(ids) - int(ends[-1]) if len(ends) else before_last_end + len(ids)
        yield Encoded(ids, lengths, None, len(data) - len(ends), words, text.count("\n"))


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
    end = np.array([] if labelled else [tokenizer.end_of_text], tokenizer.dtype)
    rows = [np.concatenate([ids, end]) for ids in tokenizer.encode_batch(texts)]
    return Encoded(
        ids=np.concatenate(rows),
        lengths=np.array([len(row) for row in rows], np.int64),
        labels=np.array([document.label for document in documents], np.int64) if labelled else None,
        bytes=sum(len(text.encode()) for text in texts),
        words=sum(len(text.split()) for text in texts),
        lines=sum(text.count("\n") for text in texts),
    )


def encode_all(
    documents: Iterable[Document], tokenizer: Tokenizer, labelled: bool, processes: int
) -> Iterator[Encoded]:
    """In the order of the documents, and the same for any number of processes."""
    stream = batches(documents)
    first = [] if processes == 1 else list(islice(stream, BATCHES_FOR_PROCESSES))
    if len(first) < BATCHES_FOR_PROCESSES:
        yield from (encode(tokenizer, labelled, batch) for batch in chain(first, stream))
        return
    # Not forked: threads of the tokenizers library, or of torch in the calling program, do not survive a fork.
    context = multiprocessing.get_context("spawn")
    fresh = replace(tokenizer)  # without what it remembers, which would travel too
    pool = ProcessPoolExecutor(processes, context, _begin, (fresh, labelled))
    waiting: deque[Future[Encoded]] = deque()
    try:
        for batch in chain(first, stream):
            waiting.append(pool.submit(_encode, batch))
            # A bounded queue bounds memory.
            if len(waiting) > 2 * processes:
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


def _begin(tokenizer: Tokenizer, labelled: bool) -> None:
    global _worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent reports an interruption, once
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _worker = tokenizer, labelled


def _end_with_parent() -> None:
    """A killed parent cannot stop its processes, and they would wait for work for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def _encode(batch: list[Document]) -> Encoded:
    assert _worker is not None
    return encode(*_worker, batch)
