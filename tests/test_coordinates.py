"""Spectral coordinates: the same function with rotated weights, there and back, and what has none."""

import json

import pytest
import torch

from chiar.config import ChiarConfig
from chiar.errors import InputError
from chiar.kernels.transform import basis_matrix
from chiar.model.coordinates import to_feature_coordinates, to_spectral_coordinates
from chiar.model.heads import read_heads, save_heads
from chiar.model.modeling import ChiarForCausalLM, ChiarForSequenceClassification
from commands import run
from helpers import padding_mask, random_model, randomise, router_options, small_config, token_ids

THREE = {"operators": ["spectral", "rbf", "attention"]}
LEARNED = {"router": "learned"}
OPTIONS = {
    "v3-causal-gate": {"gate_pool": "causal"},
    "v2": {"preset": "v2-tiny"},
    "v1": {"preset": "v1-tiny"},
    "baseline": {"preset": "baseline-tiny"},
    "hard-selected": {**LEARNED, "routing": "hard", "hard_estimator": "selected"},
    "soft-3": {**LEARNED, **THREE, "routing": "soft"},
    "random-position-3": {"router": "random", "random_key": "position", **THREE},
    "static": {"router": "static"},
    "entropy-3": {**THREE, "thresholds": [[0.7, 0.8], [0.7, 0.8]]},
    "keys-routed-3": {**THREE, "keys": "routed", "preset": "v1-tiny"},
    "light-ffn-off": {"light_ffn": False, "meta_router": False},
    "random-basis": {"basis": "random", "router_seed": 4},
    "authors-entropy": {"entropy_eps": 1e-8, "entropy_dc_weight": 2.0},
    "odd-width": {"hidden_size": 15, "num_attention_heads": 3, "positions": "learned"},
    "untied": {"tie_word_embeddings": False},
    "filter-gamma-off": {"filter_gamma": False},
    "embedding-norm": {"embedding_norm": True},
    "quantile": router_options("quantile"),
    "learned-scaled": router_options("learned scaled"),
}


def pre_norm(preset="v3-tiny", **fields) -> ChiarConfig:
    return small_config(preset, **{"norm": "rmsnorm", "norm_position": "pre", **fields})


def light_gamma(model, value=1.3):
    """The filter's norms with one γ for all features, as conversion needs it."""
    with torch.no_grad():
        for layer in model.model.layers:
            if "spectral" in layer.norms and layer.norms["spectral"].weight is not None:
                layer.norms["spectral"].weight.fill_(value)
    return model


def make(dtype=torch.float64, seed=3, **fields):
    return light_gamma(random_model(pre_norm(**fields), seed)).to(dtype)


def basis_of(config):
    return basis_matrix(config.basis, config.hidden_size, config.router_seed, torch.float64)


def observe(model, **inputs):
    """The output, and the gradient of the loss in the embedded tokens."""
    embedded = []
    watch = model.model.embed_tokens.register_forward_hook(lambda module, inputs, output: embedded.append(output))
    output = model(**inputs, output_routing=True)
    watch.remove()
    (gradient,) = torch.autograd.grad(output.loss, embedded)
    return output, gradient


def tolerance(config, dtype):
    """Four parts compute in fp32 in a float64 model too: RoPE's tables (the same in both), and these three."""
    rounded = config.meta_router or config.router == "learned" or "rbf" in config.operators
    return 1e-10 if dtype == torch.float64 and not rounded else 1e-5


def assert_same(model, converted, turn_DD, **inputs):
    (ours, gradient), (theirs, turned) = observe(model, **inputs), observe(converted, **inputs)

    def close(a, b):
        # Relative to the largest entry: weights of size 1 make gradients of any size.
        bound = tolerance(model.config, model.dtype)
        torch.testing.assert_close(a.double(), b.double(), atol=bound * max(1.0, float(b.detach().abs().max())), rtol=0)

    close(theirs.logits, ours.logits)
    close(turned, gradient.double() @ turn_DD.T)
    for a, b in zip(theirs.routing.layers, ours.routing.layers, strict=True):
        close(a.entropy_BT, b.entropy_BT)
        assert torch.equal(a.choice_BT, b.choice_BT)
        if b.gate_BT is not None:
            close(a.gate_BT, b.gate_BT)


