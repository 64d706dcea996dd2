"""What every router option keeps: gradients, causality, the cache, one compiled graph, sparse training, coordinates."""

import copy

import pytest
import torch

from chiar import ChiarForCausalLM
from chiar.errors import InputError
from chiar.kernels.spectral_entropy import spectral_entropy
from chiar.kernels.transform import Transform
from chiar.layers.context import TokenContext
from chiar.layers.routers import Route, Weighing
from chiar.model.coordinates import to_spectral_coordinates
from chiar.model.inputs import make_context
from chiar.routing.budget import budget_loss
from chiar.training.compiling import PLAIN, GraphedPasses
from helpers import mixed_routes, random_model, randomise, small_config, token_ids
from routed import ANNEALED, OPTIONS, STRAIGHT, options

ROWS, TOKENS = 2, 10
every = pytest.mark.parametrize("option", [*OPTIONS, *ANNEALED])


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
    model.model.set_progress(0.2)
    ids = token_ids(ROWS, TOKENS)
    model(ids, labels=ids, forced_routes=mixed_routes(model.config, ROWS, TOKENS)).loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        # A bias moves all scores alike, which means nothing to a threshold that follows them.
        shift = name.endswith("router.score.bias") and model.config.follows_quantile and not model.config.benefit_weight
        assert (parameter.grad.abs().max() > 1e-12) != shift, name


