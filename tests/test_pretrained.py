"""The models as transformers models: saving, loading, resizing, losses, outputs, classification."""

import json
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedTokenizerFast,
)

from chiar import ChiarConfig, ChiarForCausalLM, ChiarForSequenceClassification, ChiarModel
from chiar.errors import InputError
from helpers import small_config

ROWS, TOKENS, VOCABULARY, WIDTH, LAYERS = 3, 10, 257, 32, 4
LENGTHS = (10, 7, 4)
TINY = ["baseline-tiny", "v1-tiny", "v2-tiny", "v3-tiny", "v4-tiny"]
every_preset = pytest.mark.parametrize("preset", TINY)
both_sides = pytest.mark.parametrize("side", ["left", "right"])
# Two ways to sum the same fp32 products; logits reach 25, where fp32 resolves 2e-6.
ROUNDING = 2e-4
# Relative to a tensor's largest gradient: fp32 sums over tokens and heads in another order.
GRADIENT_ROUNDING = 1e-4


@pytest.fixture
def ids():
    return torch.randint(0, VOCABULARY, (ROWS, TOKENS), generator=torch.Generator().manual_seed(19))


def padded(ids, side):
    """The mask of LENGTHS[b] real tokens a row, and the ids with their real tokens moved to them."""
    mask, moved = torch.zeros_like(ids), torch.zeros_like(ids)
    for row, length in enumerate(LENGTHS):
        place = slice(TOKENS - length, TOKENS) if side == "left" else slice(0, length)
        mask[row, place] = 1
        moved[row, place] = ids[row, :length]
    return moved, mask


def logits(model, ids, **kwargs):
    with torch.no_grad():
        return model(ids, **kwargs).logits


def gradients(model):
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


def assert_same_logits(found, expected):
    """Weights that were loaded lie at other addresses than those that were made: a CPU may then block its sums another
    way, which moves the last bits."""
    torch.testing.assert_close(found, expected, atol=ROUNDING, rtol=0)


def assert_same_basis(model, original, dtype):
    """In this precision, and the same after rounding to fp32."""
    expected = dict(original.model.basis.named_buffers())
    found = dict(model.model.basis.named_buffers())
    assert expected.keys() == found.keys() == ({"even_hh", "odd_hh"} if original.config.basis == "dct" else set())
    for name, buffer in found.items():
        assert buffer.dtype == dtype
        assert torch.equal(buffer.float(), expected[name])


