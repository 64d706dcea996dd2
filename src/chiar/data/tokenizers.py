"""The three tokenizers, all byte-level BPE, and how a corpus chooses among them.

Ids are dense, and the last one is the end of text. Text never produces that id, even if it spells the token out.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from chiar.errors import InputError, errors_as, require, unknown_name

if TYPE_CHECKING:
    from chiar.config import ChiarConfig

END_OF_TEXT = "<|endoftext|>"
KINDS = ("gpt2", "bpe", "bytes")
GPT2_FILES = (("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe"))
GPT2_ENTRIES, GPT2_MERGES = 50_257, 50_000
# A file beside tokenizer.json, and our key in it: a BPE trained here may be exactly as large as GPT-2's.
SETTINGS, IS_GPT2 = "tokenizer_config.json", "chiar_gpt2"
# GPT-2's byte alphabet, which writes vocabularies of bytes as JSON text: printable Latin-1 characters represent
# themselves; the other bytes become the characters from U+0100 on, in order.
_PRINTABLE = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
CHARACTER_OF_BYTE = {byte: chr(byte if byte in _PRINTABLE else 256 + _OTHERS.index(byte)) for byte in range(256)}
BYTE_OF_CHARACTER = {character: byte for byte, character in CHARACTER_OF_BYTE.items()}
# GPT-2's pattern always starts a new word at a space, newline, tab or carriage return after a non-space character. The
# piece between two such places is encoded on its own, once, and cached. Rarer kinds of space start no new piece,
# because Python and the tokenizers library disagree about some of them.
PIECES = re.compile(r"\s*\S+(?:[^\S \n\t\r]\s*\S*)*|\s+")
NEW_WORD = re.compile(r"(?<=\S)[ \n\t\r]")
TRAINED_AT_ONCE = 1 << 16  # characters; longer texts cost the library much memory and twice the time


class Tokenizer:
    """`vocabulary` in GPT-2's byte alphabet, by id, without the end of text; `merges` in order of priority."""

    def __init__(self, kind: str, vocabulary: Iterable[str], merges: Iterable[tuple[str, str]]) -> None:
        self.kind, self.vocabulary, self.merges = kind, tuple(vocabulary), tuple(merges)
        self.end_of_text = len(self.vocabulary)
        self.vocab_size = self.end_of_text + 1
        self.dtype = np.dtype("<u2" if self.vocab_size <= 65536 else "<u4")
        # The fingerprint covers what the tokenizer does, not its files: libraries write the same one in several ways.
        definition: dict[str, Any] = {"family": "byte-level-bpe", "pattern": None if kind == "bytes" else "gpt2"}
        definition |= {"vocabulary": self.vocabulary, "merges": self.merges}
        definition["end_of_text"] = [END_OF_TEXT, self.end_of_text]
        self.fingerprint = hashlib.sha256(json.dumps(definition, separators=(",", ":")).encode()).hexdigest()

    @cached_property
    def token_bytes(self) -> list[bytes]:
        """The bytes of each id; none for the end of text."""
        return [bytes(map(BYTE_OF_CHARACTER.__getitem__, token)) for token in (*self.vocabulary, "")]

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        """Ids of each text, as from `AutoTokenizer.from_pretrained` of the saved folder, without special tokens."""
        if self.kind == "bytes":
            return [np.frombuffer(text.encode(), np.uint8).astype(self.dtype) for text in texts]
        return [np.frombuffer(b"".join(map(self._ids_of, PIECES.findall(text))), self.dtype) for text in texts]

    @cached_property
    def _ids_of(self) -> Callable[[str], bytes]:
        """Ids of a piece of text, cached: text repeats itself, and encoding takes ten times as long as a lookup."""
        encode, dtype = self._model().encode, self.dtype
        return lru_cache(400_000)(lambda piece: np.array(encode(piece, add_special_tokens=False).ids, dtype).tobytes())

    def decode_bytes(self, ids: np.ndarray) -> bytes:
        return b"".join(map(self.token_bytes.__getitem__, ids.tolist()))

    def decode(self, ids: np.ndarray) -> str:
        return self.decode_bytes(ids).decode("utf-8", "replace")

    def describe(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("kind", "fingerprint", "vocab_size", "end_of_text")}

    def save(self, folder: Path) -> None:
        """Write a folder for `AutoTokenizer.from_pretrained` and `Tokenizer.open`."""
        from tokenizers import AddedToken

        folder.mkdir(parents=True, exist_ok=True)
        model = self._model()
        # An id of its own that no text produces: see split_special_tokens below.
        model.add_special_tokens([AddedToken(END_OF_TEXT, special=True, normalized=False)])
        assert model.token_to_id(END_OF_TEXT) == self.end_of_text
        model.save(str(folder / "tokenizer.json"))
        settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END_OF_TEXT}
        settings |= {"bos_token": END_OF_TEXT, "split_special_tokens": True, "clean_up_tokenization_spaces": False}
        settings |= {"model_max_length": 10**30, IS_GPT2: self.kind == "gpt2"}
        (folder / SETTINGS).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")

    def _model(self) -> Any:
        from tokenizers import Tokenizer as Model
        from tokenizers import decoders, models, pre_tokenizers

        vocab = {token: number for number, token in enumerate(self.vocabulary)}
        model = Model(models.BPE(vocab=vocab, merges=list(self.merges)))
        model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=self.kind != "bytes")
        model.decoder = decoders.ByteLevel()
        return model

    @classmethod
    def open(cls, folder: Path) -> "Tokenizer":
        """Read GPT-2's two files under either pair of names, or a tokenizer.json of byte-level BPE."""
        pair = next((pair for pair in GPT2_FILES if all((folder / name).is_file() for name in pair)), None)
        path = folder / (pair[0] if pair else "tokenizer.json")
        require(path.is_file(), f"{folder} has no tokenizer.json, and neither vocab.json with merges.txt.")
        with errors_as(f"{path} is not a readable tokenizer", KeyError, TypeError, ValueError, AttributeError):
            stored = json.loads(path.read_text(encoding="utf-8"))
            if pair:
                lines = (folder / pair[1]).read_text(encoding="utf-8").splitlines()
                merges = [line for line in lines if line and not line.startswith("#version")]
                return cls.checked("gpt2" if len(merges) == GPT2_MERGES else "bpe", stored, merges, str(path))
            model, pre = stored["model"], stored["pre_tokenizer"]
            plain = not any((stored["normalizer"], model.get("dropout"), model.get("ignore_merges")))
            if not plain or (model["type"], pre["type"], pre["add_prefix_space"]) != ("BPE", "ByteLevel", False):
                raise InputError(f"{path} is not plain byte-level BPE, the only supported kind of tokenizer.")
            extra = json.loads((folder / SETTINGS).read_text(encoding="utf-8")) if (folder / SETTINGS).is_file() else {}
            kind = "gpt2" if extra.get(IS_GPT2, len(model["merges"]) == GPT2_MERGES) else "bpe"
            if not pre.get("use_regex", True):
                kind = "bytes"
            opened = cls.checked(kind, model["vocab"], model["merges"], str(path))
            if kind == "bytes" and opened.fingerprint != cls.of_bytes().fingerprint:
                raise InputError(f"{path} does not split words and yet is not the tokenizer of bytes.")
            return opened

    @classmethod
    def checked(cls, kind: str, vocab: dict[str, int], merges: Iterable[Any], where: str) -> "Tokenizer":
        """From a stored vocabulary and merges: the end of text may be missing, and merges are pairs or "one two"."""
        tokens = sorted(vocab.keys() - {END_OF_TEXT}, key=vocab.__getitem__)
        if [vocab.get(token) for token in (*tokens, END_OF_TEXT)][: len(vocab)] != list(range(len(vocab))):
            raise InputError(f"{where}: ids must run from 0 without gaps, with {END_OF_TEXT} last.")
        if not BYTE_OF_CHARACTER.keys() <= vocab.keys():
            raise InputError(f"{where} does not hold all 256 bytes: it is not a byte-level vocabulary.")
        pairs = [tuple(merge.split(" ") if isinstance(merge, str) else merge) for merge in merges]
        for first, second in pairs:
            if not {first, second, first + second} <= vocab.keys():
                raise InputError(f"{where} has a merge '{first} {second}' that the vocabulary does not know.")
        return cls(kind, tokens, pairs)

    @classmethod
    def of_bytes(cls) -> "Tokenizer":
        return cls("bytes", CHARACTER_OF_BYTE.values(), ())  # ids are byte values, 256 is the end of text

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> "Tokenizer":
        """Byte-level BPE with at most `vocab_size` entries; the same texts give the same tokenizer, in any order."""
        from tokenizers.trainers import BpeTrainer

        sizes = "at least 257 (256 bytes and the end of text) and at most a million"
        if not 257 <= vocab_size <= 1_000_000:  # the trainer allocates memory for all of them
            raise InputError(f"--vocab-size must be {sizes}, got {vocab_size}.")
        model = cls("bpe", (), ())._model()
        settings: Any = {"min_frequency": 2, "show_progress": False, "initial_alphabet": sorted(BYTE_OF_CHARACTER)}
        model.train_from_iterator(in_parts(texts), BpeTrainer(vocab_size=vocab_size - 1, **settings))
        trained = json.loads(model.to_str())["model"]
        return cls.checked("bpe", trained["vocab"], trained["merges"], "the trained tokenizer")


