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
import mmap
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from chiar.data.tokenizers import Tokenizer
from chiar.errors import InputError, unknown_name

FORMAT = "chiar-corpus/1"
# What the fingerprint leaves out: the same corpus read from other files is the same corpus.
UNFINGERPRINTED = ("fingerprint", "inputs")


def fingerprint(manifest: dict[str, Any]) -> str:
    known = {key: value for key, value in manifest.items() if key not in UNFINGERPRINTED}
    return hashlib.sha256(json.dumps(known, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def file_hash(path: Path) -> str:
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


class Split:
    """Random access to the ids of one split."""

    def __init__(self, folder: Path, name: str, entry: dict[str, Any], dtype: np.dtype, shard_tokens: int) -> None:
        self.name = name
        self.tokens: int = entry["tokens"]
        self.documents: int = entry["documents"]
        self.bytes: int = entry["bytes"]
        self.words: int = entry["words"]
        self.lines: int = entry["lines"]
        self.dtype = dtype
        self._folder = folder
        self._entry = entry
        self._shard_tokens = shard_tokens
        self._shards = [_map(folder / shard["file"], dtype) for shard in entry["shards"]]

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
        try:
            array = np.load(path, mmap_mode="r", allow_pickle=False)
        except (ValueError, OSError, EOFError) as error:
            raise InputError(f"{path} is not a readable .npy file: {error}") from error
        if array.shape != (length,) or array.dtype.kind not in "iu":
            raise InputError(f"{path} holds {array.dtype} of shape {array.shape}, expected {length} whole numbers.")
        return array


class Corpus:
    """An opened corpus. `verify` reads all of it and compares every hash; sizes are always compared.

    `remarks` say where it differs from the published corpus of its name; figures measured on it repeat them.
    """

    def __init__(self, folder: Path, manifest: dict[str, Any]) -> None:
        self.folder = folder
        self.manifest = manifest
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
        folder = Path(path)
        manifest = read_manifest(folder)
        try:
            for entry in manifest["splits"].values():
                for shard in entry["shards"]:
                    check_file(folder, shard, verify, shard["tokens"] * np.dtype(manifest["dtype"]).itemsize)
                for what in ("offsets", "labels"):
                    if what in entry:
                        check_file(folder, entry[what], verify)
            corpus = cls(folder, manifest)
        except (KeyError, TypeError, AttributeError) as error:
            raise InputError(
                f"{folder / 'manifest.json'} is incomplete: {error!r}. Prepare the corpus again."
            ) from error
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
        tokenizer = Tokenizer.open(self.folder / "tokenizer")
        if tokenizer.fingerprint != self.tokenizer_fingerprint:
            raise InputError(
                f"{self.folder / 'tokenizer'} is not the tokenizer this corpus was prepared with: prepare it again."
            )
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
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        received = manifest.get("format") if isinstance(manifest, dict) else None
        raise InputError(f"{path} has the format {received!r}, expected {FORMAT!r}.")
    if manifest.get("fingerprint") != fingerprint(manifest):
        raise InputError(f"{path} does not have the fingerprint it states: it was changed after the preparation.")
    return manifest


def check_file(folder: Path, entry: dict[str, Any], verify: bool, size: int | None = None) -> None:
    name = entry["file"]
    if Path(name).name != name:
        raise InputError(f"{folder / 'manifest.json'} names a file outside its folder: {name!r}.")
    path = folder / name
    if not path.is_file():
        raise InputError(f"{path} is missing.")
    if size is not None and path.stat().st_size != size:
        raise InputError(f"{path} has {path.stat().st_size} bytes, expected {size}: prepare the corpus again.")
    if verify and file_hash(path) != entry["sha256"]:
        raise InputError(f"{path} does not have the hash in the manifest: it is damaged; prepare the corpus again.")


def _map(path: Path, dtype: np.dtype) -> np.ndarray:
    # A plain array over the map: slices of np.memmap cost several times as much.
    with path.open("rb") as handle:
        return np.frombuffer(mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ), dtype)
