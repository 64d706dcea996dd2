"""Writes a source to a folder of shards: streaming, resumable, and with the same bytes each time."""

import codecs
import io
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from rich import progress as rich
from rich.console import Console

from chiar import __version__
from chiar.data.corpora import Document, Source, by_split, one_folder, open_bytes, split_of_file
from chiar.data.shards import COUNTED, FORMAT, Corpus, file_hash, fingerprint
from chiar.data.tokenizers import Tokenizer, TokenizerChoice
from chiar.errors import InputError, require
from chiar.files import acquire_lock, check_new, put_in_place, write_atomic

CHECKPOINT_SECONDS, MANIFEST = 2.0, "manifest.json"
BLOCK_BYTES = 1 << 22
# Ids of some documents, concatenated; each document's end among them and its label, (documents, 2); their counts.
Encoded = tuple[np.ndarray, np.ndarray, list[int]]


class TokensFile(Source):
    """Existing token ids, stored unchanged; each end of text ends a document. Yields blocks of ids, not documents."""

    def __init__(self, paths: list[Path], name: str = "tokens") -> None:
        layout = "train.u16 (or train.0.u16, train.1.u16…), valid.u16 and test.u16 (or .bin)"
        folder, files = one_folder(name, paths, layout)
        matches = {path: re.fullmatch(r"[a-z]+(?:\.(\d+))?\.(?:u16|bin)", file) for file, path in files.items()}
        numbers = {path: int(match[1] or 0) for path, match in matches.items() if match and split_of_file(path)}
        given = by_split(sorted(numbers, key=numbers.__getitem__))
        require(given, f"{folder} holds none of {layout}.")
        for split, parts in given.items():
            if [numbers[path] for path in parts] != list(range(len(parts))):
                raise InputError(f"{folder}: the files of {split} are not numbered 0 to {len(parts) - 1}.")
        super().__init__(folder.resolve().name if name == "tokens" else name, given, {"documents": "ids as given"})

    def blocks(self, split: str) -> Iterator[np.ndarray]:
        """The ids of a split in order, a few million at a time."""
        for path in self.paths[split]:
            with open_bytes(path) as handle:
                while data := handle.read(BLOCK_BYTES):
                    require(len(data) % 2 == 0, f"{path} has an odd number of bytes, so it is not uint16 token ids.")
                    yield np.frombuffer(data, "<u2")


class Enwik8(TokensFile):
    """The first 10⁸ bytes of Wikipedia as of 2006, one id per byte, in the usual split: 90, 5 and 5 million bytes."""

    SIZES: ClassVar[dict[str, int]] = {"train": 90_000_000, "valid": 5_000_000, "test": 5_000_000}

    def __init__(self, paths: list[Path], name: str) -> None:
        layout = "the file enwik8, or enwik8.gz (unpack a .zip first)"
        require(len(paths) == 1 and paths[0].is_file(), f"{name} is read from {layout}.")
        Source.__init__(self, name, dict.fromkeys(self.SIZES, paths), {"split": [*self.SIZES.values()]})

    def blocks(self, split: str) -> Iterator[np.ndarray]:
        (path,), splits, total = self.paths[split], [*self.SIZES], sum(self.SIZES.values())
        before = sum(self.SIZES[earlier] for earlier in splits[: splits.index(split)])
        with open_bytes(path) as handle:
            handle.seek(before)
            for start in range(0, self.SIZES[split], BLOCK_BYTES):
                size = min(BLOCK_BYTES, self.SIZES[split] - start)
                data = handle.read(size)
                require(len(data) == size, f"{path} is shorter than the {total:,} bytes of {self.name}: is it whole?")
                yield np.frombuffer(data, np.uint8).astype("<u2")
            longer = split == splits[-1] and handle.read(1)
        require(not longer, f"{path} is longer than the {total:,} bytes of {self.name}: is it another file?")


class Display(rich.Progress):
    """Progress on standard error: bars in a terminal and notes anywhere, or nothing if quiet."""

    def __init__(self, quiet: bool = True) -> None:
        columns = "{task.description}", rich.BarColumn(16), rich.DownloadColumn(), rich.TransferSpeedColumn()
        options: Any = {"console": Console(stderr=True, quiet=quiet), "disable": quiet or not sys.stderr.isatty()}
        super().__init__(*columns, rich.TimeRemainingColumn(), "{task.fields[note]}", **options)
        self.known: dict[str, rich.TaskID] = {}

    def at(self, task: str, done: int, expected: int | None = None, note: str = "") -> None:
        """Show that a split, or the training of a tokenizer, has reached `done` bytes."""
        if task not in self.known:
            self.known[task] = self.add_task(task, total=None, note="")
        self.update(self.known[task], completed=done, total=expected, note=note)

    def note(self, sentence: str) -> None:
        self.console.print(f"note: {sentence}", markup=False, highlight=False, soft_wrap=True)


