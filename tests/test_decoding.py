"""Fast decoding gives the tokens of plain decoding and of decoding without a cache, by a step that never changes."""

import copy
import pickle

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from chiar.errors import InputError
from chiar.layers.ragged import ROOM, Shelf
from chiar.model import decoding
from chiar.model.decoding import FastDecoder, Inputs
from helpers import ALONG_TIME, mixed_routes, random_model, small_config, token_ids

ROWS, TOKENS, NEW = 3, 10, 8
LENGTHS = (10, 7, 4)
PRE = {"norm": "rmsnorm", "norm_position": "pre"}
DESIGNS = {
    "baseline": {"preset": "baseline-tiny"},
    "v2": {"preset": "v2-tiny"},
    "v3-routed-keys": {"keys": "routed"},
    "routed": {**PRE, "keys": "routed", "basis": "identity"},
    "light-ffn-off": {**PRE, "keys": "routed", "light_ffn": False},
    "equation": {"spectral_form": "equation"},
    "soft": {"router": "learned", "routing": "soft"},
    "hard": {"router": "learned", "keys": "routed"},
    "random-position": {"router": "random", "random_key": "position", "keys": "routed"},
    "hard-gate": {"gate_skip_below": 0.5},
    "scale-one-learned-positions": {"positions": "learned", "meta_router": True, "embedding_norm": True},
    **ALONG_TIME,
}
designs = pytest.mark.parametrize("design", DESIGNS.values(), ids=DESIGNS.keys())
# Same products, in another order where rows take no part: differences seen are at fp32's rounding of logits up to 25.
LOGIT_ROUNDING = 2e-4


@pytest.fixture
def ids():
    return torch.randint(0, 257, (ROWS, TOKENS), generator=torch.Generator().manual_seed(19))


@pytest.fixture
def left_mask():
    return torch.tensor([[0] * (TOKENS - length) + [1] * length for length in LENGTHS])


def generate(model, ids, fast, new=NEW, **options):
    """Tokens, and how many steps were fast."""
    model.disable_fast_decoding()
    if fast:
        model.enable_fast_decoding()
    torch.manual_seed(3)
    found = model.generate(ids, max_new_tokens=new, pad_token_id=0, **options)
    return found, model.fast_decoder.steps if fast else 0


HOW = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "temperature": 3.0},
    "beams": {"do_sample": False, "num_beams": 3, "num_return_sequences": 2},
}


@designs
@pytest.mark.parametrize("how", HOW.values(), ids=HOW.keys())
def test_fast_slow_and_uncached_generation(lively, design, ids, left_mask, how):
    model = lively(design)
    fast, steps = generate(model, ids, True, attention_mask=left_mask, **how)
    assert steps == NEW - 1
    assert torch.equal(fast, generate(model, ids, False, attention_mask=left_mask, **how)[0])
    assert torch.equal(fast, generate(model, ids, False, attention_mask=left_mask, use_cache=False, **how)[0])


@pytest.mark.parametrize("design", ["baseline", "routed", "v3-routed-keys"])
def test_growth_while_decoding(lively, ids, left_mask, design):
    """Several times the room of a store; one row alone, and rows of different lengths."""
    model = lively(DESIGNS[design])
    for rows, mask in ((slice(0, 1), None), (slice(None), left_mask)):
        fast, steps = generate(model, ids[rows], True, 3 * ROOM, attention_mask=mask, do_sample=False)
        assert steps == 3 * ROOM - 1
        assert torch.equal(fast, generate(model, ids[rows], False, 3 * ROOM, attention_mask=mask, do_sample=False)[0])


@pytest.mark.parametrize("pool", ["batch", "sequence"])
def test_a_frozen_gate(lively, ids, left_mask, pool):
    model = lively({}, gate_pool=pool, gate_generation="prefill")
    fast, steps = generate(model, ids, True, attention_mask=left_mask)
    assert steps == NEW - 1
    assert torch.equal(fast, generate(model, ids, False, attention_mask=left_mask)[0])