class TestSaving:
    @every_preset
    def test_round_trip_is_exact(self, lively, ids, tmp_path, preset):
        model = lively({"preset": preset, "gate_pool": "batch"})
        model.save_pretrained(tmp_path)
        loaded = ChiarForCausalLM.from_pretrained(tmp_path).eval()
        saved_state, loaded_state = model.state_dict(), loaded.state_dict()
        assert saved_state.keys() == loaded_state.keys()
        assert all(torch.equal(saved_state[name], loaded_state[name]) for name in saved_state)
        assert_same_basis(loaded, model, torch.float32)
        assert_same_logits(logits(loaded, ids), logits(model, ids))

    def test_round_trip_of_every_option(self, lively, ids, tmp_path, option):
        model = lively(option)
        model.save_pretrained(tmp_path)
        implementation = option.get("attn_implementation")
        loaded = ChiarForCausalLM.from_pretrained(tmp_path, attn_implementation=implementation).eval()
        assert_same_logits(logits(loaded, ids), logits(model, ids))

    @every_preset
    def test_the_tied_matrix_is_stored_once(self, lively, tmp_path, preset):
        model = lively({"preset": preset})
        model.save_pretrained(tmp_path)
        with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
            names = set(file.keys())
            sizes = {name: file.get_tensor(name).numel() for name in names}
        assert len(names & {"lm_head.weight", "model.embed_tokens.weight"}) == 1
        saved = ("omega_Dm", "threshold_L", "updates_L")
        saved_buffers = {name: value.numel() for name, value in model.named_buffers() if name.endswith(saved)}
        assert sum(sizes.values()) == sum(p.numel() for p in model.parameters()) + sum(saved_buffers.values())
        loaded = ChiarForCausalLM.from_pretrained(tmp_path)
        assert loaded.lm_head.weight is loaded.model.embed_tokens.weight

    @every_preset
    def test_auto_classes(self, lively, ids, tmp_path, preset):
        model = lively({"preset": preset})
        model.save_pretrained(tmp_path)
        assert type(AutoConfig.from_pretrained(tmp_path)) is ChiarConfig
        language_model = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
        assert type(language_model) is ChiarForCausalLM
        assert_same_logits(logits(language_model, ids), logits(model, ids))
        decoder = AutoModel.from_pretrained(tmp_path).eval()
        assert type(decoder) is ChiarModel
        with torch.no_grad():
            assert_same_logits(decoder(ids).last_hidden_state, model.model(ids).last_hidden_state)
        classifier = AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=5)
        assert type(classifier) is ChiarForSequenceClassification
        assert logits(classifier, ids).shape == (ROWS, 5)
        assert type(AutoModelForCausalLM.from_config(model.config)) is ChiarForCausalLM

    def test_thresholds_survive_exactly(self, lively, ids, tmp_path):
        model = lively({})
        before = logits(model, ids)
        values = [0.8123456789012345, 0.7 + 1e-16]
        model.model.set_thresholds(values)
        assert not torch.equal(logits(model, ids), before)
        model.save_pretrained(tmp_path)
        loaded = ChiarForCausalLM.from_pretrained(tmp_path).eval()
        assert loaded.config.thresholds == values
        assert loaded.config.layer_thresholds() == [(values[0],), (values[1],)]
        for layer, value in zip((1, 2), values, strict=True):
            assert torch.equal(loaded.model.layers[layer].router.thresholds, torch.tensor([value]))
        assert_same_logits(logits(loaded, ids), logits(model, ids))

    def test_pairs_of_thresholds_survive_exactly(self, lively, tmp_path):
        model = lively({"operators": ["spectral", "rbf", "attention"]})
        model.model.set_thresholds([[0.71, 0.8123456789012345], [0.75, 0.75]])
        model.save_pretrained(tmp_path)
        loaded = ChiarForCausalLM.from_pretrained(tmp_path)
        assert loaded.config.layer_thresholds() == [(0.71, 0.8123456789012345), (0.75, 0.75)]

    def test_bad_thresholds_leave_the_model_as_it_was(self, lively, ids):
        model = lively({})
        before = logits(model, ids)
        with pytest.raises(InputError, match="thresholds has 3 entries for 2 routed layers"):
            model.model.set_thresholds([0.1, 0.2, 0.3])
        assert model.config.thresholds is None
        assert torch.equal(logits(model, ids), before)

    @pytest.mark.parametrize("value", [0, 1, 0.5])
    def test_one_threshold_for_all_layers(self, lively, ids, value):
        model = lively({})
        model.model.set_thresholds(value)
        assert model.config.layer_thresholds() == [(float(value),)] * 2
        fraction = model(ids, output_routing=True).routing.attention_fraction(1)
        assert fraction == {0: 1.0, 1: 0.0, 0.5: 1.0}[value]

    @every_preset
    def test_loading_in_bfloat16_keeps_basis_and_thresholds(self, lively, ids, tmp_path, preset):
        model = lively({"preset": preset})
        model.save_pretrained(tmp_path)
        loaded = ChiarForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
        assert {p.dtype for p in loaded.parameters()} == {torch.bfloat16}
        assert_same_basis(loaded, model, torch.float32)
        for layer, original in zip(loaded.model.layers, model.model.layers, strict=True):
            if hasattr(layer.router, "thresholds"):
                assert layer.router.thresholds.dtype == torch.float32
                assert torch.equal(layer.router.thresholds, original.router.thresholds)
        found = logits(loaded, ids)
        assert found.dtype == torch.bfloat16
        assert found.isfinite().all()

    @pytest.mark.parametrize("cast", ["to", "half", "bfloat16", "double"])
    def test_casting_keeps_basis_and_thresholds(self, lively, cast):
        model = lively({})
        original, thresholds = lively({}), model.model.layers[1].router.thresholds.clone()
        model = model.to(torch.bfloat16) if cast == "to" else getattr(model, cast)()
        assert model.lm_head.weight.dtype != torch.float32
        kept = torch.float64 if cast == "double" else torch.float32
        assert model.model.layers[1].router.thresholds.dtype == kept
        assert torch.equal(model.model.layers[1].router.thresholds.float(), thresholds)
        assert_same_basis(model, original, kept)

    def test_registering_for_an_auto_class_copies_no_source(self, lively, tmp_path):
        ChiarConfig.register_for_auto_class()
        ChiarForCausalLM.register_for_auto_class("AutoModelForCausalLM")
        lively({}).save_pretrained(tmp_path)
        assert [path.name for path in tmp_path.rglob("*.py")] == ["chiar_shim.py"]

    def test_a_folder_that_names_the_shim_holds_it(self, tmp_path):
        """A configuration saved alone: its auto_map is of no use without the file."""
        ChiarConfig().save_pretrained(tmp_path)
        assert "chiar_shim" in (tmp_path / "config.json").read_text()
        assert (tmp_path / "chiar_shim.py").exists()


