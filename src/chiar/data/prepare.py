"""From a source to a folder of shards: streaming, resumable, the same bytes each time."""

import codecs
import io
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from chiar import __version__
from chiar.data.corpora import TokensFile
from chiar.data.documents import Document, Source
from chiar.data.shards import COUNTED, FORMAT, Corpus, file_hash, fingerprint
from chiar.data.tokenizers import Tokenizer, TokenizerChoice
from chiar.errors import InputError
from chiar.files import check_new, hold, write_whole

SHARD_TOKENS = 1 << 26
CHECKPOINT_SECONDS = 2.0
BATCH_DOCUMENTS = 64  # after each batch progress is shown and may be kept


class Display:
    """What a person sees meanwhile, on standard error: bars in a terminal and notes anywhere, or nothing if quiet."""

    def __init__(self, quiet: bool = True) -> None:
        from rich import progress as rich
        from rich.console import Console

        columns = (rich.TextColumn("{task.description}"), rich.BarColumn(bar_width=16), rich.DownloadColumn())
        columns += (rich.TransferSpeedColumn(), rich.TimeRemainingColumn(), rich.TextColumn("{task.fields[note]}"))
        console = Console(stderr=True, quiet=quiet)
        self.progress = rich.Progress(*columns, console=console, disable=quiet or not sys.stderr.isatty())
        self.tasks: dict[str, Any] = {}

    def at(self, task: str, done: int, expected: int | None = None, note: str = "") -> None:
        """A split, or the training of a tokenizer, has come so many bytes far; all is done where that is expected."""
        if task not in self.tasks:
            self.tasks[task] = self.progress.add_task(task, total=None, note="")
        self.progress.update(self.tasks[task], completed=done, total=expected, note=note)

    def note(self, sentence: str) -> None:
        """Something the person should know."""
        self.progress.console.print(f"note: {sentence}", markup=False, highlight=False, soft_wrap=True)


def prepare(
    source: Source, out: Path, tokenizer: TokenizerChoice, *, shard_tokens: int = SHARD_TOKENS,
    display: Display | None = None,
) -> Corpus:  # fmt: skip
    display = display or Display()
    check_new(out)
    if shard_tokens < 1:
        raise InputError(f"--shard-tokens must be at least 1, got {shard_tokens}.")
    ready, given_ids = tokenizer.ready(), isinstance(source, TokensFile)
    if ready is None and (given_ids or "train" not in source.splits):
        what = "is tokenised already" if given_ids else "has no train split to train a BPE on"
        raise InputError(f"{source.name} {what}: name its tokenizer, such as --tokenizer gpt2 --tokenizer-path FOLDER.")
    files = [[str(p.absolute()), p.stat().st_size, p.stat().st_mtime_ns] for p in source.files]
    about = [__version__, FORMAT, source.name, source.kind, source.options, shard_tokens, files]
    inputs = [*about, ready.describe() if ready else tokenizer.trained_size]
    with partial_folder(out, json.dumps(inputs, sort_keys=True), display.note) as folder:
        saved = folder / "tokenizer"
        used = Tokenizer.open(saved) if saved.is_dir() else ready  # an interrupted run may have left it
        if used is None:
            display.at("tokenizer", 0)
            used = Tokenizer.train((document.text for document in source.documents("train")), tokenizer.trained_size)
            display.at("tokenizer", 1, 1)
        if not saved.is_dir():
            used.save(saved.with_suffix(".new"))
            os.replace(saved.with_suffix(".new"), saved)
        entries = {split: write_split(folder, split, source, used, shard_tokens, display) for split in source.splits}
        manifest: dict[str, Any] = {
            "format": FORMAT,
            "name": source.name,
            "kind": source.kind,
            "labels": list(source.labels),
            "tokenizer": used.describe(),
            "dtype": used.dtype.newbyteorder("=").name,
            "shard_tokens": shard_tokens,
            "options": source.options,
            "remarks": [] if given_ids else source.remarks(entries),
            "inputs": {"files": len(files), "bytes": sum(size for _, size, _ in files)},
            "splits": entries,
        }
        manifest["fingerprint"] = fingerprint(manifest)
        text = json.dumps(manifest, indent=1, ensure_ascii=False) + "\n"
        (folder / "manifest.json").write_text(text, encoding="utf-8")
        for path in [*folder.glob("*.part"), *folder.glob("*.progress.json")]:
            path.unlink()
    return Corpus.open(out)


