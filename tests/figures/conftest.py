import pytest

from chiar import presets
from chiar.training.loop import train
from chiar.training.settings import TrainSettings
from commands import run as chiar
from small_corpora import labelled_corpus, language_corpus


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    return language_corpus(tmp_path_factory.mktemp("corpus"), 120)


@pytest.fixture(scope="session")
def labelled(tmp_path_factory, corpus):
    return labelled_corpus(tmp_path_factory.mktemp("labelled"), corpus, 20, 9, 5)


@pytest.fixture(scope="session")
def mixed_run(tmp_path_factory, corpus, labelled):
    """A real run of a tiny v3 on a text and labelled documents."""
    out = tmp_path_factory.mktemp("runs") / "mixed"
    settings = TrainSettings(
        data=[str(corpus), str(labelled)], mixing="added", added_share=0.5, length=16, batch=8, micro_batch=4, steps=4,
        warmup=1, precision="fp32", compile=False, evaluate_rows=4, evaluate_every=2, save_every=4, log_every=1,
    )  # fmt: skip
    train(presets.get("v3-tiny", hidden_size=16), settings, out, device="cpu", quiet=True)
    return out


@pytest.fixture(scope="session")
def nulltest(tmp_path_factory, mixed_run, corpus):
    """The folder `chiar nulltest --out` writes."""
    out = tmp_path_factory.mktemp("null") / "out"
    code, output = chiar("nulltest", mixed_run, "--data", corpus, "--tokens", 320, "--flips", 4, "--out", out)
    assert code == 0, output
    return out
