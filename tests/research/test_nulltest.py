"""The null test of tiny models, against numbers from the model's own trace and flips by full passes."""

import json
import random
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from typer.testing import CliRunner

from chiar.data.catalog import build_source
from chiar.data.own_files import Text
from chiar.data.prepare import prepare
from chiar.data.tokenizers import TokenizerChoice
from chiar.errors import InputError
from chiar.kernels.white_noise import white_noise_entropy
from chiar.model.modeling import ChiarForCausalLM
from helpers import random_model, randomise, small_config, token_ids
from research.figures import FIGURES, RESULTS
from research.nulltest import nulltest
from research.nulltest.__main__ import app, verdict_on
from research.nulltest.pictures import draw_entropy, draw_flips
from research.nulltest.report import read_report
from research.nulltest.sample import flip_routes

LENGTH, ROWS, T = 16, 6, 10
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


def measured(model, corpus, **options):
    options = {"tokens": 320, "flips": 4, "shuffles": 3, "device": "cpu", **options}
    return json.loads(nulltest(str(model), corpus.folder, **options).to_json())


def command(*arguments):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    return result.exit_code, str(result.exception) if isinstance(result.exception, InputError) else result.output


def test_the_command_writes_numbers_and_pictures_that_can_be_read_back(tmp_path, save, corpus):
    save().rename(tmp_path / "best")
    arguments = (tmp_path, "--data", corpus.folder, "--tokens", 320, "--flips", 8, "--shuffles", 3)
    code, output = command(*arguments, "--json", tmp_path / "null.json", "--out", tmp_path / "out")
    assert code == 0, output
    assert all(shown in output for shown in ("white noise of width 16", "rank r", "its best model is tested"))
    lines = output.splitlines()
    assert lines[-1].startswith("verdict: H is ") and not any(line.startswith("verdict") for line in lines[:-1])
    table = lines[lines.index(f"{tmp_path} is a training run: its best model is tested.") + 1 :]
    assert max(len(line.rstrip()) for line in table if not line.startswith(("note: ", "verdict: "))) <= 100
    report = json.loads((tmp_path / "null.json").read_text())
    assert report == json.loads((tmp_path / "out" / "nulltest.json").read_text())
    assert {path.stem for path in (tmp_path / "out").glob("*.svg")} == {"entropy", "flips"}
    again = read_report(tmp_path / "out")
    assert json.loads(again.to_json()) == report
    drawn = draw_flips(again).axes
    assert len(drawn) == 3
    for axes in drawn:  # error bars are fully visible
        ends = [y for bars in axes.collections for segment in bars.get_segments() for y in segment[:, 1]]
        assert ends and axes.get_ylim()[0] <= min(ends) and max(ends) <= axes.get_ylim()[1]
    for option, path in (("--json", "null.json"), ("--out", "out")):
        assert "exists already" in command(*arguments, option, tmp_path / path)[1]
    for damage in ("{", "7", *map(json.dumps, ({**report, "format": "other"}, {**report, "layers": [7]}))):
        (tmp_path / "damaged.json").write_text(damage)
        with pytest.raises(InputError, match="is not a null test"):
            read_report(tmp_path / "damaged.json")


