"""Tiny corpora and models for the tests of evaluation."""

import random
from pathlib import Path

from chiar.data.catalog import build_source
from chiar.data.prepare import prepare
from chiar.data.shards import Corpus
from chiar.data.tokenizers import TokenizerChoice
from chiar.model.modeling import ChiarForCausalLM
from helpers import randomise, small_config

BYTES = TokenizerChoice("bytes")
LENGTH = 16


def sentence(seed: int, words: int = 8) -> str:
    return " ".join(random.Random(seed).choices(["light", "dark", "naïve", "漢", "of", "42", "."], k=words))


def make_corpus(folder: Path, name: str = "text", tokenizer: TokenizerChoice = BYTES) -> Corpus:
    """Text, whose test split has about 190 bytes, no multiple of any length; or CoLA, sentences of 1 to 9 words."""
    texts = ["\n\n".join(f"{sentence(n)}\n{sentence(n + 50, 3)}" for n in range(count)) for count in (30, 3, 3)]
    files = dict(zip(("train.txt", "valid.txt", "test.txt"), texts, strict=True))
    if name == "cola":
        rows = [f"x\t{int(n % 3 > 0)}\t\t{sentence(n, 1 + n % 9)}" for n in range(23)]
        files = {"train.tsv": "\n".join(rows[:8]), "dev.tsv": "\n".join(rows)}
    folder.mkdir()
    for file, text in files.items():
        (folder / file).write_text(f"{text}\n", encoding="utf-8")
    return prepare(build_source([name, str(folder)]), folder / "corpus", tokenizer)


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