FRESH_PROCESS = """
import json, sys
import torch
from transformers import (
    AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification,
)

folder, again = sys.argv[1:]
assert not any(name.split(".")[0] == "chiar" for name in sys.modules)
config = AutoConfig.from_pretrained(folder + "/lm", trust_remote_code=True)
assert "chiar.config" in sys.modules
ids = torch.load(folder + "/ids.pt")
model = AutoModelForCausalLM.from_pretrained(folder + "/lm", trust_remote_code=True).eval()
decoder = AutoModel.from_pretrained(folder + "/lm", trust_remote_code=True).eval()
classifier = AutoModelForSequenceClassification.from_pretrained(folder + "/classifier", trust_remote_code=True).eval()
with torch.no_grad():
    found = {
        "config": config.to_dict()["layer_types"],
        "logits": model(ids).logits,
        "states": decoder(ids).last_hidden_state,
        "classes": classifier(ids).logits,
        "generated": model.generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=0),
    }
torch.save(found, folder + "/found.pt")
model.save_pretrained(again)
"""


@pytest.fixture(scope="module")
def loaded(lively, tmp_path_factory):
    """What a process that never imported chiar gets from folders saved here, and the folder it saved itself."""
    folder = tmp_path_factory.mktemp("fresh")
    ids = torch.arange(12).view(2, 6)
    model = lively({})
    classifier = lively({}, ChiarForSequenceClassification, num_labels=3)
    model.save_pretrained(folder / "lm")
    classifier.save_pretrained(folder / "classifier")
    torch.save(ids, folder / "ids.pt")
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "home"), "OMP_NUM_THREADS": "1"}
    environment.pop("HF_MODULES_CACHE", None)
    done = subprocess.run(
        [sys.executable, "-c", FRESH_PROCESS, str(folder), str(folder / "again")],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    expected = {
        "config": model.config.layer_types,
        "logits": logits(model, ids),
        "states": model.model(ids).last_hidden_state.detach(),
        "classes": logits(classifier, ids),
        "generated": model.generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=0),
    }
    found = torch.load(folder / "found.pt")
    return {"expected": expected, "found": found, "saved here": folder / "lm", "saved there": folder / "again"}


