import pytest

from chiar.data.catalog import build_source
from chiar.data.prepare import prepare
from chiar.data.tokenizers import TokenizerChoice
from small_corpora import WORDS, labelled_corpus, language_corpus


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """A small language corpus of bytes."""
    return str(language_corpus(tmp_path_factory.mktemp("corpus"), 200))


@pytest.fixture(scope="session")
def listops(tmp_path_factory, corpus):
    return str(labelled_corpus(tmp_path_factory.mktemp("listops"), corpus, 60, 10, 10))


@pytest.fixture(scope="session")
def reviews(tmp_path_factory, corpus):
    """In IMDB's layout."""
    folder = tmp_path_factory.mktemp("reviews")
    for split, count in (("train", 40), ("valid", 8), ("test", 8)):
        rows = [f"{i % 2}\t{'bad' if i % 2 else 'good'} {WORDS[i % len(WORDS)]} film {i}" for i in range(count)]
        (folder / f"{split}.tsv").write_text("\n".join(rows) + "\n")
    prepare(build_source(["imdb", str(folder)]), folder / "prepared", TokenizerChoice(like=corpus))
    return str(folder / "prepared")
