"""Writing one split so that a kill at any moment loses seconds of work, not the split."""

import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy

from chiar.data.encoding import Encoded
from chiar.data.shards import file_hash

CHECKPOINT_SECONDS = 2.0


@dataclass
class Counts:
    """How far a split has come."""

    documents: int = 0
    tokens: int = 0
    bytes: int = 0
    words: int = 0
    lines: int = 0


class SplitWriter:
    """Ids go to shards of `shard_tokens`, document ends and labels to files beside them.

    Every few seconds all is flushed to disk and the counts are noted in a file of progress. A writer on a folder that
    has such a file cuts everything back to what it says and goes on from there.
    """

    def __init__(self, folder: Path, split: str, dtype: np.dtype, shard_tokens: int, labels: int) -> None:
        self.folder = folder
        self.split = split
        self.dtype = dtype
        self.shard_tokens = shard_tokens
        self.labels = labels
        self.counts = Counts()
        self.entry: dict[str, Any] | None = None
        self._ends = folder / f"{split}.ends.part"
        self._label_file = folder / f"{split}.labels.part"
        self._progress = folder / f"{split}.progress.json"
        self._last_end = 0
        self._resume()
        if self.entry is None:
            self._shard: IO[bytes] = self._open_shard()
            self._ends_handle = self._ends.open("ab")
            self._labels_handle = self._label_file.open("ab")
        self._noted = time.monotonic()

    def append(self, encoded: Encoded, checkpoint: bool = True) -> None:
        """`checkpoint=False` for ids that cannot be continued in the middle."""
        ids = encoded.ids
        while len(ids):
            space = self.shard_tokens - self.counts.tokens % self.shard_tokens
            part, ids = ids[:space], ids[space:]
            self._shard.write(np.ascontiguousarray(part, self.dtype).data)
            self.counts.tokens += len(part)
            if len(part) == space:
                self._sync(self._shard)
                self._shard.close()
                self._shard = self._open_shard()
        if len(encoded.lengths):
            ends = self._last_end + np.cumsum(encoded.lengths)
            self._last_end = int(ends[-1])
            self._ends_handle.write(ends.astype("<u8").tobytes())
        if encoded.labels is not None:
            self._labels_handle.write(encoded.labels.astype("<i8").tobytes())
        self.counts.documents += len(encoded.lengths)
        self.counts.bytes += encoded.bytes
        self.counts.words += encoded.words
        self.counts.lines += encoded.lines
        if checkpoint and time.monotonic() - self._noted >= CHECKPOINT_SECONDS:
            self._note()

    def finish(self) -> dict[str, Any]:
        """The split's entry in the manifest."""
        if self.counts.tokens > self._last_end:  # ids after the last end of text are a document too
            self._ends_handle.write(np.array([self.counts.tokens], "<u8").tobytes())
            self.counts.documents += 1
        for handle in (self._shard, self._ends_handle, self._labels_handle):
            self._sync(handle)
            handle.close()
        shards = []
        for number in range(-(-self.counts.tokens // self.shard_tokens)):
            path = self._shard_path(number)
            tokens = path.stat().st_size // self.dtype.itemsize
            shards.append({"file": path.name, "tokens": tokens, "sha256": file_hash(path)})
        entry: dict[str, Any] = {**asdict(self.counts), "shards": shards}
        entry["offsets"] = self._as_npy("documents", self._ends, "<u8", self.counts.documents + 1, b"\0" * 8)
        if self.labels:
            values = np.fromfile(self._label_file, "<i8")
            entry["labels"] = self._as_npy("labels", self._label_file, "<i8", self.counts.documents, b"")
            entry["label_counts"] = np.bincount(values, minlength=self.labels).tolist()
        self.entry = entry
        self._note()
        return entry

    def remove_notes(self) -> None:
        for path in (self._progress, self._ends, self._label_file):
            path.unlink(missing_ok=True)
        # Opened for ids that never came, when the ones before filled their shard exactly.
        for path in self.folder.glob(f"{self.split}.*.bin"):
            if path.stat().st_size == 0:
                path.unlink()

    def close(self) -> None:
        """After an interruption: nothing more is noted than already was."""
        if self.entry is None:
            for handle in (self._shard, self._ends_handle, self._labels_handle):
                handle.close()

    def _shard_path(self, number: int) -> Path:
        return self.folder / f"{self.split}.{number:03d}.bin"

    def _open_shard(self) -> IO[bytes]:
        return self._shard_path(self.counts.tokens // self.shard_tokens).open("ab")

    @staticmethod
    def _sync(handle: IO[bytes]) -> None:
        handle.flush()
        os.fsync(handle.fileno())

    def _note(self) -> None:
        if self.entry is None:
            for handle in (self._shard, self._ends_handle, self._labels_handle):
                self._sync(handle)
        aside = self._progress.with_suffix(".new")
        progress = {"counts": asdict(self.counts), "last_end": self._last_end, "entry": self.entry}
        with aside.open("wb") as handle:
            handle.write(json.dumps(progress).encode())
            self._sync(handle)
        os.replace(aside, self._progress)
        self._noted = time.monotonic()

    def _resume(self) -> None:
        noted = json.loads(self._progress.read_text()) if self._progress.is_file() else None
        if noted is not None:
            self.counts = Counts(**noted["counts"])
            self._last_end = noted["last_end"]
            self.entry = noted["entry"]
            if self.entry is not None:
                return
        sizes = {self._ends: self.counts.documents * 8}
        sizes[self._label_file] = self.counts.documents * 8 if self.labels else 0
        whole, rest = divmod(self.counts.tokens, self.shard_tokens)
        for number in range(whole + 1):
            size = self.shard_tokens if number < whole else rest
            sizes[self._shard_path(number)] = size * self.dtype.itemsize
        for path in [*self.folder.glob(f"{self.split}.*.bin"), *sizes]:
            if path in sizes:
                path.touch()
                os.truncate(path, sizes[path])
            else:
                path.unlink()

    def _as_npy(self, name: str, raw: Path, dtype: str, length: int, before: bytes) -> dict[str, str]:
        """A header in front of numbers that were appended one batch at a time."""
        path = self.folder / f"{self.split}.{name}.npy"
        with path.open("wb") as handle:
            npy.write_array_header_1_0(handle, {"descr": dtype, "fortran_order": False, "shape": (length,)})
            handle.write(before)
            with raw.open("rb") as numbers:
                while data := numbers.read(1 << 24):
                    handle.write(data)
            self._sync(handle)
        return {"file": path.name, "sha256": file_hash(path)}
