"""The models as transformers models: saving, loading, resizing, losses, outputs, classification."""

import json
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers import PreTrainedTokenizerFast as FastTokenizer

from chiar import ChiarConfig, ChiarForCausalLM, ChiarForSequenceClassification, ChiarModel
from chiar.model.load import open_weights
from helpers import LENGTHS, ROWS, TOKENS, gradients, refused, small_config

VOCABULARY, WIDTH, LAYERS = 257, 32, 4
every_preset = pytest.mark.parametrize("preset", ["baseline-tiny", "v1-tiny", "v2-tiny", "v3-tiny", "v4-tiny"])
SOFT = {"router": "learned", "routing": "soft"}
# Two ways to sum the same fp32 products; logits reach 25, where fp32 resolves 2e-6.
ROUNDING = 2e-4
# Relative to a tensor's largest gradient: fp32 sums over tokens and heads in another order.
GRADIENT_ROUNDING = 1e-4


def logits(model, ids, **kwargs):
    with torch.no_grad():
        return model(ids, **kwargs).logits


def assert_same_logits(found, expected):
    """Weights that were loaded lie at other addresses than those that were made: a CPU may then block its sums another
    way, which moves the last bits."""
    torch.testing.assert_close(found, expected, atol=ROUNDING, rtol=0)


def assert_same_state(found, expected):
    """Copied, so to the bit."""
    found, expected = found.state_dict(), expected.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def assert_kept(model, original, dtype):
    """Basis and thresholds, which are computed and never saved, in this precision, and the same rounded to fp32."""
    derived = dict(original.named_buffers()).keys() - original.state_dict().keys()
    assert any("basis" in name for name in derived)
    for name in derived:
        assert model.get_buffer(name).dtype == dtype
        assert torch.equal(model.get_buffer(name).float(), original.get_buffer(name))


class TestSaving:
    def test_round_trip_of_every_option(self, lively, ids, tmp_path, option):
        model = lively(option)
        model.save_pretrained(tmp_path)
        implementation = option.get("attn_implementation")
        loaded = ChiarForCausalLM.from_pretrained(tmp_path, attn_implementation=implementation).eval()
        assert loaded.config.to_diff_dict() == model.config.to_diff_dict()
        assert_same_state(loaded, model)
        assert_kept(loaded, model, torch.float32)
        assert_same_logits(logits(loaded, ids), logits(model, ids))

    @every_preset
    def test_auto_classes_precision_and_the_tied_matrix(self, lively, ids, tmp_path, preset):
        model = lively({"preset": preset})
        model.save_pretrained(tmp_path)
        sizes = {name: value.numel() for name, value in load_file(tmp_path / "model.safetensors").items()}
        assert len(sizes.keys() & {"lm_head.weight", "model.embed_tokens.weight"}) == 1, "stored once"
        saved = ("omega_Dm", "threshold_L", "updates_L")
        buffers = [value.numel() for name, value in model.named_buffers() if name.endswith(saved)]
        assert sum(sizes.values()) == sum(p.numel() for p in model.parameters()) + sum(buffers)

        assert type(AutoConfig.from_pretrained(tmp_path)) is ChiarConfig
        assert type(AutoModelForCausalLM.from_config(model.config)) is ChiarForCausalLM
        kinds = {AutoModelForSequenceClassification: ChiarForSequenceClassification, AutoModel: ChiarModel}
        for auto, kind in {**kinds, AutoModelForCausalLM: ChiarForCausalLM}.items():
            loaded = auto.from_pretrained(tmp_path)
            assert type(loaded) is kind
            assert_same_state(loaded.base_model, model.model)
        assert loaded.lm_head.weight is loaded.model.embed_tokens.weight

        half = ChiarForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
        assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
        assert_kept(half, model, torch.float32)
        assert logits(half, ids).dtype == torch.bfloat16 and logits(half, ids).isfinite().all()

    def test_thresholds_set_later_survive_exactly(self, lively, ids, tmp_path):
        model, values = lively({"preset": "v1-tiny", "router": "entropy"}), [[0.71, 0.8123456789012345], [0.75, 0.75]]
        before = logits(model, ids)
        model.model.set_thresholds(values)
        assert (logits(model, ids) - before).abs().max() > ROUNDING
        model.save_pretrained(tmp_path)
        loaded = ChiarForCausalLM.from_pretrained(tmp_path).eval()
        assert loaded.config.thresholds == values
        assert_kept(loaded, model, torch.float32)

    @pytest.mark.parametrize("cast", ["to", "half", "bfloat16", "double", "there and back"])
    def test_casting_keeps_basis_and_thresholds(self, lively, cast):
        casts = {"to": lambda model: model.to(torch.bfloat16), "there and back": lambda model: model.half().float()}
        model = casts.get(cast, lambda model: getattr(model, cast)())(lively({}, thresholds=0.8954))
        assert float(torch.tensor(0.8954).bfloat16()) != float(torch.tensor(0.8954)), "bfloat16 would blur it"
        assert_kept(model, lively({}, thresholds=0.8954), torch.float64 if cast == "double" else torch.float32)

    def test_a_folder_of_an_older_version_opens_without_a_word(self, tmp_path):
        """Its router state held more, of experiments that are gone, and its layer types had another name."""
        model = ChiarForCausalLM(small_config("v4-tiny"))
        model.save_pretrained(tmp_path)
        file = tmp_path / "model.safetensors"
        gone = {"model.router_state.spread_L": torch.ones(2), "model.router_state.progress": torch.zeros(())}
        save_file({**load_file(file), **gone}, file, metadata={"format": "pt"})
        config = json.loads((tmp_path / "config.json").read_text())
        config["layer_types"] = config.pop("chiar_layer_types")
        (tmp_path / "config.json").write_text(json.dumps(config))
        loaded, told = ChiarForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
        assert not any(told.values()) and loaded.config.layer_types == model.config.layer_types
        assert_same_state(loaded, model)


