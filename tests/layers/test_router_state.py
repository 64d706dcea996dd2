"""Thresholds that follow a stream: the asked fraction, no padding, nothing in evaluation, and no loss of precision."""

import pytest
import torch

from chiar import ChiarForCausalLM
from chiar.errors import InputError
from chiar.layers.router_state import SAMPLE, RouterState
from chiar.routing.calibration import calibrate
from helpers import random_model, router_options, small_config, token_ids

FRACTIONS = [0.1, 0.5, 0.8]


def follower(fractions=FRACTIONS):
    layers = ["attention", *["routed"] * len(fractions), "attention"]
    return RouterState(small_config(layer_types=layers, target_fraction=fractions, meta_router=False))


def stream(steps, rows=8, tokens=64, seed=0):
    """Skewed scores around 0.9, as narrow as entropies."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        yield [0.9 + 0.004 * torch.randn(rows, tokens, generator=generator).exp() for _ in FRACTIONS]


def test_a_stream_is_split_as_asked_and_followed():
    state = follower()
    for n, scores in enumerate(stream(160)):
        state.follow([score - 0.5 * (n < 60) for score in scores])
    fresh = list(stream(40, seed=1))
    for n, fraction in enumerate(FRACTIONS):
        found = torch.stack([scores[n] > state.threshold_L[n] for scores in fresh]).float().mean()
        # The thresholds of some 20 batches of 512 are averaged: a deviation of 0.005 in the share.
        assert found == pytest.approx(fraction, abs=0.015)


def test_the_first_batch_sets_the_threshold_exactly():
    state = follower([0.25, 0.5])
    scores = torch.arange(101.0).view(1, 101)
    state.follow([scores, scores + 1000])
    assert state.threshold_L.tolist() == pytest.approx([75.0, 1050.0])
    sampled, tokens = follower([0.5]), 8 * SAMPLE
    sampled.follow([torch.arange(float(tokens)).view(64, -1)])
    assert float(sampled.threshold_L[0]) == pytest.approx(tokens / 2, rel=0.01), "a large batch, from all positions"


def test_padding_is_not_counted():
    state, padded = follower([0.5]), follower([0.5])
    scores, real = torch.arange(60.0).view(2, 30), torch.ones(2, 30, dtype=torch.bool)
    state.follow([scores[:, :20]])
    real[:, 20:] = False
    padded.follow([torch.where(real, scores, float("nan"))], real)
    torch.testing.assert_close(state.threshold_L, padded.threshold_L)
    before = {name: value.clone() for name, value in padded.state_dict().items()}
    padded.follow([scores], torch.zeros_like(real))
    assert all(torch.equal(value, before[name]) for name, value in padded.state_dict().items()), "nothing was real"


def test_a_trained_model_sends_its_fraction_to_attention():
    torch.manual_seed(0)
    model = ChiarForCausalLM(small_config(**router_options("quantile"), vocab_size=512)).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for seed in range(30):
        ids = token_ids(32, 16, seed=seed, vocabulary=512)
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    moved = model.model.router_state.threshold_L.clone()
    assert (moved != ChiarForCausalLM(model.config).model.router_state.threshold_L).all()
    with torch.no_grad():
        routing = model.eval()(token_ids(64, 16, seed=99, vocabulary=512), output_routing=True).routing
    for layer, fraction in zip(model.config.routed_layers, model.config.target_fraction, strict=True):
        # The threshold is some passes behind weights that move: 0.02 was seen.
        assert routing.attention_fraction(layer) == pytest.approx(fraction, abs=0.05)
        assert routing.layers[layer].thresholds == [float(moved[layer - 1])]
    assert torch.equal(model.model.router_state.threshold_L, moved), "evaluation moves nothing"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_saved_in_full_precision(dtype, tmp_path):
    model = ChiarForCausalLM(small_config(target_fraction=0.3))
    model.model.router_state.threshold_L.copy_(torch.tensor([0.8954321, 0.8912345]))
    model = model.to(dtype)
    model.save_pretrained(tmp_path)
    loaded = ChiarForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    assert loaded.lm_head.weight.dtype == dtype
    for name, value in model.model.router_state.state_dict().items():
        found = loaded.model.router_state.state_dict()[name]
        assert value.dtype == found.dtype == torch.float32, name
        assert torch.equal(value, found), name
    assert model.model.router_state.threshold_L[0] == torch.tensor(0.8954321)


def test_thresholds_cannot_be_set_or_calibrated():
    model = random_model(small_config(target_fraction=0.3))
    model.model.set_thresholds(None)  # what a run without thresholds of its own restores
    with pytest.raises(InputError, match=r"target_fraction=0\.3 finds the thresholds"):
        model.model.set_thresholds(0.9)
    with pytest.raises(InputError, match="only a model without it is calibrated"):
        calibrate(model, [{"input_ids": token_ids()}])
    assert random_model(small_config()).model.router_state is None, "others have no state"