class TestFreshProcess:
    def test_outputs_are_equal(self, loaded):
        expected, found = loaded["expected"], loaded["found"]
        assert found["config"] == expected["config"]
        assert torch.equal(found["generated"], expected["generated"])
        for name in ("logits", "states", "classes"):
            assert_same_logits(found[name], expected[name])

    @pytest.mark.parametrize("where", ["saved here", "saved there"])
    def test_the_only_source_file_is_the_shim(self, loaded, where):
        assert [path.name for path in loaded[where].rglob("*.py")] == ["chiar_shim.py"]
        lines = (loaded[where] / "chiar_shim.py").read_text().splitlines()
        code = [line for line in lines if line.strip() and not line.lstrip().startswith("#")]
        assert len(code) <= 3
        assert all(line.startswith("from chiar.") for line in code)

    @pytest.mark.parametrize("where", ["saved here", "saved there"])
    def test_the_auto_map_names_the_shim(self, loaded, where):
        config = json.loads((loaded[where] / "config.json").read_text())
        assert config["model_type"] == "chiar"
        assert config["auto_map"] == {
            "AutoConfig": "chiar_shim.ChiarConfig",
            "AutoModel": "chiar_shim.ChiarModel",
            "AutoModelForCausalLM": "chiar_shim.ChiarForCausalLM",
            "AutoModelForSequenceClassification": "chiar_shim.ChiarForSequenceClassification",
        }

    def test_what_was_saved_there_loads_here(self, loaded):
        model = ChiarForCausalLM.from_pretrained(loaded["saved there"]).eval()
        original = ChiarForCausalLM.from_pretrained(loaded["saved here"])
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), original.parameters(), strict=True))


class TestEmbeddings:
    @pytest.mark.parametrize("size", [300, 200])
    def test_resizing(self, lively, ids, tmp_path, size):
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
        assert after.shape == (ROWS, TOKENS, size)
        # The output matrix has another number of rows, so the product may be blocked another way.
        assert (after[..., :kept] - before[..., :kept]).abs().max() < ROUNDING
        model.save_pretrained(tmp_path)
        loaded = ChiarForCausalLM.from_pretrained(tmp_path).eval()
        assert loaded.config.vocab_size == size
        assert loaded.lm_head.weight is loaded.get_input_embeddings().weight
        assert_same_logits(logits(loaded, ids), after)

    def test_the_vocabulary_checked_is_the_resized_one(self, lively):
        model = lively({})
        model.resize_token_embeddings(300)
        assert logits(model, torch.tensor([[299]])).isfinite().all()
        with pytest.raises(InputError, match=r"token id 300 is outside the vocabulary 0\.\.299"):
            model(torch.tensor([[300]]))

    def test_inputs_embeds_equal_input_ids(self, lively, option, ids):
        model = lively(option)
        embeddings = model.get_input_embeddings()(ids)
        if model.config.router == "random" and model.config.random_key == "token":
            with pytest.raises(InputError, match="random_key='token' hashes token ids"):
                model(inputs_embeds=embeddings)
        else:
            assert_same_logits(logits(model, None, inputs_embeds=embeddings), logits(model, ids))


