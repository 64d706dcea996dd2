"""A prepared corpus: a folder of memory-mapped token shards with a manifest.

    manifest.json         what it holds, with a hash of every file and a fingerprint of the whole
    tokenizer/            opens with AutoTokenizer.from_pretrained
    train.000.bin …       ids, raw little-endian, each shard but the last of a split of `shard_tokens` ids
    train.documents.npy   where documents begin, and where the last one ends
    train.labels.npy      one label a document, in classification corpora

In language corpora each document is followed by the end of text. Opening never unpickles.
"""

import hashlib
import json
import os
import time
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from chiar.data.tokenizers import Tokenizer
from chiar.errors import InputError, unknown_name

FORMAT = "chiar-corpus/1"
COUNTED = ("documents", "tokens", "bytes", "words", "lines")
CHECKPOINT_SECONDS = 2.0


def fingerprint(manifest: dict[str, Any]) -> str:
    """The same corpus read from other files is the same corpus, so `inputs` are left out."""
    known = {key: value for key, value in manifest.items() if key not in ("fingerprint", "inputs")}
    return hashlib.sha256(json.dumps(known, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def file_hash(path: Path) -> str:
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def read_npy(path: Path, mmap_mode: Literal["r"] | None = None) -> np.ndarray:
    try:
        return np.load(path, mmap_mode=mmap_mode, allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise InputError(f"{path} is not a readable .npy file: {error}") from error


class Split:
    """Random access to the ids of one split."""

    def __init__(self, folder: Path, name: str, entry: dict[str, Any], dtype: np.dtype, shard_tokens: int) -> None:
        self.name, self.dtype = name, dtype
        self.documents, self.tokens, self.bytes, self.words, self.lines = (int(entry[count]) for count in COUNTED)
        self._folder, self._entry, self._shard_tokens = folder, entry, shard_tokens
        # Plain arrays over the maps: slices of np.memmap cost several times as much.
        self._shards = [np.asarray(np.memmap(folder / shard["file"], dtype, "r")) for shard in entry["shards"]]

    def read(self, start: int, count: int) -> np.ndarray:
        """`count` ids from `start` on: a read-only view, or a copy where they lie in several shards."""
        stop = start + count
        if start < 0 or count < 0 or stop > self.tokens:
            raise IndexError(f"ids {start} to {stop} of split {self.name!r}, which has {self.tokens}")
        shard, offset = divmod(start, self._shard_tokens)
        if offset + count <= self._shard_tokens:
            return self._shards[shard][offset : offset + count] if count else np.empty(0, self.dtype)
        parts = []
        while start < stop:
            shard, offset = divmod(start, self._shard_tokens)
            parts.append(self._shards[shard][offset : offset + stop - start])
            start += len(parts[-1])
        return np.concatenate(parts)

    def rows(self, starts: np.ndarray, count: int) -> np.ndarray:
        """(len(starts), count) int64: one row of ids from each start, ready for a model."""
        rows = np.empty((len(starts), count), np.int64)
        for row, start in zip(rows, starts.tolist(), strict=True):
            row[:] = self.read(start, count)
        return rows

    @cached_property
    def offsets(self) -> np.ndarray:
        """Where documents begin, and where the last one ends: documents + 1 numbers."""
        return self._load("offsets", self.documents + 1)

    @cached_property
    def labels(self) -> np.ndarray | None:
        """One label a document, or None in a language corpus."""
        return self._load("labels", self.documents) if "labels" in self._entry else None

    def document(self, index: int) -> np.ndarray:
        """A document's ids, with its end of text where there is one."""
        if not 0 <= index < self.documents:
            raise IndexError(f"document {index} of split {self.name!r}, which has {self.documents}")
        start, stop = self.offsets[index : index + 2].tolist()
        return self.read(start, stop - start)

    def _load(self, what: str, length: int) -> np.ndarray:
        path = self._folder / self._entry[what]["file"]
        array = read_npy(path, "r")
        if array.shape != (length,) or array.dtype.kind not in "iu":
            raise InputError(f"{path} holds {array.dtype} of shape {array.shape}, expected {length} whole numbers.")
        return array


class Corpus:
    """An opened corpus. `remarks` say where it differs from the published one of its name; figures repeat them."""

    def __init__(self, folder: Path, manifest: dict[str, Any]) -> None:
        self.folder, self.manifest = folder, manifest
        self.name: str = manifest["name"]
        self.kind: str = manifest["kind"]
        self.fingerprint: str = manifest["fingerprint"]
        self.labels: list[str] = manifest["labels"]
        self.remarks: list[str] = manifest["remarks"]
        self.splits: list[str] = list(manifest["splits"])
        self.dtype = np.dtype(manifest["dtype"]).newbyteorder("<")
        self.tokenizer_kind: str = manifest["tokenizer"]["kind"]
        self.tokenizer_fingerprint: str = manifest["tokenizer"]["fingerprint"]
        self.vocab_size: int = manifest["tokenizer"]["vocab_size"]
        self.end_of_text: int = manifest["tokenizer"]["end_of_text"]
        self._opened: dict[str, Split] = {}

    @classmethod
    def open(cls, path: Path | str, verify: bool = False) -> "Corpus":
        """`verify` reads all of it and compares every hash; sizes are always compared."""
        folder = Path(path)
        manifest = read_manifest(folder)
        try:
            corpus = cls(folder, manifest)
            for entry in manifest["splits"].values():
                for shard in entry["shards"]:
                    check_file(folder, shard, verify, shard["tokens"] * corpus.dtype.itemsize)
                for what in {"offsets", "labels"} & entry.keys():
                    check_file(folder, entry[what], verify)
        except (KeyError, TypeError, AttributeError) as error:
            where = folder / "manifest.json"
            raise InputError(f"{where} is incomplete: {error!r}. Prepare the corpus again.") from error
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
        """The tokenizer the corpus was prepared with; its folder is `self.folder / "tokenizer"`."""
        folder = self.folder / "tokenizer"
        tokenizer = Tokenizer.open(folder)
        if tokenizer.fingerprint != self.tokenizer_fingerprint:
            raise InputError(f"{folder} is not the tokenizer this corpus was prepared with: prepare it again.")
        return tokenizer

    def require_same_tokenizer(self, other: "Corpus") -> None:
        """For whatever reads both with one model."""
        if self.tokenizer_fingerprint != other.tokenizer_fingerprint:
            raise InputError(
                f"{self.folder} ({self.tokenizer_kind}, {self.vocab_size} entries) and {other.folder} "
                f"({other.tokenizer_kind}, {other.vocab_size} entries) have different tokenizers: prepare one of them "
                f"again with --like the other."
            )


def read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / "manifest.json"
    if not folder.exists():
        raise InputError(f"there is no folder {folder}: chiar data prepare makes one.")
    if not path.is_file():
        raise InputError(f"{folder} is not a prepared corpus: it has no manifest.json (see chiar data prepare).")
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"{path} is damaged: {error}.") from error
    received = manifest.get("format") if isinstance(manifest, dict) else None
    if received != FORMAT:
        raise InputError(f"{path} has the format {received!r}, expected {FORMAT!r}.")
    if manifest.get("fingerprint") != fingerprint(manifest):
        raise InputError(f"{path} does not have the fingerprint it states: it was changed after the preparation.")
    return manifest


def check_file(folder: Path, entry: dict[str, Any], verify: bool, size: int | None = None) -> None:
    path = folder / entry["file"]
    if path.name != entry["file"]:
        raise InputError(f"{folder / 'manifest.json'} names a file outside its folder: {entry['file']!r}.")
    if not path.is_file():
        raise InputError(f"{path} is missing.")
    if size not in (None, path.stat().st_size):
        raise InputError(f"{path} has {path.stat().st_size} bytes, expected {size}: prepare the corpus again.")
    if verify and file_hash(path) != entry["sha256"]:
        raise InputError(f"{path} does not have the hash in the manifest: it is damaged; prepare the corpus again.")


class Encoded(NamedTuple):
    """Some documents' ids in a row, with what the manifest counts of their text."""

    ids: np.ndarray
    lengths: np.ndarray
    labels: np.ndarray | None
    bytes: int
    words: int
    lines: int


class SplitWriter:
    """Writes one split so that a kill at any moment loses seconds of work.

    Ids go to shards, document ends and labels to files beside them. Every few seconds what came meanwhile is appended,
    synced to disk and noted in a file of progress. A writer that finds one goes on from what it says.
    """

    def __init__(self, folder: Path, split: str, dtype: np.dtype, shard_tokens: int, labels: int) -> None:
        self.folder, self.split, self.dtype, self.shard_tokens, self.labels = folder, split, dtype, shard_tokens, labels
        self.counts = dict.fromkeys(COUNTED, 0)
        self.entry: dict[str, Any] | None = None
        self._last_end = 0
        self._ends, self._labels = folder / f"{split}.ends.part", folder / f"{split}.labels.part"
        self._progress = folder / f"{split}.progress.json"
        if self._progress.is_file():
            noted = json.loads(self._progress.read_text())
            self.counts, self._last_end, self.entry = noted["counts"], noted["last_end"], noted["entry"]
        self._pending: list[Encoded] = []
        self._written = self.counts
        self._flushed = time.monotonic()

    def append(self, encoded: Encoded, note: bool = True) -> None:
        """`note=False` for ids that cannot be continued in the middle."""
        self._pending.append(encoded)
        more = (len(encoded.lengths), len(encoded.ids), encoded.bytes, encoded.words, encoded.lines)
        self.counts = {name: self.counts[name] + count for name, count in zip(COUNTED, more, strict=True)}
        if time.monotonic() - self._flushed >= CHECKPOINT_SECONDS:
            self._flush()
            if note:
                self._note()

    def finish(self) -> None:
        """Makes the split's entry in the manifest."""
        self._flush()
        if self.counts["tokens"] > self._last_end:  # ids after the last end of text are a document too
            _write_at(self._ends, 8 * self.counts["documents"], np.array([self.counts["tokens"]], "<u8"))
            self.counts["documents"] += 1
        shards = []
        for number in range(-(-self.counts["tokens"] // self.shard_tokens)):
            path = self._shard_path(number)
            tokens = path.stat().st_size // self.dtype.itemsize
            shards.append({"file": path.name, "tokens": tokens, "sha256": file_hash(path)})
        entry: dict[str, Any] = {**self.counts, "shards": shards}
        entry["offsets"] = self._save("documents", np.append(np.zeros(1, "<u8"), np.fromfile(self._ends, "<u8")))
        if self.labels:
            labels = np.fromfile(self._labels, "<i8")
            entry["labels"] = self._save("labels", labels)
            entry["label_counts"] = np.bincount(labels, minlength=self.labels).tolist()
        self.entry = entry
        self._note()

    def remove_notes(self) -> None:
        for path in (self._progress, self._ends, self._labels):
            path.unlink(missing_ok=True)

    def _shard_path(self, number: int) -> Path:
        return self.folder / f"{self.split}.{number:03d}.bin"

    def _flush(self) -> None:
        documents, tokens = 8 * self._written["documents"], self._written["tokens"]
        ids = _joined([encoded.ids for encoded in self._pending], self.dtype)
        while len(ids):
            number, used = divmod(tokens, self.shard_tokens)
            part, ids = np.split(ids, [self.shard_tokens - used])
            _write_at(self._shard_path(number), used * self.dtype.itemsize, part)
            tokens += len(part)
        ends = self._last_end + np.cumsum(_joined([encoded.lengths for encoded in self._pending], "<u8"), dtype="<u8")
        _write_at(self._ends, documents, ends)
        if self.labels:
            _write_at(self._labels, documents, _joined([encoded.labels for encoded in self._pending], "<i8"))
        self._last_end = int(ends[-1]) if len(ends) else self._last_end
        self._pending, self._written, self._flushed = [], self.counts, time.monotonic()

    def _note(self) -> None:
        aside = self._progress.with_suffix(".new")
        progress = {"counts": self.counts, "last_end": self._last_end, "entry": self.entry}
        _write_at(aside, 0, np.frombuffer(json.dumps(progress).encode(), np.uint8))
        os.replace(aside, self._progress)

    def _save(self, name: str, array: np.ndarray) -> dict[str, str]:
        path = self.folder / f"{self.split}.{name}.npy"
        with path.open("wb") as handle:
            np.save(handle, array)
            handle.flush()
            os.fsync(handle.fileno())
        return {"file": path.name, "sha256": file_hash(path)}


def _joined(arrays: list[Any], dtype: np.dtype | str) -> np.ndarray:
    return np.concatenate([np.empty(0, dtype), *arrays], dtype=dtype, casting="unsafe")


def _write_at(path: Path, place: int, array: np.ndarray) -> None:
    """From `place` on, to disk; what lay there was not noted and is not trusted."""
    with path.open("ab") as handle:
        handle.truncate(place)
        handle.write(array.tobytes())
        handle.flush()
        os.fsync(handle.fileno())
