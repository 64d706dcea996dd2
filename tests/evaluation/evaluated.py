"""Tiny corpora and models for the tests of evaluation."""

import random
from pathlib import Path

from chiar.data.corpora import Labelled, Text
from chiar.data.prepare import prepare
from chiar.data.shards import Corpus
from chiar.data.tokenizers import TokenizerChoice
from chiar.model.modeling import ChiarForCausalLM
from helpers import randomise, small_config

BYTES = TokenizerChoice("bytes")
LENGTH = 16


def sentence(seed: int, words: int = 8) -> str:
    return " ".join(random.Random(seed).choices(["light", "dark", "naïve", "漢", "of", "42", "."], k=words))


def language_corpus(folder: Path, tokenizer: TokenizerChoice = BYTES) -> Corpus:
    """Its test split has about 190 bytes, no multiple of any length used."""
    folder.mkdir()
    for split, documents in (("train", 30), ("valid", 3), ("test", 3)):
        texts = [f"{sentence(n)}\n{sentence(n + 50, 3)}" for n in range(documents)]
        (folder / f"{split}.txt").write_text("\n\n".join(texts) + "\n", encoding="utf-8")
    return prepare(Text([folder]), folder / "corpus", tokenizer)


def class_corpus(folder: Path) -> Corpus:
    """CoLA's layout, sentences of 1 to 9 words."""
    folder.mkdir()
    for name, count in (("train", 8), ("dev", 23)):
        rows = [f"x\t{int(n % 3 > 0)}\t\t{sentence(n, 1 + n % 9)}" for n in range(count)]
        (folder / f"{name}.tsv").write_text("\n".join(rows) + "\n", encoding="utf-8")
    return prepare(Labelled([folder], "cola"), folder / "corpus", BYTES)


def tiny_model(preset: str = "v3-tiny", kind: type = ChiarForCausalLM, **changes):
    """fp32, with routes that mix and a gate that moves; causal unless told otherwise."""
    config = small_config(preset, **{"vocab_size": 257, "gate_pool": "causal", **changes})
    return randomise(kind(config).eval(), seed=1)


def save(model, folder: Path, corpus: Corpus | None = None) -> Path:
    """A model folder, with the corpus's tokenizer where one is given."""
    model.save_pretrained(folder)
    if corpus is not None:
        corpus.tokenizer().save(folder)
    return folder
