"""Decoding under keys="routed": rows have their own lengths, and a token stores nothing where it is not sent."""

import copy

import pytest
import torch

from chiar.errors import InputError
from chiar.layers.ragged import BLOCK, LEAST, ROOM, Shelf
from chiar.layers.sparse import sparse_tokens
from chiar.model.cache import ChiarCache
from helpers import VOCABULARY, fed_logits, mixed_routes, random_model, small_config, token_ids

ROWS, TOKENS = 3, 90
# Sums run in another order. The models are float64; eager attention and RBF mixing take their softmax in fp32.
ROUNDING, FP32_ROUNDING = 1e-9, 2e-5
MIXED_CHUNKS = [40, 3, *[1] * 27, 20]  # a prompt, pieces, and steps over the end of a block
DESIGNS = {
    "v3": {},
    "eager": {"attn_implementation": "eager"},
    "pre-norm": {"norm": "rmsnorm", "norm_position": "pre", "basis": "identity"},
    "auto": {"execution": "auto", "light_ffn": False, "norm_position": "pre"},
    "sparse learned": {"router": "learned", "hard_estimator": "selected", "execution": "sparse"},
    "v1": {"preset": "v1-tiny", "max_position_embeddings": TOKENS, "hard_estimator": "selected"},
    "three-operators": {"operators": ["spectral", "rbf", "attention"], "execution": "auto"},
}
designs = pytest.mark.parametrize("design", DESIGNS.values(), ids=DESIGNS.keys())


def routed_model(**changes):
    return random_model(small_config(**{"keys": "routed", "meta_router": False, **changes}))


def ragged_routes(config, tokens=TOKENS):
    """Row 0 mixes, row 1 is all light but for its last token, row 2 all attention."""
    attention = config.operators.index("attention")
    routes = mixed_routes(config, ROWS, tokens)
    for choice_BT in routes.values():
        choice_BT[1], choice_BT[1, -1], choice_BT[2] = 0, attention, attention
    return routes


def exact_routes(config, fraction, rows=ROWS, tokens=TOKENS):
    """Just this fraction of every row's tokens goes to attention, at random places."""
    generator = torch.Generator().manual_seed(7)
    rank = {i: torch.rand(rows, tokens, generator=generator).argsort(1).argsort(1) for i in config.routed_layers}
    return {i: (rank_BT < round(fraction * tokens)).long() for i, rank_BT in rank.items()}


def whole(model, ids, routes=None, mask=None):
    with torch.no_grad():
        return model(ids, mask, forced_routes=routes or None).logits


def stored_bytes(cache, layers):
    """Of all tensors of these layers, however they are stored."""
    tensors = [tensor for i in layers for tensor in cache.layers[i].state.values()]
    tensors += [part for i in layers for store in cache.layers[i].stores.values() for part in store.parts.values()]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def rounding(config):
    fp32 = config._attn_implementation == "eager" or "rbf" in config.operators
    return FP32_ROUNDING if fp32 else ROUNDING


def attention_stores(model, cache):
    return [cache.layers[i].stores["attention"] for i in model.config.routed_layers]


@designs
@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
def test_rows_of_very_different_lengths(design, padded):
    """Neither light tokens nor padding store anything."""
    model, ids = routed_model(**design), token_ids(ROWS, TOKENS)
    routes, mask = ragged_routes(model.config), torch.ones_like(ids)
    if padded:
        mask[0, :50], mask[2, :85] = 0, 0
    found, cache = fed_logits(model, ids, MIXED_CHUNKS, mask if padded else None, routes)
    real = mask.bool()
    assert (found - whole(model, ids, routes, mask if padded else None))[real].abs().max() < rounding(model.config)
    attention = model.config.operators.index("attention")
    for layer, store in zip(model.config.routed_layers, attention_stores(model, cache), strict=True):
        assert store.length_B.tolist() == ((routes[layer] == attention) & real).sum(1).tolist()


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