class TestLoss:
    def test_the_loss_is_the_shifted_cross_entropy(self, lively, option, ids):
        model = lively(option)
        log_p = logits(model, ids).double().log_softmax(-1)
        by_hand = -sum(log_p[b, t, ids[b, t + 1]] for b in range(ROWS) for t in range(TOKENS - 1))
        by_hand = by_hand / (ROWS * (TOKENS - 1))
        # A mean of 27 fp32 terms of size 10 against the same in fp64.
        assert model(ids, labels=ids).loss.item() == pytest.approx(by_hand.item(), abs=1e-5)

    def test_ignored_labels(self, lively, ids):
        model = lively({})
        labels = ids.clone()
        labels[:, :4] = -100
        labels[1, 7] = -100
        log_p = logits(model, ids).double().log_softmax(-1)
        terms = [-log_p[b, t - 1, ids[b, t]] for b in range(ROWS) for t in range(4, TOKENS) if (b, t) != (1, 7)]
        # A mean of 17 fp32 terms of size 10 against the same in fp64.
        assert model(ids, labels=labels).loss.item() == pytest.approx((sum(terms) / len(terms)).item(), abs=1e-5)

    def test_no_loss_without_labels(self, lively, ids):
        assert lively({})(ids).loss is None

    def test_the_collapse_regulariser_is_added(self, lively, ids):
        option = {"router": "learned", "routing": "soft"}
        plain, model = lively(option)(ids, labels=ids), lively(option, collapse_regulariser=0.5)
        regularised = model.train()(ids, labels=ids)
        assert plain.routing_loss is None
        assert regularised.routing_loss < 0
        torch.testing.assert_close(regularised.loss, plain.loss + regularised.routing_loss)
        evaluated = model.eval()(ids, labels=ids)
        torch.testing.assert_close(evaluated.loss, plain.loss, msg="exp(loss) must be a perplexity")

    def test_accumulated_regularisers_count_once(self, lively, ids):
        model = lively({"router": "learned", "routing": "soft"}, collapse_regulariser=0.5).train()
        labels = ROWS * (TOKENS - 1)
        whole = model(ids, labels=ids).loss
        parts = [model(ids, labels=ids, num_items_in_batch=4 * labels).loss for _ in range(4)]
        assert torch.allclose(sum(parts), whole)

    def test_the_loss_under_accumulation(self, lively, ids):
        """transformers' Trainer hands the token count of all micro-batches to a forward that takes **kwargs, unless
        the model says it does not use it, and then leaves the division to the model."""
        model = lively({})
        if getattr(model, "accepts_loss_kwargs", True):
            tokens = ROWS * (TOKENS - 1)
            mean, share = (model(ids, labels=ids, **extra).loss for extra in ({}, {"num_items_in_batch": 4 * tokens}))
            # A quarter, up to one fp32 rounding.
            assert share.item() == pytest.approx(mean.item() / 4, rel=1e-6)

    def test_gradient_checkpointing_changes_nothing(self, lively, router_option, ids):
        _, mask = padded(ids, "right")
        results = []
        for checkpointing in (False, True):
            model = lively(router_option).train()
            if checkpointing:
                model.gradient_checkpointing_enable()
                assert model.model.gradient_checkpointing
            loss = model(ids, labels=ids, attention_mask=mask).loss
            loss.backward()
            results.append((loss.detach(), gradients(model)))
        (plain_loss, plain), (loss, found) = results
        torch.testing.assert_close(loss, plain_loss)
        torch.testing.assert_close(found, plain)

    def test_other_checkpointing_options_do_not_make_it_reentrant(self, lively, ids):
        """torch's default is reentrant, which would lose the gradients of the first layer."""
        plain, checkpointed = lively({}).train(), lively({}).train()
        checkpointed.gradient_checkpointing_enable({"preserve_rng_state": False})
        for model in (plain, checkpointed):
            model(ids, labels=ids).loss.backward()
        torch.testing.assert_close(gradients(checkpointed), gradients(plain))

    def test_reentrant_checkpointing_is_refused(self, lively):
        for model in (lively({}), lively({}).model):
            with pytest.raises(InputError, match="use_reentrant"):
                model.gradient_checkpointing_enable({"use_reentrant": True})

    def test_gradient_checkpointing_with_a_cache_asked_for(self, lively, ids):
        """Trainers leave use_cache on: the second pass of a checkpoint must not add to the cache again."""
        plain, checkpointed = lively({}).train(), lively({}).train()
        checkpointed.gradient_checkpointing_enable()
        plain(ids, labels=ids).loss.backward()
        checkpointed(ids, labels=ids, use_cache=True).loss.backward()
        expected, found = gradients(plain), gradients(checkpointed)
        # With a cache attention takes a mask instead of the causal kernel: sums in another order.
        for name in expected:
            assert (expected[name] - found[name]).abs().max() <= GRADIENT_ROUNDING * expected[name].abs().max(), name

    @pytest.mark.parametrize("estimator", ["both", "selected"])
    def test_a_certain_router_stays_finite(self, lively, ids, estimator):
        """A probability that underflows to 0 must not become 0 / 0."""
        model = lively({"router": "learned"}, hard_estimator=estimator)
        with torch.no_grad():
            for layer in model.config.routed_layers:
                model.model.layers[layer].router.score.bias.copy_(torch.tensor([200.0, 0.0]))
        loss = model(ids, labels=ids).loss
        loss.backward()
        assert loss.isfinite()
        assert all(gradient.isfinite().all() for gradient in gradients(model).values())

    @pytest.mark.parametrize("keys", ["all", "routed"])
    @pytest.mark.parametrize("preset", ["baseline-tiny", "v1-tiny", "v3-tiny"])
    @both_sides
    def test_eager_equals_sdpa(self, lively, ids, preset, keys, side):
        moved, mask = padded(ids, side)
        real = mask.bool()
        results = []
        for implementation in ("sdpa", "eager"):
            model = lively({"preset": preset}, keys=keys, attn_implementation=implementation)
            output = model(moved, labels=moved.masked_fill(~real, -100), attention_mask=mask)
            output.loss.backward()
            results.append((output.logits[real].detach(), gradients(model)))
        (sdpa, sdpa_gradients), (eager, eager_gradients) = results
        assert (sdpa - eager).abs().max() < ROUNDING
        assert sdpa_gradients.keys() == eager_gradients.keys()
        for name, expected in sdpa_gradients.items():
            difference = (expected - eager_gradients[name]).abs().max()
            assert difference <= GRADIENT_ROUNDING * max(1.0, expected.abs().max()), name