def test_numbers_agree_with_the_trace(save, corpus):
    folder = save()
    report = measured(folder, corpus, flips=0)
    model, split = ChiarForCausalLM.from_pretrained(folder).eval(), corpus.split("valid")
    step = (split.tokens - 1) // LENGTH
    ids = torch.tensor([split.read(row * step // 20 * LENGTH, LENGTH).tolist() for row in range(20)])
    with torch.no_grad():
        trace = model(ids, output_routing=True).routing
    mean, deviation = white_noise_entropy(16)
    assert (report["null_mean"], report["null_deviation"]) == pytest.approx((mean, deviation))
    for layer, seen in zip(report["layers"], trace.layers, strict=True):
        entropy, own = float(seen.entropy_BT.double().mean()), layer["whiteness"][0]
        # Entropies are fp32, from batches of another size.
        assert own["basis"] == "dct" and own["mean"] == pytest.approx(entropy, abs=1e-6)
        assert own["effect"] == pytest.approx((entropy - mean) / deviation, abs=1e-3)
        assert sum(row["tokens"] for row in layer["classes"]) == 320
        assert sum(row["tokens"] * row["mean"] for row in layer["classes"]) / 320 == pytest.approx(entropy, abs=1e-6)
        if seen.kind == "routed":
            light, route = seen.choice_BT == 0, layer["signals"][0]
            assert layer["dark"] == pytest.approx(1 - float(light.double().mean()))
            assert route["name"] == "route" and route["dark"] == layer["dark"]


# The thresholds make everything dark.
KINDS = [("baseline-tiny", {}), ("v1-tiny", {}), ("v3-tiny", {"router": "static"}), ("v3-tiny", {"thresholds": 0.01})]
KINDS += [("v3-tiny", {"router": "learned", "routing": "soft"}), ("v3-tiny", {"basis": "random", "gate_pool": "batch"})]
KINDS += [("v3-tiny", {"entropy_eps": 1e-8, "entropy_dc_weight": 2.0, "operators": ["temporal", "attention"]})]


@pytest.mark.parametrize(("preset", "changes"), KINDS)
def test_every_kind_of_model(save, corpus, preset, changes):
    report, flips = measured(save(preset, **changes), corpus), preset != "baseline-tiny" and "routing" not in changes
    assert bool(report["flips"]) == (report["worth"] is not None) == flips
    assert flips == (not any("no routes were flipped" in remark for remark in report["remarks"]))
    assert report["null_exact"] == ("entropy_eps" not in changes)
    names = [row["basis"] for row in report["layers"][0]["whiteness"]]
    assert names[0] == changes.get("basis", "dct") and set(names) == {"dct", "identity", "random"}
    assert any("gate_pool 'batch'" in remark for remark in report["remarks"]) == ("gate_pool" in changes)
    if "thresholds" in changes:
        routed = [layer for layer in report["layers"] if layer["kind"] == "routed"]
        assert all(layer["dark"] == 1 and layer["signals"][0]["token"]["bits"] == 0 for layer in routed)


def test_a_seed_fixes_the_numbers_and_untestable_input_gets_one_sentence(tmp_path, save, corpus):
    model, source = save(), build_source(["listops"], depth=3, arguments=3, examples=(9, 3, 3))
    first, again, other = (measured(model, corpus, seed=seed) for seed in (1, 1, 2))
    assert first == again and first["flips"] != other["flips"]
    labelled = prepare(source, tmp_path / "ops", TokenizerChoice(like=corpus.folder))
    for data, options, sentence in (
        (labelled.folder, (), "classification corpus"),
        (corpus.folder, ("--tokens", 20), "fewer than two rows of 16"),
        (corpus.folder, ("--length", 5000), "split 'valid', which has"),
        (corpus.folder, ("--split", "test"), "Allowed: train, valid"),
        (tmp_path, (), "manifest.json"),
    ):
        assert sentence in command(model, "--data", data, *options)[1]
    assert "16 learned positions" in command(save("v1-tiny"), "--data", corpus.folder, "--length", 20)[1]


FLIPPED = {
    "v3": {"gate_pool": "batch"},
    "v1": {"preset": "v1-tiny"},
    "random": {"router": "random"},
    "keys-routed": {"keys": "routed", "light_ffn": False},
    "pre": {"norm": "rmsnorm", "norm_position": "pre"},
}


def flipped(flips=12, **option):
    model, ids = random_model(small_config(**{"preset": "v3-tiny", **option}), 3), token_ids(ROWS, T + 1, seed=4)
    found = flip_routes(model, lambda rows: ids.numpy()[rows], ROWS, flips, 3, 0)
    assert len(found) == flips * len(model.config.routed_layers)
    return model, ids, found


@pytest.mark.parametrize("option", FLIPPED.values(), ids=FLIPPED.keys())
def test_flips_agree_with_full_passes(option):
    model, ids, found = flipped(**option)
    routed, dark = model.config.routed_layers, model.config.operators.index("attention")
    # With gate_pool "batch" the gate sees all rows of a pass, so the same three rows must share a pass.
    rows_of = [flip.row for flip in found if flip.layer == routed[0]]
    for number, flip in enumerate(found):
        first, b = 3 * (number // (3 * len(routed))), number % 3
        rows = ids[rows_of[first : first + 3]]
        trace = model(rows[:, :-1], output_routing=True).routing
        routes = {layer: trace.layers[layer].choice_BT.clone() for layer in routed}
        before = int(routes[flip.layer][b, flip.position])
        assert rows_of[first + b] == flip.row and flip.was_dark == (before == dark)
        assert flip.entropy == pytest.approx(float(trace.layers[flip.layer].entropy_BT[b, flip.position]))
        plain = model(rows[:, :-1]).logits[b]
        routes[flip.layer][b, flip.position] = 0 if before == dark else dark
        changed = model(rows[:, :-1], forced_routes=routes).logits[b]
        losses = [F.cross_entropy(logits, rows[b, 1:], reduction="none") for logits in (plain, changed)]
        difference = (losses[1] - losses[0]).detach()
        # The null test computes losses from fp32 logits.
        assert flip.own == pytest.approx(float(difference[flip.position]), abs=2e-5)
        assert flip.later == pytest.approx(float(difference[flip.position + 1 :].sum()), abs=1e-4)
        assert float(difference[: flip.position].abs().sum()) == pytest.approx(0, abs=1e-9)


def test_the_verdict():
    report = read_report(RESULTS / "reproduction-16m" / "threshold")
    noise = "H is no more than noise (farthest in layer 3: -0.16 ± 0.09 σ)"
    assert verdict_on(report) == f"{noise}; what attention adds to a token does not depend on it (rank r +0.02 ± 0.06)."
    assert verdict_on(replace(report, worth=None)) == f"{noise}; what a route is worth was not measured."
    falling = replace(report.worth, spearman=-0.3, correlation_error=0.1)
    assert "falls with it (rank r -0.30 ± 0.10)" in verdict_on(replace(report, worth=falling))
    first = report.layers[0]
    apart = replace(first, whiteness=[replace(first.whiteness[0], effect=-4.0), *first.whiteness[1:]])
    assert verdict_on(replace(report, layers=[apart])).startswith(
        "H is not that of white noise (farthest in layer 1: -4.00"
    )


def test_recorded_results_are_drawn(tmp_path):
    assert len(draw_entropy(read_report(RESULTS / "reproduction-16m" / "sandwich")).axes[0].get_xticks()) == 4
    # Four contenders, a bound for each, and the baseline.
    assert [len(axes.lines) for axes in FIGURES["speed"]().axes] == [9, 9]
    assert {path.stem for path in (RESULTS.parent / "figures").glob("*.svg")} == set(FIGURES)