def prepare(
    source: Source, out: Path, tokenizer: TokenizerChoice, shard_tokens: int = 1 << 26, display: Display | None = None,
    overwrite: bool = False,
) -> Corpus:  # fmt: skip
    display, given_ids = display or Display(), isinstance(source, TokensFile)
    check_new(out, overwrite, MANIFEST)
    require(shard_tokens >= 1, f"--shard-tokens must be at least 1, got {shard_tokens}.")
    used, vocab_size = tokenizer.ready(), 8192 if tokenizer.vocab_size is None else tokenizer.vocab_size
    if used is None and (given_ids or "train" not in source.splits):
        what = "is tokenised already" if given_ids else "has no train split to train a BPE on"
        how = "bytes" if isinstance(source, Enwik8) else "gpt2 --tokenizer-path FOLDER"
        raise InputError(f"{source.name} {what}: name its tokenizer, such as --tokenizer {how}.")
    for split in source.splits:
        pieces = source.blocks(split) if isinstance(source, TokensFile) else (d.text for d in source.documents(split))
        if not any(map(len, pieces)):
            few = ": give more documents or another --split-fractions"
            raise InputError(f"{source.name} is empty: its {split} split has no text{few if source.carve else ''}.")
    files = [(str(p.absolute()), p.stat().st_size, p.stat().st_mtime_ns) for p in source.files]
    inputs = [__version__, FORMAT, source.name, source.kind, source.options, shard_tokens, files]
    inputs.append(used.describe() if used else vocab_size)
    with partial_folder(out, json.dumps(inputs, sort_keys=True), display.note, overwrite) as folder:
        saved = folder / "tokenizer"
        if (saved / "tokenizer.json").is_file():  # left by an interrupted run
            used = Tokenizer.open(saved)
        else:
            display.at("tokenizer", 0)
            used = used or Tokenizer.train((document.text for document in source.documents("train")), vocab_size)
            used.save(folder / "tokenizer.new")
            os.replace(folder / "tokenizer.new", saved)
            display.at("tokenizer", 1, 1)
        splits = {split: write_split(folder, split, source, used, shard_tokens, display) for split in source.splits}
        manifest: dict[str, Any] = {"format": FORMAT, "name": source.name, "kind": source.kind}
        manifest |= {"labels": list(source.labels), "tokenizer": used.describe()}
        manifest |= {"dtype": used.dtype.newbyteorder("=").name, "shard_tokens": shard_tokens}
        # Only older corpora have remarks, which say how they differ from the published ones.
        manifest |= {"options": source.options, "remarks": [], "splits": splits}
        manifest["inputs"] = {"files": len(files), "bytes": sum(size for _, size, _ in files)}
        manifest["fingerprint"] = fingerprint(manifest)
        write_atomic(folder / MANIFEST, json.dumps(manifest, indent=1, ensure_ascii=False) + "\n")
        for path in [*folder.glob("*.part"), *folder.glob("*.progress.json")]:
            path.unlink()
    return Corpus.open(out)


@contextmanager
def partial_folder(out: Path, inputs: str, note: Callable[[str], None], overwrite: bool) -> Iterator[Path]:
    """Becomes `out` when the block succeeds. Earlier work with equal `inputs` is resumed; an InputError removes it."""
    out = Path(os.path.abspath(out))
    folder = out.with_name(f".{out.name}.partial")
    folder.mkdir(parents=True, exist_ok=True)
    recorded, lock = folder / "inputs.json", folder / "lock"
    with lock.open("w") as held:
        acquire_lock(held, f"another process is preparing {out} right now.")
        before = recorded.read_text(encoding="utf-8") if recorded.is_file() else None
        if before is not None:
            other = f"an unfinished {out.name} from other inputs or options is discarded; starting over."
            note(f"resuming the unfinished {out.name}." if before == inputs else other)
        for path in [path for path in folder.rglob("*") if path.is_file() and path != lock and before != inputs]:
            path.unlink()
        recorded.write_text(inputs, encoding="utf-8")
        try:
            yield folder
        except InputError:
            shutil.rmtree(folder)
            raise
        check_new(out, overwrite, MANIFEST)
        recorded.unlink()
        lock.unlink()
        put_in_place(folder, out)