class TestOutputs:
    def test_hidden_states(self, lively, option, ids):
        model = lively(option)
        with torch.no_grad():
            output = model.model(ids, output_hidden_states=True)
            language = model(ids, output_hidden_states=True)
        assert len(output.hidden_states) == LAYERS + 1
        assert all(state.shape == (ROWS, TOKENS, WIDTH) for state in output.hidden_states)
        assert torch.equal(output.hidden_states[-1], output.last_hidden_state)
        assert torch.equal(model.lm_head(language.hidden_states[-1]), language.logits)
        embedded = model.get_input_embeddings()(ids)
        if model.config.positions == "learned":
            embedded = embedded + model.model.embed_positions(torch.arange(TOKENS))
        if model.config.embedding_norm:
            scaled = embedded / embedded.pow(2).mean(-1, keepdim=True).sqrt()
            torch.testing.assert_close(output.hidden_states[0], scaled)
        else:
            assert torch.equal(output.hidden_states[0], embedded)

    @pytest.mark.parametrize("keys", ["all", "routed"])
    @every_preset
    def test_attentions(self, lively, ids, preset, keys):
        model = lively({"preset": preset}, keys=keys, attn_implementation="eager")
        moved, mask = padded(ids, "left")
        with torch.no_grad():
            attentions = model(moved, attention_mask=mask, output_attentions=True).attentions
        assert [weights is None for weights in attentions] == [kind == "spectral" for kind in model.config.layer_types]
        for weights in filter(lambda weights: weights is not None, attentions):
            assert weights.shape == (ROWS, model.config.num_attention_heads, TOKENS, TOKENS)
            # A softmax row in fp32.
            assert torch.allclose(weights.sum(-1), torch.ones(weights.shape[:-1]), atol=1e-6, rtol=0)
            assert (weights.triu(1) == 0).all()
            padding = ~mask.bool()[:, None, None, :] & ~torch.eye(TOKENS, dtype=torch.bool)
            assert (weights[padding.expand_as(weights)] == 0).all()

    def test_attentions_need_eager(self, lively, ids):
        with pytest.raises(ValueError, match="eager"):
            lively({})(ids, output_attentions=True)

    def test_nothing_extra_unless_asked(self, lively, ids):
        output = lively({})(ids)
        assert set(output.keys()) == {"logits"}

    def test_tuples(self, lively, ids):
        model = lively({})
        named = model(ids, labels=ids, output_hidden_states=True)
        loss, found, states = model(ids, labels=ids, output_hidden_states=True, return_dict=False)
        assert torch.equal(loss, named.loss)
        assert torch.equal(found, named.logits)
        assert len(states) == LAYERS + 1
        decoded = model.model(ids, return_dict=False)
        assert isinstance(decoded, tuple) and len(decoded) == 1
        assert torch.equal(decoded[0], named.hidden_states[-1])

    def test_logits_to_keep(self, lively, ids):
        model = lively({})
        # The output projection multiplies fewer rows, so sums may run in another order.
        assert (logits(model, ids, logits_to_keep=2) - logits(model, ids)[:, -2:]).abs().max() < ROUNDING