@designs
def test_light_tokens_store_nothing(design):
    """Eager attention has weights to show, so it runs, with one block; its lengths are 0 all the same."""
    model, ids = routed_model(**design), token_ids(ROWS, 20)
    routes = {i: torch.zeros_like(ids) for i in model.config.routed_layers}
    found, cache = fed_logits(model, ids, [15, *[1] * 5], None, routes)
    assert (found - whole(model, ids, routes)).abs().max() < rounding(model.config)
    if "eager" in design.values():
        assert all(not store.length_B.any() and store.capacity == ROOM for store in attention_stores(model, cache))
    else:
        assert stored_bytes(cache, model.config.routed_layers) == 0


def test_growth_by_blocks(monkeypatch):
    """Capacity stays just ahead of the longest row, and the lengths are looked at once in many steps."""
    model, ids = routed_model(num_hidden_layers=6), token_ids(ROWS, 200)
    routes = exact_routes(model.config, 0.5, ROWS, 200)
    looks, look = [], Shelf.look
    monkeypatch.setattr(Shelf, "look", lambda shelf: looks.append(shelf) or look(shelf))
    cache, capacities, logits = None, [], []
    for n in range(200):
        step, cache = fed_logits(model, ids, [1], None, routes, cache, n)
        logits.append(step)
        for store in cache.layers[model.config.routed_layers[0]].stores.values():
            longest = int(store.length_B.max())
            assert longest <= store.most < store.capacity < longest + BLOCK + ROOM
            capacities.append(store.capacity)
    assert all(capacity % BLOCK == 0 for capacity in capacities)
    assert capacities == sorted(capacities)
    assert 2 <= len(set(capacities)) <= 4
    # The stores of all layers are looked at together, but for the first time, when each is made.
    assert len(looks) <= len(model.config.layer_types) + 200 / (LEAST - 1)
    assert (torch.cat(logits, 1) - whole(model, ids, routes)).abs().max() < ROUNDING


@pytest.mark.parametrize("keys", ["all", "routed"])
@pytest.mark.parametrize(
    ("operators", "padded"),
    [(["spectral", "attention"], False), (["spectral", "attention"], True), (["spectral", "rbf", "attention"], True)],
    ids=["two", "two padded", "three padded"],
)
def test_a_sparse_prefill_fills_the_cache(monkeypatch, keys, operators, padded):
    """It runs for the prompt alone, and decoding goes on from what it stored as if dense execution had."""
    model = routed_model(keys=keys, operators=operators, execution="sparse")
    ids, routes = token_ids(ROWS, TOKENS), ragged_routes(model.config)
    mask = torch.ones_like(ids)
    if padded:
        mask[0, :20], mask[2, :55] = 0, 0
    lengths = []

    def recorded(block, x_BTD, *rest):
        lengths.append(x_BTD.shape[1])
        return sparse_tokens(block, x_BTD, *rest)

    monkeypatch.setattr("chiar.layers.block.sparse_tokens", recorded)
    inputs = ids, [60, 1, 20, *[1] * 9], mask if padded else None, routes
    found, cache = fed_logits(model, *inputs)
    assert lengths == [60] * len(model.config.routed_layers)
    model.config.execution = "dense"
    expected, dense_cache = fed_logits(model, *inputs)
    assert (found - expected)[mask.bool()].abs().max() < rounding(model.config)
    for sparse, dense in zip(cache.layers, dense_cache.layers, strict=True):
        assert {n: t.shape for n, t in sparse.state.items()} == {n: t.shape for n, t in dense.state.items()}
        assert sparse.stores.keys() == dense.stores.keys()


@pytest.mark.parametrize("preset", ["v3-tiny", "v1-tiny"])
@pytest.mark.parametrize("operation", ["reorder", "repeat", "select"])
def test_rows_can_be_chosen_and_repeated(operation, preset):
    """After half of the tokens rows change places; the other half goes on as if they had always been there."""
    tokens, half = 40, 20
    model = routed_model(preset=preset, max_position_embeddings=tokens)
    ids, routes = token_ids(ROWS, tokens), ragged_routes(model.config, tokens)
    cache = fed_logits(model, ids, [half - 1, 1], None, routes)[1]
    rows = torch.tensor({"reorder": [2, 0, 0], "repeat": [0, 0, 1, 1, 2, 2], "select": [2, 1]}[operation])
    if operation == "reorder":
        cache.reorder_cache(rows)
    elif operation == "repeat":
        cache.batch_repeat_interleave(2)
    else:
        cache.batch_select_indices(rows)
    # What follows differs between rows that were one.
    ids = torch.cat([ids[rows, :half], token_ids(len(rows), half, seed=1)], 1)
    later = mixed_routes(model.config, len(rows), half, seed=1)
    routes = {i: torch.cat([routes[i][rows, :half], later[i]], 1) for i in routes}
    found, _ = fed_logits(model, ids, [7, *[1] * (half - 7)], None, routes, cache, half)
    assert (found - whole(model, ids, routes)[:, half:]).abs().max() < rounding(model.config)