def feed(model, ids, chunks, routes=None, mask=None, **options):
    """Logits of `ids` in pieces, and the cache."""
    cache, start, logits = None, 0, []
    for size in chunks:
        stop = start + size
        forced = {i: choice_BT[:, start:stop] for i, choice_BT in routes.items()} if routes else None
        seen = None if mask is None else mask[:, :stop]
        with torch.no_grad():
            done = model(
                ids[:, start:stop], seen, past_key_values=cache, use_cache=True, forced_routes=forced, **options
            )
        cache, start = done.past_key_values, stop
        logits.append(done.logits)
    return torch.cat(logits, 1), cache


@pytest.mark.parametrize("keys", ["all", "routed"])
def test_forced_routes_and_padding_between_tokens(keys):
    """Each layer is given its own; all of them, some of them, and none, one after the other."""
    model = random_model(small_config(keys=keys, meta_router=False))
    ids, mask = token_ids(ROWS, 30), torch.ones(ROWS, 30, dtype=torch.long)
    mask[0, :12], mask[1, 20:23] = 0, 0
    routes = mixed_routes(model.config, ROWS, 30)
    for forced in (routes, dict(list(routes.items())[:1]), None):
        with torch.no_grad():
            expected = model(ids, mask, forced_routes=forced).logits
        model.enable_fast_decoding()
        found, _ = feed(model, ids, [9, *[1] * 21], forced, mask)
        assert model.fast_decoder.steps == 21
        model.disable_fast_decoding()
        assert (found - expected)[mask.bool()].abs().max() < 1e-9


def test_fast_steps_plain_steps_and_chunks_share_a_cache():
    model = random_model(small_config(keys="routed", meta_router=False))
    ids, routes = token_ids(ROWS, 40), mixed_routes(model.config, ROWS, 40)
    with torch.no_grad():
        expected = model(ids, forced_routes=routes).logits
    model.enable_fast_decoding()
    cache, start, found = None, 0, []
    for size, traced in ((10, False), (1, False), (1, True), (5, False), *[(1, n % 3 == 0) for n in range(23)]):
        forced = {i: choice_BT[:, start : start + size] for i, choice_BT in routes.items()}
        options = {"forced_routes": forced, "use_cache": True, "output_routing": traced}
        with torch.no_grad():
            done = model(ids[:, start : start + size], past_key_values=cache, **options)
        assert (done.routing is not None) == traced
        cache, start = done.past_key_values, start + size
        found.append(done.logits)
    assert 0 < model.fast_decoder.steps < 24
    assert (torch.cat(found, 1) - expected).abs().max() < 1e-9


def addresses(cache):
    tensors = [part for store in cache.shelf.stores for part in (*store.parts.values(), store.length_B)]
    tensors += [value for layer in cache.layers for value in layer.state.values()]
    return [tensor.data_ptr() for tensor in tensors]


@pytest.mark.parametrize("design", ["baseline", "v3-routed-keys", "routed", "temporal-all"])
def test_a_step_leaves_everything_in_its_place(lively, ids, left_mask, design):
    """As a captured graph needs it: addresses change only when the cache says so, and rows may change places."""
    model = lively(DESIGNS[design])
    model.enable_fast_decoding()
    _, cache = feed(model, ids, [TOKENS], mask=left_mask)
    mask, token, moved = left_mask, ids[:, :1], 0
    before, moves = addresses(cache), cache.shelf.moves
    for step in range(2 * ROOM):
        mask = torch.cat([mask, torch.ones_like(token)], 1)
        with torch.no_grad():
            model(token, mask, past_key_values=cache)
        if cache.shelf.moves == moves:
            assert addresses(cache) == before
        else:
            before, moves, moved = addresses(cache), cache.shelf.moves, moved + 1
        if step % 5 == 0:
            cache.reorder_cache(torch.tensor([2, 0, 1]))
            assert cache.shelf.moves == moves and addresses(cache) == before
    assert model.fast_decoder.steps == 2 * ROOM
    assert 1 <= moved <= 3


