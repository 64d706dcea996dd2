"""A dark stack is a plain model on the shorter text of its dark tokens, however these are laid out."""

import copy
import math
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from chiar import ChiarForCausalLM, ChiarForSequenceClassification
from chiar.layers import dark
from chiar.layers.dark import PackedLayout, thinned
from chiar.layers.routers import SAMPLE
from chiar.layers.stack_routers import predictive_entropy
from chiar.model.inputs import make_context
from helpers import (
    STACK_ROUTERS,
    fed_logits,
    gradients,
    padding_mask,
    random_model,
    small_config,
    stack_config,
    token_ids,
)
from helpers import stack_model as build

ROWS, TOKENS = 3, 12
# Sums run in another order, in float64; RoPE's tables are fp32 everywhere alike.
ROUNDING = {"rtol": 1e-8, "atol": 1e-10}
TWO_STACKS = {"layer_types": ["attention", "dark", "attention", "dark", "dark", "attention"]}
DESIGNS = {
    "plain": {},
    "no filter": {"temporal_everywhere": False},
    "smoothed": {"carry": "smoothed"},
    "no carry": {"carry": "none"},
    "wide": {"inner_size": 24, "norm": "layernorm"},
    "narrow": {"inner_size": 8, "carry": "smoothed"},
    "window": {"window": 3},
    "first and last": {"layer_types": ["dark", "dark"]},
    "two stacks": TWO_STACKS,
    "learned positions": {"positions": "learned"},
    "learned, smoothed": {"router": "learned", "carry": "smoothed"},
    "boundary, smoothed": {"router": "boundary", "carry": "smoothed"},
}
designs = pytest.mark.parametrize("design", DESIGNS.values(), ids=DESIGNS.keys())
routers = pytest.mark.parametrize("router", STACK_ROUTERS)


def use_layout(patch, name):
    """Packed in rows, as on a CPU; one text behind the other, as on a GPU; or that with the room a training step has
    there. Attention of such texts is then its definition."""
    if name != "rows":
        patch.setattr(dark, "has_flash", lambda x: True)
    if name == "room":
        patch.setattr(dark, "host_looks", lambda x, training: not training)


@pytest.fixture(params=["rows", "texts", "room"])
def layout(request, monkeypatch):
    use_layout(monkeypatch, request.param)
    return request.param


@pytest.fixture(autouse=True)
def undefined_is_nan():
    """torch then fills new memory with NaN: whoever reads a place that holds no token is found out."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def tokens(model, rows=ROWS, length=TOKENS, seed=2):
    return token_ids(rows, length, seed, model.config.vocab_size)


def forced(model, fraction, rows=ROWS, length=TOKENS, seed=3):
    generator = torch.Generator().manual_seed(seed)
    drawn = {i: torch.rand(rows, length, generator=generator) for i in model.config.routed_layers}
    return {i: (number < fraction).long() for i, number in drawn.items()}


def stacks_of(model, ids, mask=None, **options):
    return model.model(ids, attention_mask=mask, output_routes=True, **options).stacks


# The definition


def by_hand(model, x_BTD, route, mask):
    """The stack's tokens one row at a time, through its layers as a text of their own; then a loop over tokens."""
    config, decoder = model.config, model.model
    (first,) = config.stacks
    stack, y_BTD = decoder.stacks[str(first)], torch.zeros_like(x_BTD)
    positions_BT = mask.cumsum(1) - 1
    for row in range(len(x_BTD)):
        here = ((route.choice_BT[row] == 1) & mask[row].bool()).nonzero()[:, 0]
        z = x_BTD[row, here][None]
        z = z_in = z if stack.widen is None else stack.widen(z)
        place = positions_BT[row, here][None]
        context = make_context(config, decoder.basis.transform(), z, None, None, place, 0)
        for layer in config.stacks[first] if len(here) else ():
            (z, _), _ = decoder.layers[layer](z, context)
        change = z - z_in if stack.narrow is None else stack.narrow(z - z_in)
        weights = route.weights_BTK[row]
        changes = dict(zip(here.tolist(), change[0], strict=True))
        last = mean = torch.zeros_like(x_BTD[row, 0])
        for t in range(x_BTD.shape[1]):
            now = changes.get(t)
            if config.carry == "smoothed":
                p = 1.0 if route.probabilities_BTK is None else route.probabilities_BTK[row, t, 1].clamp(1e-4, 1 - 1e-4)
                mean = mean if now is None else p * now + (1 - p) * mean
                y_BTD[row, t] = x_BTD[row, t] + weights[t].sum() * mean
                continue
            now = None if now is None else weights[t, 1] * now
            last = last if now is None else now
            told = 0 if config.carry == "none" else stack.carry.weight @ last
            y_BTD[row, t] = x_BTD[row, t] + told + (0 if now is None else now)
    return y_BTD


