"""Decoding with a cache gives what the whole forward pass gives, plainly and by fixed steps; under keys="routed" rows
have lengths of their own, and a token stores nothing where it is not sent."""

import copy
import gc
import weakref
from unittest.mock import Mock

import pytest
import torch
from transformers import DynamicCache, GenerationConfig

from chiar.errors import InputError
from chiar.layers.ragged import BLOCK, LEAST, ROOM, Shelf
from chiar.layers.sparse import PackedTokens
from chiar.model.cache import ChiarCache
from helpers import (
    ALONG_TIME,
    LENGTHS,
    ROWS,
    TOKENS,
    dark_model,
    fed_logits,
    feed,
    gradients,
    mixed_routes,
    refused,
    routed_model,
    token_ids,
)

LONG, NEW = 90, 6
# A decoding step multiplies matrices of another shape than the whole pass, so sums run in another order. Logits reach
# 40, where fp32 resolves 4e-6: differences seen are below 5e-5. Entropies, weights and gates lie in [0, 1]: 1e-6.
LOGIT_ROUNDING, UNIT_ROUNDING = 2e-4, 5e-6
# Decisions further than this from a tie survive the rounding.
ROUTE_MARGIN = 2 * UNIT_ROUNDING
# Tokens are compared in float64, where only RoPE's tables, gates and RBF mixing are rounded to fp32: a flipped token
# would need logits this close.
TOKEN_MARGIN = 1e-5
# Of float64 models; eager attention and RBF mixing take their softmax in fp32.
ROUNDING, FP32_ROUNDING = 1e-9, 2e-5

REPRESENTATIVE = {
    "baseline": {"preset": "baseline-tiny"},
    "v1-routed-keys": {"preset": "v1-tiny", "keys": "routed"},
    "v3-routed-keys": {"keys": "routed"},
    "v3-paper-gate": {"gate_pool": "sequence", "gate_generation": "prefill"},
    "random-position": {"router": "random", "random_key": "position"},
    "temporal": ALONG_TIME["temporal-all"],
}
some_options = pytest.mark.parametrize("some", REPRESENTATIVE.values(), ids=REPRESENTATIVE.keys())
pools_seeing_the_future = pytest.mark.parametrize("pool", ["batch", "sequence"])


def whole(model, ids, mask=None, **options):
    with torch.no_grad():
        return model(ids, attention_mask=mask, **options)


def assert_same_decisions(full, steps, real):
    """Logits, H, choices, weights and gate of all real tokens."""
    logits = torch.cat([step.logits for step in steps], dim=1)
    assert (full.logits - logits)[real].abs().max() < LOGIT_ROUNDING
    for layer in full.routing.layers:
        for threshold in layer.thresholds or []:
            assert (layer.entropy_BT - threshold).abs()[real].min() > ROUTE_MARGIN
        for name in ("choice_BT", "weights_BTK", "entropy_BT", "gate_BT", "probabilities_BTK"):
            expected = getattr(layer, name)
            if expected is not None:
                got = torch.cat([getattr(step.routing.layers[layer.index], name) for step in steps], dim=1)
                tolerance = 0 if name == "choice_BT" else UNIT_ROUNDING
                assert (expected - got)[real].abs().max() <= tolerance, f"{name} of layer {layer.index}"


def test_decoding_equals_the_whole_pass(lively, option, ids, left_mask):
    model = lively(option)
    for mask, chunks in ((torch.ones_like(ids), [1] * TOKENS), (left_mask, [4, 3, 1, 2])):
        full = whole(model, ids, mask, output_routing=True)
        assert_same_decisions(full, feed(model, ids, chunks, mask, output_routing=True)[0], mask.bool())
    # Without its past the last token gets other logits.
    assert (full.logits[:, -1] - whole(model, ids[:, -1:]).logits[:, -1]).abs().amax(-1).min() > 0.1


