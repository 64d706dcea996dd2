"""What every router option keeps: gradients, causality, the cache, sparse training, coordinates."""

import copy

import pytest
import torch

from chiar import ChiarForCausalLM
from chiar.model.coordinates import to_spectral_coordinates
from chiar.model.inputs import make_context
from chiar.training.compiling import PLAIN, GraphedPasses
from helpers import (
    ROUTER_OPTIONS,
    fed_logits,
    mixed_routes,
    random_model,
    randomise,
    router_options,
    small_config,
    token_ids,
)

ROWS, TOKENS = 2, 10
every = pytest.mark.parametrize("option", ROUTER_OPTIONS)
# Sums run in another order, in float64.
ROUNDING = 1e-9


def model_of(option, **changes):
    """In evaluation mode, with thresholds that split the tokens."""
    model = random_model(small_config(**router_options(option), **changes))
    model.train()(token_ids(16, 16, seed=5))
    return model.eval()


@every
def test_later_tokens_forced_routes_and_the_cache(option):
    """Later tokens change nothing, nor do routes forced as they were; one by one tokens are those of one pass."""
    model, ids = model_of(option), token_ids(ROWS, TOKENS)
    other = ids.clone()
    other[:, 6:] = (other[:, 6:] + 1) % 23
    with torch.no_grad():
        free, changed = model(ids, output_routing=True), model(other).logits
        own = {layer: free.routing.layers[layer].choice_BT for layer in model.config.routed_layers}
        forced = model(ids, forced_routes=own).logits
    dark = {free.routing.attention_fraction(layer) for layer in model.config.routed_layers}
    assert any(0 < fraction < 1 for fraction in dark), "both operators are used"
    assert (changed - free.logits)[:, :6].abs().max() < ROUNDING
    assert (changed - free.logits)[:, 6:].abs().max() > 0.1
    assert (forced - free.logits).abs().max() < ROUNDING
    for fast in (False, True):
        if fast:
            model.enable_fast_decoding()
        found, _ = fed_logits(model, ids, [4, *[1] * (TOKENS - 4)])
        assert (found - free.logits).abs().max() < ROUNDING
    assert model.fast_decoder.steps == TOKENS - 4


@every
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


@every
def test_a_saved_model_is_the_same_model(option, tmp_path):
    model = randomise(ChiarForCausalLM(small_config(**router_options(option))))
    model.train()(token_ids(16, 16, seed=5))
    model.save_pretrained(tmp_path)
    loaded = ChiarForCausalLM.from_pretrained(tmp_path).eval()
    ids = token_ids(ROWS, TOKENS)
    with torch.no_grad():
        # Weights at other addresses: a CPU may block its sums another way.
        torch.testing.assert_close(loaded(ids).logits, model.eval()(ids).logits, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("option", ["quantile", "learned scaled"])
def test_spectral_coordinates_keep_the_function(option):
    model = model_of(option, filter_gamma=False)
    ids = token_ids(ROWS, TOKENS)
    with torch.no_grad():
        expected, found = model(ids).logits, to_spectral_coordinates(model)(ids).logits
    torch.testing.assert_close(found, expected, atol=ROUNDING, rtol=0)


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
