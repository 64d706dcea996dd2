"""How the residual stream begins: at the scale of the embeddings, or at 1; and what light filters add at first."""

import pytest
import torch

from chiar import ChiarForCausalLM, presets
from chiar.errors import InputError
from helpers import random_model, small_config, token_ids

PRE = {"norm": "rmsnorm", "norm_position": "pre"}


@pytest.mark.parametrize("positions", ["rope", "learned"])
def test_a_normed_stream_begins_at_scale_one(positions):
    model = random_model(small_config(embedding_norm=True, positions=positions))
    first_BTD = model(token_ids(2, 7), output_hidden_states=True).hidden_states[0]
    torch.testing.assert_close(first_BTD.square().mean(-1).float(), torch.ones(2, 7))


@torch.no_grad()
@pytest.mark.parametrize("normed", [True, False])
def test_only_a_normed_stream_does_not_know_the_scale_of_embeddings(normed):
    model, ids = random_model(small_config(embedding_norm=normed, **PRE)).model, token_ids(2, 7)
    before_BTD = model(ids).last_hidden_state
    model.embed_tokens.weight *= 4.0
    same = torch.allclose(model(ids).last_hidden_state, before_BTD, atol=1e-5)
    assert same == normed


def test_a_token_without_embedding_gives_numbers():
    model = random_model(small_config(embedding_norm=True))
    model.get_input_embeddings().weight.data[3] = 0.0
    assert model(torch.tensor([[3, 5, 3]])).logits.isfinite().all()


@torch.no_grad()
@pytest.mark.parametrize("zero", [0, 0.0], ids=["whole", "float"])
@pytest.mark.parametrize("operator", ["spectral", "temporal"])
def test_filters_that_begin_at_zero_add_nothing_under_pre_norm(operator, zero):
    fields = {"operators": [operator, "attention"], "meta_router": False, "filter_init": zero, **PRE}
    torch.manual_seed(0)
    model = ChiarForCausalLM(presets.get("v3-tiny", **fields)).eval()
    light = {layer: torch.zeros(2, 7, dtype=torch.long) for layer in model.config.routed_layers}
    states = model(token_ids(2, 7), forced_routes=light, output_hidden_states=True).hidden_states
    for layer in model.config.routed_layers:
        block, x_BTD = model.model.layers[layer], states[layer]
        torch.testing.assert_close(states[layer + 1], x_BTD + block.ffn(block.ffn_norm(x_BTD)))


def test_filters_begin_at_one_unless_told():
    filters = [m for m in ChiarForCausalLM(presets.get("v3-tiny")).modules() if type(m).__name__ == "SpectralFilter"]
    assert filters and all(torch.equal(m.weight, torch.ones_like(m.weight)) for m in filters)


def test_a_beginning_must_be_a_number():
    with pytest.raises(InputError, match="filter_init"):
        presets.get("v3-tiny", filter_init=float("nan"))