def test_beam_search_with_ragged_rows(monkeypatch):
    """Beams that have other lengths than those they replace; the whole search equals the one without a cache."""
    model = routed_model(router="random", random_key="token", random_fraction=0.4, execution="auto")
    with torch.no_grad():
        model.model.norm.weight.mul_(0.2)  # flatter logits, so that beams part
    swaps, reorder = [], ChiarCache.reorder_cache

    def recorded(cache, rows):
        lengths = [store.length_B for store in attention_stores(model, cache)]
        swaps.append(any(not torch.equal(length_B[rows], length_B) for length_B in lengths))
        reorder(cache, rows)

    monkeypatch.setattr(ChiarCache, "reorder_cache", recorded)
    ids = token_ids(2, 12)
    mask = torch.ones_like(ids)
    mask[1, :7] = 0
    kwargs = {"num_beams": 4, "max_new_tokens": 25, "do_sample": False, "pad_token_id": 0, "attention_mask": mask}
    cached = model.generate(ids, use_cache=True, **kwargs)
    assert any(swaps)
    assert torch.equal(cached, model.generate(ids, use_cache=False, **kwargs))


def test_copied_reset_and_inference_mode_caches():
    model, ids = routed_model(), token_ids(ROWS, TOKENS)
    routes, half = ragged_routes(model.config), TOKENS - 12
    expected = whole(model, ids, routes)[:, half:]
    with torch.inference_mode():
        cache = fed_logits(model, ids, [half - 1, 1], None, routes)[1]
    other = copy.deepcopy(cache)
    fed_logits(model, (ids + 1) % VOCABULARY, [1] * 12, None, routes, other, half)
    found, _ = fed_logits(model, ids, [1] * 12, None, routes, cache, half)
    assert (found - expected).abs().max() < ROUNDING, "a copy goes its own way"
    cache.reset()
    assert cache.get_seq_length() == 0 and stored_bytes(cache, range(len(cache.layers))) == 0
    found, _ = fed_logits(model, ids[:1], [1] * 20, cache=cache)
    assert (found - whole(model, ids[:1, :20])).abs().max() < ROUNDING, "another batch"


@designs
def test_gradients_through_the_cache(design):
    """Tokens fed in pieces, with gradients through what was stored, give those of the whole pass. The learned router
    and what eager attention and RBF mixing do in fp32 leave fp32's rounding."""
    model, ids = routed_model(**design), token_ids(ROWS, 20)
    routes = ragged_routes(model.config, 20)

    def gradients(chunks):
        model.zero_grad()
        loss, cache, start = 0.0, None, 0
        for size in chunks:
            forced = {i: choice_BT[:, start : start + size] for i, choice_BT in routes.items()}
            part = ids[:, start : start + size]
            done = model(part, past_key_values=cache, use_cache=len(chunks) > 1, forced_routes=forced)
            loss = loss + done.logits.square().sum()
            cache, start = done.past_key_values, start + size
        loss.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    expected, found = gradients([20]), gradients([8, 1, 5, 1, 1, 1, 3])
    assert expected.keys() == found.keys()
    for name, gradient in expected.items():
        assert (gradient - found[name]).abs().max() <= 1e-5 * gradient.abs().max() + 1e-12, name


def test_training_with_a_cache_where_the_router_needs_both_operators():
    model = routed_model(router="learned", hard_estimator="both")
    ids = token_ids(ROWS, 8)
    with torch.no_grad():
        model(ids, use_cache=True)
    with pytest.raises(InputError, match=r"hard_estimator='both'.*use_cache"):
        model.train()(ids, use_cache=True)
