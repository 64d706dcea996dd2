"""Small corpora, prepared as a user would."""

import json

from chiar.data.catalog import build_source
from chiar.data.prepare import prepare
from chiar.data.tokenizers import TokenizerChoice

WORDS = ["light", "dark", "token", "filter", "attention", "entropy", "layer", "gate", "route", "model", "noise"]


def language_corpus(folder, documents, words=19):
    """Bytes, with all three splits."""
    lines = [f"{i} " + " ".join(WORDS[(i * k) % len(WORDS)] for k in range(1, words + 1)) for i in range(documents)]
    (folder / "text.jsonl").write_text("\n".join(json.dumps({"text": line}) for line in lines))
    prepare(build_source([str(folder / "text.jsonl")]), folder / "prepared", TokenizerChoice(kind="bytes"))
    return folder / "prepared"


def labelled_corpus(folder, like, *examples):
    """ListOps with the tokenizer of another corpus: so many in train, valid and test."""
    source = build_source(["listops"], depth=3, arguments=3, examples=examples)
    prepare(source, folder / "prepared", TokenizerChoice(like=like))
    return folder / "prepared"
