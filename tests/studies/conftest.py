from pathlib import Path

import pytest

from commands import run
from small_corpora import labelled_corpus, language_corpus

ROOT = Path(__file__).parents[2]
# Seconds a run. `dense` and `hash` have two seeds, so that differences are paired.
STUDY = """
title = "Small"
preset = "v3-tiny"
baseline = "dense"
tokens = 390
test_rows = 8
seeds = [0, 1]
config = { hidden_size = 16, meta_router = false, layer_types = ["routed", "routed", "attention"] }
settings = { length = 16, batch = 4, micro_batch = 2, learning_rate = 0.01, warmup = 1, precision = "fp32", \
compile = false, evaluate_every = 2, evaluate_rows = 4, save_every = 1 }
[variants]
dense = { role = "control", config = { layer_types = ["attention", "attention", "attention"] } }
hash = { role = "control", title = "random hash", config = { router = "random", random_fraction = 0.25 } }
learned = { role = "candidate", seeds = [1], config = { router = "learned", routing = "hard", light_ffn = false } }
"""


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    """Studies by name lie in ./research/studies."""
    monkeypatch.chdir(ROOT)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """A small language corpus of bytes."""
    return str(language_corpus(tmp_path_factory.mktemp("corpus"), 200))


@pytest.fixture(scope="session")
def listops(tmp_path_factory, corpus):
    return str(labelled_corpus(tmp_path_factory.mktemp("listops"), corpus, 60, 10, 10))


@pytest.fixture(scope="session")
def toml(tmp_path_factory):
    """Writes a study file: STUDY with texts replaced and added."""

    def write(*replaced, more=""):
        text = STUDY
        for before, after in replaced:
            assert before in text
            text = text.replace(before, after)
        path = tmp_path_factory.mktemp("declared") / "small.toml"
        path.write_text(text + more)
        return path

    return write


@pytest.fixture(scope="session")
def study(corpus, toml, tmp_path_factory):
    """The study, done once, one run at a time, and what was said; tests read it and leave it as it is."""
    out = tmp_path_factory.mktemp("study") / "out"
    code, output = run("study", "run", toml(), "--data", corpus, "--out", out, "--device", "cpu")
    assert code == 0, output
    return out, output