@pytest.mark.parametrize("name", [name for name in DESIGNS if name != "two stacks"])
@torch.no_grad()
def test_what_a_stack_does(name, layout):
    model = build(**DESIGNS[name], execution="sparse")
    ids, (first,) = tokens(model), model.config.stacks
    for mask in (padding_mask(side, ROWS, TOKENS) for side in ("left", "right", "holes")):
        done = model.model(ids, attention_mask=mask, output_hidden_states=True, output_routes=True)
        (route,), states, real = done.routes, done.hidden_states, mask.bool()
        assert 0 < route.choice_BT[real].sum() < real.sum()
        expected = by_hand(model, states[first], route, mask)
        if name == "first and last":  # the last state is normed
            expected = model.model.norm(expected)
        after = states[-1] if name == "first and last" else states[first + 1]
        # A weight of 1 is 1 − 1e-6 in a running mean.
        rounding = {"rtol": 1e-5, "atol": 1e-4} if model.config.carry == "smoothed" else ROUNDING
        torch.testing.assert_close(after[real], expected[real], **rounding)


def test_all_dark_it_is_a_plain_decoder():
    """With a carry that says nothing yet."""
    model = build(window=4)
    torch.nn.init.zeros_(model.model.stacks["1"].carry.weight)
    changes = {"layer_types": ["attention"] * 4, "norm": "rmsnorm", "norm_position": "pre", "embedding_norm": True}
    changes |= {"temporal_everywhere": True, "temporal_window": 4, "tie_word_embeddings": False}
    plain = random_model(small_config("baseline-tiny", **changes))
    missing, extra = plain.load_state_dict(model.state_dict(), strict=False)
    assert not missing and all(".stacks." in name or "router_state" in name for name in extra)
    for layer in (0, 3):
        plain.model.layers[layer].operators["attention"].window = 4
    ids, mask = tokens(model), padding_mask("left", ROWS, TOKENS)
    for execution in ("dense", "sparse"):
        model.config.execution = execution
        found = model(ids, mask, forced_routes=forced(model, 1.0)).logits
        torch.testing.assert_close(found[mask.bool()], plain(ids, mask).logits[mask.bool()], **ROUNDING)


@pytest.mark.parametrize("carry", ["linear", "smoothed", "none"])
@pytest.mark.parametrize("execution", ["dense", "sparse"])
def test_no_dark_token(carry, execution, layout, monkeypatch):
    """The state passes as it is. In decoding no layer runs; with gradients every parameter has one, of 0."""
    model = build(carry=carry, execution=execution, inner_size=24, early_weight=0.0)
    ids, light = tokens(model), forced(model, 0.0)
    inner = model.model.layers[1]
    run = Mock(side_effect=inner.forward)
    monkeypatch.setattr(inner, "forward", run)
    logits, _ = fed_logits(model, ids, [5, 1, 6], None, light)
    assert not run.called
    with torch.no_grad():
        states = model.model(ids, forced_routes=light, output_hidden_states=True).hidden_states
    assert torch.equal(states[1], states[2]) and run.called, "processes that share weights all need them"
    torch.testing.assert_close(logits, model.train()(ids, forced_routes=light).logits, **ROUNDING)
    model(ids, labels=ids, forced_routes=light).loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name
        assert "layers.1." not in name or not parameter.grad.any(), name


# The layouts


def run(model, execution, ids, mask=None, routes=None, training=False):
    """Logits of real tokens and gradients of a sum of these, in training with what the stack itself learns from."""
    model.config.execution = execution
    model.train(training).zero_grad()
    state = model.model.router_state
    before = None if state is None else copy.deepcopy(state.state_dict())
    real = torch.ones_like(ids).bool() if mask is None else mask.bool()
    done = model.model(ids, attention_mask=mask, forced_routes=routes, output_routes=True)
    logits = model.lm_head(done.last_hidden_state)[real]
    loss = (logits * torch.linspace(-1, 1, logits.numel(), dtype=torch.float64).view(logits.shape)).sum()
    if training:
        loss = loss + model.model.early_loss(done, torch.where(real, ids, -100), model.lm_head)
        loss = loss if done.routing_loss is None else loss + done.routing_loss
    loss.backward()
    if state is not None:
        state.load_state_dict(before)
    assert sum(int(stack.dropped) for stack in done.stacks) == 0
    return logits.detach(), gradients(model)


