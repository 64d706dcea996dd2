"""What every router option keeps: gradients, causality, the cache, one compiled graph, sparse training, coordinates."""

import copy

import pytest
import torch

from chiar import ChiarForCausalLM
from chiar.kernels.transform import Transform
from chiar.layers.context import TokenContext
from chiar.model.coordinates import to_spectral_coordinates
from chiar.model.inputs import make_context
from chiar.training.compiling import PLAIN, GraphedPasses
from helpers import mixed_routes, random_model, randomise, small_config, token_ids
from routed import OPTIONS, options

ROWS, TOKENS = 2, 10
every = pytest.mark.parametrize("option", OPTIONS)


def model_of(option, **changes):
    """In evaluation mode, with thresholds and spreads that split the tokens."""
    model = random_model(small_config(**options(option), **changes))
    if model.model.router_state is not None:
        model.train()(token_ids(16, 16, seed=5))
        model.eval()
    return model


@every
def test_a_later_token_changes_nothing_before_it(option):
    model, ids = model_of(option), token_ids(ROWS, TOKENS)
    other = ids.clone()
    other[:, 6:] = (other[:, 6:] + 1) % 23
    with torch.no_grad():
        ours, theirs = model(ids).logits, model(other).logits
    assert torch.equal(ours[:, :6], theirs[:, :6])
    assert not torch.equal(ours[:, 6:], theirs[:, 6:])


@every
def test_routes_that_are_forced_as_they_were_change_nothing(option):
    model, ids = model_of(option), token_ids(ROWS, TOKENS)
    with torch.no_grad():
        free = model(ids, output_routing=True)
        own = {layer: free.routing.layers[layer].choice_BT for layer in model.config.routed_layers}
        torch.testing.assert_close(model(ids, forced_routes=own).logits, free.logits)


@every
def test_tokens_decoded_one_by_one_are_those_of_one_pass(option):
    model, ids = model_of(option), token_ids(ROWS, TOKENS)
    with torch.no_grad():
        trace = model(ids, output_routing=True)
        found = {}
        for fast in (False, True):
            model.enable_fast_decoding() if fast else model.disable_fast_decoding()
            done = model(ids[:, :4], use_cache=True)
            logits, cache = [done.logits], done.past_key_values
            for t in range(4, TOKENS):
                logits.append(model(ids[:, t : t + 1], past_key_values=cache, use_cache=True).logits)
            found[fast] = torch.cat(logits, 1)
        assert model.fast_decoder.steps == TOKENS - 4
    dark = {trace.routing.attention_fraction(layer) for layer in model.config.routed_layers}
    assert any(0 < fraction < 1 for fraction in dark), "both operators are used"
    for logits in found.values():
        # Sums run in another order, in float64.
        torch.testing.assert_close(logits, trace.logits, atol=1e-9, rtol=0)


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
    block = model.model.layers[1]
    own = [p for name, p in block.named_parameters() if "router" in name]

    def decode(x_BTD, *parameters):
        return model.model(inputs_embeds=x_BTD, forced_routes=forced).last_hidden_state

    assert torch.autograd.gradcheck(decode, (x_BTD.requires_grad_(), *own), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("option", ["learned quantile", "learned quantile post"])
def test_no_gradient_moves_all_scores_alike_where_a_threshold_follows_them(option):
    model, ids = model_of(option).train(), token_ids(ROWS, TOKENS)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    context = make_context(
        model.config, model.model.basis.transform(), torch.zeros(ROWS, TOKENS, 16), ids, mask, None, 0
    )
    router, context = model.model.layers[1].router, model.model.layer_contexts(context)[1]
    x = torch.randn(ROWS, TOKENS, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    H = torch.rand(ROWS, TOKENS, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    route = router(x, H, context, None)
    (route.weights_BTK.sum(-1) * torch.randn(ROWS, TOKENS) * mask).sum().backward()
    assert H.grad.abs().max() > 1e-3
    assert float(H.grad.sum()) == pytest.approx(0, abs=1e-12)
    plain = router.eval()(x, H, context, None)
    torch.testing.assert_close(route.weights_BTK, plain.weights_BTK, msg="the values are the same")


def blank():
    return TokenContext(transform=Transform(), positions_BT=None, real_BT=None, token_ids_BT=None, rope=None)


@pytest.mark.parametrize("option", ["quantile", "learned scaled", "routed keys"])
def test_one_graph_serves_all_training_steps(option):
    torch.manual_seed(0)
    model = ChiarForCausalLM(small_config(**options(option))).train()
    plain = copy.deepcopy(model)
    graphs = []

    def count(graph, _):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(model, backend=count, fullgraph=True, dynamic=False)
    for step in range(3):
        ids = token_ids(4, 16, seed=step)
        losses = []
        for each in (compiled, plain):
            loss = each(ids, labels=ids).loss
            loss.backward()
            losses.append(loss.detach())
        torch.testing.assert_close(losses[0], losses[1])
    assert len(graphs) == 1
    for name, value in plain.model.router_state.state_dict().items():
        torch.testing.assert_close(model.model.router_state.state_dict()[name], value, msg=name)


def test_a_compiled_backward_pass_reads_the_state_of_its_forward_pass():
    """Compilers may read a buffer again instead of keeping a copy, and by then it has moved."""
    torch.manual_seed(0)
    changes = {**options("learned scaled"), "layer_types": ["attention", "routed"]}
    model = ChiarForCausalLM(small_config(**changes)).train()
    plain, ids = copy.deepcopy(model), token_ids(4, 16)
    torch._dynamo.reset()
    torch.compile(model, backend="aot_eager")(ids, labels=ids).loss.backward()
    plain(ids, labels=ids).loss.backward()
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        # Operators are taken apart, so sums run in another order, in fp32.
        torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-6, rtol=1e-4, msg=name)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("option", ["learned scaled", "routed keys"])
def test_a_recorded_pass_moves_the_state_as_a_plain_one_does(option):
    torch.manual_seed(0)
    model = ChiarForCausalLM(small_config(**options(option))).cuda().train()
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


@pytest.mark.parametrize("option", ["quantile", "learned scaled", "routed keys"])
@pytest.mark.parametrize("how", ["sparse", "checkpointed"])
def test_a_training_step_is_the_same_otherwise_computed(option, how):
    model = random_model(small_config(**options(option))).train()
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
    model = randomise(ChiarForCausalLM(small_config(**options(option))))
    model.train()(token_ids(16, 16, seed=5))
    model.save_pretrained(tmp_path)
    loaded = ChiarForCausalLM.from_pretrained(tmp_path).eval()
    ids = token_ids(ROWS, TOKENS)
    with torch.no_grad():
        # Weights at other addresses: a CPU may block its sums another way.
        torch.testing.assert_close(loaded(ids).logits, model.eval()(ids).logits, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("option", ["quantile", "learned quantile", "learned scaled"])
def test_spectral_coordinates_keep_the_function(option):
    model = model_of(option, filter_gamma=False)
    ids = token_ids(ROWS, TOKENS)
    with torch.no_grad():
        expected, found = model(ids).logits, to_spectral_coordinates(model)(ids).logits
    torch.testing.assert_close(found, expected, atol=1e-9, rtol=0)