@pytest.mark.parametrize("option", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_the_same_function_there_and_back(option, dtype):
    model = make(dtype, **option)
    config, before = model.config, {name: value.clone() for name, value in model.state_dict().items()}
    converted = to_spectral_coordinates(model)
    assert converted.config.basis == "identity" and not dict(converted.model.basis.named_buffers())
    assert converted.config.layer_thresholds() == config.layer_thresholds() and converted.dtype == dtype
    ids, mask = token_ids(3, 10), padding_mask("left", 3, 10)
    inputs = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    assert_same(model, converted, basis_of(config), **inputs)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items()), "the original changed"
    if dtype == torch.float64:
        back = to_feature_coordinates(converted, config.basis, config.router_seed)
        assert (back.config.basis, back.config.router_seed) == (config.basis, config.router_seed)
        assert_same(model, back, torch.eye(config.hidden_size).double(), **inputs)


@pytest.mark.parametrize("constant", [True, False], ids=["one-gamma", "many-gammas"])
def test_classifiers(constant):
    config = pre_norm("v2-tiny", num_labels=3)
    model = light_gamma(randomise(ChiarForSequenceClassification(config).double()).eval())
    if constant:
        model.model.norm.weight.data.fill_(0.7)
    converted = to_spectral_coordinates(model)
    assert isinstance(converted, ChiarForSequenceClassification)
    labels, mask = torch.tensor([0, 2, 1]), padding_mask("right", 3, 10)
    assert_same(model, converted, basis_of(config), input_ids=token_ids(3, 10), attention_mask=mask, labels=labels)


def test_tied_output_weights_stay_tied_under_one_final_gamma():
    model, ids = make(preset="v2-tiny"), token_ids()
    assert not to_spectral_coordinates(model).config.tie_word_embeddings
    model.model.norm.weight.data.fill_(0.7)
    converted = to_spectral_coordinates(model)
    assert converted.config.tie_word_embeddings
    assert converted.lm_head.weight is converted.model.embed_tokens.weight
    assert_same(model, converted, basis_of(model.config), input_ids=ids, labels=ids)


def test_models_without_spectral_coordinates():
    for message, fields in (
        ("it is post-norm", {"norm_position": "post"}),
        ("LayerNorm subtracts the mean", {"norm": "layernorm"}),
        ("in spectral coordinates already", {"basis": "identity"}),
        ("a rotation mixes features", {"temporal_everywhere": True}),
        ("a rotation mixes features", {"operators": ["temporal", "attention"]}),
    ):
        with pytest.raises(InputError, match=message):
            to_spectral_coordinates(make(**fields))
    with pytest.raises(InputError, match="has a γ that differs between features"):
        to_spectral_coordinates(random_model(pre_norm()))


def test_the_command_writes_folders_that_open(tmp_path):
    folder, out, ids = tmp_path / "model", tmp_path / "out", token_ids()
    make(torch.float32, preset="v2-tiny").save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    save_heads(folder, {"reviews": torch.nn.Linear(16, 2)})
    for arguments, message in (
        (["--out", folder], "exists already"),
        (["--out", out, "--coordinates", "features"], "only a model with basis='identity'"),
        (["--out", out, "--routing", "soft"], "--routing is for a .pt file"),
    ):
        code, output = run("convert", folder, *arguments)
        assert code == 2 and message in output and not out.exists()

    out.mkdir()
    (out / "mine.txt").write_text("not a model's folder")
    assert "remove it first" in run("convert", folder, "--out", out, "--overwrite")[1]
    (out / "mine.txt").rename(out / "chiar_shim.py")  # now it looks like one
    assert "add --overwrite" in run("convert", folder, "--out", out)[1]
    code, output = run("convert", folder, "--out", out, "--overwrite")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out"]
    assert code == 0 and "basis identity, output projection a matrix of its own" in output, output
    assert json.loads((out / "config.json").read_text())["basis"] == "identity"
    assert (out / "tokenizer.json").read_text() == "{}"
    model, converted = (ChiarForCausalLM.from_pretrained(f).eval() for f in (folder, out))
    assert_same(model, converted, basis_of(model.config), input_ids=ids, labels=ids)
    states = [m.model(ids).last_hidden_state for m in (model, converted)]
    before, after = (read_heads(f)["reviews"](s) for f, s in zip((folder, out), states, strict=True))
    # Rotated fp32 weights: rounding of a few layers, twice over on the way back.
    torch.testing.assert_close(after, before, atol=1e-5, rtol=0)
    code, output = run("convert", out, "--out", tmp_path / "back", "--coordinates", "features")
    assert code == 0 and "basis dct" in output
    back = ChiarForCausalLM.from_pretrained(tmp_path / "back").eval()
    torch.testing.assert_close(back(ids).logits, model(ids).logits, atol=1e-4, rtol=0)
