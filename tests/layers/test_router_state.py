"""Thresholds that follow a stream, and what routers that have them keep in training."""

import copy

import pytest
import torch

from chiar import ChiarForCausalLM
from chiar.errors import InputError
from chiar.layers.routers import SAMPLE, RouterState
from chiar.model.inputs import make_context
from chiar.routing.calibration import calibrate
from chiar.training.compiling import PLAIN, GraphedPasses
from helpers import ROUTER_OPTIONS, mixed_routes, random_model, router_options, small_config, token_ids

ROWS, TOKENS = 2, 10


def follower(fractions):
    layers = ["attention", *["routed"] * len(fractions), "attention"]
    return RouterState(small_config(layer_types=layers, target_fraction=fractions, meta_router=False))


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


def test_a_trained_model_sends_its_fraction_to_attention_and_evaluation_moves_nothing():
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
    assert torch.equal(model.model.router_state.threshold_L, moved)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_saved_in_full_precision(dtype, tmp_path):
    model = ChiarForCausalLM(small_config(target_fraction=0.3))
    model.model.router_state.threshold_L.copy_(torch.tensor([0.8954321, 0.8912345]))
    model.to(dtype).save_pretrained(tmp_path)
    loaded = ChiarForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    assert loaded.lm_head.weight.dtype == dtype
    assert torch.equal(loaded.model.router_state.threshold_L, torch.tensor([0.8954321, 0.8912345]))


def test_thresholds_cannot_be_set_or_calibrated():
    model = random_model(small_config(target_fraction=0.3))
    model.model.set_thresholds(None)  # what a run without thresholds of its own restores
    with pytest.raises(InputError, match=r"target_fraction=0\.3 finds the thresholds"):
        model.model.set_thresholds(0.9)
    with pytest.raises(InputError, match="it is not calibrated"):
        calibrate(model, [{"input_ids": token_ids()}])


def model_of(option, **changes):
    """In evaluation mode, with thresholds that split the tokens."""
    model = random_model(small_config(**router_options(option), **changes))
    model.train()(token_ids(16, 16, seed=5))
    return model.eval()


@pytest.mark.parametrize("option", ROUTER_OPTIONS)
def test_every_parameter_has_a_gradient(option):
    model = model_of(option).train()
    ids = token_ids(ROWS, TOKENS)
    model(ids, labels=ids, forced_routes=mixed_routes(model.config, ROWS, TOKENS)).loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        # A bias moves all scores alike, which means nothing to a threshold that follows them.
        shift = name.endswith("router.score.bias")
        assert (parameter.grad.abs().max() > 1e-12) != shift, name


@pytest.mark.parametrize("option", ["learned scaled", "routed keys"])
def test_gradients_are_those_of_finite_differences(option):
    """With routes held fast, a weight of 2p is an ordinary function of the states and the router's weights."""
    model = model_of(option)
    forced = mixed_routes(model.config, 1, 4)
    x_BTD = torch.randn(1, 4, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    own = [p for name, p in model.model.layers[1].named_parameters() if "router" in name]

    def decode(x_BTD, *parameters):
        return model.model(inputs_embeds=x_BTD, forced_routes=forced).last_hidden_state

    assert torch.autograd.gradcheck(decode, (x_BTD.requires_grad_(), *own), atol=1e-5, rtol=1e-4, fast_mode=True)


@pytest.mark.parametrize("option", ["learned quantile", "learned quantile post"])
def test_no_gradient_moves_all_scores_alike_where_a_threshold_follows_them(option):
    model, ids = model_of(option).train(), token_ids(ROWS, TOKENS)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    x = torch.randn(ROWS, TOKENS, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    context = make_context(model.config, model.model.basis.transform(), x, ids, mask, None, 0)
    router, context = model.model.layers[1].router, model.model.layer_contexts(context)[1]
    H = torch.rand(ROWS, TOKENS, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    route = router(x, H, context, None)
    (route.weights_BTK.sum(-1) * torch.randn(ROWS, TOKENS) * mask).sum().backward()
    assert H.grad.abs().max() > 1e-3
    assert float(H.grad.sum()) == pytest.approx(0, abs=1e-12)
    plain = router.eval()(x, H, context, None)
    torch.testing.assert_close(route.weights_BTK, plain.weights_BTK, msg="the values are the same")


@pytest.mark.parametrize("option", ["quantile", "learned scaled", "routed keys"])
@pytest.mark.parametrize("how", ["sparse", "checkpointed"])
def test_a_training_step_is_the_same_otherwise_computed(option, how):
    model = random_model(small_config(**router_options(option))).train()
    other = copy.deepcopy(model)
    if how == "sparse":
        other.config.execution = "sparse"
    else:
        other.gradient_checkpointing_enable()
    for step in range(2):
        ids = token_ids(4, 16, seed=step)
        for each in (model, other):
            each(ids, labels=ids).loss.backward()
    for (name, ours), theirs in zip(model.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-9, rtol=1e-7, msg=name)
    for name, value in model.model.router_state.state_dict().items():
        torch.testing.assert_close(other.model.router_state.state_dict()[name], value, msg=name)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("option", ["learned scaled", "routed keys"])
def test_a_recorded_pass_moves_the_state_as_a_plain_one_does(option):
    torch.manual_seed(0)
    model = ChiarForCausalLM(small_config(**router_options(option))).cuda().train()
    plain = copy.deepcopy(model)

    def training_pass(each, ids):
        loss = each(ids, labels=ids).loss
        loss.backward()
        return (loss.detach(),)

    recorded = GraphedPasses(lambda ids: training_pass(model, ids), model.parameters())
    for step in range(2 * PLAIN):
        ids = token_ids(4, 16, seed=step).cuda()
        for each in (model, plain):
            each.zero_grad()
        ours, theirs = recorded(ids)[0], training_pass(plain, ids)[0]
        torch.testing.assert_close(ours, theirs)
    assert recorded.failure is None and recorded.records
    for name, value in plain.model.router_state.state_dict().items():
        torch.testing.assert_close(model.model.router_state.state_dict()[name], value, msg=name)