FRESH_PROCESS = """
import sys
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

folder, again = sys.argv[1:]
assert AutoTokenizer.from_pretrained(folder + "/lm")("dark").input_ids == [2]
assert not any(name.split(".")[0] == "chiar" for name in sys.modules)
config = AutoConfig.from_pretrained(folder + "/lm", trust_remote_code=True)
assert "chiar.config" in sys.modules
ids = torch.load(folder + "/ids.pt")
model = AutoModelForCausalLM.from_pretrained(folder + "/lm", trust_remote_code=True).eval()
decoder = AutoModel.from_pretrained(folder + "/lm", trust_remote_code=True).eval()
classifier = AutoModelForSequenceClassification.from_pretrained(folder + "/classifier", trust_remote_code=True).eval()
with torch.no_grad():
    found = [model(ids).logits, decoder(ids).last_hidden_state, classifier(ids).logits]
model.save_pretrained(again)
torch.save([config.to_dict()["layer_types"], *found], folder + "/found.pt")
"""


def test_a_model_stays_whole_when_its_file_shrinks(lively, ids, tmp_path):
    """Weights mapped into memory, as transformers does by itself, would end the process by a bus error."""
    (model := lively({})).save_pretrained(tmp_path)
    loaded = open_weights(ChiarForCausalLM, str(tmp_path)).eval()
    os.truncate(tmp_path / "model.safetensors", 0)
    assert_same_logits(logits(loaded, ids), logits(model, ids))


def test_a_process_that_never_imported_chiar(lively, tmp_path):
    """It opens the tokenizer without us, the models through the shim, and saves what opens here."""
    ids, model = torch.arange(12).view(2, 6), lively({})
    ChiarForCausalLM.register_for_auto_class("AutoModelForCausalLM")  # which would copy the source
    classifier = lively({}, ChiarForSequenceClassification, num_labels=3)
    model.save_pretrained(tmp_path / "lm")
    words = Tokenizer(WordLevel({"<unk>": 0, "light": 1, "dark": 2}, unk_token="<unk>"))
    FastTokenizer(tokenizer_object=words, unk_token="<unk>").save_pretrained(tmp_path / "lm")
    classifier.save_pretrained(tmp_path / "classifier")
    torch.save(ids, tmp_path / "ids.pt")
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home"), "OMP_NUM_THREADS": "1"}
    environment.pop("HF_MODULES_CACHE", None)
    command = [sys.executable, "-c", FRESH_PROCESS, str(tmp_path), str(tmp_path / "again")]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    layers, *found = torch.load(tmp_path / "found.pt")
    assert layers == model.config.layer_types
    assert_same_logits(found, [logits(model, ids), model.model(ids).last_hidden_state, logits(classifier, ids)])
    for folder in (tmp_path / "lm", tmp_path / "again"):
        assert [path.name for path in folder.rglob("*.py")] == ["chiar_shim.py"]
        lines = (folder / "chiar_shim.py").read_text().splitlines()
        code = [line for line in lines if line.strip() and not line.lstrip().startswith("#")]
        assert len(code) <= 3 and all(line.startswith("from chiar.") for line in code)
    assert_same_state(ChiarForCausalLM.from_pretrained(tmp_path / "again"), model)