class TestClassification:
    def build(self, lively, pool, labels=3):
        return lively({}, ChiarForSequenceClassification, classifier_pool=pool, num_labels=labels)

    @pytest.mark.parametrize("pool", ["last", "mean"])
    @both_sides
    def test_padding_does_not_matter(self, lively, ids, pool, side):
        model = self.build(lively, pool)
        moved, mask = padded(ids, side)
        together = logits(model, moved, attention_mask=mask)
        for row, length in enumerate(LENGTHS):
            alone = ids[row : row + 1, :length]
            assert (together[row] - logits(model, alone)[0]).abs().max() < ROUNDING

    @pytest.mark.parametrize("pool", ["last", "mean"])
    def test_pools_by_hand(self, lively, ids, pool):
        model = self.build(lively, pool)
        with torch.no_grad():
            states = model.model(ids).last_hidden_state
            pooled = states[:, -1] if pool == "last" else states.mean(1)
            expected = model.score(pooled)
        # A mean of ten fp32 numbers in another order.
        assert torch.allclose(logits(model, ids), expected, atol=1e-5, rtol=0)

    def test_the_pools_differ(self, lively, ids):
        last, mean = self.build(lively, "last"), self.build(lively, "mean")
        assert (logits(last, ids) - logits(mean, ids)).abs().max() > 0.1

    def test_loss_of_classes(self, lively, ids):
        model, labels = self.build(lively, "last"), torch.tensor([2, 0, 1])
        output = model(ids, labels=labels)
        by_hand = -output.logits.log_softmax(-1)[torch.arange(ROWS), labels].mean()
        # The same three fp32 terms through another kernel.
        assert output.loss.item() == pytest.approx(by_hand.item(), abs=1e-6)
        assert torch.equal(output.loss, F.cross_entropy(output.logits, labels))

    def test_loss_of_one_label_is_a_regression(self, lively, ids):
        model, targets = self.build(lively, "last", labels=1), torch.tensor([0.5, -1.0, 3.0])
        output = model(ids, labels=targets)
        assert output.logits.shape == (ROWS, 1)
        # The same three fp32 terms through another kernel.
        assert output.loss.item() == pytest.approx((output.logits[:, 0] - targets).square().mean().item(), rel=1e-6)

    @every_preset
    def test_from_a_language_model(self, lively, ids, tmp_path, preset):
        language = lively({"preset": preset})
        language.save_pretrained(tmp_path)
        classifier = ChiarForSequenceClassification.from_pretrained(tmp_path, num_labels=4).eval()
        assert classifier.score.weight.shape == (4, WIDTH)
        backbone, original = classifier.model.state_dict(), language.model.state_dict()
        assert backbone.keys() == original.keys()
        assert all(torch.equal(backbone[name], original[name]) for name in original)
        with torch.no_grad():
            assert_same_logits(classifier.model(ids).last_hidden_state, language.model(ids).last_hidden_state)

    def test_round_trip_is_exact(self, lively, ids, tmp_path):
        model = self.build(lively, "mean", labels=4)
        model.save_pretrained(tmp_path)
        loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
        assert loaded.config.num_labels == 4
        assert_same_logits(logits(loaded, ids), logits(model, ids))


def test_a_tokenizer_beside_the_model_opens_without_us(tmp_path):
    """transformers reads config.json for it, and knows neither the package nor our layer types."""
    words = Tokenizer(WordLevel({"<unk>": 0, "light": 1, "dark": 2}, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>").save_pretrained(tmp_path)
    ChiarForCausalLM(small_config("v4-tiny")).save_pretrained(tmp_path)
    code = (
        "import sys; from transformers import AutoTokenizer; tokenizer = AutoTokenizer.from_pretrained(sys.argv[1]); "
        "print(tokenizer('dark').input_ids, 'chiar' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True)
    assert done.stdout.strip().endswith("[2] False"), done.stderr[-1000:]


def test_files_saved_under_the_old_name_of_the_layer_types_open(tmp_path):
    config = small_config("v3-tiny")
    config.save_pretrained(tmp_path)
    told = json.loads((tmp_path / "config.json").read_text())
    told["layer_types"] = told.pop("chiar_layer_types")
    (tmp_path / "config.json").write_text(json.dumps(told))
    assert ChiarConfig.from_pretrained(tmp_path).layer_types == config.layer_types
