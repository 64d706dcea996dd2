"""Thresholds from a baseline's calibration into another model's training, through files."""

import json

import pytest

from chiar.errors import InputError
from chiar.model.load import load_config
from chiar.routing.calibration_file import read_thresholds
from commands import run
from helpers import small_config

TEXT = "\n\n".join(f"{n}: the overwhelming consensus of many scientists is that carbon matters." for n in range(200))
SHORT = ["--steps", 2, "--batch", 2, "--micro-batch", 2, "--length", 16, "--no-compile", "--set", "precision=fp32"]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A corpus, a baseline trained for two steps, and its calibration."""
    place = tmp_path_factory.mktemp("calibration")
    (place / "text.txt").write_text(TEXT)
    run("data", "prepare", place / "text.txt", "--out", place / "corpus", "--tokenizer", "bytes")
    run("train", "baseline-tiny", "--data", place / "corpus", "--out", place / "baseline", *SHORT)
    code, output = run(
        "calibrate", place / "baseline", "--data", place / "corpus", "--rule", "embeddings", "--length", 16,
        "--json", place / "tau.json",
    )  # fmt: skip
    assert code == 0, output
    return place


def test_a_run_is_trained_with_the_baselines_threshold(place):
    stored = json.loads((place / "tau.json").read_text())
    tau = stored["layers"][0]["thresholds"][0]
    code, output = run(
        "train",
        "v3-tiny",
        "--data",
        place / "corpus",
        "--out",
        place / "v3",
        "--thresholds",
        place / "tau.json",
        *SHORT,
    )
    assert code == 0, output
    assert load_config(str(place / "v3" / "best")).thresholds == [tau, tau]
    arguments = ["--data", place / "corpus", "--rule", "embeddings", "--json", place / "tau.json"]
    assert "exists already" in run("calibrate", place / "baseline", *arguments)[1]
    _, printed = run("calibrate", place / "baseline", *arguments[:-1], "-", "--length", 16)
    assert json.loads(printed) == stored


def test_the_corpus_is_read_as_its_text_would_be(place, tmp_path):
    (tmp_path / "valid.u16").write_bytes((place / "corpus" / "valid.000.bin").read_bytes())
    arguments = ["calibrate", place / "baseline", "--rule", "embeddings", "--length", 16]
    _, corpus = run(*arguments, "--data", place / "corpus")
    _, tokens = run(*arguments, "--token-file", tmp_path / "valid.u16")
    assert corpus == tokens


def test_thresholds_of_layers_go_to_as_many_layers(place, tmp_path):
    run("calibrate", "v3-tiny", "--data", place / "corpus", "--length", 16, "--json", tmp_path / "layers.json")
    stored = json.loads((tmp_path / "layers.json").read_text())
    config = load_config("v3-tiny")
    assert read_thresholds(tmp_path / "layers.json", config) == [layer["thresholds"][0] for layer in stored["layers"]]
    with pytest.raises(InputError, match="for 2 routed layers, the model has 3"):
        read_thresholds(tmp_path / "layers.json", small_config(num_hidden_layers=5, hidden_size=32, vocab_size=257))


@pytest.mark.parametrize(
    ("model", "more", "message"),
    [
        ("v3-tiny", ["--set", "hidden_size=64"], "differ in hidden_size (32, 64)"),
        ("v3-tiny", ["--set", "thresholds=0.5"], "twice"),
        ("v3-tiny", ["--set", "routing=soft"], "has no thresholds"),
        ("baseline-tiny", [], "no routed layers"),
    ],
)
def test_thresholds_that_do_not_carry(place, tmp_path, model, more, message):
    arguments = ["--out", tmp_path / "run", "--thresholds", place / "tau.json", *SHORT, *more]
    code, output = run("train", model, "--data", place / "corpus", *arguments)
    assert code == 2 and message in output
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"format": "chiar-calibration/1"}', "{broken"])
def test_other_files(tmp_path, text):
    (tmp_path / "tau.json").write_text(text)
    with pytest.raises(InputError, match=r"not a (readable )?calibration"):
        read_thresholds(tmp_path / "tau.json", load_config("v3-tiny"))
