"""Where dropout acts and how weights and the residual stream begin, which no forward value at rest can show."""

import pytest
import torch
import torch.nn.functional as F

from chiar import ChiarForCausalLM, presets
from helpers import random_model, small_config, token_ids

PRE = {"norm": "rmsnorm", "norm_position": "pre"}
IDS = torch.arange(12).view(2, 6)


@pytest.mark.parametrize("kind", ["attention", "spectral"])
def test_dropout_acts_on_embeddings_attention_probabilities_and_the_ffns_hidden_and_output(kind, monkeypatch):
    seen, real = [], F.dropout

    def record(x, p=0.5, training=True, inplace=False):
        if training and p > 0:
            seen.append((tuple(x.shape), p))
        return real(x, p, training, inplace)

    monkeypatch.setattr(F, "dropout", record)
    config = presets.get("baseline-tiny", layer_types=[kind], meta_router=False, attn_implementation="eager")
    model, width, heads = ChiarForCausalLM(config), 32, 2
    model.eval()(IDS)
    assert not seen
    model.train()(IDS)
    probabilities = [(2, heads, 6, 6)] if kind == "attention" else []
    assert seen == [(shape, 0.1) for shape in ((2, 6, width), *probabilities, (2, 6, 4 * width), (2, 6, width))]


def test_sdpa_drops_attention_probabilities_in_training_only(monkeypatch):
    given, real = [], F.scaled_dot_product_attention
    monkeypatch.setattr(
        F, "scaled_dot_product_attention", lambda *a, **k: given.append(k["dropout_p"]) or real(*a, **k)
    )
    model = ChiarForCausalLM(presets.get("baseline-tiny"))
    model.train()(IDS)
    model.eval()(IDS)
    assert given == [0.1] * 4 + [0.0] * 4


def test_weights_begin_as_the_paper_says():
    torch.manual_seed(0)
    model = ChiarForCausalLM(presets.get("v1-16m", layer_types=["spectral", "routed", "attention"], vocab_size=999))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert (parameter == 0).all(), name
        elif "norm" in name or name.endswith("spectral.weight"):
            assert (parameter == 1).all(), name
        else:
            # N(0, 0.02): the smallest matrix has 771 entries, so its deviation is known to 2.5%.
            assert parameter.std().item() == pytest.approx(0.02, rel=0.1), name
            assert abs(parameter.mean().item()) < 0.003, name
    omega = model.model.layers[1].operators["rbf"].omega_Dm
    assert omega.std().item() == pytest.approx(2**0.5, rel=0.02)


@torch.no_grad()
@pytest.mark.parametrize("positions", ["rope", "learned"])
@pytest.mark.parametrize("normed", [True, False])
def test_only_a_normed_stream_begins_at_scale_one_whatever_the_embeddings(normed, positions):
    fields = {"embedding_norm": normed, "positions": positions, "meta_router": False, **PRE}
    model, ids = random_model(small_config(**fields)), token_ids(2, 7)
    before = model(ids, output_hidden_states=True)
    ones = torch.ones(2, 7, dtype=torch.float64)
    assert torch.allclose(before.hidden_states[0].square().mean(-1), ones) == normed
    for embedding in (model.model.embed_tokens, model.model.embed_positions):
        if embedding is not None:
            embedding.weight *= 4.0
    after = model.model(ids).last_hidden_state
    assert torch.allclose(after, before.hidden_states[-1], atol=1e-5) == normed
    model.get_input_embeddings().weight[3] = 0.0
    assert model(torch.tensor([[3, 5, 3]])).logits.isfinite().all()


@torch.no_grad()
@pytest.mark.parametrize(("operator", "zero"), [("spectral", 0), ("temporal", 0.0)])
def test_filters_that_begin_at_zero_add_nothing_under_pre_norm(operator, zero):
    fields = {"operators": [operator, "attention"], "meta_router": False, "filter_init": zero, **PRE}
    torch.manual_seed(0)
    model = ChiarForCausalLM(presets.get("v3-tiny", **fields)).eval()
    light = {layer: torch.zeros(2, 7, dtype=torch.long) for layer in model.config.routed_layers}
    states = model(token_ids(2, 7), forced_routes=light, output_hidden_states=True).hidden_states
    for layer in model.config.routed_layers:
        block, x_BTD = model.model.layers[layer], states[layer]
        torch.testing.assert_close(states[layer + 1], x_BTD + block.ffn(block.ffn_norm(x_BTD)))
