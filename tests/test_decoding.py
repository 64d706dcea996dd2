"""Fast decoding: a step that never changes. That it gives the tokens of plain decoding, test_cache.py says."""

import copy
import pickle
from functools import partial

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from chiar.errors import InputError
from chiar.layers.ragged import ROOM
from chiar.model.decoding import FastDecoder, Inputs, Step
from helpers import ALONG_TIME, ROWS, TOKENS, dark_model, fed_logits, feed, mixed_routes, routed_model, token_ids

NEW = 8
DESIGNS = {
    "baseline": {"preset": "baseline-tiny"},
    "v3-routed-keys": {"keys": "routed"},
    "routed": {"norm": "rmsnorm", "norm_position": "pre", "keys": "routed", "basis": "identity"},
    "random-position": {"router": "random", "random_key": "position", "keys": "routed"},
    "hard-gate": {"gate_skip_below": 0.5},
    "soft": {"router": "learned", "routing": "soft"},
    "temporal-all": ALONG_TIME["temporal-all"],
    "dark": {"preset": "v5-tiny", "window": 5},
}
# Float64 models whose sums run in another order.
ROUNDING = 1e-9


@pytest.fixture
def fast(lively):
    """A fast model of a design, in float64: no tie between tokens or operators is near enough to be turned."""

    def build(design, **changes):
        model = lively(DESIGNS[design], **changes).double()
        model.enable_fast_decoding()
        return model

    return build


def generate(model, ids, new=NEW, **options):
    return model.generate(ids, max_new_tokens=new, do_sample=False, pad_token_id=0, **options)


@torch.no_grad()
def feed_one(model, ids, cache, mask=None, **options):
    model(ids[:, :1], mask, past_key_values=cache, **options)


@pytest.mark.parametrize("keys", ["all", "routed"])
def test_forced_routes_padding_and_plain_passes_between_steps(keys):
    """Each layer is given its own routes; all of them, some of them, and none. Chunks and traced tokens share the
    cache."""
    model = routed_model(keys=keys)
    ids, mask = token_ids(ROWS, 30), torch.ones(ROWS, 30, dtype=torch.long)
    mask[0, :12], mask[1, 20:23] = 0, 0
    routes = mixed_routes(model.config, ROWS, 30)
    for forced in (routes, dict(list(routes.items())[:1]), None):
        with torch.no_grad():
            expected = model(ids, mask, forced_routes=forced).logits
        model.enable_fast_decoding()
        cache, start, found = None, 0, []
        for size, traced in ((9, False), (1, False), (1, True), (5, False), *[(1, n % 3 == 0) for n in range(14)]):
            (done,), cache = feed(model, ids, [size], mask, forced, cache, start, output_routing=traced)
            assert (done.routing is not None) == traced
            start += size
            found.append(done.logits)
        assert model.fast_decoder.steps == 10
        model.disable_fast_decoding()
        assert (torch.cat(found, 1) - expected)[mask.bool()].abs().max() < ROUNDING


def addresses(cache):
    tensors = [part for store in cache.shelf.stores for part in (*store.parts.values(), store.length_B)]
    tensors += [value for layer in cache.layers for value in layer.state.values()]
    return [tensor.data_ptr() for tensor in tensors]


@pytest.mark.parametrize("design", ["baseline", "v3-routed-keys", "temporal-all", "dark"])
def test_a_step_leaves_everything_in_its_place(fast, ids, left_mask, design):
    """As a captured graph needs it: addresses change only when the cache says so, and rows may change places."""
    model = fast(design)
    if design == "dark":
        model.model.set_thresholds(0.0)  # so that the stack's stores fill up too
    _, cache = feed(model, ids, [TOKENS], left_mask)
    mask, token, moved = left_mask, ids[:, :1], 0
    before, moves = addresses(cache), cache.shelf.moves
    for step in range(2 * ROOM):
        mask = torch.cat([mask, torch.ones_like(token)], 1)
        feed_one(model, token, cache, mask)
        if cache.shelf.moves == moves:
            assert addresses(cache) == before
        else:
            before, moves, moved = addresses(cache), cache.shelf.moves, moved + 1
        if step % 5 == 0:
            cache.reorder_cache(torch.tensor([2, 0, 1]))
            assert cache.shelf.moves == moves and addresses(cache) == before
    assert model.fast_decoder.steps == 2 * ROOM
    assert (1 if design != "dark" else 0) <= moved <= 3  # what a window holds slides in its place


class LookedAt(Exception):
    """A value of a tensor was read by the host."""


class NoLooking(torch.overrides.TorchFunctionMode):
    """Reading a value, which on a GPU would wait for the device, is an error."""

    def __torch_function__(self, function, types, arguments=(), options=None):
        name = getattr(function, "__name__", "")
        if name in ("item", "tolist", "__bool__", "__int__", "__index__", "__float__", "nonzero", "cpu"):
            raise LookedAt(name)
        return function(*arguments, **(options or {}))


