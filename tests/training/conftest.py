import json

import pytest

from chiar import presets
from chiar.data.catalog import build_source
from chiar.data.prepare import prepare
from chiar.data.tokenizer_choice import TokenizerChoice
from chiar.training.settings import TrainSettings

WORDS = ["light", "dark", "token", "filter", "attention", "entropy", "layer", "gate", "route", "model", "noise"]


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """A small language corpus of bytes, with all three splits."""
    folder = tmp_path_factory.mktemp("corpus")
    lines = [f"{i} " + " ".join(WORDS[(i * k) % len(WORDS)] for k in range(1, 30)) for i in range(400)]
    (folder / "text.jsonl").write_text("\n".join(json.dumps({"text": line}) for line in lines))
    prepare(build_source([str(folder / "text.jsonl")]), folder / "prepared", TokenizerChoice(kind="bytes"))
    return folder / "prepared"


@pytest.fixture(scope="session")
def labelled(tmp_path_factory, corpus):
    """A small classification corpus with the same tokenizer."""
    folder = tmp_path_factory.mktemp("labelled")
    source = build_source(["listops"], depth=3, arguments=3, examples=(60, 20, 20))
    prepare(source, folder / "prepared", TokenizerChoice(like=corpus))
    return folder / "prepared"


@pytest.fixture
def settings(corpus):
    def make(**changes):
        base = {"data": [str(corpus)], "length": 16, "batch": 8, "micro_batch": 2, "steps": 12, "warmup": 3}
        base |= {"learning_rate": 3e-3, "precision": "fp32", "compile": False, "evaluate_rows": 4}
        base |= {"evaluate_every": 6, "save_every": 4, "log_every": 1}
        return TrainSettings(**{**base, **changes})

    return make


@pytest.fixture
def config():
    def make(name="v3-tiny", **changes):
        return presets.get(name, **{"hidden_size": 16, **changes})

    return make