@contextmanager
def partial_folder(out: Path, inputs: str, note: Callable[[str], None]) -> Iterator[Path]:
    """`.NAME.partial` beside `out`, where work is kept until it is complete; becomes `out` when the block ends well.

    Work found there is kept if it was begun with equal `inputs` and cleared otherwise. It survives a kill, a full disk
    or an interruption; input that is refused leaves nothing behind.
    """
    out = Path(os.path.abspath(out))
    folder = out.with_name(f".{out.name}.partial")
    folder.mkdir(parents=True, exist_ok=True)
    recorded = folder / "inputs.json"
    with (folder / "lock").open("w") as lock:
        hold(lock, f"another process is preparing {out} right now.")
        before = recorded.read_text(encoding="utf-8") if recorded.is_file() else None
        if before == inputs:
            note(f"going on with the unfinished {out.name}.")
        else:
            if before is not None:
                note(f"an unfinished {out.name} from other inputs or options was there; it is begun anew.")
            shutil.rmtree(folder / "tokenizer", ignore_errors=True)
            shutil.rmtree(folder / "tokenizer.new", ignore_errors=True)
            for path in folder.glob("*.*"):
                path.unlink()
            recorded.write_text(inputs, encoding="utf-8")
        try:
            yield folder
        except InputError:
            shutil.rmtree(folder)
            raise
        check_new(out)
        recorded.unlink()
        (folder / "lock").unlink()
        if out.exists():
            out.rmdir()
        os.replace(folder, out)


class Encoded(NamedTuple):
    """Some documents' ids in a row, (documents, 2) their lengths and labels, and what they add to the counts."""

    ids: np.ndarray
    documents: np.ndarray
    counts: list[int]


