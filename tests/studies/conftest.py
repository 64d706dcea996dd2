import pytest

from small_corpora import language_corpus

# Seconds a run. `dense` and `hash` have two seeds, so that differences are paired.
STUDY = """
title = "Small"
preset = "v3-tiny"
baseline = "dense"
tokens = 390
test_rows = 8
seeds = [0, 1]

[config]
hidden_size = 16
meta_router = false
layer_types = ["routed", "routed", "attention"]

[settings]
length = 16
batch = 4
micro_batch = 2
learning_rate = 0.01
warmup = 1
precision = "fp32"
compile = false
evaluate_every = 2
evaluate_rows = 4
save_every = 1

[variants.dense]
role = "control"
config = { layer_types = ["attention", "attention", "attention"] }

[variants.hash]
role = "control"
title = "random hash"
config = { router = "random", random_fraction = 0.25 }

[variants.learned]
role = "candidate"
seeds = [1]
rank = 2
config = { router = "learned", routing = "hard", light_ffn = false }
"""


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """A small language corpus of bytes."""
    return str(language_corpus(tmp_path_factory.mktemp("corpus"), 200))


@pytest.fixture(scope="session")
def toml(tmp_path_factory):
    """Writes a study file: STUDY with texts replaced and added."""

    def write(*replaced, more="", name="small"):
        text = STUDY
        for before, after in replaced:
            assert before in text
            text = text.replace(before, after)
        path = tmp_path_factory.mktemp("declared") / f"{name}.toml"
        path.write_text(text + more)
        return path

    return write