def in_parts(texts: Iterable[str]) -> Iterator[str]:
    """Long texts in parts that begin where a word does, so that the words are the same."""
    for text in texts:
        start = 0
        while start < len(text):
            cut = NEW_WORD.search(text, start + TRAINED_AT_ONCE)
            end = cut.start() if cut else len(text)
            yield text[start:end]
            start = end


@dataclass(frozen=True)
class TokenizerChoice:
    """GPT-2's tokenizer, bytes, a saved one (`path`), a prepared corpus's (`like`), or a BPE trained on the corpus."""

    kind: str | None = None
    path: Path | None = None
    vocab_size: int | None = None
    like: Path | None = None
    from_hub: bool = False

    def ready(self) -> Tokenizer | None:
        """The tokenizer, or None if it has to be trained on the corpus."""
        path = self.path
        if self.kind not in (None, *KINDS):
            raise unknown_name("tokenizer", self.kind, KINDS)
        if self.vocab_size is not None and not self.like and (self.kind in ("gpt2", "bytes") or path is not None):
            raise InputError("--vocab-size is for a BPE trained on the corpus: leave it out here.")
        if self.kind == "bytes" and path is not None:
            raise InputError("the bytes tokenizer has no files: leave --tokenizer-path out.")
        if self.like is not None:
            from chiar.data.shards import Corpus

            opened = Corpus.open(self.like).tokenizer()
            if self.kind not in (None, opened.kind) or self.vocab_size not in (None, opened.vocab_size):
                what = f"{self.like} was prepared with {opened.kind} of {opened.vocab_size} entries"
                raise InputError(f"{what}, not the --tokenizer or --vocab-size asked for: with --like, leave them out.")
            if path is not None and Tokenizer.open(path).fingerprint != opened.fingerprint:
                raise InputError(f"the tokenizer in {path} is not the one {self.like} was prepared with.")
            return opened
        if self.kind == "bytes":
            return Tokenizer.of_bytes()
        if self.kind == "gpt2" and path is None:
            if not self.from_hub:
                files = "vocab.json and merges.txt (or encoder.json and vocab.bpe)"
                raise InputError(f"gpt2 needs --tokenizer-path FOLDER with {files}, or --from-hub to fetch them.")
            from huggingface_hub import hf_hub_download

            with errors_as("gpt2 could not be fetched from the Hub", Exception):  # raised by many libraries
                _, path = (Path(hf_hub_download("openai-community/gpt2", name)).parent for name in GPT2_FILES[0])
        saved = None if path is None else Tokenizer.open(path)
        if saved and self.kind == "gpt2" and saved.vocab_size != GPT2_ENTRIES:
            raise InputError(f"{path} holds {saved.vocab_size} entries, but GPT-2's tokenizer has {GPT2_ENTRIES}.")
        return saved


def check_tokenizer(folder: str, config: "ChiarConfig", corpus: Any) -> list[str]:
    """InputError if the corpus has another tokenizer than the model; a remark if that cannot be checked."""
    what = f"{corpus.folder} has a vocabulary of {corpus.vocab_size}"
    if corpus.vocab_size > config.vocab_size:
        more = f"more than the {config.vocab_size} entries of {folder}"
        raise InputError(f"{what}, {more}: prepare the corpus with the model's tokenizer.")
    if not Path(folder).is_dir():
        return [f"{folder} is a preset with random weights."]
    folders = [path for path in (Path(folder), Path(folder) / "tokenizer") if (path / "tokenizer.json").is_file()]
    if not folders:
        return [f"{folder} has no tokenizer: whether {corpus.name} was prepared with the model's was not checked."]
    try:
        own = Tokenizer.open(folders[0]).fingerprint
    except InputError as error:
        return [f"the tokenizers of model and corpus were not compared: {error}"]
    if own != corpus.tokenizer_fingerprint:
        raise InputError(f"{what} and was prepared with another tokenizer than the one in {folder}: prepare it again.")
    return []