def generate(model, prompt, fast=False, **options):
    model.disable_fast_decoding()
    if fast:
        model.enable_fast_decoding()
    torch.manual_seed(3)
    found = model.generate(prompt, **{"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, **options})
    fixed = "rbf" not in model.config.operators and model.config._attn_implementation != "eager"
    assert not fast or model.fast_decoder.steps == (NEW - 1 if fixed else 0)
    return found


def test_greedy_generation(lively, option, ids, left_mask):
    """Without a cache, with one, by fixed steps where there are such, and the best token of the whole pass."""
    model = lively(option).double()
    plainly = {"use_cache": False, "output_logits": True, "return_dict_in_generate": True}
    found = generate(model, ids, attention_mask=left_mask, **plainly)
    first, second = torch.stack(found.logits).topk(2).values.unbind(-1)
    assert (first - second).min() > TOKEN_MARGIN
    expected = found.sequences
    mask = torch.cat([left_mask, left_mask.new_ones(ROWS, NEW - 1)], 1)
    best = whole(model, expected[:, :-1], mask).logits[:, TOKENS - 1 :].argmax(-1)
    assert torch.equal(expected, torch.cat([ids, best], 1))
    for fast in (False, True):
        assert torch.equal(generate(model, ids, fast, attention_mask=left_mask), expected)


@some_options
def test_padded_rows_sampling_and_beams(lively, some, ids, left_mask, monkeypatch):
    """A left-padded batch generates what its rows do, fixed steps what plain ones do, a cache what none does, and
    embeddings what their tokens do."""
    model = lively(some).double()
    orders, reorder = [], ChiarCache.reorder_cache
    monkeypatch.setattr(ChiarCache, "reorder_cache", lambda *given: orders.append(given[1].tolist()) or reorder(*given))
    for how in ({}, {"num_beams": 3}, {"do_sample": True, "temperature": 3.0}):
        found = generate(model, ids, attention_mask=left_mask, **how)
        assert torch.equal(found, generate(model, ids, True, attention_mask=left_mask, **how))
        if "gate_generation" not in some:
            assert torch.equal(found, generate(model, ids, attention_mask=left_mask, use_cache=False, **how))
        for row, length in enumerate(LENGTHS) if "do_sample" not in how else ():
            alone = generate(model, ids[row : row + 1, -length:], **how)
            assert torch.equal(found[row, -length - NEW :], alone[0])
    assert any(order != list(range(len(order))) for order in orders)
    embeddings = model.get_input_embeddings()(ids)
    found = generate(model, None, inputs_embeds=embeddings, attention_mask=left_mask)
    assert torch.equal(found, generate(model, ids, attention_mask=left_mask)[:, TOKENS:])


@pools_seeing_the_future
def test_a_gate_that_sees_the_future_refuses_to_generate(lively, ids, pool):
    model = lively({}, gate_pool=pool)
    reason = f"gate_pool='{pool}' lets every token see the whole {pool}.*gate_generation='prefill'"
    for options in ({"use_cache": True}, {"past_key_values": ChiarCache(4)}):
        refused(reason, model, ids, **options)
    for cached in (True, False):
        refused(reason, generate, model, ids, use_cache=cached)
    assert whole(model, ids).past_key_values is None


@pools_seeing_the_future
def test_prefill_freezes_the_gate(lively, ids, left_mask, pool):
    model = lively({}, gate_pool=pool, gate_generation="prefill").double()
    steps, _ = feed(model, ids, [6, 2, 1, 1], left_mask, output_routing=True)
    frozen, *later = (step.routing.layers[0].gate_BT for step in steps)
    alone, full = (whole(model, ids[:, :n], left_mask[:, :n], output_routing=True) for n in (6, TOKENS))
    # A cache may take sums along another way.
    assert (frozen - alone.routing.layers[0].gate_BT).abs().max() < UNIT_ROUNDING
    assert all(torch.equal(gate, frozen[:, :1].expand_as(gate)) for gate in later)
    assert (full.routing.layers[0].gate_BT[:, 0] - frozen[:, 0]).abs().max() > 1e-3

    mask = torch.cat([left_mask, left_mask.new_ones(ROWS, NEW - 1)], 1)
    for fast in (False, True):
        generated = generate(model, ids, fast, attention_mask=left_mask)
        logits, _ = fed_logits(model, generated[:, :-1], [TOKENS, *[1] * (NEW - 1)], mask)
        assert torch.equal(generated[:, TOKENS:], logits[:, TOKENS - 1 :].argmax(-1))
    refused("cache", model.generate, ids, generation_config=GenerationConfig(max_new_tokens=2, use_cache=False))
    model.generation_config.use_cache = False
    refused("cache", generate, model, ids)


def test_caches_that_do_not_fit_are_refused(lively, ids):
    model = lively({})
    for cache, name in [(DynamicCache(), "DynamicCache"), (((),), "tuple")]:
        with pytest.raises(TypeError, match=f"needs a chiar.model.cache.ChiarCache, got .*{name}"):
            model(ids, past_key_values=cache)
    with pytest.raises(TypeError, match=r"needs a chiar\.model\.cache\.ChiarCache"):
        generate(model, ids, past_key_values=DynamicCache())
    cache = feed(model, ids, [TOKENS])[1]
    with pytest.raises(NotImplementedError, match="cannot be cropped"):
        cache.crop(4)
    # A batch of another size would be written into other rows, on a GPU beside the tensors.
    for fast in (False, True):
        if fast:
            model.enable_fast_decoding()
        for rows in (1, ROWS + 1):
            with pytest.raises(InputError, match=f"holds {ROWS} rows and the input has {rows}"), torch.no_grad():
                model(ids[:1, :1].expand(rows, 1), past_key_values=cache, use_cache=True)
    model = routed_model(router="learned", hard_estimator="both")
    whole(model, ids % 23, use_cache=True)
    refused(r"hard_estimator='both'.*use_cache", model.train(), ids % 23, use_cache=True)


def test_more_tokens_than_positions(lively, ids):
    """Learned positions end; RoPE goes beyond the trained length."""
    model = lively({"preset": "v1-tiny"}, max_position_embeddings=8)
    reason = "tokens, but the model has 8 learned positions"
    refused(f"10 {reason}", model, ids)
    cache = feed(model, ids, [5, 3])[1]
    refused(f"9 {reason}", model, ids[:, 8:9], past_key_values=cache)
    refused(f"9 {reason}", generate, model, ids[:, :5])
    assert generate(lively({}, max_position_embeddings=8), ids).shape == (ROWS, TOKENS + NEW)


JOINED = {
    "v2": {"preset": "v2-tiny"},
    "v3-paper-gate": {"gate_pool": "batch", "gate_generation": "prefill"},
    "hard-gate": {"gate_skip_below": 0.5},
    **{name: REPRESENTATIVE[name] for name in ("v1-routed-keys", "v3-routed-keys", "temporal")},
}
STEPS, PROMPTS = 7, (7, 2, 11)
TEXTS = [token_ids(1, prompt + STEPS, seed=prompt, vocabulary=257) for prompt in PROMPTS]


def prefilled(model, row):
    return feed(model, TEXTS[row], [PROMPTS[row]])[1]


def alone(model, row):
    """The logits of a text whose prompt is read at once and the rest token by token."""
    return fed_logits(model, TEXTS[row], [PROMPTS[row], *[1] * STEPS])[0][0]


@pytest.mark.parametrize("fast", [False, True], ids=["plain", "fast"])
@pytest.mark.parametrize("some", JOINED.values(), ids=JOINED.keys())
def test_rows_come_and_go(lively, some, fast):
    """Each goes on as if it were alone."""
    model = lively(some, max_position_embeddings=64)
    expected = [alone(model, row) for row in range(3)]
    if fast:
        model.enable_fast_decoding()
    cache, live, lengths = prefilled(model, 0), [0], list(PROMPTS)
    for time in range(STEPS):
        if time == 5:
            cache.batch_select_indices(torch.tensor([0, 2]))
            live.remove(1)
        if row := {2: 1, 3: 2}.get(time):
            cache.join(prefilled(model, row), len(live), 1)
            live.append(row)
        ids_B1 = torch.stack([TEXTS[row][0, lengths[row]] for row in live])[:, None]
        positions_B1 = torch.tensor([lengths[row] for row in live])[:, None]
        logits_BV = whole(model, ids_B1, past_key_values=cache, position_ids=positions_B1).logits[:, -1]
        for row, logits_V in zip(live, logits_BV, strict=True):
            torch.testing.assert_close(logits_V, expected[row][lengths[row]], atol=LOGIT_ROUNDING, rtol=0)
            lengths[row] += 1
    assert lengths == [7 + 7, 2 + 3, 11 + 4]


def test_a_join_that_fails_changes_nothing(lively):
    model = lively({"keys": "routed"})
    cache, foreign, other = prefilled(model, 0), prefilled(lively({"meta_router": False}), 1), prefilled(model, 1)
    other.layers[-1].state["unknown"] = torch.zeros(1)  # the layers before it can be joined
    for wrong in (foreign, other):
        refused("different models", cache.join, wrong, 1, 1)
    found, _ = fed_logits(model, TEXTS[0], [1] * STEPS, cache=cache, start=PROMPTS[0])
    torch.testing.assert_close(found[0], alone(model, 0)[PROMPTS[0] :], atol=LOGIT_ROUNDING, rtol=0)


DESIGNS = {
    "v3": {},
    "eager": {"attn_implementation": "eager"},
    "pre-norm": {"norm": "rmsnorm", "norm_position": "pre", "basis": "identity"},
    "auto": {"execution": "auto", "light_ffn": False, "norm_position": "pre"},
    "sparse learned": {"router": "learned", "hard_estimator": "selected", "execution": "sparse"},
    "v1": {"preset": "v1-tiny", "max_position_embeddings": LONG, "hard_estimator": "selected"},
    "three-operators": {"operators": ["spectral", "rbf", "attention"], "execution": "auto"},
}
designs = pytest.mark.parametrize("design", DESIGNS.values(), ids=DESIGNS.keys())


def ragged_routes(config, tokens=LONG):
    """Row 0 mixes, row 1 is all light but for its last token, row 2 all attention."""
    attention = config.operators.index("attention")
    routes = mixed_routes(config, ROWS, tokens)
    for choice_BT in routes.values():
        choice_BT[1], choice_BT[1, -1], choice_BT[2] = 0, attention, attention
    return routes


def exact_routes(config, fraction, rows, tokens):
    """Just this fraction of every row's tokens goes to attention, chosen at random."""
    generator = torch.Generator().manual_seed(7)
    rank = {i: torch.rand(rows, tokens, generator=generator).argsort(1).argsort(1) for i in config.routed_layers}
    return {i: (rank_BT < round(fraction * tokens)).long() for i, rank_BT in rank.items()}


def stored_bytes(cache, layers):
    """Of all tensors of these layers, however they are stored."""
    tensors = [tensor for i in layers for tensor in cache.layers[i].state.values()]
    tensors += [part for i in layers for store in cache.layers[i].stores.values() for part in store.parts.values()]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def rounding(config):
    fp32 = config._attn_implementation == "eager" or "rbf" in config.operators
    return FP32_ROUNDING if fp32 else ROUNDING


@designs
@pytest.mark.parametrize("case", ["full", "padded", "light"])
def test_rows_of_very_different_lengths(design, case):
    """A prompt, pieces, and steps over the end of a block. Neither light tokens nor padding store anything; eager
    attention has weights to show, so it runs, with one block."""
    model, ids = routed_model(**design), token_ids(ROWS, LONG)
    routes, real = ragged_routes(model.config), torch.ones_like(ids)
    if case == "padded":
        real[0, :50], real[2, :85] = 0, 0
    if case == "light":
        routes = {i: torch.zeros_like(ids) for i in routes}
    mask, real = real if case == "padded" else None, real.bool()
    found, cache = fed_logits(model, ids, [40, 3, *[1] * 27, 20], mask, routes)
    expected = whole(model, ids, mask, forced_routes=routes).logits
    assert (found - expected)[real].abs().max() < rounding(model.config)
    attention, eager = model.config.operators.index("attention"), "eager" in design.values()
    assert case != "light" or eager or stored_bytes(cache, model.config.routed_layers) == 0
    for layer in model.config.routed_layers if case != "light" or eager else ():
        store = cache.layers[layer].stores["attention"]
        assert store.length_B.tolist() == ((routes[layer] == attention) & real).sum(1).tolist()
        assert case != "light" or store.capacity == ROOM


@pytest.mark.parametrize("fraction", [0.5, 0.25])
@pytest.mark.parametrize("chunks", [[1000, *[1] * 24], [512, 512]], ids=["prefilled", "chunked"])
def test_bytes_follow_the_fraction(fraction, chunks):
    """Against the same layers where all tokens are keys."""
    tokens = sum(chunks)
    ids = token_ids(2, tokens)
    model, dense = routed_model(), routed_model(keys="all")
    layers = model.config.routed_layers
    routes = exact_routes(model.config, fraction, 2, tokens)
    found, expected = (stored_bytes(fed_logits(m, ids, chunks, None, routes)[1], layers) for m in (model, dense))
    numbers = 2 * 2 * tokens * model.config.hidden_size * 8  # keys and values of two rows in float64
    spare = BLOCK + max(ROOM, tokens // 8 if len(chunks) == 2 else 0)  # a second prompt makes what was there grow
    assert 1 <= expected / (len(layers) * numbers) < 1 + spare / tokens
    assert fraction <= found / (len(layers) * numbers) <= fraction + spare / tokens


def test_growth_by_blocks(monkeypatch):
    """Capacity stays just ahead of the longest row, and the lengths are looked at once in many steps."""
    model, ids = routed_model(num_hidden_layers=6), token_ids(ROWS, 200)
    routes = exact_routes(model.config, 0.5, ROWS, 200)
    looks, look = [], Shelf.look
    monkeypatch.setattr(Shelf, "look", lambda shelf: looks.append(shelf) or look(shelf))
    cache, capacities, logits = None, [], []
    for n in range(200):
        done, cache = fed_logits(model, ids, [1], None, routes, cache, n)
        logits.append(done)
        for store in cache.layers[model.config.routed_layers[0]].stores.values():
            longest = int(store.length_B.max())
            assert longest <= store.most < store.capacity < longest + BLOCK + ROOM
            capacities.append(store.capacity)
    assert all(capacity % BLOCK == 0 for capacity in capacities)
    assert capacities == sorted(capacities)
    assert 2 <= len(set(capacities)) <= 4
    # The stores of all layers are looked at together, but for the first time, when each is made.
    assert len(looks) <= len(model.config.layer_types) + 200 / (LEAST - 1)
    assert (torch.cat(logits, 1) - whole(model, ids, forced_routes=routes).logits).abs().max() < ROUNDING


@pytest.mark.parametrize("rows", [1, ROWS])
@pytest.mark.parametrize(
    "design", [{"layer_types": ["attention"] * 3}, {}, {"window": 9}], ids=["dense", "v5", "window"]
)
def test_a_prompt_does_not_wait_for_lengths(monkeypatch, design, rows):
    """Each look would wait for the device; the length of a prompt, or of its longest row of dark tokens, is known."""
    model, ids = dark_model(**design), token_ids(rows, 200)
    monkeypatch.setattr(Shelf, "look", Mock(side_effect=AssertionError))
    _, cache = fed_logits(model, ids, [200], None, None)
    for store in cache.shelf.stores:
        assert store.most == int(store.length_B.max())


def test_a_dropped_cache_is_freed_at_once():
    """Without waiting for the garbage collector, or old caches would fill a GPU."""
    model, ids = dark_model(), token_ids(ROWS, 40)
    gc.collect()
    gc.disable()
    try:
        _, cache = fed_logits(model, ids, [38, 1, 1], None, None)
        held = [weakref.ref(part) for store in cache.shelf.stores for part in (*store.parts.values(), store.length_B)]
        del cache
        assert held and not any(reference() is not None for reference in held)
    finally:
        gc.enable()


@pytest.mark.parametrize("keys", ["all", "routed"])
@pytest.mark.parametrize("operators", [["spectral", "attention"], ["spectral", "rbf", "attention"]], ids=len)
def test_a_sparse_prefill_fills_the_cache(monkeypatch, keys, operators):
    """It runs for the prompt alone, and decoding goes on from what it stored as if dense execution had."""
    model = routed_model(keys=keys, operators=operators, execution="sparse")
    ids, routes = token_ids(ROWS, LONG), ragged_routes(model.config)
    padded = torch.ones_like(ids)
    padded[0, :20], padded[2, :55] = 0, 0
    recorded = Mock(side_effect=PackedTokens)
    monkeypatch.setattr("chiar.layers.block.PackedTokens", recorded)
    for mask in (None, padded):
        model.config.execution = "sparse"
        inputs = ids, [60, 1, 20, *[1] * 9], mask, routes
        found, cache = fed_logits(model, *inputs)
        lengths = [call.args[1].shape[1] for call in recorded.call_args_list]
        assert lengths == [60] * len(model.config.routed_layers)
        recorded.reset_mock()
        model.config.execution = "dense"
        expected, dense_cache = fed_logits(model, *inputs)
        real = torch.ones_like(ids).bool() if mask is None else mask.bool()
        assert (found - expected)[real].abs().max() < rounding(model.config)
        for sparse, dense in zip(cache.layers, dense_cache.layers, strict=True):
            assert {n: t.shape for n, t in sparse.state.items()} == {n: t.shape for n, t in dense.state.items()}
            assert sparse.stores.keys() == dense.stores.keys()


CHANGES_OF_ROWS = {
    "reorder": ([2, 0, 0], lambda cache, rows: cache.reorder_cache(rows)),
    "repeat": ([0, 0, 1, 1, 2, 2], lambda cache, _: cache.batch_repeat_interleave(2)),
    "select": ([2, 1], lambda cache, rows: cache.batch_select_indices(rows)),
}


@pytest.mark.parametrize("preset", ["v3-tiny", "v1-tiny"])
@pytest.mark.parametrize(("rows", "change"), CHANGES_OF_ROWS.values(), ids=CHANGES_OF_ROWS.keys())
def test_rows_can_be_chosen_and_repeated(rows, change, preset):
    """After half of the tokens rows change places; the other half goes on as if they had always been there."""
    tokens, half = 40, 20
    model = routed_model(preset=preset, max_position_embeddings=tokens)
    ids, routes = token_ids(ROWS, tokens), ragged_routes(model.config, tokens)
    cache = fed_logits(model, ids, [half - 1, 1], None, routes)[1]
    change(cache, torch.tensor(rows))
    # What follows differs between rows that were one.
    ids = torch.cat([ids[rows, :half], token_ids(len(rows), half, seed=1)], 1)
    later = mixed_routes(model.config, len(rows), half, seed=1)
    routes = {i: torch.cat([routes[i][rows, :half], later[i]], 1) for i in routes}
    found, _ = fed_logits(model, ids, [7, *[1] * (half - 7)], None, routes, cache, half)
    expected = whole(model, ids, forced_routes=routes).logits[:, half:]
    assert (found - expected).abs().max() < rounding(model.config)


def test_copied_reset_and_inference_mode_caches():
    model, ids = routed_model(), token_ids(ROWS, LONG)
    routes, half = ragged_routes(model.config), LONG - 12
    with torch.inference_mode():
        cache = fed_logits(model, ids, [half - 1, 1], None, routes)[1]
    other = copy.deepcopy(cache)
    fed_logits(model, (ids + 1) % model.config.vocab_size, [1] * 12, None, routes, other, half)
    found, _ = fed_logits(model, ids, [1] * 12, None, routes, cache, half)
    expected = whole(model, ids, forced_routes=routes).logits[:, half:]
    assert (found - expected).abs().max() < ROUNDING, "a copy goes its own way"
    cache.reset()
    assert cache.get_seq_length() == 0 and stored_bytes(cache, range(len(cache.layers))) == 0
    found, _ = fed_logits(model, ids[:1], [1] * 20, cache=cache)
    assert (found - whole(model, ids[:1, :20]).logits).abs().max() < ROUNDING, "another batch"


@designs
def test_gradients_through_the_cache(design):
    """Tokens fed in pieces, with gradients through what was stored, give those of the whole pass. The learned router
    and what eager attention and RBF mixing do in fp32 leave fp32's rounding."""
    model, ids = routed_model(**design), token_ids(ROWS, 20)
    routes = ragged_routes(model.config, 20)

    model(ids, forced_routes=routes).logits.square().sum().backward()
    expected = gradients(model)
    model.zero_grad()
    fed_logits(model, ids, [8, 1, 5, 1, 1, 1, 3], None, routes, gradients=True)[0].square().sum().backward()
    found = gradients(model)
    assert expected.keys() == found.keys()
    for name, gradient in expected.items():
        assert (gradient - found[name]).abs().max() <= 1e-5 * gradient.abs().max() + 1e-12, name