def assert_alike(model, *inputs, **options):
    dense, dense_gradients = run(model, "dense", *inputs, **options)
    sparse, sparse_gradients = run(model, "sparse", *inputs, **options)
    torch.testing.assert_close(sparse, dense, **ROUNDING)
    assert sparse_gradients.keys() == dense_gradients.keys(), "every parameter stays in the graph"
    for name, gradient in dense_gradients.items():
        scale = max(1.0, float(gradient.abs().max()))
        torch.testing.assert_close(sparse_gradients[name], gradient, atol=1e-9 * scale, rtol=1e-7, msg=name)


@routers
@pytest.mark.parametrize("training", [False, True])
def test_packed_is_dense_for_every_router(router, training, layout):
    if layout == "room" and router in ("space", "stride", "random"):
        pytest.skip("rules keep to no fraction: see the test of what there is no room for")
    model = build(router=router, **({"target_fraction": 0.6} if router == "boundary" else {}))
    for mask in (None, padding_mask("left", ROWS, TOKENS)):
        assert_alike(model, tokens(model), mask, training=training)


@designs
def test_packed_is_dense_in_every_design(design, layout):
    model = build(**{**design, "target_fraction": 0.8})  # room for all that is forced
    ids, routes = tokens(model), forced(model, 0.4)
    for n, mask in enumerate((None, *(padding_mask(side, ROWS, TOKENS) for side in ("left", "right", "holes")))):
        assert_alike(model, ids, mask, routes, training=layout == "room" or n == 0)


@st.composite
def cases(draw):
    kinds = st.sampled_from
    layers = draw(kinds([["dark"], ["attention", "dark", "attention"], ["dark", "attention", "dark", "dark"]]))
    fields = {
        "layer_types": layers,
        "carry": draw(kinds(["linear", "smoothed", "none"])),
        "inner_size": draw(kinds([None, 4, 24])),
        "temporal_everywhere": draw(st.booleans()),
        "temporal_window": draw(kinds([2, 4])),
        "temporal_coefficients": 2,
        "router": draw(kinds(["rise", "learned", "boundary"])),
        "hidden_size": 8,
    }
    length = draw(st.integers(1, 9))
    fields["window"] = draw(st.none() | st.integers(1, length + 1))
    mask = draw(st.none() | st.lists(st.lists(st.booleans(), min_size=length, max_size=length), min_size=2, max_size=2))
    mask = None if mask is None else torch.tensor(mask).long()
    fraction = draw(kinds([0.0, 0.2, 0.5, 0.9, 1.0]))
    return fields, length, mask, fraction, draw(kinds(["rows", "texts"])), draw(st.integers(0, 99))


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cases(), st.data())
def test_any_stack(case, data):
    """Packed is dense with gradients, in pieces is at once, what comes later does not matter, nor does another row."""
    fields, length, mask, fraction, layout, seed = case
    model = build(**fields)
    ids, routes = tokens(model, 2, length, seed), forced(model, fraction, 2, length, seed)
    real = torch.ones_like(ids).bool() if mask is None else mask.bool()
    with pytest.MonkeyPatch.context() as patch:
        use_layout(patch, layout)
        assert_alike(model, ids, mask, routes)
        with torch.no_grad():
            expected = model(ids, mask, forced_routes=routes).logits
    pieces = []
    while sum(pieces) < length:
        pieces.append(data.draw(st.integers(1, length - sum(pieces))))
    found, _ = fed_logits(model, ids, pieces, mask, routes)
    torch.testing.assert_close(found[real], expected[real], **ROUNDING)
    stop = pieces[0]
    other = ids.clone()
    other[:, stop:] = (other[:, stop:] + 1) % model.config.vocab_size
    later = {i: torch.cat([choice[:, :stop], 1 - choice[:, stop:]], 1) for i, choice in routes.items()}
    with torch.no_grad():
        found = model(other, mask, forced_routes=later).logits[:, :stop]
        torch.testing.assert_close(found[real[:, :stop]], expected[:, :stop][real[:, :stop]], **ROUNDING)
        alone = {i: choice[1:] for i, choice in routes.items()}
        found = model(ids[1:], None if mask is None else mask[1:], forced_routes=alone).logits
    torch.testing.assert_close(found[real[1:]], expected[1:][real[1:]], **ROUNDING)


