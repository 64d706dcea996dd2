"""Corpora and models that no test changes."""

import pytest

from chiar.model.modeling import ChiarForSequenceClassification
from small_corpora import measured_corpus, save, tiny_model


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    return measured_corpus(tmp_path_factory.mktemp("evaluation") / "text")


@pytest.fixture(scope="session")
def classes(tmp_path_factory):
    return measured_corpus(tmp_path_factory.mktemp("evaluation") / "cola", "cola")


@pytest.fixture(scope="session")
def language(tmp_path_factory, corpus):
    return str(save(tiny_model(), tmp_path_factory.mktemp("evaluation") / "language", corpus.tokenizer()))


@pytest.fixture(scope="session")
def two_classes():
    return tiny_model(kind=ChiarForSequenceClassification, num_labels=2)


@pytest.fixture(scope="session")
def classifier(tmp_path_factory, two_classes):
    return str(save(two_classes, tmp_path_factory.mktemp("evaluation") / "classifier"))
