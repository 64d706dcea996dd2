"""Corpora that are tokenised already: raw little-endian uint16 ids in `train.u16`, or `train.0.u16`, `train.1.u16`…

Files may be compressed; numbered ones are one stream. The ids are stored as they are: a document ends at each end of
text, and what has none is one document. A `meta.json` beside them that counts tokens or hashes train is held to it.
"""

import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from chiar.data.documents import SPLIT_ALIASES, SPLITS
from chiar.data.files import one_folder, open_bytes, plain_name
from chiar.errors import InputError

NAME = re.compile(r"(\w+?)(?:\.(\d+))?\.(?:u16|bin)")
BLOCK_BYTES = 1 << 22


class TokensFile:
    """Not a `Source`: it gives ids where those give text."""

    kind = "language"
    labels: tuple[str, ...] = ()

    def __init__(self, paths: list[Path], name: str = "tokens") -> None:
        folder = one_folder(name, paths, "train.u16 (or train.0.u16, train.1.u16…), valid.u16 and test.u16")
        parts: dict[str, list[tuple[int, Path]]] = {}
        for path in sorted(folder.iterdir()):
            match = NAME.fullmatch(plain_name(path))
            if match and match[1] in SPLIT_ALIASES:
                parts.setdefault(SPLIT_ALIASES[match[1]], []).append((int(match[2] or 0), path))
        if not parts:
            raise InputError(f"{folder} holds no train, valid or test file of uint16 ids (.u16 or .bin).")
        for split, numbered in parts.items():
            if sorted(number for number, _ in numbered) != list(range(len(numbered))):
                raise InputError(f"{folder}: the files of {split} are not numbered 0 to {len(numbered) - 1}.")
        self.paths = {split: [path for _, path in sorted(parts[split])] for split in SPLITS if split in parts}
        self.meta = read_meta(folder / "meta.json")
        self.name = folder.resolve().name if name == "tokens" else name
        self.splits = tuple(self.paths)
        self.options: dict[str, Any] = {"documents": "ids as given"}
        self.files = [path for paths in self.paths.values() for path in paths]

    def blocks(self, split: str) -> Iterator[np.ndarray]:
        """The ids of a split in order, a few million at a time."""
        digest = hashlib.sha256()
        count = 0
        for path in self.paths[split]:
            with open_bytes(path) as handle:
                while data := handle.read(BLOCK_BYTES):
                    if len(data) % 2:
                        raise InputError(f"{path} has an odd number of bytes, so it is not uint16 token ids.")
                    digest.update(data)
                    count += len(data) // 2
                    yield np.frombuffer(data, "<u2")
        expected = self.meta.get(split, count)
        if count != expected:
            raise InputError(f"{split} holds {count:,} tokens, but its meta.json says {expected:,}: a file is missing.")
        if self.meta.get(f"{split}_sha256", digest.hexdigest()) != digest.hexdigest():
            raise InputError(f"the ids of {split} do not have the hash its meta.json gives: a file is damaged.")


def read_meta(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"{path} is not JSON: {error}.") from error
    if not isinstance(meta, dict):
        raise InputError(f"{path} does not hold an object.")
    return meta
