"""The author's files: the same numbers as the author's code, and nothing in a file is ever run."""

import json
import os
import pickle
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from chiar import ChiarForCausalLM, ChiarForSequenceClassification
from chiar.errors import InputError
from chiar.model.author_checkpoint import PUBLISHED_TAU, convert, import_checkpoint, read_checkpoint

GOLDEN = Path(__file__).parent / "golden"
META = json.loads((GOLDEN / "meta.json").read_text())
TAU = 0.79  # midpoint of meta.json's tau_low and tau_high


def content(name):
    return torch.load(GOLDEN / f"{name}.pt", weights_only=True)


def saved(tmp_path, data):
    path = tmp_path / "checkpoint.pt"
    torch.save(data, path)
    return path


@pytest.mark.parametrize("name", META)
def test_logits_entropies_and_routes_equal_the_authors(name, tmp_path):
    assert (META[name]["tau_low"] + META[name]["tau_high"]) / 2 == pytest.approx(TAU)
    import_checkpoint(GOLDEN / f"{name}.pt", tmp_path / "model", tau=TAU)
    model = ChiarForCausalLM.from_pretrained(tmp_path / "model").eval()
    expected = np.load(GOLDEN / f"{name}.npz")
    with torch.no_grad():
        output = model(torch.tensor(expected["ids"]), output_routing=True)
    # fp32 on both sides, four layers: rounding alone is a few 1e-6.
    assert np.abs(output.logits.numpy() - expected["logits"]).max() < 1e-5
    assert model.config.num_attention_heads == META[name]["n_heads"]
    # The golden states are too large for ε to show; test_against_transcription.py has it.
    assert (model.config.entropy_eps, model.config.entropy_dc_weight) == (1e-8, 2.0)
    layers = [int(key.split(".")[1]) for key in expected.files if key.startswith("H.")]
    assert layers == ([] if name == "baseline" else [1, 2])
    for layer in layers:
        trace = output.routing.layers[layer]
        assert np.abs(trace.entropy_BT.numpy() - expected[f"H.{layer}"]).max() < 1e-6
        assert np.array_equal(trace.choice_BT.numpy(), expected[f"route.{layer}"])
        assert np.abs(trace.weights_BTK.numpy() - expected[f"gates.{layer}"]).max() < 1e-6
        assert 0 < trace.choice_BT.float().mean() < 1
    if layers:
        assert np.abs(output.routing.layers[0].gate_BT.numpy() - expected["g"]).max() < 1e-6


def test_mixed_file_without_cfg_keeps_its_heads_apart(tmp_path):
    tensors = content("threshold")["model"]
    tensors["_cls_head_imdb.weight"], tensors["_cls_head_imdb.bias"] = torch.ones(2, 32), torch.zeros(2)
    tensors["_cls_head_listops.weight"] = torch.ones(10, 32)
    imported = import_checkpoint(saved(tmp_path, {"model": tensors}), tmp_path / "model", tau=TAU)
    heads = load_file(tmp_path / "model" / "mixed_heads.safetensors")
    assert set(heads) == {"_cls_head_imdb.weight", "_cls_head_imdb.bias", "_cls_head_listops.weight"}
    assert any("mixed-training heads" in note for note in imported.notes)
    assert ChiarForCausalLM.from_pretrained(tmp_path / "model").config.thresholds == TAU


def test_bare_state_dict_needs_the_routing_only_where_it_is_ambiguous(tmp_path):
    import_checkpoint(saved(tmp_path, content("threshold")["model"]), tmp_path / "threshold", tau=TAU)
    path = saved(tmp_path, content("hard")["model"])
    with pytest.raises(InputError, match="pass --routing soft or hard"):
        import_checkpoint(path, tmp_path / "model")
    assert not (tmp_path / "model").exists()
    import_checkpoint(path, tmp_path / "model", routing="hard")
    assert ChiarForCausalLM.from_pretrained(tmp_path / "model").config.routing == "hard"