def write_split(
    folder: Path, split: str, source: Source, tokenizer: Tokenizer, shard_tokens: int, display: Display
) -> dict[str, Any]:
    """Writes one split so that a kill at any moment loses seconds of work; its entry in the manifest.

    Ids go to shards, document ends and labels to a table beside them. Every few seconds what came meanwhile is
    appended, synced to disk and noted in a file of progress, from which the next run goes on.
    """
    progress, table = folder / f"{split}.progress.json", folder / f"{split}.documents.part"
    noted = json.loads(progress.read_text()) if progress.is_file() else {"counts": [0] * len(COUNTED), "last_end": 0}
    if "entry" in noted:
        return noted["entry"]
    counts = written = np.array(noted["counts"])
    last_end, pending, flushed, expected = noted["last_end"], [], time.monotonic(), None
    if isinstance(source, TokensFile):
        stream = read_ids(source, split, tokenizer)
    else:
        expected, remaining = source.expected_bytes(split), islice(source.documents(split), int(counts[0]), None)
        stream = encode(remaining, tokenizer, source.kind == "classification")
    for encoded in chain(stream, [None]):
        if encoded is not None:
            pending.append(encoded)
            counts = counts + encoded.counts
            display.at(split, int(counts[2]), expected, f"{counts[1]:,} tokens")
            if time.monotonic() - flushed < CHECKPOINT_SECONDS:
                continue
        place = int(written[1])
        ids = np.concatenate([np.empty(0, tokenizer.dtype), *(one.ids for one in pending)])
        while len(ids):
            number, used = divmod(place, shard_tokens)
            part, ids = np.split(ids, [shard_tokens - used])
            write_at(folder / f"{split}.{number:03d}.bin", used * part.itemsize, part.tobytes())
            place += len(part)
        documents = np.concatenate([np.empty((0, 2), "<i8"), *(one.documents for one in pending)])
        documents[:, 0] = last_end + np.cumsum(documents[:, 0])
        write_at(table, int(written[0]) * documents[:1].nbytes, documents.tobytes())
        last_end = int(documents[-1, 0]) if len(documents) else last_end
        written, flushed, pending = counts, time.monotonic(), []
        if not isinstance(source, TokensFile):  # words of ids are counted across blocks: such a split is one piece
            write_whole(progress, json.dumps({"counts": counts.tolist(), "last_end": last_end}))
    if not counts[1]:
        few = ": give more documents, another --split-fractions or, for plain text, another --documents"
        raise InputError(f"{source.name} is empty in its {split} split{few if source.carve else ''}.")
    documents = np.fromfile(table, "<i8").reshape(-1, 2)
    if counts[1] > last_end:  # ids after the last end of text are a document too
        documents = np.append(documents, [[int(counts[1]), 0]], axis=0)
    counts[0] = len(documents)
    display.at(split, int(counts[2]), int(counts[2]), f"{counts[1]:,} tokens")
    entry: dict[str, Any] = dict(zip(COUNTED, counts.tolist(), strict=True)) | {"shards": []}
    for path in [folder / f"{split}.{number:03d}.bin" for number in range(-(-entry["tokens"] // shard_tokens))]:
        tokens = path.stat().st_size // tokenizer.dtype.itemsize
        entry["shards"].append({"file": path.name, "tokens": tokens, "sha256": file_hash(path)})
    entry["offsets"] = write_array(folder / f"{split}.documents.npy", np.append(0, documents[:, 0]).astype("<u8"))
    if source.labels:
        entry["labels"] = write_array(folder / f"{split}.labels.npy", documents[:, 1].copy())
        entry["label_counts"] = np.bincount(documents[:, 1], minlength=len(source.labels)).tolist()
    write_whole(progress, json.dumps({"entry": entry}))
    return entry


def write_at(path: Path, place: int, data: bytes) -> None:
    """From `place` on, to disk; what lay there was not noted and is not trusted."""
    with path.open("ab") as handle:
        handle.truncate(place)
        handle.write(data)
        handle.flush()
        os.fsync(handle.fileno())


def write_array(path: Path, array: np.ndarray) -> dict[str, str]:
    np.save(buffer := io.BytesIO(), array)
    write_at(path, 0, buffer.getvalue())
    return {"file": path.name, "sha256": file_hash(path)}


def read_ids(source: TokensFile, split: str, tokenizer: Tokenizer) -> Iterator[Encoded]:
    """Counts bytes and words of the text the ids stand for, so that figures by byte and by word can be given."""
    # A space stands for the end of text, which parts words but is no text itself.
    spoken = [*tokenizer.token_bytes[:-1], b" "]
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    before_last_end, in_word = 0, False
    for ids in source.blocks(split):
        if int(ids.max(initial=0)) >= tokenizer.vocab_size:
            entries = f"the {tokenizer.vocab_size} entries of the {tokenizer.kind} tokenizer: is it the right one?"
            raise InputError(f"{split} of {source.name} holds id {ids.max()}, outside {entries}")
        ends = np.flatnonzero(ids == tokenizer.end_of_text) + 1
        data = b"".join(map(spoken.__getitem__, ids.tolist()))
        text = decoder.decode(data)
        words = len(text.split()) - (in_word and text[:1].strip() != "")
        in_word = text[-1:].strip() != "" if text else in_word
        lengths = np.diff(ends, prepend=-before_last_end)
        before_last_end = len(ids) - int(ends[-1]) if len(ends) else before_last_end + len(ids)
        counts = [len(ends), len(ids), len(data) - len(ends), words, text.count("\n")]
        yield Encoded(ids, np.stack([lengths, np.zeros_like(lengths)], axis=1), counts)


def encode(documents: Iterator[Document], tokenizer: Tokenizer, labelled: bool) -> Iterator[Encoded]:
    """Language documents are followed by the end of text; labelled ones are not, the label is what comes next."""
    end = np.array([] if labelled else [tokenizer.end_of_text], tokenizer.dtype)
    while batch := list(islice(documents, BATCH_DOCUMENTS)):
        texts = [document.text for document in batch]
        rows = [np.concatenate([ids, end]) for ids in tokenizer.encode_batch(texts)]
        lengths = [(len(row), document.label or 0) for row, document in zip(rows, batch, strict=True)]
        sizes = [sum(len(text.encode()) for text in texts), sum(len(text.split()) for text in texts)]
        counts = [len(batch), sum(map(len, rows)), *sizes, sum(text.count("\n") for text in texts)]
        yield Encoded(np.concatenate(rows), np.array(lengths, "<i8"), counts)
