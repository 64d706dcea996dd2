import json

import pytest

from chiar.data.catalog import build_source
from chiar.data.prepare import prepare
from chiar.data.tokenizer_choice import TokenizerChoice

WORDS = ["light", "dark", "token", "filter", "attention", "entropy", "layer", "gate", "route", "model", "noise"]


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """A small language corpus of bytes."""
    folder = tmp_path_factory.mktemp("corpus")
    lines = [f"{i} " + " ".join(WORDS[(i * k) % len(WORDS)] for k in range(1, 20)) for i in range(200)]
    (folder / "text.jsonl").write_text("\n".join(json.dumps({"text": line}) for line in lines))
    prepare(build_source([str(folder / "text.jsonl")]), folder / "prepared", TokenizerChoice(kind="bytes"))
    return str(folder / "prepared")


@pytest.fixture(scope="session")
def listops(tmp_path_factory, corpus):
    folder = tmp_path_factory.mktemp("listops")
    source = build_source(["listops"], depth=3, arguments=3, examples=(60, 10, 10))
    prepare(source, folder / "prepared", TokenizerChoice(like=corpus))
    return str(folder / "prepared")


@pytest.fixture(scope="session")
def reviews(tmp_path_factory, corpus):
    """In IMDB's layout."""
    folder = tmp_path_factory.mktemp("reviews")
    for split, count in (("train", 40), ("valid", 8), ("test", 8)):
        rows = [f"{i % 2}\t{'bad' if i % 2 else 'good'} {WORDS[i % len(WORDS)]} film {i}" for i in range(count)]
        (folder / f"{split}.tsv").write_text("\n".join(rows) + "\n")
    prepare(build_source(["imdb", str(folder)]), folder / "prepared", TokenizerChoice(like=corpus))
    return str(folder / "prepared")
