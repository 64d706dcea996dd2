"""`chiar nulltest` as a user runs it, on tiny models, with its numbers computed again from the model's own trace."""

import json
import random
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import pytest
import scipy.stats
import torch

from chiar.data.catalog import build_source
from chiar.data.corpora import Text
from chiar.data.prepare import prepare
from chiar.data.tokenizers import TokenizerChoice
from chiar.kernels.white_noise import white_noise_entropy
from chiar.model.modeling import ChiarForCausalLM
from chiar.nulltest.words import CONTENT, FUNCTION
from commands import run
from helpers import randomise, small_config

LENGTH = 16
WORDS = ["the", "cat", "of", "Anna", "saw", "42", ",", "light", "and", "it", "dark", "was", "entropy", "."]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    for split, seed in (("train", 0), ("valid", 1)):
        text = " ".join(random.Random(seed).choices(WORDS, k=600))
        (folder / f"{split}.txt").write_text(text + "\n", encoding="utf-8")
    return prepare(Text([folder]), folder / "corpus", TokenizerChoice("bpe", vocab_size=280))


@pytest.fixture(scope="module")
def save(tmp_path_factory, corpus):
    def write(preset="v3-tiny", **changes):
        config = small_config(preset, **{"vocab_size": corpus.vocab_size, "gate_pool": "causal", **changes})
        folder = tmp_path_factory.mktemp("model")
        randomise(ChiarForCausalLM(config).eval(), seed=1).save_pretrained(folder)
        corpus.tokenizer().save(folder)
        return folder

    return write


def measured(model, corpus, *options):
    code, output = run("nulltest", model, "--data", corpus.folder, "--tokens", 320, "--json", "-", *options)
    assert code == 0, output
    return json.loads(output)


def test_tables_json_and_pictures(tmp_path, save, corpus):
    model = save()
    arguments = ("nulltest", model, "--data", corpus.folder, "--tokens", 320, "--flips", 8)
    code, output = run(*arguments, "--json", tmp_path / "null.json", "--out", tmp_path / "out")
    assert code == 0
    for shown in (
        "white noise of width 16",
        "token identity",
        "determiner *",
        "without a capital",
        "dark → filter",
        "KLT",
    ):
        assert shown in output
    report = json.loads((tmp_path / "null.json").read_text())
    assert report == json.loads((tmp_path / "out" / "nulltest.json").read_text())
    assert report["format"] == "chiar-nulltest/1" and report["split"] == "valid"
    assert (report["tokens"], report["rows"], report["length"]) == (320, 20, LENGTH)
    pictures = {path.name: ElementTree.parse(path) for path in (tmp_path / "out").glob("*.svg")}
    assert set(pictures) == {"entropy.svg", "information.svg", "flips.svg", "compaction.svg", "classes.svg"}
    polygons = pictures["entropy.svg"].findall(".//{http://www.w3.org/2000/svg}polygon")
    assert len(polygons) == len(report["layers"])
    assert len(report["flips"]) == 16
    for again in (("--json", tmp_path / "null.json"), ("--out", tmp_path / "out")):
        code, output = run(*arguments, *again)
        assert code == 2 and "exists already" in output