@routers
def test_rows_that_route_differently_in_pieces(router):
    """Their own choices, with a prompt that is packed, then pieces of any size, then token by token."""
    model = build(router=router, window=4, execution="sparse")
    ids, mask = tokens(model, length=30), padding_mask("left", ROWS, 30)
    with torch.no_grad():
        expected = model(ids, mask, output_routing=True)
    trace = expected.routing
    counts = trace.layers[1].choice_BT.mul(mask).sum(1)
    assert router == "stride" or len(set(counts.tolist())) > 1, "rows differ"
    for pieces in ([11, 1, 1, 5, *[1] * 12], [1] * 30, [3, 20, 7]):
        found, cache = fed_logits(model, ids, pieces, mask)
        torch.testing.assert_close(found[mask.bool()], expected.logits[mask.bool()], **ROUNDING)
        assert cache.layers[1].stores["attention"].length_B.tolist() == counts.tolist(), "light ones take no memory"


# Room


@pytest.mark.parametrize(("marked", "room"), [(10, 3), (10, 10), (3, 10), (0, 4), (7, 1), (100, 33)])
def test_what_there_is_no_room_for_is_spread_evenly(marked, room):
    dark_BT = torch.zeros(4, 50, dtype=torch.bool)
    dark_BT.view(-1)[torch.randperm(200)[:marked]] = True
    kept_BT, dropped = thinned(dark_BT, room)
    assert int(kept_BT.sum()) == min(marked, room) and int(dropped) == max(0, marked - room)
    assert not (kept_BT & ~dark_BT).any()
    numbers = kept_BT[dark_BT].nonzero()[:, 0].diff()
    assert not len(numbers) or int(numbers.max() - numbers.min()) <= 1


def test_room_is_made_for_the_fraction_that_a_field_says():
    model = build(router="random", target_fraction=0.2, random_fraction=0.6)
    assert model.model.stacks["1"].share == 0.6
    assert build(**TWO_STACKS, target_fraction=[0.2, 0.7]).model.stacks["3"].share == 0.7


@pytest.mark.parametrize("carry", ["linear", "smoothed", "none"])
def test_too_many_dark_tokens(carry, monkeypatch):
    """In training what there is no room for is light, and counted; evaluation leaves none out."""
    use_layout(monkeypatch, "room")
    model = build(carry=carry, target_fraction=0.25).train()
    ids, all_dark = tokens(model), forced(model, 1.0)
    model.config.execution = "sparse"
    found = model.model(ids, forced_routes=all_dark, output_routes=True)
    room = ROWS * TOKENS // 4 + 1
    assert int(found.stacks[0].dropped) == ROWS * TOKENS - room
    model.config.execution = "dense"
    kept, _ = thinned(all_dark[1] == 1, room)
    expected = model.model(ids, forced_routes={1: kept.long()})
    torch.testing.assert_close(found.last_hidden_state, expected.last_hidden_state, **ROUNDING)
    model.eval()
    expected = model.model(ids, forced_routes=all_dark)
    model.config.execution = "sparse"
    for looks in (True, False):  # a compiled pass may not look
        monkeypatch.setattr(dark, "host_looks", lambda x, training, looks=looks: looks)
        found = model.model(ids, forced_routes=all_dark, output_routes=True)
        assert int(found.stacks[0].dropped) == 0
        torch.testing.assert_close(found.last_hidden_state, expected.last_hidden_state, **ROUNDING)


def test_routes_may_be_asked_for_while_training():
    model = build().train()
    assert model(tokens(model), labels=tokens(model), output_routes=True).loss.isfinite()


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("rows", [1, 3])
def test_texts_of_a_pass_that_looks_are_as_long_as_it_says_and_fill_all_places(share, rows, monkeypatch):
    """Flash attention reads no further than the longest."""
    use_layout(monkeypatch, "texts")
    model, made = build().eval(), []
    monkeypatch.setattr(dark, "PackedLayout", lambda *a, **k: made.append(PackedLayout(*a, **k)) or made[-1])
    ids = token_ids(rows, TOKENS)
    chosen = (torch.rand(rows, TOKENS, generator=torch.Generator().manual_seed(0)) < share).long()
    model.config.execution = "sparse"
    model.model(ids, forced_routes={1: chosen})
    (layout,) = made
    lengths = layout.context.rows.diff()
    assert lengths.max() <= layout.context.longest and layout.context.rows[-1] == layout.used_P.numel()
    assert layout.used_P.sum() == chosen.sum()


