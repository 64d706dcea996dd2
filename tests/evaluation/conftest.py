"""Corpora and models that no test changes."""

import pytest
from evaluated import class_corpus, language_corpus, save, tiny_model

from chiar.model.modeling import ChiarForSequenceClassification


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    return language_corpus(tmp_path_factory.mktemp("evaluation") / "text")


@pytest.fixture(scope="session")
def split(corpus):
    return corpus.split("test")


@pytest.fixture(scope="session")
def classes(tmp_path_factory):
    return class_corpus(tmp_path_factory.mktemp("evaluation") / "cola")


@pytest.fixture(scope="session")
def language(tmp_path_factory, corpus):
    return str(save(tiny_model(), tmp_path_factory.mktemp("evaluation") / "language", corpus))


@pytest.fixture(scope="session")
def classifier(tmp_path_factory):
    model = tiny_model(kind=ChiarForSequenceClassification, num_labels=2)
    return str(save(model, tmp_path_factory.mktemp("evaluation") / "classifier"))
