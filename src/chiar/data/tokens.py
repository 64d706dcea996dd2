"""Text for the commands that run a model, as token ids in rows of equal length."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from chiar.config import ChiarConfig
from chiar.data.corpora import read_lines
from chiar.errors import InputError, errors_as, require
from chiar.files import check_file
from chiar.visible import SURROGATES

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


def encode(text: str, config: ChiarConfig, folder: Path | None, tokenizer: Path | None) -> tuple[list[int], list[str]]:
    """The ids of a text, and the text of each."""
    codec = TextCodec.open(config, folder, tokenizer)
    ids = codec.encode(text)
    return ids, codec.pieces(ids)


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
