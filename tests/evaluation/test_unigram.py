"""The entropy of token frequencies, against counting by hand."""

import json
import math
import re
from collections import Counter

import pytest
from evaluated import BYTES, language_corpus, save, tiny_model

from chiar.data.corpora import Text
from chiar.data.prepare import prepare
from chiar.data.shards import Corpus
from chiar.evaluation import unigram
from chiar.evaluation.report import EvaluationReport
from commands import run


def by_hand(ids):
    counts = Counter(ids)
    return -sum(n / len(ids) * math.log(n / len(ids)) for n in counts.values())


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return language_corpus(tmp_path_factory.mktemp("unigram") / "text")


def test_against_counting(corpus):
    for name in corpus.splits:
        split = corpus.split(name)
        targets = split.read(1, split.tokens - 1).tolist()
        # Sums of a few dozen float64 terms.
        assert unigram.unigram_entropy(split, corpus.vocab_size) == pytest.approx(by_hand(targets), rel=1e-12)
        assert unigram.unigram_entropy(split, corpus.vocab_size, 9) == pytest.approx(by_hand(targets[:9]), rel=1e-12)


def test_in_pieces_over_several_shards(tmp_path, corpus, monkeypatch):
    whole = unigram.unigram_entropy(corpus.split("train"), corpus.vocab_size)
    prepare(Text([corpus.folder.parent]), tmp_path / "shards", BYTES, shard_tokens=100)
    split = Corpus.open(tmp_path / "shards").split("train")
    monkeypatch.setattr(unigram, "CHUNK", 37)
    assert unigram.unigram_entropy(split, corpus.vocab_size) == whole


def test_reports_show_it(tmp_path, corpus):
    model = save(tiny_model(), tmp_path / "model", corpus)
    _, output = run("eval", model, "--data", corpus.folder, "--length", 16, "--rows", 4, "--json", tmp_path / "r.json")
    stored = json.loads((tmp_path / "r.json").read_text())
    found = stored["scores"]["unigram_entropy"]
    assert found == pytest.approx(by_hand(corpus.split("test").read(1, 64).tolist()), rel=1e-12)
    assert re.search(rf"unigram entropy of the same tokens, nats +{found:.4f}", output)
    assert f"{found:.4f} nats (unigram entropy)" in run("compare", tmp_path / "r.json")[1]
    del stored["scores"]["unigram_entropy"]
    assert EvaluationReport.from_dict(stored).scores.unigram_entropy is None
