"""A prepared corpus: a folder of token shards with a manifest.

    manifest.json         splits, tokenizer and options, a hash of every file and a fingerprint of the corpus
    tokenizer/            opens with AutoTokenizer.from_pretrained
    train.000.bin …       raw little-endian ids, `shard_tokens` in every shard but the last of a split
    train.documents.npy   the start of each document, and the end of the last
    train.labels.npy      one label per document, in classification corpora

In language corpora each document is followed by the end of text. Opening never unpickles. Shards are read, never
mapped into memory: if a mapped file shrinks, the system kills the process that reads it.
"""

import hashlib
import json
import os
import weakref
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from chiar.data.tokenizers import Tokenizer
from chiar.errors import InputError, errors_as, require, unknown_name

FORMAT = "chiar-corpus/1"
RECOVER = "restore it, or remove the corpus and prepare it again"
COUNTED = ("documents", "tokens", "bytes", "words", "lines")


def fingerprint(manifest: dict[str, Any]) -> str:
    """A hash of the manifest without `inputs`: the same corpus read from other files is the same corpus."""
    hashed = {key: value for key, value in manifest.items() if key not in ("fingerprint", "inputs")}
    return hashlib.sha256(json.dumps(hashed, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def file_hash(path: Path) -> str:
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def read_npy(path: Path, length: int) -> np.ndarray:
    """An array of `length` whole numbers."""
    with errors_as(f"{path} is damaged, prepare the corpus again", ValueError, OSError, EOFError):
        array = np.load(path, allow_pickle=False)
    if array.shape != (length,) or array.dtype.kind not in "iu":
        raise InputError(f"{path} holds {array.dtype} of shape {array.shape}, expected {length} whole numbers.")
    return array


class Split:
    """Random access to the ids of one split."""

    def __init__(self, folder: Path, name: str, entry: dict[str, Any], dtype: np.dtype, shard_tokens: int) -> None:
        self.name, self.dtype, self._folder, self._entry, self._shard_tokens = name, dtype, folder, entry, shard_tokens
        self.documents, self.tokens, self.bytes, self.words, self.lines = (int(entry[count]) for count in COUNTED)
        self._files = [folder / shard["file"] for shard in entry["shards"]]
        # Kept open, so that a corpus that is moved or replaced meanwhile is still read as it was.
        self._shards = [os.open(file, os.O_RDONLY) for file in self._files]
        weakref.finalize(self, lambda shards: [*map(os.close, shards)], self._shards)

    def read(self, start: int, count: int) -> np.ndarray:
        """`count` ids from `start` on, read-only; InputError if the file no longer holds them."""
        parts, stop, size = [], start + count, self.dtype.itemsize
        if start < 0 or count < 0 or stop > self.tokens:
            raise IndexError(f"ids {start} to {stop} of split {self.name!r}, which has {self.tokens}")
        while start < stop:
            shard, offset = divmod(start, self._shard_tokens)
            wanted = min(stop - start, self._shard_tokens - offset)
            data = os.pread(self._shards[shard], wanted * size, offset * size)
            if len(data) < size:
                what = f"{self._files[shard]} was cut short after it was opened"
                raise InputError(f"{what}: {RECOVER}, then repeat the command (chiar train with --resume).")
            parts.append(np.frombuffer(data, self.dtype, len(data) // size))
            start += len(parts[-1])
        return parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, self.dtype), *parts])

    def rows(self, starts: np.ndarray, count: int) -> np.ndarray:
        """(len(starts), count) int64: one row of ids from each start, ready for a model."""
        parts = [self.read(start, count) for start in starts.tolist()]
        return np.array(parts, np.int64).reshape(len(starts), count)

    @cached_property
    def offsets(self) -> np.ndarray:
        """The start of each document, and the end of the last: documents + 1 numbers."""
        return read_npy(self._folder / self._entry["offsets"]["file"], self.documents + 1)

    @cached_property
    def labels(self) -> np.ndarray | None:
        """One label per document, or None in a language corpus."""
        entry = self._entry.get("labels")
        return None if entry is None else read_npy(self._folder / entry["file"], self.documents)

    def choose(self, rows: int | None) -> list[int]:
        """Indices of all documents, or of `rows` spread over the split, because files are often sorted by label."""
        count = min(rows or self.documents, self.documents)
        return [row * self.documents // count for row in range(count)]

    def document(self, index: int) -> np.ndarray:
        if not 0 <= index < self.documents:
            raise IndexError(f"document {index} of split {self.name!r}, which has {self.documents}")
        start, stop = self.offsets[index : index + 2].tolist()
        return self.read(start, stop - start)


class Corpus:
    """An opened corpus. `remarks` say how it differs from the published one of its name; reports repeat them."""

    def __init__(self, folder: Path, manifest: dict[str, Any]) -> None:
        self.folder, self.manifest = folder, manifest
        self.name, self.kind, self.fingerprint = (str(manifest[key]) for key in ("name", "kind", "fingerprint"))
        self.labels, self.remarks, self.splits = (list[str](manifest[key]) for key in ("labels", "remarks", "splits"))
        self.dtype = np.dtype(manifest["dtype"]).newbyteorder("<")
        tokenizer = manifest["tokenizer"]
        self.tokenizer_kind, self.tokenizer_fingerprint = str(tokenizer["kind"]), str(tokenizer["fingerprint"])
        self.vocab_size, self.end_of_text = int(tokenizer["vocab_size"]), int(tokenizer["end_of_text"])
        self._opened: dict[str, Split] = {}

    @classmethod
    def open(cls, path: Path | str, verify: bool = False) -> "Corpus":
        """`verify` reads every file and compares its hash; sizes are always compared."""
        folder, where = Path(path), Path(path) / "manifest.json"
        if not where.is_file():
            what = f"{folder} is not a prepared corpus" if folder.exists() else f"there is no folder {folder}"
            raise InputError(f"{what}: chiar data prepare makes one, with a manifest.json.")
        damaged = f"{where} is damaged or incomplete, prepare the corpus again"
        with errors_as(damaged, KeyError, TypeError, AttributeError, ValueError):
            manifest = json.loads(where.read_text(encoding="utf-8"))
            if manifest["format"] != FORMAT:
                raise InputError(f"{where} has the format {manifest['format']!r}, expected {FORMAT!r}.")
            if manifest["fingerprint"] != fingerprint(manifest):
                raise InputError(f"{where} was changed after the preparation: its fingerprint does not match.")
            corpus = cls(folder, manifest)
            for entry in manifest["splits"].values():
                for file in [*entry["shards"], *(entry[what] for what in ("offsets", "labels") if what in entry)]:
                    stored, wrong = folder / file["file"], ""
                    size = stored.stat().st_size if stored.is_file() else None
                    expected = file["tokens"] * corpus.dtype.itemsize if "tokens" in file else size
                    if stored.name != file["file"]:
                        wrong = "lies outside its folder"
                    elif size is None or size != expected:
                        wrong = "is missing" if size is None else f"has {size} bytes, expected {expected}"
                    elif verify and file_hash(stored) != file["sha256"]:
                        wrong = "does not have the hash in the manifest"
                    require(not wrong, f"{stored} {wrong}: {RECOVER}.")
        if verify:
            corpus.tokenizer()
        return corpus

    def split(self, name: str) -> Split:
        if name not in self.splits:
            raise unknown_name(f"split of {self.folder}", name, self.splits)
        if name not in self._opened:
            entry = self.manifest["splits"][name]
            self._opened[name] = Split(self.folder, name, entry, self.dtype, self.manifest["shard_tokens"])
        return self._opened[name]

    def tokenizer(self) -> Tokenizer:
        tokenizer = Tokenizer.open(folder := self.folder / "tokenizer")
        if tokenizer.fingerprint != self.tokenizer_fingerprint:
            raise InputError(f"{folder} is not the tokenizer this corpus was prepared with.")
        return tokenizer

    def require_same_tokenizer(self, other: "Corpus") -> None:
        """InputError unless one model can read both corpora."""
        if self.tokenizer_fingerprint != other.tokenizer_fingerprint:
            one, two = (f"{c.folder} ({c.tokenizer_kind}, {c.vocab_size} entries)" for c in (self, other))
            raise InputError(f"{one} and {two} have different tokenizers: prepare one of them --like the other.")
