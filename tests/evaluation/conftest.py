"""Corpora and models that no test changes."""

import pytest
from evaluated import make_corpus, save, tiny_model

from chiar.model.modeling import ChiarForSequenceClassification


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    return make_corpus(tmp_path_factory.mktemp("evaluation") / "text")


@pytest.fixture(scope="session")
def classes(tmp_path_factory):
    return make_corpus(tmp_path_factory.mktemp("evaluation") / "cola", "cola")


@pytest.fixture(scope="session")
def language(tmp_path_factory, corpus):
    return str(save(tiny_model(), tmp_path_factory.mktemp("evaluation") / "language", corpus))


@pytest.fixture(scope="session")
def two_classes():
    return tiny_model(kind=ChiarForSequenceClassification, num_labels=2)


@pytest.fixture(scope="session")
def classifier(tmp_path_factory, two_classes):
    return str(save(two_classes, tmp_path_factory.mktemp("evaluation") / "classifier"))