# Thresholds


@pytest.mark.parametrize("router", ["rise", "predictive", "forecast", "learned", "spectral"])
def test_training_cuts_its_own_quantile_and_evaluation_keeps_the_mean(router, tmp_path):
    model = build(router=router, target_fraction=0.3).train()
    state = model.model.router_state
    state.load_state_dict({name: value.double() for name, value in state.initial().items()})
    expected, mask = [], padding_mask("right", 8, 25)
    for seed in range(3):
        ids = tokens(model, 8, 25, seed)
        (route,) = model.model(ids, output_routes=True).routes
        assert route.choice_BT.sum() == int(0.3 * 200)
        scores = route.score_BT.detach().flatten()
        assert ((scores > scores[route.choice_BT.flatten() == 0].max()).long() == route.choice_BT.flatten()).all()
        expected.append(scores.quantile(0.7))
        assert ids.numel() <= SAMPLE and state.threshold_L.item() == pytest.approx(sum(expected).item() / (seed + 1))
    (route,) = model.model(ids, attention_mask=mask, output_routes=True).routes
    assert (route.choice_BT * mask).sum() == int(0.3 * mask.sum()), "padding does not count"
    cut = state.threshold_L.clone()
    model.eval()
    with torch.no_grad():
        (route,) = model.model(ids[:1, :7], output_routes=True).routes
    assert torch.equal(route.choice_BT, (route.score_BT > cut).long())
    assert torch.equal(state.threshold_L, cut)
    model.float().save_pretrained(tmp_path)
    again = ChiarForCausalLM.from_pretrained(tmp_path).eval()
    assert again.model.router_state.threshold_L.item() == pytest.approx(cut.item(), rel=1e-6)
    assert again.state_dict().keys() == model.state_dict().keys()
    torch.testing.assert_close(again(ids).logits, model(ids).logits)


def test_thresholds_can_be_moved_where_there_are_any():
    model, ids = build(**TWO_STACKS), token_ids(ROWS, TOKENS)
    model.model.set_thresholds([-1.0, 1.0])
    first, second = (stack.route.choice_BT for stack in stacks_of(model, ids))
    assert first.all() and not second.any()
    model.model.set_thresholds(1.0)
    assert not any(stack.route.choice_BT.any() for stack in stacks_of(model, ids))
    model.model.set_thresholds(None)
    for router, wrong, message in (
        *(
            ("predictive", wrong, "1 dark stacks need a number each")
            for wrong in ([0.1, 0.2], ["high"], True, math.nan)
        ),
        ("space", 0.5, "router='space' has no threshold"),
    ):
        with pytest.raises(ValueError, match=message):
            build(router=router).model.set_thresholds(wrong)


def test_entropies_lie_between_0_and_1():
    flat, sharp = torch.zeros(1, 1, 11), 1e4 * F.one_hot(torch.tensor([[3]]), 11).float()
    assert predictive_entropy(flat).item() == pytest.approx(1.0) and predictive_entropy(sharp).item() == 0.0
    p = torch.tensor([[[0.5, 0.25, 0.25]]])
    assert predictive_entropy(p.log()).item() == pytest.approx(1.5 * torch.log(torch.tensor(2.0)).item() / 1.0986123)
    for router in ("predictive", "spectral"):
        model = build(router=router)
        (stack,) = stacks_of(model, tokens(model))
        assert stack.entropy_BT.min() >= 0 and stack.entropy_BT.max() <= 1 and not stack.entropy_BT.requires_grad
        if router == "predictive":
            torch.testing.assert_close(
                stack.entropy_BT, predictive_entropy(model.model.stacks["1"].early(stack.router_input_BTD))
            )


# What stacks learn from


def early_by_hand(model, ids, labels):
    """The mean next-token loss of the early head."""
    (stack,) = stacks_of(model, ids)
    logits = model.model.stacks["1"].early(stack.router_input_BTD)[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())


