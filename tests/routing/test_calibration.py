"""Calibrated thresholds give the splits they report, and carry over to other models."""

import json

import numpy as np
import pytest
import torch

from chiar import ChiarForCausalLM, presets
from chiar.errors import InputError
from chiar.model.load import load_config, load_model
from chiar.routing.calibration import calibrate, choose_thresholds, layer_report, noise_entropies, read_thresholds
from commands import run
from helpers import small_config

TEXT = "\n\n".join(f"{n}: the overwhelming consensus of many scientists is that carbon matters." for n in range(200))
SHORT = ["--steps", 2, "--batch", 2, "--micro-batch", 2, "--length", 16, "--no-compile", "--set", "precision=fp32"]


def stream(rows=24, length=32, seed=0, vocabulary=257):
    ids = torch.randint(0, vocabulary, (rows, length), generator=torch.Generator().manual_seed(seed))
    return [{"input_ids": part} for part in ids.split(8)]


def make(preset="v3-tiny", **changes):
    """Larger weights, so that entropies differ between layers and tokens."""
    model = ChiarForCausalLM(presets.get(preset, **changes))
    torch.manual_seed(1)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


def test_thresholds_are_the_papers_percentiles():
    """On a ramp the p-th percentile is p."""
    ramp, rules = np.linspace(0, 1, 100_001), ((2, None, [0.33, 0.67]), (1, None, [0.5]), (1, 0.2, [0.8]))
    for boundaries, fraction, expected in (*rules, (2, 0.2, [0.4, 0.8])):
        assert choose_thresholds(ramp, boundaries, fraction) == pytest.approx(expected, abs=1e-9)


def test_report_has_percentiles_and_distance_from_noise():
    """Embeddings that are pure tones have H far below noise."""
    noise = noise_entropies(64, 0.0, 1.0)
    assert layer_report(None, noise, [0.9], noise).distance_from_noise == 0
    model = ChiarForCausalLM(presets.get("baseline-tiny", basis="identity"))
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(torch.eye(257, 32) + torch.eye(257, 32).roll(1, 1))
    (low,) = calibrate(model, [{"input_ids": torch.arange(32).repeat(8, 1)}], rule="embeddings").layers
    # Two equal coefficients of 32: H = log 2 / log 32 = 0.2.
    assert low.percentiles == {p: pytest.approx(0.2, abs=1e-4) for p in (5, 33, 50, 67, 95)}
    assert low.thresholds == pytest.approx([0.2], abs=1e-4)
    assert low.shift_from_noise < -5 and low.distance_from_noise == 1


SPLITS = [("embeddings", None, {}), ("layers", None, {}), ("layers", 0.8, {"keys": "routed"})]
SPLITS += [("layers", 0.25, {"norm_position": "pre", "norm": "rmsnorm"})]


@pytest.mark.parametrize(("rule", "fraction", "changes"), SPLITS)
def test_each_layer_gets_the_reported_split(rule, fraction, changes):
    model = make(gate_pool="causal", **changes)
    found = calibrate(model, stream(), rule, fraction)
    assert model.config.thresholds is None
    assert [layer.layer for layer in found.layers] == [None, 1, 2][rule == "layers" :]
    model.model.set_thresholds(found.thresholds(2))
    with torch.no_grad():
        routing = model(torch.cat([batch["input_ids"] for batch in stream()]), output_routing=True).routing
    for layer in found.layers[-2:]:
        # One token of 768 is 0.0013, and quantiles are interpolated.
        assert routing.attention_fraction(layer.layer) == pytest.approx(layer.split[-1], abs=0.005)
        assert fraction is None or layer.split[-1] == pytest.approx(fraction, abs=0.02)


@pytest.mark.parametrize("rule", ["layers", "embeddings"])
def test_padding_is_not_counted(rule):
    model, (batch,) = make("v2-tiny"), stream(rows=8)
    mask = torch.cat([torch.ones(8, 32), torch.zeros(8, 9)], dim=1).long()
    padded = {"input_ids": torch.cat([batch["input_ids"], torch.full((8, 9), 7)], dim=1), "attention_mask": mask}
    plain, again = calibrate(model, [batch], rule), calibrate(model, [padded], rule)
    assert {r.tokens for r in again.layers} == {r.tokens for r in plain.layers} == {256}
    # Another length changes the order of sums.
    assert again.thresholds(2) == pytest.approx(plain.thresholds(2), abs=1e-4)


