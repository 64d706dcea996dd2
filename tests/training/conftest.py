import pytest

from chiar import presets
from chiar.training.loop import train
from chiar.training.settings import TrainSettings
from small_corpora import labelled_corpus, language_corpus


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """A small language corpus of bytes, with all three splits."""
    return language_corpus(tmp_path_factory.mktemp("corpus"), 400, 29)


@pytest.fixture(scope="session")
def labelled(tmp_path_factory, corpus):
    """A small classification corpus with the same tokenizer."""
    return labelled_corpus(tmp_path_factory.mktemp("labelled"), corpus, 60, 20, 20)


@pytest.fixture
def settings(corpus):
    base = {"data": [str(corpus)], "length": 16, "batch": 4, "micro_batch": 2, "steps": 12, "warmup": 3}
    base |= {"learning_rate": 3e-3, "precision": "fp32", "compile": False, "evaluate_rows": 4, "evaluate_every": 6}
    return lambda **changes: TrainSettings(**{**base, "save_every": 4, "log_every": 1, **changes})


@pytest.fixture
def config():
    return lambda name="v3-tiny", **changes: presets.get(name, **{"hidden_size": 16, **changes})


@pytest.fixture
def go(config, settings, tmp_path):
    """Train a small model into a folder of the test: `go("run", steps=4)`, `go("run", config(…), resume=True)`."""

    def run(name, model=None, resume=False, quiet=True, **changes):
        return train(model or config(), settings(**changes), tmp_path / name, resume, "cpu", quiet, extend=True)

    return run