def write_split(
    folder: Path, split: str, source: Source, tokenizer: Tokenizer, shard_tokens: int, display: Display
) -> dict[str, Any]:
    """Write shards, and a table of document ends and labels; what is synced is recorded, for the next run to resume."""
    progress, table = folder / f"{split}.progress.json", folder / f"{split}.documents.part"
    recorded: Any = json.loads(progress.read_text()) if progress.is_file() else {"counts": [0] * len(COUNTED)}
    if "entry" in recorded:
        return recorded["entry"]
    counts = np.array(recorded["counts"])
    if isinstance(source, TokensFile):
        stream = read_ids(source, split, tokenizer)
    else:
        stream = encode(islice(source.documents(split), int(counts[0]), None), tokenizer, bool(source.labels))
    for ids, documents, more in stream:
        first, offset = divmod(int(counts[1]), shard_tokens)
        for shard, part in enumerate(np.split(ids, range(shard_tokens - offset, len(ids), shard_tokens)), first):
            start = offset * tokenizer.dtype.itemsize if shard == first else 0
            write_at(folder / f"{split}.{shard:03d}.bin", start, part.astype(tokenizer.dtype))
        documents[:, 0] += counts[1]
        write_at(table, 16 * int(counts[0]), documents)
        counts += more
        display.at(split, int(counts[2]), None, f"{counts[1]:,} tokens")
        if not isinstance(source, TokensFile):  # words of ids are counted across blocks: such a split is not resumed
            write_atomic(progress, json.dumps({"counts": counts.tolist()}))
    documents = np.fromfile(table, "<i8").reshape(-1, 2)
    if counts[1] > documents[-1:, 0].sum():  # ids after the last end of text are a document too
        documents = np.append(documents, [[counts[1], 0]], axis=0)
    counts[0] = len(documents)
    display.at(split, int(counts[2]), int(counts[2]), f"{counts[1]:,} tokens")
    entry: dict[str, Any] = dict(zip(COUNTED, counts.tolist(), strict=True)) | {"shards": []}
    for start in range(0, entry["tokens"], shard_tokens):
        path, tokens = folder / f"{split}.{start // shard_tokens:03d}.bin", min(shard_tokens, entry["tokens"] - start)
        entry["shards"].append({"file": path.name, "tokens": tokens, "sha256": file_hash(path)})
    entry["offsets"] = write_array(folder / f"{split}.documents.npy", np.append(0, documents[:, 0]).astype("<u8"))
    if source.labels:
        entry["labels"] = write_array(folder / f"{split}.labels.npy", documents[:, 1])
        entry["label_counts"] = np.bincount(documents[:, 1], minlength=len(source.labels)).tolist()
    write_atomic(progress, json.dumps({"entry": entry}))
    return entry


def write_at(path: Path, place: int, data: Any) -> None:
    """Replace the file from byte `place` on, and sync. What was there was not recorded, so it is not trusted."""
    with path.open("ab") as handle:
        handle.truncate(place)
        handle.write(data)
        handle.flush()
        os.fsync(handle.fileno())


def write_array(path: Path, array: np.ndarray) -> dict[str, str]:
    np.save(buffer := io.BytesIO(), array)
    write_at(path, 0, buffer.getbuffer())
    return {"file": path.name, "sha256": file_hash(path)}


def read_ids(source: TokensFile, split: str, tokenizer: Tokenizer) -> Iterator[Encoded]:
    """Ids with the bytes and words of their text, for figures per byte and per word."""
    # The end of text becomes a space: it separates words but is no text itself.
    bytes_of_id = [*tokenizer.token_bytes[:-1], b" "]
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    in_word = False
    for ids in source.blocks(split):
        if int(ids.max(initial=0)) >= tokenizer.vocab_size:
            entries = f"the {tokenizer.vocab_size} entries of the {tokenizer.kind} tokenizer: is it the right one?"
            raise InputError(f"{split} of {source.name} holds id {ids.max()}, outside {entries}")
        ends = np.flatnonzero(ids == tokenizer.end_of_text) + 1
        data = b"".join(map(bytes_of_id.__getitem__, ids.tolist()))
        text = decoder.decode(data)
        words = len(text.split()) - (in_word and text[:1].strip() != "")
        in_word = text[-1:].strip() != "" if text else in_word
        counts = [len(ends), len(ids), len(data) - len(ends), words, text.count("\n")]
        yield ids, np.stack([ends, np.zeros_like(ends)], axis=1), counts


def encode(documents: Iterator[Document], tokenizer: Tokenizer, labelled: bool) -> Iterator[Encoded]:
    """Language documents are followed by the end of text; labelled ones are not, their label follows."""
    end = np.array([] if labelled else [tokenizer.end_of_text], tokenizer.dtype)
    rows: list[np.ndarray] = []
    labels: list[int] = []
    counts, started = np.zeros(3, np.int64), time.monotonic()
    for document in chain(documents, [None]):
        if document is not None:
            text = document.text
            rows.append(np.concatenate([*tokenizer.encode_batch([text]), end]))
            labels.append(document.label or 0)
            counts += (len(text.encode()), len(text.split()), text.count("\n"))
        if rows and (document is None or time.monotonic() - started >= CHECKPOINT_SECONDS):
            ids, ends = np.concatenate(rows), np.cumsum([len(row) for row in rows])
            yield ids, np.stack([ends, labels], axis=1), [len(rows), len(ids), *counts.tolist()]
            rows, labels, counts, started = [], [], np.zeros(3, np.int64), time.monotonic()