def test_three_operators_get_two_thresholds_and_convergence_is_reported():
    found = calibrate(make("v1-tiny", router="entropy"), stream())
    for layer in found.layers:
        assert layer.thresholds[0] < layer.thresholds[1] and len(layer.split) == 3
        assert all(0.25 < share < 0.42 for share in layer.split)
    model = make(gate_pool="causal", thresholds=0.0).train()
    assert not calibrate(model, stream(), passes=1).converged
    found = calibrate(model, stream())
    assert found.converged and 1 < found.passes <= 6 and model.model.training


TWO_STACKS = {"layer_types": ["attention", "dark", "dark", "attention", "dark", "attention"]}


@pytest.mark.parametrize("router", ["rise", "predictive", "forecast", "learned", "spectral"])
def test_stacks_are_calibrated_to_any_share(router):
    model = make("v5-tiny", router=router, **TWO_STACKS)
    before = model.model.router_state.threshold_L.clone()
    found = calibrate(model, stream(), fraction=0.3, tolerance=0.001)
    assert torch.equal(model.model.router_state.threshold_L, before)
    assert [layer.layer for layer in found.layers] == [1, 4] and found.converged
    assert (found.noise_mean is None) == (found.layers[0].shift_from_noise is None) == (router != "spectral")
    model.model.set_thresholds(found.thresholds(2))
    with torch.no_grad():
        routing = model(torch.cat([batch["input_ids"] for batch in stream()]), output_routing=True).routing
    for layer in found.layers:
        assert layer.split[-1] == pytest.approx(0.3, abs=0.005)
        assert routing.attention_fraction(layer.layer) == pytest.approx(layer.split[-1], abs=0.005)


def test_stacks_default_to_their_own_share_and_routers_without_threshold_are_rejected():
    model = make("v5-tiny", target_fraction=[0.1, 0.6], **TWO_STACKS)
    found = calibrate(model, stream(), tolerance=0.001)
    assert [layer.split[-1] for layer in found.layers] == pytest.approx([0.1, 0.6], abs=0.005)
    assert found.score == "rise of the predictive entropy"
    for router, message in (
        ("space", "'space' has no threshold to calibrate. Those that have: learned, rise"),
        ("random", "its share is random_fraction"),
    ):
        with pytest.raises(InputError, match=message):
            calibrate(make("v5-tiny", router=router), stream(), fraction=0.3)
    with pytest.raises(InputError, match="use rule 'layers'"):
        calibrate(model, stream(), "embeddings")


