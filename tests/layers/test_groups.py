"""Layers that take turns or go together, and an f that settles from 1."""

import pytest
import torch

from chiar import ChiarForCausalLM
from chiar.errors import InputError
from chiar.layers.groups import Groups, Turn, shares
from chiar.layers.router_state import RouterState
from chiar.layers.routers import Route, one_hot
from chiar.routing.flops import count_flops, operator_shares
from chiar.studies.costs import count_costs
from helpers import random_model, small_config, token_ids
from routed import HARD, STRAIGHT

THREES = {"layer_types": ["attention", *["routed"] * 6, "attention"], "turns": 3, "meta_router": False}
PRE = {"norm_position": "pre", "norm": "rmsnorm"}
TOGETHER = {**HARD, **PRE, "router_scale": "probability", "target_fraction": 0.25}
ROUTERS = {
    "learned": {**HARD, **PRE, "router_scale": "probability"},
    "entropy": {},
    "entropy with gradients": {**STRAIGHT},
    "random": {"router": "random"},
}
each = pytest.mark.parametrize("router", ROUTERS)


def used_model(router, **changes):
    """In evaluation mode, with thresholds that have followed a batch until those before them stood still."""
    model = random_model(small_config(**THREES, **ROUTERS[router], vocab_size=512, **changes))
    for _ in range(40 if model.model.router_state is not None else 0):
        model.train()(token_ids(64, 16, seed=1, vocabulary=512))
    return model.eval()


@torch.no_grad()
def choices(model, ids, **given):
    routing = model(ids, output_routing=True, **given).routing
    return torch.stack([routing.layers[layer].choice_BT for layer in routing.routed_layers])


@each
def test_every_token_has_attention_once_in_every_group(router):
    model = used_model(router)
    choice_LBT = choices(model, token_ids(64, 16, seed=1, vocabulary=512))
    assert torch.equal(choice_LBT.view(2, 3, 64, 16).sum(1), torch.ones(2, 64, 16, dtype=torch.long))
    # The thresholds are the batch's own quantiles; a hash is as even as chance lets it be.
    tolerance = 0.06 if router == "random" else 0.01
    assert choice_LBT.float().mean((1, 2)).tolist() == pytest.approx([1 / 3] * 6, abs=tolerance)


@each
def test_sparse_execution_takes_the_same_turns(router):
    ids = token_ids(4, 16, vocabulary=512)
    routes, logits = [], []
    for execution in ("dense", "sparse"):
        model = used_model(router, execution=execution)
        routes.append(choices(model, ids))
        with torch.no_grad():
            logits.append(model(ids).logits)
    assert torch.equal(*routes)
    torch.testing.assert_close(*logits, atol=2e-5, rtol=1e-4)


def test_checkpointed_layers_take_the_turns_they_took():
    ids, gradients = token_ids(4, 16), []
    for checkpointed in (False, True):
        model = random_model(small_config(**THREES, **ROUTERS["learned"])).train()
        if checkpointed:
            model.gradient_checkpointing_enable()
        model(ids, labels=ids).loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, msg=name)


def test_the_last_of_a_group_takes_whoever_was_forced_to_wait():
    model, ids = used_model("learned"), token_ids(2, 8)
    nobody = torch.zeros(2, 8, dtype=torch.long)
    choice_LBT = choices(model, ids, forced_routes={1: nobody, 2: nobody})
    assert bool(choice_LBT[2].all()), "layers 1 and 2 took nobody"


def test_padding_counts_for_no_threshold():
    config = small_config(**THREES, **ROUTERS["learned"])
    whole, padded = (random_model(config).train() for _ in range(2))
    ids = token_ids(8, 10)
    mask = torch.ones(8, 14, dtype=torch.long)
    mask[:, 10:] = 0
    whole(ids)
    padded(torch.nn.functional.pad(ids, (0, 4)), attention_mask=mask)
    for name in ("threshold_L", "spread_L"):
        ours, theirs = (getattr(model.model.router_state, name) for model in (whole, padded))
        torch.testing.assert_close(ours, theirs, msg=name)


def test_a_group_shares_evenly_among_those_who_wait():
    assert shares(3, 6) == pytest.approx([1 / 3, 1 / 2, 1 / 2] * 2)
    groups, context = Groups(small_config(turns=2)), small_context()
    assert groups.context(0, context) is context, "no routed layer"
    choice_BT = torch.tensor([[0, 1]])
    groups.took(1, Route(choice_BT, one_hot(choice_BT, 2)))
    turn = groups.context(2, context).turn
    assert turn.last and turn.choice(torch.tensor([[0, 1]])).tolist() == [[1, 0]]
    assert Turn(torch.tensor([[True, False]]), last=False).choice(torch.tensor([[1, 1]])).tolist() == [[1, 0]]


def small_context():
    from chiar.kernels.transform import Transform
    from chiar.layers.context import TokenContext

    return TokenContext(Transform(), torch.zeros(1, 2, dtype=torch.long), None, None, None)