def every_stack_runs(monkeypatch):
    """As in the step that warms up for a captured one."""
    run = FastDecoder.run
    monkeypatch.setattr(FastDecoder, "run", lambda *given: run(*given, whole=True))


@pytest.mark.parametrize("design", DESIGNS)
def test_the_step_itself_reads_no_values(fast, ids, design, monkeypatch):
    """Of what runs between the inputs and the logits; a CPU alone looks whether anything is dark at all, and the host
    whether a stack is needed."""
    monkeypatch.setattr("chiar.layers.attention.surely_none", lambda key_BT: False)
    model = fast(design)
    _, cache = feed(model, ids, [TOKENS])

    def watched(part):
        def run(*given):
            with NoLooking():
                part(*given)

        return run

    monkeypatch.setattr(Step, "pass_all", watched(Step.pass_all))
    monkeypatch.setattr(Step, "pass_stack", watched(Step.pass_stack))
    every_stack_runs(monkeypatch)
    feed_one(model, ids, cache)
    assert model.fast_decoder.steps == 1
    with pytest.raises(LookedAt), NoLooking():
        bool(ids.any())


@pytest.mark.parametrize("design", ["v3-routed-keys", "routed", "temporal-all", "dark"])
def test_a_compiled_step_has_a_graph_for_each_kind_of_layer(fast, ids, left_mask, design, monkeypatch):
    """Six layers, rows of several lengths and stores that grow: traced once for each kind, whole, and never again."""
    model, new = fast(design, num_hidden_layers=6), ROOM + 16
    model.disable_fast_decoding()
    expected = generate(model, ids, new, attention_mask=left_mask)
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(torch, "compile", partial(torch.compile, fullgraph=True, backend=counter))
    model.enable_fast_decoding(compile=True)
    decoder = model.fast_decoder
    for _ in range(2):
        assert torch.equal(generate(model, ids, new, attention_mask=left_mask), expected)
    assert decoder.steps == 2 * (new - 1)
    # And the embedding and the logits. Around a stack: who is dark (the compiler begins this twice), what others are
    # told, and once more a dark layer, because the first reads a state that is no sum of two.
    around = 6 if model.config.stacks else 2
    assert counter.frame_count == len(set(model.config.layer_types)) + around


LONG = 110  # long enough for stores to grow, and to slide
STACKS = {
    "one": {},
    "narrow window": {"window": 5},
    "wide window": {"window": 80},
    "several": {"layer_types": ["attention", "dark", "dark", "attention", "dark", "attention"]},
    "nothing around": {"layer_types": ["dark", "dark"], "window": 7},
    "wider": {"inner_size": 32},
    "smoothed": {"router": "boundary", "carry": "smoothed"},
    "no carry": {"router": "stride", "carry": "none", "temporal_everywhere": False},
}


def stack_routes(model, how):
    """One row all light, one all dark, but for their last tokens; or all rows."""
    routes = mixed_routes(model.config, ROWS, LONG)
    for choice_BT in routes.values():
        if how == "mixed":
            choice_BT[1, :-5], choice_BT[2, :-5] = 0, 1
        else:
            choice_BT[:] = ["light", "dark"].index(how)
    return None if how == "own" else routes


@pytest.mark.parametrize("how", ["own", "mixed", "light", "dark"])
@pytest.mark.parametrize("design", STACKS.values(), ids=STACKS)
def test_rows_pass_stacks_separately(design, how):
    """Fixed steps, plain ones and chunks give the whole pass's logits; padding stands in front and in between."""
    model, ids, mask = dark_model(**design), token_ids(ROWS, LONG), torch.ones(ROWS, LONG, dtype=torch.long)
    mask[0, :12], mask[1, 50:53] = 0, 0
    routes = None if how == "own" else stack_routes(model, how)
    with torch.no_grad():
        expected = model(ids, mask, forced_routes=routes)
    inner = {i for layers in model.config.stacks.values() for i in layers}
    for fast in (False, True):
        if fast:
            model.enable_fast_decoding()
        found, cache = fed_logits(model, ids, [20, *[1] * 25, 5, *[1] * (LONG - 50)], mask, routes)
        assert (found - expected.logits)[mask.bool()].abs().max() < ROUNDING
        for i, layer in enumerate(cache.layers):
            store = layer.stores["attention"]
            if how in ("light", "dark") and i in inner:
                assert store.length_B.tolist() == (mask.sum(1) * (how == "dark")).tolist()
            if i not in inner and model.config.window == 5:
                assert store.capacity <= 5 + ROOM + 31
    assert model.fast_decoder.steps == LONG - 25