@pytest.mark.parametrize("name", ["baseline", "threshold"])
def test_classifier_file(name, tmp_path):
    tensors = {f"backbone.{key}": value for key, value in content(name)["model"].items()}
    tensors["classifier.weight"], tensors["classifier.bias"] = torch.randn(3, 32), torch.randn(3)
    import_checkpoint(saved(tmp_path, {"model": tensors}), tmp_path / "model", tau=TAU, classifier_pool="mean")
    classifier = ChiarForSequenceClassification.from_pretrained(tmp_path / "model").eval()
    import_checkpoint(GOLDEN / f"{name}.pt", tmp_path / "lm", tau=TAU)
    decoder = ChiarForCausalLM.from_pretrained(tmp_path / "lm").eval().model
    ids = torch.tensor(np.load(GOLDEN / f"{name}.npz")["ids"])
    pooled = decoder(ids).last_hidden_state.mean(1)
    expected = pooled @ tensors["classifier.weight"].T + tensors["classifier.bias"]
    # A mean of 24 states and one product in another order of summation.
    assert torch.allclose(classifier(ids).logits, expected, atol=1e-5)


def without(*parts):
    def damage(data):
        data["model"] = {k: v for k, v in data["model"].items() if not any(part in k for part in parts)}

    return damage


def put(name, value):
    def damage(data):
        data["model"][name] = value(data["model"].get(name)) if callable(value) else value

    return damage


def doubled(value, levels=28):
    """A few hundred bytes of a file, and 2^levels values to whoever walks, hashes or prints them."""
    for _ in range(levels):
        value = type(value)((value, value))
    return value


def nested(levels):
    return [nested(levels - 1)] if levels else []


def tell(**cfg):
    return lambda data: data["cfg"].update(cfg)


ENDLESS, ONCE = [], torch.zeros(100_000)
ENDLESS += [ENDLESS, ENDLESS]
TOO_LARGE = "was not opened: it holds more than"
ODD_HEADS = 10000.0 ** -(torch.arange(0, 10, 2) / 10)
ROPE = "layers.{}.attn.rope.inv_freq"
DAMAGES = {
    "missing tensor": (without("layers.2.attn.qkv.bias"), r"missing layers\.2\.attn\.qkv\.bias"),
    "extra tensor": (put("layers.1.surprise", torch.zeros(3)), r"unexpected layers\.1\.surprise"),
    "wrong shape": (put("norm.weight", torch.zeros(64)), r"norm\.weight has shape \(64,\), expected \(32,\)"),
    "missing layer": (without("layers.1."), r"has layers\.3\.\* but no layers\.1\.\*"),
    "far layer": (put("layers.30000000.x", torch.zeros(1)), r"has layers\.30000000\.\* but no layers\.4\.\*"),
    "untied output": (put("lm_head.weight", lambda tied: tied + 1), r"lm_head\.weight differs"),
    "no embedding": (without("token_emb.weight"), r"missing token_emb\.weight"),
    "not a tensor": (put("norm.weight", 3), r"'norm\.weight' is a int"),
    "integers": (put("norm.weight", torch.zeros(32, dtype=torch.long)), r"norm\.weight \(torch\.int64\) is not"),
    "sparse": (put("norm.weight", torch.eye(32).to_sparse()[0]), r"norm\.weight .* is not an ordinary dense tensor"),
    "terabytes": (put("token_emb.weight", torch.zeros(1).expand(10**11, 32)), r"larger than what the file stores"),
    "not a number": (put("norm.weight", torch.full((32,), torch.nan)), r"norm\.weight holds .* not finite"),
    "odd heads": (lambda data: [put(ROPE.format(i), ODD_HEADS)(data) for i in (1, 2, 3)], r"not divide the width"),
    "no rope": (without(".rope."), r"rope\.inv_freq"),
    "other rope": (put(ROPE.format(2), lambda rope: rope / 2), r"2\.attn\.rope\.inv_freq is not RoPE with base"),
    "rope of no dimension": (put(ROPE.format(1), torch.tensor(1.0)), r"shape \(\), expected 1 dimensions"),
    "empty rope": (put(ROPE.format(1), torch.zeros(0)), r"inv_freq of shape \(0,\) is empty"),
    "contradiction": (tell(routing_mode="soft"), r"contradicts 'soft'"),
    "bomb as mode": (tell(routing_mode=doubled([])), TOO_LARGE),
    "bomb unread": (tell(more=doubled([])), TOO_LARGE),
    "bomb as tensor": (put("norm.weight", doubled(())), TOO_LARGE),
    "deep": (tell(more=nested(60)), TOO_LARGE),
    "endless": (tell(more=ENDLESS), TOO_LARGE),
    "many values": (tell(more=[None] * 1_000_001), TOO_LARGE),
    "a list as mode": (tell(routing_mode=[1]), "routing_mode .* is a list, expected one word"),
    "a long mode": (tell(routing_mode="x" * 10_000), "routing_mode .* is a str, expected one word"),
    "a long name": (put("x" * 10_000, torch.zeros(1)), r"invalid name, a str: expected up to 200 letters"),
    "a pair as name": (put((1, 2), torch.zeros(1)), r"invalid name, a tuple"),
    "many wrong": (lambda data: [put(f"x{i}", torch.zeros(9))(data) for i in range(999)], "; and 991 more"),
    "one told often": (lambda data: [put(f"x{i}", ONCE)(data) for i in range(99)], "together larger than"),
    "empty": (lambda data: data.update(model={}), r"no tensors"),
}