def test_lengths_are_looked_at_once_in_many_steps(lively, ids, monkeypatch):
    model = lively(DESIGNS["routed"])
    model.enable_fast_decoding()
    _, cache = feed(model, ids, [TOKENS])
    looks, look = [], Shelf.look

    def recorded(shelf):
        looks.append(shelf)
        look(shelf)

    monkeypatch.setattr(Shelf, "look", recorded)
    for n in range(ROOM - 2):
        with torch.no_grad():
            model(ids[:, :1], past_key_values=cache)
        assert len(looks) == 0, n


class LookedAt(Exception):
    """A value of a tensor was read by the host."""


class NoLooking(torch.overrides.TorchFunctionMode):
    """Reading a value, which on a GPU would wait for the device, is an error."""

    def __torch_function__(self, function, types, arguments=(), options=None):
        name = getattr(function, "__name__", "")
        if name in ("item", "tolist", "__bool__", "__int__", "__index__", "__float__", "nonzero", "cpu"):
            raise LookedAt(name)
        return function(*arguments, **(options or {}))


@pytest.mark.parametrize(
    "design", ["baseline", "v3-routed-keys", "routed", "random-position", "hard-gate", "soft", "temporal-all"]
)
def test_the_step_itself_reads_no_values(lively, ids, design, monkeypatch):
    """Of what runs between the inputs and the logits; a CPU alone looks whether anything is dark at all."""
    monkeypatch.setattr("chiar.layers.attention.surely_none", lambda key_BT: False)
    model = lively(DESIGNS[design])
    model.enable_fast_decoding()
    _, cache = feed(model, ids, [TOKENS])
    run = FastDecoder.run
    ran = []

    def watched(decoder, language, inputs, cache):
        ran.append(1)
        with NoLooking():
            return run(decoder, language, inputs, cache)

    monkeypatch.setattr(FastDecoder, "run", watched)
    feed_one(model, ids, cache)
    assert ran
    with pytest.raises(LookedAt), NoLooking():
        bool(ids.any())


def feed_one(model, ids, cache):
    with torch.no_grad():
        return model(ids[:, :1], past_key_values=cache).logits


@pytest.mark.parametrize("design", ["baseline", "v3-routed-keys", "routed", "temporal-all"])
def test_a_compiled_step_has_a_graph_for_each_kind_of_layer(lively, ids, left_mask, design):
    """Seven layers, rows of several lengths and stores that grow: traced once for each kind, whole, and never again."""
    model = lively(DESIGNS[design], num_hidden_layers=7)
    expected, _ = generate(model, ids, False, 2 * ROOM, attention_mask=left_mask, do_sample=False)
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    model.enable_fast_decoding()
    fast = model.fast_decoder
    fast.compile = True
    for name in ("enter", "step_layer", "leave"):
        compiled = torch.compile(getattr(decoding, name), fullgraph=True, dynamic=False, backend=counter)
        setattr(fast, name, compiled)
    for _ in range(2):
        found = model.generate(ids, attention_mask=left_mask, max_new_tokens=2 * ROOM, do_sample=False, pad_token_id=0)
        assert torch.equal(found, expected)
    assert fast.steps == 2 * (2 * ROOM - 1)
    kinds = len(set(model.config.layer_types))
    assert counter.frame_count == kinds + 2  # and the embedding and the logits


NOT_FAST = {
    "rbf": {"preset": "v1-tiny"},
    "eager": {"attn_implementation": "eager"},
}


@pytest.mark.parametrize("design", NOT_FAST.values(), ids=NOT_FAST.keys())
def test_what_has_no_fixed_step_runs_as_before(lively, ids, design):
    model = lively(design)
    fast, steps = generate(model, ids, True, do_sample=False)
    assert steps == 0
    assert torch.equal(fast, generate(model, ids, False, do_sample=False)[0])