@pytest.mark.parametrize("size", [300, 200])
def test_resizing(lively, ids, tmp_path, size):
    model = lively({})
    ids = ids % 200
    before, rows = logits(model, ids), model.get_input_embeddings().weight.detach().clone()
    model.resize_token_embeddings(size)
    kept = min(size, VOCABULARY)
    assert model.config.vocab_size == size
    assert model.get_input_embeddings().weight.shape == (size, WIDTH)
    assert model.lm_head.weight is model.get_input_embeddings().weight
    assert torch.equal(model.get_input_embeddings().weight[:kept], rows[:kept])
    after = logits(model, ids)
    # The output matrix has another number of rows, so the product may be blocked another way.
    assert_same_logits(after[..., :kept], before[..., :kept])
    assert logits(model, torch.tensor([[size - 1]])).isfinite().all()
    refused(rf"token id {size} is outside the vocabulary 0\.\.{size - 1}", model, torch.tensor([[size]]))
    model.save_pretrained(tmp_path)
    loaded = ChiarForCausalLM.from_pretrained(tmp_path).eval()
    assert loaded.lm_head.weight is loaded.get_input_embeddings().weight
    assert_same_logits(logits(loaded, ids), after)


class TestLoss:
    def test_every_option_by_hand_and_from_embeddings(self, lively, option, ids):
        """The loss is the shifted cross-entropy of labels not ignored; embeddings give what their tokens give."""
        model = lively(option)
        labels = ids.clone()
        labels[:, :4], labels[1, 7] = -100, -100
        found = model(ids, labels=labels)
        log_p = found.logits.detach().double().log_softmax(-1)
        by_hand = -log_p[:, :-1].gather(2, ids[:, 1:, None])[..., 0][labels[:, 1:] != -100].mean()
        # A mean of 17 fp32 terms of size 10 against the same in fp64.
        assert found.loss.item() == pytest.approx(by_hand.item(), abs=1e-5)
        embeddings = model.get_input_embeddings()(ids)
        if model.config.router == "random" and model.config.random_key == "token":
            refused("random_key='token' hashes token ids", model, inputs_embeds=embeddings)
        elif model.config.router == "space":
            refused("router='space' reads bytes: pass input_ids", model, inputs_embeds=embeddings)
        else:
            assert_same_logits(logits(model, None, inputs_embeds=embeddings), found.logits.detach())

    def test_the_collapse_regulariser_and_accumulation(self, lively, ids):
        """transformers' Trainer hands the token count of all micro-batches to the forward pass and leaves the division
        to the model."""
        plain, model = lively(SOFT)(ids, labels=ids), lively(SOFT, collapse_regulariser=0.5)
        regularised = model.train()(ids, labels=ids)
        assert plain.routing_loss is None
        assert regularised.routing_loss < 0
        torch.testing.assert_close(regularised.loss, plain.loss + regularised.routing_loss)
        labels = ROWS * (TOKENS - 1)
        share = model(ids, labels=ids, num_items_in_batch=4 * labels).loss
        torch.testing.assert_close(4 * share, regularised.loss)
        evaluated = model.eval()(ids, labels=ids)
        torch.testing.assert_close(evaluated.loss, plain.loss, msg="exp(loss) must be a perplexity")

    def test_gradient_checkpointing_changes_nothing(self, lively, option, ids, left_mask):
        """Nor with other options of torch's, or with a cache asked for, as trainers do: the second pass of a checkpoint
        must not add to the cache again, and a reentrant one would lose the gradients of the first layer."""
        results = []
        for options, extra in ((None, {}), ({"preserve_rng_state": False}, {"use_cache": True})):
            model = lively(option).train()
            if options:
                model.gradient_checkpointing_enable(options)
                assert model.model.gradient_checkpointing
            loss = model(ids, labels=ids, attention_mask=left_mask, **extra).loss
            loss.backward()
            results.append((loss.detach(), gradients(model)))
        torch.testing.assert_close(results[1], results[0])

    def test_reentrant_checkpointing_is_refused(self, lively):
        for model in (lively({}), lively({}).model):
            refused("use_reentrant", model.gradient_checkpointing_enable, {"use_reentrant": True})

    @pytest.mark.parametrize("keys", ["all", "routed"])
    @pytest.mark.parametrize("preset", ["v1-tiny", "v3-tiny"])
    def test_eager_gradients_are_those_of_sdpa(self, lively, ids, left_mask, preset, keys):
        found, labels = {}, ids.masked_fill(left_mask == 0, -100)
        for implementation in ("sdpa", "eager"):
            model = lively({"preset": preset}, keys=keys, attn_implementation=implementation)
            model(ids, labels=labels, attention_mask=left_mask).loss.backward()
            found[implementation] = gradients(model)
        assert found["sdpa"].keys() == found["eager"].keys()
        for name, expected in found["sdpa"].items():
            difference = (expected - found["eager"][name]).abs().max()
            assert difference <= GRADIENT_ROUNDING * max(1.0, expected.abs().max()), name