@pytest.mark.parametrize("option", ["straight scaled", "learned weights", "learned scaled", "mixture of depths"])
def test_gradients_are_those_of_finite_differences(option):
    """With routes held fast, a weight of 2p is an ordinary function of the states and the router's weights."""
    model = model_of(option)
    model.model.layers[1].router.weighing = model.model.layers[2].router.weighing = Weighing(scale="probability")
    forced = mixed_routes(model.config, 1, 4)
    x_BTD = torch.randn(1, 4, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    block = model.model.layers[1]
    own = [p for name, p in block.named_parameters() if "router" in name or "entropy_weights" in name]

    def decode(x_BTD, *parameters):
        return model.model(inputs_embeds=x_BTD, forced_routes=forced).last_hidden_state

    assert torch.autograd.gradcheck(decode, (x_BTD.requires_grad_(), *own), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("chosen", [0, 1], ids=["light", "dark"])
def test_the_straight_through_gradient_is_that_of_log_p_times_the_chosen_change(chosen):
    model = model_of("straight")
    router, state = model.model.layers[1].router, model.model.layer_contexts(blank())[1].router_state
    H = torch.tensor([[0.83, 0.9]], dtype=torch.float64, requires_grad=True)
    context = model.model.layer_contexts(blank())[1]
    route = router(torch.zeros(1, 2, 16), H, context, torch.full((1, 2), chosen))
    assert route.weights_BTK[..., chosen].tolist() == [[1.0, 1.0]]
    assert route.weights_BTK[..., 1 - chosen].tolist() == [[0.0, 0.0]]
    value = torch.tensor([3.0, -2.0], dtype=torch.float64)
    (route.weights_BTK[0, :, chosen] * value).sum().backward()
    z = (H.detach()[0] - router.thresholds[0]) / (0.5 * state.spread)
    p_chosen = torch.sigmoid(z if chosen else -z)
    expected = value * (1 - p_chosen) * (1 if chosen else -1) / (0.5 * state.spread)
    torch.testing.assert_close(H.grad[0], expected)


@pytest.mark.parametrize("option", ["learned quantile", "straight post"])
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


def test_annealing_goes_from_the_probabilities_to_the_choice():
    weigh = Weighing(anneal=0.5)
    log_p = torch.tensor([[[0.3, 0.7]]]).log()
    choice = torch.tensor([[1]])
    for progress, expected in ((0.0, [0.3, 0.7]), (0.25, [0.15, 0.85]), (0.5, [0.0, 1.0]), (1.0, [0.0, 1.0])):
        assert weigh(log_p, choice, torch.tensor(progress))[0, 0].tolist() == pytest.approx(expected)
    assert weigh(log_p, choice, None)[0, 0].tolist() == [0.0, 1.0], "evaluation is hard"


def test_annealing_is_refused_sparsely_in_training_only():
    model = model_of("annealed entropy")
    model.config.execution = "sparse"
    assert model(token_ids()).logits.isfinite().all()
    with pytest.raises(InputError, match=r"in training anneal=0\.5 needs every operator's output"):
        model.train()(token_ids())
    model.config.execution = "auto"
    assert model(token_ids()).logits.isfinite().all()


def test_learned_weights_of_a_band_are_the_entropy_of_the_band():
    x = torch.randn(3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    band = torch.tensor([0.0, 1, 1, 1, 0, 0, 0, 0], dtype=torch.float64)
    found = spectral_entropy(x, Transform(), weight_D=band)
    p = x[:, 1:4].square() / x[:, 1:4].square().sum(-1, keepdim=True)
    torch.testing.assert_close(found, -(p * p.log()).sum(-1) / torch.tensor(8.0, dtype=torch.float64).log())
    assert torch.equal(spectral_entropy(x, Transform(), weight_D=torch.ones(8)), spectral_entropy(x, Transform()))
    model = ChiarForCausalLM(small_config(**options("learned weights")))
    torch.testing.assert_close(model.model.layers[1].entropy_weights(), torch.ones(16))


def test_a_skipped_token_passes_the_layer_unchanged():
    model = model_of("mixture of depths")
    forced = {layer: torch.zeros(ROWS, TOKENS, dtype=torch.long) for layer in model.config.routed_layers}
    states = model(token_ids(ROWS, TOKENS), forced_routes=forced, output_hidden_states=True).hidden_states
    assert torch.equal(states[1], states[2]) and torch.equal(states[2], states[3])


def test_a_bypassed_token_gets_what_attention_gives_to_a_token_alone():
    model = model_of("dtrnet")
    alone, attended = (
        model(token_ids(ROWS, 1), forced_routes=dict.fromkeys(model.config.routed_layers, torch.full((ROWS, 1), k)))
        for k in (0, 1)
    )
    torch.testing.assert_close(alone.logits, attended.logits)


def test_the_budget_loss_is_the_squared_distance_in_training_only():
    model = model_of("two layers")
    ids = token_ids(ROWS, TOKENS)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    done = model(ids, labels=ids, attention_mask=mask, output_routing=True)
    layers = [done.routing.layers[layer] for layer in model.config.routed_layers]
    shares = [(layer.choice_BT[mask.bool()] == 1).double().mean() for layer in layers]
    torch.testing.assert_close(done.routing_loss, sum((share - 0.3) ** 2 for share in shares) / 2)
    torch.testing.assert_close(model.train()(ids, labels=ids, attention_mask=mask).loss, done.loss + done.routing_loss)


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_the_budget_loss_has_the_gradient_of_the_mean_probability(share):
    p = torch.rand(2, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    route = Route(torch.full((2, 5), int(share)), torch.zeros(2, 5, 2), torch.stack([1 - p, p], dim=-1))
    loss = budget_loss([route], None, [0.3], 2.0)
    assert float(loss.detach()) == pytest.approx(2 * (share - 0.3) ** 2)
    loss.backward()
    torch.testing.assert_close(p.grad, torch.full_like(p, 2 * 2 * (share - 0.3) / 10))


@pytest.mark.parametrize("option", ["quantile", "straight scaled", "annealed entropy", "mixture of depths"])
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
            (model if each is compiled else plain).model.set_progress(step / 3)
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
    changes = {**options("straight scaled"), "layer_types": ["attention", "routed"]}
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
@pytest.mark.parametrize("option", ["straight scaled", "mixture of depths", "annealed entropy"])
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
            each.model.set_progress(step / 20)
        ours, theirs = recorded(ids)[0], training_pass(plain, ids)[0]
        torch.testing.assert_close(ours, theirs)
    assert recorded.failure is None and recorded.records
    for name, value in plain.model.router_state.state_dict().items():
        torch.testing.assert_close(model.model.router_state.state_dict()[name], value, msg=name)


@pytest.mark.parametrize("option", ["quantile", "straight scaled", "mixture of depths"])
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
        assert torch.equal(loaded(ids).logits, model.eval()(ids).logits)


@pytest.mark.parametrize("option", ["learned weights", "learned quantile", "two layers", "mixture of depths", "bypass"])
def test_spectral_coordinates_keep_the_function(option):
    model = model_of(option, filter_gamma=False)
    ids = token_ids(ROWS, TOKENS)
    with torch.no_grad():
        expected, found = model(ids).logits, to_spectral_coordinates(model)(ids).logits
    torch.testing.assert_close(found, expected, atol=1e-9, rtol=0)


def test_the_benefit_loss_draws_the_router_alone_to_what_attention_does():
    model, ids = model_of("benefit").train(), token_ids(ROWS, TOKENS)
    mask = torch.ones_like(ids)
    mask[1, 7:] = 0
    found = model.model(ids, attention_mask=mask, output_routes=True, output_hidden_states=True)
    route, x, real = found.routes[0], found.hidden_states[1].detach(), mask.bool()
    block, transform = model.model.layers[1], model.model.basis.transform()
    context = make_context(model.config, transform, x, ids, mask, None, 0)
    with torch.no_grad():
        attended = block.operators["attention"](block.norms["attention"](x), context, real)[0]
        benefit = 1 - torch.nn.functional.cosine_similarity(x, x + attended, dim=-1)[real]
        target = (benefit - benefit.mean()) / benefit.std(correction=0)
        expected = (route.score_BT[real] - target).square().mean()
    torch.testing.assert_close(route.benefit_loss.detach(), expected)
    route.benefit_loss.backward()
    touched = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert touched == {f"model.layers.1.router.score.{part}" for part in ("weight", "bias")}


def test_a_cache_is_refused_where_annealing_needs_what_it_lacks():
    model = model_of("annealed learned").train()
    with pytest.raises(InputError, match=r"anneal=0\.5 needs .* train with use_cache=False"):
        model(token_ids(), use_cache=True)


def test_the_state_is_read_before_a_pass_moves_it():
    """The backward pass reads the spread that the forward pass did, though it has moved in between."""
    model = random_model(small_config(**STRAIGHT)).train()
    ids = token_ids(4, 16)
    first, second = model(ids, labels=ids).loss, model(ids, labels=ids).loss
    (first + second).backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