@pytest.mark.parametrize(("damage", "message"), [*DAMAGES.values(), (None, "holds a list")], ids=[*DAMAGES, "a list"])
def test_what_does_not_fit_is_named_and_nothing_is_written(damage, message, tmp_path):
    data = content("threshold") if damage else [1, 2]
    if damage:
        damage(data)
    with pytest.raises(InputError, match=message) as refused:
        import_checkpoint(saved(tmp_path, data), tmp_path / "out" / "model", tau=TAU)
    assert len(str(refused.value)) < 1000 and not (tmp_path / "out").exists()


class Payload:
    def __init__(self, marker):
        self.marker = str(marker)

    def __reduce__(self):
        return os.mkdir, (self.marker,)


@pytest.mark.parametrize("form", ["torch zip", "torch legacy", "plain pickle"])
def test_a_hostile_file_is_refused_and_never_runs(form, tmp_path):
    marker, path = tmp_path / "executed", tmp_path / "hostile.pt"
    if form == "plain pickle":
        path.write_bytes(pickle.dumps({"cfg": Payload(marker)}))
    else:
        hostile = {"model": content("threshold")["model"], "cfg": Payload(marker)}
        torch.save(hostile, path, _use_new_zipfile_serialization=form == "torch zip")
    with pytest.raises(InputError, match="not opened"):
        import_checkpoint(path, tmp_path / "model", tau=TAU)
    assert not marker.exists() and not (tmp_path / "model").exists()
    if form == "plain pickle":  # the payload itself works: an ordinary unpickler would have run it
        pickle.loads(path.read_bytes())
        assert marker.is_dir()


def test_a_name_that_takes_for_ever_to_hash_and_a_compressed_file_are_refused(tmp_path):
    key, path = pickle.dumps(doubled((), 60), protocol=2), tmp_path / "crafted.pt"
    with ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", key[:2] + b"}" + key[2:-1] + b"K\x01s.")  # {key: 1}
    with pytest.raises(InputError, match=TOO_LARGE):
        read_checkpoint(path)
    with ZipFile(path, "w", ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(1_000_000))
    with pytest.raises(InputError, match="is compressed"):
        read_checkpoint(path)


@pytest.mark.parametrize("keep", [0.0, 0.01, 0.5, 0.99])
def test_truncated_files_are_refused(keep, tmp_path):
    whole, path = (GOLDEN / "threshold.pt").read_bytes(), tmp_path / "short.pt"
    path.write_bytes(whole[: int(keep * len(whole))])
    with pytest.raises(InputError, match=r"not opened|not a readable checkpoint"):
        read_checkpoint(path)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"routing": "treshold"}, "Did you mean 'threshold'"), ({"classifier_pool": "men"}, "'mean'")],
)
def test_options_a_file_cannot_have(options, message, tmp_path):
    tensors = content("threshold")["model"]
    tensors |= {"classifier.weight": torch.ones(3, 32), "classifier.bias": torch.ones(3)}
    for data in ({"model": tensors}, content("baseline")):
        with pytest.raises(InputError, match=message):
            import_checkpoint(saved(tmp_path, data), tmp_path / "model", TAU, **options)
    with pytest.raises(InputError, match="the file says 'soft'"):
        import_checkpoint(GOLDEN / "soft.pt", tmp_path / "model", routing="hard")
    assert not (tmp_path / "model").exists()
    imported = import_checkpoint(GOLDEN / "baseline.pt", tmp_path / "dense", routing="soft")
    assert imported.notes == ["the file has no routed layers: --tau and --routing are not used."]


def test_existing_folder_and_published_threshold(tmp_path):
    (tmp_path / "mine.txt").write_text("keep")
    with pytest.raises(InputError, match="exists already"):
        import_checkpoint(GOLDEN / "baseline.pt", tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["mine.txt"]
    assert PUBLISHED_TAU == {1024: 0.8954}
    with pytest.raises(InputError, match="none is published for width 32"):
        convert(*read_checkpoint(GOLDEN / "threshold.pt"))