def test_hidden_states_gradients_and_training_run_as_before(lively, ids):
    model = lively(DESIGNS["routed"])
    model.enable_fast_decoding()
    _, cache = feed(model, ids, [TOKENS])
    with torch.no_grad():
        assert len(model(ids[:, :1], past_key_values=cache, output_hidden_states=True).hidden_states) == 5
    model(ids[:, :1], past_key_values=copy.deepcopy(cache)).logits.sum().backward()
    assert model.lm_head.weight.grad is not None
    model.train()
    feed_one(model, ids, cache)
    assert model.fast_decoder.steps == 0
    model.eval()
    feed_one(model, ids, cache)
    assert model.fast_decoder.steps == 1


def test_wrong_input_is_found_in_a_step_too(lively, ids):
    model = lively(DESIGNS["routed"])
    model.enable_fast_decoding()
    _, cache = feed(model, ids, [TOKENS])
    before = addresses(cache), cache.get_seq_length()
    with pytest.raises(InputError, match="outside the vocabulary"):
        feed_one(model, ids + 300, cache)
    with pytest.raises(InputError, match="attention_mask has shape"), torch.no_grad():
        model(ids[:, :1], torch.ones(ROWS, 3), past_key_values=cache)
    with pytest.raises(InputError, match="is not routed"), torch.no_grad():
        model(ids[:, :1], past_key_values=cache, forced_routes={0: ids[:, :1]})
    assert (addresses(cache), cache.get_seq_length()) == before


def test_caches_made_in_inference_mode(lively, ids):
    model = lively(DESIGNS["v3-routed-keys"])
    expected, _ = feed(model, ids, [6, 1, 1, 1, 1])
    model.enable_fast_decoding()
    with torch.inference_mode():
        done = model(ids[:, :6], use_cache=True)
    for n in range(6, TOKENS):
        with torch.no_grad():
            logits = model(ids[:, n : n + 1], past_key_values=done.past_key_values).logits
        assert (logits - expected[:, n : n + 1]).abs().max() < LOGIT_ROUNDING
    assert model.fast_decoder.steps == TOKENS - 6


def test_a_decoder_first_used_in_inference_mode(lively, ids):
    model = lively(DESIGNS["v3-routed-keys"])
    expected, _ = generate(model, ids, False, do_sample=False)
    model.enable_fast_decoding()
    options = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    with torch.inference_mode():
        assert torch.equal(model.generate(ids, **options), expected)
    assert torch.equal(model.generate(ids, **options), expected)
    assert model.fast_decoder.steps == 2 * (NEW - 1)


def test_a_copied_or_moved_model_begins_anew(lively, ids):
    model = lively(DESIGNS["routed"])
    model.enable_fast_decoding(compile=False, graph=False)
    generate_once = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    model.generate(ids, **generate_once)
    other = copy.deepcopy(model)
    assert other.fast_decoder.inputs is None and other.fast_decoder.graph is False
    assert torch.equal(other.generate(ids, **generate_once), model.generate(ids, **generate_once))
    assert pickle.loads(pickle.dumps(model.fast_decoder)).steps == 0
    model.double()
    assert model.fast_decoder.inputs is None
    model.generate(ids, **generate_once)


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_forced_routes_lie_where_compiled_code_reads_them_in_place(rows):
    """Inductor copies an input that does not begin on a boundary of 16 bytes."""
    inputs = Inputs(rows, [1, 2, 5], torch.device("cpu"))
    routes = {layer: torch.full((rows, 1), layer) for layer in (1, 2, 5)}
    tokens = torch.zeros(rows, 1, dtype=torch.long)
    inputs.fill(tokens, tokens, None, routes)
    assert all(place.data_ptr() % 16 == 0 and place.is_contiguous() for place in inputs.forced.values())
    assert all(torch.equal(inputs.forced[layer], routes[layer]) for layer in routes)