def test_layers_that_go_together_send_the_same_tokens():
    model, ids = random_model(small_config(**{**THREES, "turns": 0, "together": 3}, **TOGETHER)), token_ids(8, 16)
    for _ in range(20):
        model.train()(ids)
    choice_LBT = choices(model.eval(), ids)
    assert torch.equal(choice_LBT[0], choice_LBT[1]) and torch.equal(choice_LBT[0], choice_LBT[2])
    assert not torch.equal(choice_LBT[0], choice_LBT[3]), "another group"
    assert choice_LBT.float().mean((1, 2)).tolist() == pytest.approx([0.25] * 6, abs=0.02)
    nobody = torch.zeros(8, 16, dtype=torch.long)
    assert not choices(model, ids, forced_routes={1: nobody})[:3].any(), "a forced leader is followed too"
    assert [len(list(layer.router.parameters())) for layer in model.model.layers[1:7]] == [2, 0, 0, 2, 0, 0]


def test_only_the_leading_layers_router_is_counted():
    costs = {}
    for together in (0, 3):
        config = small_config(**{**THREES, "turns": 0, "together": together}, **TOGETHER)
        costs[together] = count_flops(config, 16).part("router")
    assert costs[3] == pytest.approx(costs[0] / 3)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"together": 4}, "divide the 6 routed layers"),
        ({"together": 2, "turns": 2}, "either take turns or go together"),
        ({"together": 2, "router": "static"}, "one choice a token"),
        ({"together": 2, "target_fraction": [0.1, 0.2] * 3}, "one f"),
        ({"together": 2}, "needs a target_fraction"),
    ],
)
def test_what_cannot_go_together_says_so(changes, words):
    with pytest.raises(InputError, match=words):
        small_config(**{**THREES, "turns": 0, **changes})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"turns": 4}, "divide the 6 routed layers"),
        ({"turns": 1}, "0, or 2 or more"),
        ({"router": "static"}, "entropy, random or hard learned"),
        ({"routing": "soft"}, "entropy, random or hard learned"),
        ({"target_fraction": 0.5}, "target_fraction=0.5 cannot be"),
        ({"router": "random", "random_fraction": 0.9}, "random_fraction=0.9 cannot be"),
        ({**HARD, "anneal": 0.5}, "train with all"),
        ({"routing": "hard"}, "train with all"),
        ({**HARD, "budget_weight": 1.0}, "nothing to hold"),
        ({"settle": 0.5}, "set turns"),
    ],
)
def test_what_has_no_turns_says_so(changes, words):
    with pytest.raises(InputError, match=words):
        small_config(**{**THREES, **changes})


def test_f_settles_from_one():
    model = ChiarForCausalLM(small_config(target_fraction=0.25, settle=0.5, vocab_size=512)).train()
    seen = {}
    for progress in (0.0, 0.25, 0.5, 1.0):
        model.model.set_progress(progress)
        model.model.router_state.updates_L.zero_()  # the next pass sets the threshold exactly
        ids = token_ids(64, 16, vocabulary=512)
        model(ids)
        with torch.no_grad():
            routing = model.eval()(ids, output_routing=True).routing
        model.train()
        seen[progress] = routing.attention_fraction(routing.routed_layers[0])
    assert list(seen.values()) == pytest.approx([1.0, 0.625, 0.25, 0.25], abs=0.01)


def test_what_has_settled_stays_settled():
    model = ChiarForCausalLM(small_config(target_fraction=0.25, settle=0.5))
    for progress, expected in ((0.2, 0.2), (1.0, 1.0), (0.0, 1.0)):
        model.model.set_progress(progress)
        assert float(model.model.router_state.progress) == pytest.approx(expected)


def test_training_flops_of_a_falling_f_are_those_of_all_its_values():
    lean = {**PRE, **HARD, "light_ffn": False, "meta_router": False, "keys": "routed"}
    config = small_config(**lean, target_fraction=0.25, settle=0.4)
    passing = 0.0
    for n in range(200):
        f = 1 - 0.75 * min((n + 0.5) / 200 / 0.4, 1.0)
        now = small_config(**lean, target_fraction=0.25)
        passing += count_costs(now, 512, operator_shares(now, f))["training"] / 200
    assert count_costs(config, 512, operator_shares(config))["training"] == pytest.approx(passing, rel=1e-3)


def test_a_layer_that_had_nobody_at_first_finds_its_threshold_at_once():
    state = RouterState(small_config(**{**THREES, "turns": 2}))
    scores, nobody = torch.arange(101.0).view(1, 101), torch.zeros(1, 101, dtype=torch.bool)
    state.follow([scores] * 6, [None, nobody] * 3)
    state.follow([scores + 50] * 6, [None, ~nobody] * 3)
    assert float(state.threshold_L[1]) == pytest.approx(100.0), "its first batch is taken as it is"
    assert 50 < float(state.threshold_L[0]) < 100, "and here the second is averaged in"


def test_settling_needs_something_to_settle_at():
    with pytest.raises(InputError, match="needs a target_fraction"):
        small_config(settle=0.5)


def test_training_flops_know_how_a_model_is_trained():
    lean = {**PRE, **HARD, "target_fraction": 0.25, "light_ffn": False, "meta_router": False, "keys": "routed"}
    costs = {}
    for name, changes in {"hard": {}, "settled": {"settle": 0.4}, "annealed": {"anneal": 0.5}}.items():
        config = small_config(**lean, **changes)
        costs[name] = count_costs(config, 16, operator_shares(config))
    assert costs["hard"]["forward"] == costs["settled"]["forward"] == costs["annealed"]["forward"]
    assert costs["hard"]["training"] < costs["settled"]["training"] < costs["annealed"]["training"]