def test_numbers_are_those_of_the_trace(save, corpus):
    folder = save()
    report = measured(folder, corpus, "--flips", 0)
    model = ChiarForCausalLM.from_pretrained(folder).eval()
    split = corpus.split("valid")
    step = (split.tokens - 1) // LENGTH
    starts = [row * step // 20 * LENGTH for row in range(20)]
    ids = torch.tensor([split.read(start, LENGTH).tolist() for start in starts])
    with torch.no_grad():
        trace = model(ids, output_routing=True).routing
    mean, deviation = white_noise_entropy(16)
    assert (report["null_mean"], report["null_deviation"]) == pytest.approx((mean, deviation))
    assert len(report["layers"]) == len(trace.layers)
    for layer, seen in zip(report["layers"], trace.layers, strict=True):
        entropy = seen.entropy_BT.flatten().double()
        own = layer["whiteness"][0]
        assert own["basis"] == "dct"
        assert own["mean"] == pytest.approx(float(entropy.mean()), abs=1e-6)
        assert own["effect"] == pytest.approx((float(entropy.mean()) - mean) / deviation, abs=1e-3)
        assert sum(row["tokens"] for row in layer["classes"]) == 320
        weighted = sum(row["tokens"] * row["mean"] for row in layer["classes"]) / 320
        assert weighted == pytest.approx(float(entropy.mean()), abs=1e-6)
        means = []
        for names in (FUNCTION, CONTENT):
            rows = [row for row in layer["classes"] if row["name"] in names]
            means.append(sum(r["tokens"] * r["mean"] for r in rows) / sum(r["tokens"] for r in rows))
        assert layer["contrasts"][0]["difference"] == pytest.approx((means[0] - means[1]) / deviation, abs=1e-6)
        if seen.kind == "routed":
            light = seen.choice_BT == 0
            assert layer["dark"] == pytest.approx(1 - float(light.double().mean()))
            shares = sum(row["tokens"] * row["light"] for row in layer["classes"]) / 320
            assert shares == pytest.approx(float(light.double().mean()))
            route = layer["signals"][0]
            assert route["name"] == "route" and route["dark"] == layer["dark"]
            joint = scipy.stats.contingency.crosstab(light.flatten().numpy(), ids.flatten().numpy()).count
            nats = sum(map(scipy.stats.entropy, (joint.sum(0), joint.sum(1)))) - scipy.stats.entropy(joint.flatten())
            assert route["token"]["bits"] == pytest.approx(nats / 0.6931471805599453)
            # The entropy router's route is its own H, cut.
            dct = layer["signals"][1]
            assert dct["token"]["bits"] == pytest.approx(route["token"]["bits"], abs=0.02)


@pytest.mark.parametrize(
    ("preset", "changes", "flips"),
    [
        ("baseline-tiny", {}, False),
        ("v1-tiny", {}, True),
        ("v3-tiny", {"router": "learned", "routing": "soft"}, False),
        ("v3-tiny", {"router": "learned", "routing": "hard"}, True),
        ("v3-tiny", {"router": "static"}, True),
        ("v3-tiny", {"thresholds": 0.01}, True),  # everything dark
        ("v3-tiny", {"basis": "random"}, True),
        ("v3-tiny", {"entropy_eps": 1e-8, "entropy_dc_weight": 2.0}, True),
        ("v3-tiny", {"gate_pool": "batch"}, True),
    ],
)  # fmt: skip
def test_every_kind_of_model(save, corpus, preset, changes, flips):
    report = measured(save(preset, **changes), corpus, "--flips", 4)
    assert bool(report["flips"]) == (report["worth"] is not None) == flips
    assert flips == (not any("no routes were flipped" in remark for remark in report["remarks"]))
    assert report["null_exact"] == ("entropy_eps" not in changes)
    names = [row["basis"] for row in report["layers"][0]["whiteness"]]
    assert names[0] == changes.get("basis", "dct") and set(names) == {"dct", "identity", "random"}
    assert any("gate_pool 'batch'" in remark for remark in report["remarks"]) == (changes.get("gate_pool") == "batch")
    if preset == "baseline-tiny":
        assert {layer["dark"] for layer in report["layers"]} == {None}
    if "thresholds" in changes:
        routed = [layer for layer in report["layers"] if layer["kind"] == "routed"]
        assert all(layer["dark"] == 1 and layer["signals"][0]["token"]["bits"] == 0 for layer in routed)
        assert all(0.4 < layer["signals"][1]["dark"] < 0.6 for layer in routed)


def test_the_same_seed_gives_the_same_numbers(save, corpus):
    model = save()
    first, again, other = (measured(model, corpus, "--flips", 4, "--seed", seed) for seed in (1, 1, 2))
    assert first == again
    assert first["flips"] != other["flips"]
    assert first["layers"][0]["whiteness"][0]["mean"] == other["layers"][0]["whiteness"][0]["mean"]


def test_a_run_is_announced(tmp_path, save, corpus):
    save().rename(tmp_path / "best")
    code, output = run("nulltest", tmp_path, "--data", corpus.folder, "--tokens", 64, "--flips", 0)
    assert code == 0 and "its best model is tested" in output
    assert "few for a width of 16" in output


def test_what_cannot_be_tested_is_said(tmp_path, save, corpus):
    model = save()
    source = build_source(["listops"], depth=3, arguments=3, examples=(9, 3, 3))
    labelled = prepare(source, tmp_path / "ops", TokenizerChoice(like=corpus.folder))
    for data, options, sentence in (
        (labelled.folder, (), "classification corpus"),
        (corpus.folder, ("--tokens", 20), "fewer than two rows of 16"),
        (corpus.folder, ("--length", 5000), "split 'valid', which has"),
        (corpus.folder, ("--split", "test"), "Allowed: train, valid"),
        (corpus.folder, ("--device", "tpu"), "unknown device"),
        (tmp_path, (), "manifest.json"),
    ):
        code, output = run("nulltest", model, "--data", data, *options)
        assert code == 2 and sentence in output, output
    code, output = run("nulltest", save("v1-tiny"), "--data", corpus.folder, "--length", 20)
    assert code == 2 and "16 learned positions" in output


def test_help_imports_nothing_heavy():
    heavy = "{'torch', 'transformers', 'numpy', 'rich'}"
    code = f"import sys, chiar.nulltest.cli; assert not {heavy} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
