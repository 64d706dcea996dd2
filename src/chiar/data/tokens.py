"""Text for the commands that run a model: as token ids, in rows of equal length, and back in whole characters."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from chiar.config import ChiarConfig
from chiar.data.corpora import read_lines
from chiar.errors import InputError, errors_as, require
from chiar.files import check_file
from chiar.visible import SURROGATES, visible

BROKEN = "\N{REPLACEMENT CHARACTER}"
MAX_WAITING = 16  # tokens held back for one character: up to four with its bytes, and others without text
PART = "◦"  # shown for a part of a character
UNUSABLE = "the tokenizer in {} cannot be used"  # the library raises plain Exception for a damaged file


class TextCodec:
    """A model's own tokenizer, or bytes if the vocabulary is bytes."""

    def __init__(self, tokenizer: Any, source: Path | None) -> None:
        self.tokenizer, self.source = tokenizer, source

    @classmethod
    def open(cls, config: ChiarConfig, folder: Path | None, tokenizer: Path | None = None) -> "TextCodec":
        source, size = tokenizer or folder, config.vocab_size
        if source is not None and any((source / name).is_file() for name in ("tokenizer.json", "vocab.json")):
            from transformers import AutoTokenizer

            with errors_as(UNUSABLE.format(source), Exception):
                return cls(AutoTokenizer.from_pretrained(source), source)
        require(tokenizer is None, f"{tokenizer} is not a tokenizer folder: it has no tokenizer.json or vocab.json.")
        require(size in (256, 257), f"the model has a vocabulary of {size} and no tokenizer: pass --tokenizer FOLDER.")
        return cls(None, None)

    def encode(self, text: str) -> list[int]:
        require(not SURROGATES.search(text), "the text holds invalid UTF-8 or half of a surrogate pair: remove it.")
        if self.source is None:
            return list(text.encode())
        with errors_as(UNUSABLE.format(self.source), Exception):
            return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def decode(self, ids: list[int]) -> str:
        """The text of these ids, without the end of text."""
        if self.source is None:
            return bytes(i for i in ids if i < 256).decode("utf-8", "replace")
        return self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def pieces(self, ids: list[int]) -> list[str]:
        """The text to show for each id."""
        if self.source is None:
            return [chr(i) if 32 <= i < 127 else "·" for i in ids]
        return [self.tokenizer.decode([i]) for i in ids]

    def labels(self, ids: list[int]) -> list[str]:
        """What to show for each id of a text. A character of several tokens is shown at the last of them."""
        pieces = Pieces(self)
        return [pieces.next(token) for token in ids]


@dataclass
class Characters:
    """Incremental decoding: text is returned once its characters are complete, as a token may be part of one."""

    codec: TextCodec
    waiting: list[int] = field(default_factory=list)

    def add(self, token: int) -> tuple[int, str]:
        """The number of waiting tokens that are now decoded, and their text. An incomplete character has at most three
        bytes, so it begins in the last three tokens, where the text can be split."""
        self.waiting.append(token)
        waiting, decode, text = self.waiting, self.codec.decode, self.codec.decode(self.waiting)
        if not text.endswith(BROKEN) or len(waiting) > MAX_WAITING:
            return self.end()
        for start in range(len(waiting) - 1, max(0, len(waiting) - 4), -1):
            rest = decode(waiting[start:])
            if rest and decode(waiting[:start]) + rest == text:
                self.waiting = waiting[start:]
                return start, decode(waiting[:start])
        return 0, ""

    def end(self) -> tuple[int, str]:
        waiting, self.waiting = self.waiting, []
        return len(waiting), self.codec.decode(waiting)


class Pieces(Characters):
    """What to show for each token. A character made of several tokens is shown at the last of them."""

    def next(self, token: int) -> str:
        count, text = self.add(token)
        return (visible(text) or self.codec.pieces([token])[0]) if count else PART


def read_text_file(path: Path) -> str:
    check_file(path)
    return "".join(read_lines(path))


def batches(ids: np.ndarray, rows: int, length: int, batch_size: int) -> list[dict[str, Tensor]]:
    """The first rows × length ids as batches; an incomplete last row is left out."""
    available = len(ids) // length
    if available == 0:
        raise InputError(f"{len(ids)} tokens are fewer than one row of {length}: give more text or a smaller --length.")
    table = torch.from_numpy(ids[: min(rows, available) * length].astype(np.int64)).view(-1, length)
    return [{"input_ids": part} for part in table.split(batch_size)]
