"""Which tokenizer a corpus is prepared with: one of the three kinds, or another corpus's."""

import json
from dataclasses import dataclass
from pathlib import Path

from chiar.data.documents import check_choice
from chiar.data.tokenizers import KINDS, Tokenizer
from chiar.errors import InputError

DEFAULT_VOCAB_SIZE = 8192
HUB_REPOSITORY = "openai-community/gpt2"
GPT2_FILES = (("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe"))
GPT2_ENTRIES = 50_257


@dataclass(frozen=True)
class TokenizerChoice:
    """`path`: GPT-2's files, or a saved tokenizer of any kind. `like`: a prepared corpus whose tokenizer is taken.

    With neither `kind` nor `like`, a BPE is trained on the corpus.
    """

    kind: str | None = None
    path: Path | None = None
    vocab_size: int | None = None
    like: Path | None = None
    from_hub: bool = False

    def ready(self) -> Tokenizer | None:
        """The tokenizer, or None if it has to be trained on the corpus, with `trained_size` entries."""
        if self.kind is not None:
            check_choice("tokenizer", self.kind, KINDS)
        if self.like is not None:
            return self._like(self.like)
        kind = self.kind or "bpe"
        if self.vocab_size is not None and (kind != "bpe" or self.path is not None):
            raise InputError("--vocab-size is for a BPE trained on the corpus: leave it out here.")
        if kind == "gpt2":
            return self._gpt2()
        if kind == "bytes":
            if self.path is not None:
                raise InputError("the bytes tokenizer has no files: leave --tokenizer-path out.")
            return Tokenizer.of_bytes()
        return None if self.path is None else Tokenizer.open(self.path)

    @property
    def trained_size(self) -> int:
        return DEFAULT_VOCAB_SIZE if self.vocab_size is None else self.vocab_size

    def _gpt2(self) -> Tokenizer:
        if self.path is not None:
            return read_gpt2(self.path)
        if not self.from_hub:
            raise InputError(
                "the gpt2 tokenizer needs its files: --tokenizer-path FOLDER with vocab.json and merges.txt (or "
                "encoder.json and vocab.bpe), or --from-hub to fetch them."
            )
        return fetch_gpt2()

    def _like(self, folder: Path) -> Tokenizer:
        from chiar.data.shards import Corpus

        corpus = Corpus.open(folder)
        given = self.kind is not None and self.kind != corpus.tokenizer_kind
        if given or self.vocab_size not in (None, corpus.vocab_size):
            raise InputError(
                f"{folder} was prepared with {corpus.tokenizer_kind} of {corpus.vocab_size} entries, which does not "
                f"match the --tokenizer or --vocab-size asked for: with --like, leave them out."
            )
        if self.path is not None and Tokenizer.open(self.path).fingerprint != corpus.tokenizer_fingerprint:
            raise InputError(f"the tokenizer in {self.path} is not the one {folder} was prepared with.")
        return corpus.tokenizer()


def read_gpt2(folder: Path) -> Tokenizer:
    """From vocab.json and merges.txt, or encoder.json and vocab.bpe as first published, or tokenizer.json."""
    for vocab_name, merges_name in GPT2_FILES:
        if not ((folder / vocab_name).is_file() and (folder / merges_name).is_file()):
            continue
        where = f"{folder / vocab_name} with {merges_name}"
        try:
            vocab = json.loads((folder / vocab_name).read_text(encoding="utf-8"))
            lines = (folder / merges_name).read_text(encoding="utf-8").splitlines()
            merges = [line.split(" ") for line in lines if line and not line.startswith("#version")]
            tokenizer = Tokenizer.checked("gpt2", vocab, merges, where)
        except (ValueError, TypeError, AttributeError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError(f"{where} is not a readable GPT-2 tokenizer: {error}.") from error
        break
    else:
        if not (folder / "tokenizer.json").is_file():
            raise InputError(f"{folder} has neither vocab.json and merges.txt nor encoder.json and vocab.bpe.")
        tokenizer = Tokenizer.open(folder)
    if tokenizer.vocab_size != GPT2_ENTRIES:
        raise InputError(f"{folder} holds {tokenizer.vocab_size} entries, but GPT-2's tokenizer has {GPT2_ENTRIES}.")
    return tokenizer


def fetch_gpt2() -> Tokenizer:
    from huggingface_hub import hf_hub_download

    try:
        files = [Path(hf_hub_download(HUB_REPOSITORY, name)) for name in GPT2_FILES[0]]
    except Exception as error:
        # The Hub's client raises errors of many libraries; each means that the files did not come.
        raise InputError(
            f"the gpt2 tokenizer could not be fetched from the Hub: {str(error).splitlines()[0]}"
        ) from error
    return read_gpt2(files[0].parent)