def test_the_early_loss():
    model = build(early_weight=0.3, router="space").train()
    ids = tokens(model)
    labels = ids.clone()
    labels[0, 3:7] = -100
    plain = model.eval()(ids, labels=labels).loss
    found = model.train()(ids, labels=labels).loss
    torch.testing.assert_close(found, plain + 0.3 * early_by_hand(model, ids, labels), **ROUNDING)
    counted = int((labels[:, 1:] != -100).sum())
    share = model(ids, labels=labels, num_items_in_batch=4 * counted).loss
    torch.testing.assert_close(share, found / 4, **ROUNDING)


def gradients_of(model, loss):
    model.zero_grad()
    loss.backward()
    return gradients(model)


@pytest.mark.parametrize("router", ["rise", "forecast"])
def test_without_a_weight_the_head_learns_and_nothing_else_feels_it(router):
    model = build(router=router, early_weight=0.0).train()
    ids, routes = tokens(model), forced(model, 0.4)
    own = gradients_of(model, F.cross_entropy(model(ids, forced_routes=routes).logits[:, :-1].float().mT, ids[:, 1:]))
    all_of_it = gradients_of(model, model(ids, labels=ids, forced_routes=routes).loss)
    parts = ("stacks.1.early.", "stacks.1.norm.") if router == "rise" else ("stacks.1.router.",)
    assert all_of_it.keys() - own.keys() == {
        name for name, _ in model.named_parameters() if any(p in name for p in parts)
    }
    for name in own:
        # The loss is taken in fp32.
        torch.testing.assert_close(all_of_it[name], own[name], rtol=1e-4, atol=1e-6)
    for name in all_of_it.keys() - own.keys():
        assert all_of_it[name].abs().max() > 1e-6, name


def test_forecasts_are_drawn_to_the_final_entropy():
    """Of tokens that have a next one: a mean over these, whatever is ignored."""
    model = build(router="forecast", early_weight=0.0).train()
    ids = tokens(model)
    targets = torch.where(torch.arange(TOKENS) < 8, ids, -100)
    done = model.model(ids, output_routes=True)
    final = predictive_entropy(model.lm_head(done.last_hidden_state))
    expected = (done.routes[0].score_BT - final)[:, :8].square().mean()
    torch.testing.assert_close(model.model.early_loss(done, targets, model.lm_head), expected)
    optimizer = torch.optim.Adam(model.model.stacks["1"].router.parameters(), lr=1e-2)
    losses = []
    for _ in range(80):
        done = model.model(ids, output_routes=True)
        losses.append(model.model.early_loss(done, ids, model.lm_head))
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < 0.2 * losses[0]


@designs
def test_every_parameter_has_a_gradient(design):
    model = build(**design).train()
    ids = tokens(model)
    model(ids, labels=ids, forced_routes=forced(model, 0.5)).loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name
        # A bias moves all scores alike, which means nothing to a threshold that follows them.
        shift = name.endswith("router.score.bias")
        assert (parameter.grad.abs().max() > 1e-12) != shift, name


def test_gradient_checkpointing_changes_nothing(layout):
    model = build(target_fraction=0.5).train()
    ids, found = tokens(model), []
    model.config.execution = "sparse"
    for enable in (model.gradient_checkpointing_disable, model.gradient_checkpointing_enable):
        enable()
        found.append(gradients_of(model, model(ids, labels=ids, forced_routes=forced(model, 0.4)).loss))
    torch.testing.assert_close(*found, **ROUNDING)


def test_dropout_and_a_classifier():
    torch.manual_seed(0)
    model = ChiarForSequenceClassification(stack_config(dropout=0.5, num_labels=3)).train()
    ids = token_ids()
    loss = model(ids, padding_mask("left"), labels=torch.tensor([0, 2])).loss
    loss.backward()
    unused = {name for name, parameter in model.named_parameters() if parameter.grad is None}
    assert unused == {"model.stacks.1.early.weight", "model.stacks.1.norm.weight"}


def test_what_stands_around_the_layers_can_be_compiled_and_not():
    model, ids, graphs = build().train(), token_ids(ROWS, TOKENS), []
    expected = model(ids, labels=ids).loss
    stack = model.model.dark_stacks[0]
    stack.compile(backend=lambda graph, inputs: graphs.append(graph) or graph)
    torch.testing.assert_close(model(ids, labels=ids).loss, expected)
    assert len(graphs) >= 2
    stack.uncompile()
    graphs.clear()
    torch.compiler.reset()
    torch.testing.assert_close(model(ids, labels=ids).loss, expected)
    assert not graphs