def test_bad_input():
    outside = [{"input_ids": torch.tensor([[1, 400]])}]
    for preset, batches, arguments, message in (
        ("v3-tiny", stream(), {"rule": "layer"}, "Did you mean 'layers'"),
        ("v3-tiny", stream(), {"fraction": 1.0}, "strictly between 0 and 1"),
        ("baseline-tiny", stream(), {"rule": "layers"}, "no routed layers"),
        ("v1-tiny", stream(), {"rule": "layers"}, "only the entropy router"),
        ("v3-tiny", iter(stream()), {}, "re-iterable"),
        ("v3-tiny", [], {}, "empty"),
        ("v3-tiny", outside, {"rule": "embeddings"}, "outside the vocabulary"),
        ("v3-tiny", outside, {"rule": "layers"}, "outside the vocabulary"),
    ):
        with pytest.raises(InputError, match=message):
            calibrate(ChiarForCausalLM(presets.get(preset)), batches, **arguments)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A corpus, a baseline trained for two steps, and its calibration."""
    place = tmp_path_factory.mktemp("calibration")
    (place / "text.txt").write_text(TEXT)
    measured = ["calibrate", place / "baseline", "--rule", "embeddings", "--length", 16, "--data", place / "corpus"]
    for command in (
        ["data", "prepare", place / "text.txt", "--out", place / "corpus", "--tokenizer", "bytes"],
        ["train", "baseline-tiny", "--data", place / "corpus", "--out", place / "baseline", *SHORT],
        [*measured, "--json", place / "tau.json"],
    ):
        code, output = run(*command)
        assert code == 0, output
    assert "exists already" in run(*measured, "--json", place / "tau.json")[1]
    assert run(*measured, "--json", "-")[1] == (place / "tau.json").read_text() + "\n"
    return place


def test_training_takes_the_threshold_of_a_baseline(place):
    (tau,) = json.loads((place / "tau.json").read_text())["layers"][0]["thresholds"]
    command = ["train", "v3-tiny", "--data", place / "corpus", "--out", place / "v3", *SHORT]
    code, output = run(*command, "--thresholds", place / "tau.json")
    assert code == 0, output
    assert load_config(str(place / "v3" / "best")).thresholds == [tau, tau]


def test_rows_default_to_the_trained_length_and_nothing_is_written_without_out(place, tmp_path):
    (tmp_path / "text.txt").write_text("ten bytes " * 4)
    command = ["calibrate", place / "baseline", "--rule", "embeddings", "--text-file", tmp_path / "text.txt"]
    code, output = run(*command)
    assert code == 0 and "nothing was written: --out FOLDER" in output and " 32 " in output, "two rows of 16 tokens"
    assert "fewer than one row of 256" in run(command[0], "v3-tiny", *command[2:])[1]


def test_calibrated_stack_is_saved_and_loaded(place, tmp_path):
    command = ["calibrate", "v5-tiny", "--data", place / "corpus", "--length", 32, "--fraction", 0.35]
    code, output = run(*command, "--out", tmp_path / "new")
    assert code == 0 and "predictive entropy" in output and " 2–3 " in output and "noise" not in output
    assert "note: at another share than in training the loss may rise, even if more tokens pass the stack." in output
    for other in (command[:-2], ["calibrate", "v3-tiny", *command[2:]]):
        assert "the loss may rise" not in run(*other)[1], "a stack at its own share, routed layers"
    again, _ = load_model(str(tmp_path / "new"))
    (layer,) = json.loads((tmp_path / "new" / "calibration.json").read_text())["layers"]
    assert again.model.router_state.threshold_L.tolist() == layer["thresholds"] != [0.0]
    assert again.config.target_fraction == 0.35
    with pytest.raises(InputError, match="sets its threshold in training"):
        read_thresholds(tmp_path / "new" / "calibration.json", again.config)


def test_layer_thresholds_need_as_many_layers_and_unfit_models_are_rejected(place, tmp_path):
    layers = tmp_path / "layers.json"
    run("calibrate", "v3-tiny", "--data", place / "corpus", "--length", 16, "--json", layers)
    stored = [layer["thresholds"][0] for layer in json.loads(layers.read_text())["layers"]]
    assert read_thresholds(layers, load_config("v3-tiny")) == stored
    with pytest.raises(InputError, match="for 2 routed layers, the model has 3"):
        read_thresholds(layers, small_config(num_hidden_layers=5, hidden_size=32, vocab_size=257))
    for model, more, message in (
        ("v3-tiny", ["--set", "hidden_size=64"], "differ in hidden_size (32, 64)"),
        ("v3-tiny", ["--set", "thresholds=0.5"], "twice"),
        ("v3-tiny", ["--set", "routing=soft"], "has no thresholds"),
        ("baseline-tiny", [], "no routed layers"),
    ):
        arguments = ["--out", tmp_path / "run", "--thresholds", place / "tau.json", *SHORT, *more]
        code, output = run("train", model, "--data", place / "corpus", *arguments)
        assert code == 2 and message in output and not (tmp_path / "run").exists()
    for text in ("", "{}", "[1]", '{"format": "chiar-calibration/1"}', "{broken"):
        (tmp_path / "tau.json").write_text(text)
        with pytest.raises(InputError, match="not a calibration"):
            read_thresholds(tmp_path / "tau.json", load_config("v3-tiny"))