class TestOutputs:
    def test_hidden_states(self, lively, option, ids):
        model = lively(option)
        output = model(ids, output_hidden_states=True)
        states = output.hidden_states
        assert [state.shape for state in states] == [(ROWS, TOKENS, WIDTH)] * (LAYERS + 1)
        torch.testing.assert_close(model.model(ids).last_hidden_state, states[-1])
        torch.testing.assert_close(model.lm_head(states[-1]), output.logits)
        embedded = model.get_input_embeddings()(ids)
        if model.config.positions == "learned":
            embedded = embedded + model.model.embed_positions(torch.arange(TOKENS))
        if model.config.embedding_norm:
            embedded = embedded / embedded.pow(2).mean(-1, keepdim=True).sqrt()
        torch.testing.assert_close(states[0], embedded)

    @pytest.mark.parametrize("keys", ["all", "routed"])
    @every_preset
    def test_attentions(self, lively, ids, left_mask, preset, keys):
        model = lively({"preset": preset}, keys=keys, attn_implementation="eager")
        attentions = model(ids, attention_mask=left_mask, output_attentions=True).attentions
        assert [weights is None for weights in attentions] == [kind == "spectral" for kind in model.config.layer_types]
        for weights in filter(lambda weights: weights is not None, attentions):
            assert weights.shape == (ROWS, model.config.num_attention_heads, TOKENS, TOKENS)
            # A softmax row in fp32.
            assert torch.allclose(weights.sum(-1), torch.ones(weights.shape[:-1]), atol=1e-6, rtol=0)
            assert (weights.triu(1) == 0).all()
            padding = ~left_mask.bool()[:, None, None, :] & ~torch.eye(TOKENS, dtype=torch.bool)
            assert (weights[padding.expand_as(weights)] == 0).all()

    def test_forms_of_output(self, lively, ids):
        model = lively({})
        assert set(model(ids).keys()) == {"logits"}, "nothing extra unless asked"
        named = model(ids, labels=ids, output_hidden_states=True)
        loss, found, states = model(ids, labels=ids, output_hidden_states=True, return_dict=False)
        torch.testing.assert_close((loss, found), (named.loss, named.logits))
        assert len(states) == LAYERS + 1
        decoded = model.model(ids, return_dict=False)
        assert isinstance(decoded, tuple) and len(decoded) == 1
        torch.testing.assert_close(decoded[0], named.hidden_states[-1])
        # The output projection multiplies fewer rows, so sums may run in another order.
        assert_same_logits(logits(model, ids, logits_to_keep=2), logits(model, ids)[:, -2:])


class TestClassification:
    def build(self, lively, pool, labels=3):
        return lively({}, ChiarForSequenceClassification, classifier_pool=pool, num_labels=labels)

    @pytest.mark.parametrize("pool", ["last", "mean"])
    def test_pools_and_padding(self, lively, ids, left_mask, pool):
        model = self.build(lively, pool)
        states = model.model(ids).last_hidden_state
        pooled = {"last": model.score(states[:, -1]), "mean": model.score(states.mean(1))}
        expected, other = pooled.pop(pool), *pooled.values()
        assert_same_logits(logits(model, ids), expected)
        assert (other - expected).abs().max() > 0.1
        rows = [ids[row : row + 1, :length] for row, length in enumerate(LENGTHS)]
        for mask in (left_mask, left_mask.flip(1)):
            padded = torch.zeros_like(ids).masked_scatter(mask.bool(), torch.cat(rows, 1))
            together = logits(model, padded, attention_mask=mask)
            assert_same_logits(together, torch.cat([logits(model, row) for row in rows]))

    def test_losses(self, lively, ids):
        """Of classes the cross-entropy; of one label the square, a regression."""
        classes, targets = torch.tensor([2, 0, 1]), torch.tensor([0.5, -1.0, 3.0])
        output = self.build(lively, "last")(ids, labels=classes)
        torch.testing.assert_close(output.loss, F.cross_entropy(output.logits, classes))
        output = self.build(lively, "last", labels=1)(ids, labels=targets)
        assert output.logits.shape == (ROWS, 1)
        torch.testing.assert_close(output.loss, (output.logits[:, 0] - targets).square().mean())