@pytest.mark.parametrize("design", ["one", "several"])
def test_a_light_step_leaves_the_stack_alone(design, monkeypatch):
    """At one row; and where a stack runs for nothing, as before a capture, it leaves no trace."""
    model, ids = dark_model(**STACKS[design]), token_ids(1, 40)
    routes, passed, pass_stack = mixed_routes(model.config, 1, 40), [], Step.pass_stack
    monkeypatch.setattr(Step, "pass_stack", lambda *given: passed.append(1) or pass_stack(*given))
    model.enable_fast_decoding()
    expected, _ = fed_logits(model, ids, [10, *[1] * 30], None, routes)
    assert len(passed) == sum(int(choice_BT[:, 10:].sum()) for choice_BT in routes.values())
    every_stack_runs(monkeypatch)
    found, _ = fed_logits(model, ids, [10, *[1] * 30], None, routes)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("fast", [False, True], ids=["plain", "fast"])
def test_beams_and_rows_that_join_behind_prompts_without_a_dark_token(fast):
    model, ids = dark_model(window=7), token_ids(ROWS, 30)
    with torch.no_grad():
        plainly = generate(model, ids, num_beams=3, use_cache=False)
    routes = {i: choice_BT.clone() for i, choice_BT in mixed_routes(model.config, ROWS, 30).items()}
    for choice_BT in routes.values():
        choice_BT[1, :12] = 0
    with torch.no_grad():
        expected = model(ids, forced_routes=routes).logits
    if fast:
        model.enable_fast_decoding()
    assert torch.equal(generate(model, ids, num_beams=3), plainly)
    rows = [{i: choice_BT[row : row + 1] for i, choice_BT in routes.items()} for row in range(ROWS)]
    cache = feed(model, ids[:1], [12], None, rows[0])[1]
    for row in (1, 2):
        cache.join(feed(model, ids[row : row + 1], [12], None, rows[row])[1], row, 1)
    found, _ = fed_logits(model, ids, [1] * 18, None, routes, cache, 12)
    assert (found - expected[:, 12:]).abs().max() < ROUNDING


def test_what_is_no_step_runs_as_before_and_wrong_input_is_found_in_a_step_too(fast, ids):
    """Hidden states, gradients, training."""
    model = fast("routed")
    _, cache = feed(model, ids, [TOKENS])
    with torch.no_grad():
        assert len(model(ids[:, :1], past_key_values=cache, output_hidden_states=True).hidden_states) == 5
    model(ids[:, :1], past_key_values=copy.deepcopy(cache)).logits.sum().backward()
    assert model.lm_head.weight.grad is not None
    feed_one(model.train(), ids, cache)
    assert model.fast_decoder.steps == 0
    feed_one(model.eval(), ids, cache)
    assert model.fast_decoder.steps == 1

    before = addresses(cache), cache.get_seq_length()
    for message, wrong in (
        ("outside the vocabulary", {"ids": ids + 300}),
        ("attention_mask has shape", {"mask": torch.ones(ROWS, 3)}),
        ("is not routed", {"forced_routes": {0: ids[:, :1]}}),
    ):
        with pytest.raises(InputError, match=message):
            feed_one(model, **{"ids": ids, "cache": cache, **wrong})
    assert (addresses(cache), cache.get_seq_length()) == before


def test_inference_mode_first_and_not_later(fast, ids):
    """Of the cache, and of the decoder itself."""
    model = fast("v3-routed-keys")
    model.disable_fast_decoding()
    expected, tokens = fed_logits(model, ids, [6, 1, 1, 1, 1])[0], generate(model, ids)
    model.enable_fast_decoding()
    with torch.inference_mode():
        cache = model(ids[:, :6], use_cache=True).past_key_values
    found, _ = fed_logits(model, ids, [1] * 4, cache=cache, start=6)
    assert (found - expected[:, 6:]).abs().max() < ROUNDING
    assert model.fast_decoder.steps == TOKENS - 6
    model.enable_fast_decoding()
    with torch.inference_mode():
        assert torch.equal(generate(model, ids), tokens)
    assert torch.equal(generate(model, ids), tokens)
    assert model.fast_decoder.steps == 2 * (NEW - 1)


def test_a_copied_or_moved_model_begins_anew(fast, ids):
    model = fast("routed")
    model.enable_fast_decoding(compile=False, graph=False)
    generate(model, ids, 3)
    other = copy.deepcopy(model)
    assert other.fast_decoder.inputs is None and other.fast_decoder.graph is False
    assert torch.equal(generate(other, ids, 3), generate(model, ids, 3))
    assert pickle.loads(pickle.dumps(model.fast_decoder)).steps == 0
    model.float()
    assert model.fast_decoder.inputs is None
    generate(model, ids, 3)


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_forced_routes_lie_where_compiled_code_reads_them_in_place(rows):
    """Inductor copies an input that does not begin on a boundary of 16 bytes."""
    inputs = Inputs(rows, [1, 2, 5], torch.device("cpu"))
    routes = {layer: torch.full((rows, 1), layer) for layer in (1, 2, 5)}
    tokens = torch.zeros(rows, 1, dtype=torch.long)
    inputs.fill(tokens, tokens, None, routes)
    assert all(place.data_ptr() % 16 == 0 and place.is_contiguous() for place in inputs.forced.values())
    assert all(torch.equal(inputs.forced[layer], routes[layer]) for layer in routes)
