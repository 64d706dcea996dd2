"""Decoding with a cache gives what the whole forward pass gives, plainly and by fixed steps."""

import pytest
import torch
from transformers import DynamicCache, GenerationConfig

from chiar.errors import InputError
from chiar.model.cache import ChiarCache
from helpers import ALONG_TIME, feed

ROWS, TOKENS, VOCABULARY = 3, 10, 257
LENGTHS = (10, 7, 4)
NEW = 6
# A decoding step multiplies matrices of another shape than the whole pass, so sums run in another order. Logits reach
# 40, where fp32 resolves 4e-6: differences seen are below 5e-5. Entropies, weights and gates lie in [0, 1]: 1e-6.
LOGIT_ROUNDING, UNIT_ROUNDING = 2e-4, 5e-6
# Decisions further than this from a tie survive the rounding.
ROUTE_MARGIN = 2 * UNIT_ROUNDING
# Tokens are compared in float64, where only RoPE's tables, gates and RBF mixing are rounded to fp32: a flipped token
# would need logits this close.
TOKEN_MARGIN = 1e-5

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


@pytest.fixture
def ids():
    return torch.randint(0, VOCABULARY, (ROWS, TOKENS), generator=torch.Generator().manual_seed(19))


@pytest.fixture
def left_mask():
    """Rows of 10, 7 and 4 real tokens, padded on the left."""
    return torch.tensor([[0] * (TOKENS - length) + [1] * length for length in LENGTHS])


def whole(model, ids, mask=None):
    with torch.no_grad():
        return model(ids, attention_mask=mask, output_routing=True)


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
        full = whole(model, ids, mask)
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


def clear_choices(model, prompt, **options):
    """Greedy tokens of uncached decoding, each of them the best by a margin."""
    found = generate(model, prompt, use_cache=False, output_logits=True, return_dict_in_generate=True, **options)
    for logits in found.logits:
        best = logits.topk(2).values
        assert (best[:, 0] - best[:, 1]).min() > TOKEN_MARGIN
    return found.sequences


def test_greedy_generation(lively, option, ids, left_mask):
    """Without a cache, with one, by fixed steps where there are such, and the best token of the whole pass."""
    model = lively(option).double()
    expected = clear_choices(model, ids, attention_mask=left_mask)
    mask = torch.cat([left_mask, left_mask.new_ones(ROWS, NEW - 1)], 1)
    best = whole(model, expected[:, :-1], mask).logits[:, TOKENS - 1 :].argmax(-1)
    assert torch.equal(expected, torch.cat([ids, best], 1))
    for fast in (False, True):
        assert torch.equal(generate(model, ids, fast, attention_mask=left_mask), expected)


@some_options
def test_a_left_padded_batch_generates_what_its_rows_do(lively, some, ids, left_mask):
    model = lively(some).double()
    for beams in (1, 3):
        together = generate(model, ids, attention_mask=left_mask, num_beams=beams)
        for row, length in enumerate(LENGTHS):
            alone = generate(model, ids[row : row + 1, -length:], num_beams=beams)
            assert torch.equal(together[row, -length - NEW :], alone[0])


@some_options
def test_sampling_and_beams(lively, some, ids, left_mask, monkeypatch):
    model = lively(some).double()
    orders, reorder = [], ChiarCache.reorder_cache
    monkeypatch.setattr(
        ChiarCache, "reorder_cache", lambda cache, rows: orders.append(rows.tolist()) or reorder(cache, rows)
    )
    for how in ({"do_sample": True, "temperature": 3.0}, {"num_beams": 3, "num_return_sequences": 2}):
        found = generate(model, ids, attention_mask=left_mask, **how)
        assert torch.equal(found, generate(model, ids, True, attention_mask=left_mask, **how))
        if "gate_generation" not in some:
            assert torch.equal(found, generate(model, ids, attention_mask=left_mask, use_cache=False, **how))
    assert any(order != list(range(3 * ROWS)) for order in orders)


@pytest.mark.parametrize("some", ["baseline", "v3-routed-keys"])
def test_generation_from_embeddings(lively, some, ids, left_mask):
    model = lively(REPRESENTATIVE[some]).double()
    embeddings = model.get_input_embeddings()(ids)
    generated = generate(model, None, inputs_embeds=embeddings, attention_mask=left_mask)
    assert torch.equal(generated, clear_choices(model, ids, attention_mask=left_mask)[:, TOKENS:])


@pools_seeing_the_future
def test_a_gate_that_sees_the_future_refuses_to_generate(lively, ids, pool):
    model = lively({}, gate_pool=pool)
    reason = f"gate_pool='{pool}' lets every token see the whole {pool}.*gate_generation='prefill'"
    attempts = [
        lambda: generate(model, ids),
        lambda: generate(model, ids, use_cache=False),
        lambda: model(ids, use_cache=True),
        lambda: model(ids, past_key_values=ChiarCache(4)),
    ]
    for attempt in attempts:
        with pytest.raises(InputError, match=reason):
            attempt()
    assert whole(model, ids).past_key_values is None


@pools_seeing_the_future
def test_prefill_freezes_the_gate(lively, ids, left_mask, pool):
    model = lively({}, gate_pool=pool, gate_generation="prefill")
    steps, _ = feed(model, ids, [6, 2, 1, 1], left_mask, output_routing=True)
    frozen = steps[0].routing.layers[0].gate_BT
    alone = whole(model, ids[:, :6], left_mask[:, :6]).routing.layers[0].gate_BT
    # A cache may take sums along another way.
    assert (frozen - alone).abs().max() < UNIT_ROUNDING
    for step in steps[1:]:
        gate = step.routing.layers[0].gate_BT
        assert torch.equal(gate, frozen[:, :1].expand_as(gate))
    not_frozen = whole(model, ids, left_mask).routing.layers[0].gate_BT
    assert (not_frozen[:, 0] - frozen[:, 0]).abs().max() > 1e-3


@pools_seeing_the_future
def test_generation_with_a_frozen_gate(lively, ids, left_mask, pool):
    model = lively({}, gate_pool=pool, gate_generation="prefill").double()
    prompt, mask, sequence, cache = ids, left_mask, ids, None
    for _ in range(NEW):
        with torch.no_grad():
            output = model(prompt, attention_mask=mask, past_key_values=cache, use_cache=True)
        prompt, cache = output.logits[:, -1:].argmax(-1), output.past_key_values
        sequence = torch.cat([sequence, prompt], dim=1)
        mask = torch.cat([mask, torch.ones_like(prompt)], dim=1)
    for fast in (False, True):
        assert torch.equal(generate(model, ids, fast, attention_mask=left_mask), sequence)
    with pytest.raises(InputError, match="cache"):
        model.generate(ids, generation_config=GenerationConfig(max_new_tokens=2, use_cache=False))
    model.generation_config.use_cache = False
    with pytest.raises(InputError, match="cache"):
        generate(model, ids)


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


@pytest.mark.parametrize("preset", ["v1-tiny", "v2-tiny"])
def test_more_tokens_than_learned_positions(lively, ids, preset):
    model = lively({"preset": preset}, max_position_embeddings=8)
    reason = "tokens, but the model has 8 learned positions"
    with pytest.raises(InputError, match=f"10 {reason}"):
        model(ids)
    cache = feed(model, ids, [5, 3])[1]
    with pytest.raises(InputError, match=f"9 {reason}"):
        model(ids[:, 8:9], past_key_values=cache)
    with pytest.raises(InputError, match=f"9 {reason}"):
        generate(model, ids[:, :5])


def test_rope_goes_beyond_the_trained_length(lively, ids):
    assert generate(lively({}, max_position_embeddings=8), ids).shape == (ROWS, TOKENS + NEW)


JOINED = {
    "v1-routed-keys": REPRESENTATIVE["v1-routed-keys"],
    "v2": {"preset": "v2-tiny"},
    "v3-routed-keys": {"keys": "routed"},
    "v3-paper-gate": {"gate_pool": "batch", "gate_generation": "prefill"},
    "hard-gate": {"gate_skip_below": 0.5},
    "temporal": ALONG_TIME["temporal-all"],
}
PROMPTS = [[5, 9, 200, 31, 7, 7, 88], [1, 2], [250, 3, 17, 90, 41, 6, 6, 6, 12, 13, 14]]
STEPS = 7


@torch.no_grad()
def begin(model, prompt):
    cache = ChiarCache(len(model.model.layers))
    return model(torch.tensor([prompt]), past_key_values=cache).logits[:, -1], cache


@torch.no_grad()
def step(model, cache, tokens, lengths):
    """The logits behind one more token a row, the rows having their own lengths."""
    ids_B1, positions_B1 = (torch.tensor(values)[:, None] for values in (tokens, lengths))
    return model(ids_B1, past_key_values=cache, position_ids=positions_B1).logits[:, -1]


def alone(model, prompt):
    """Logits of every step of a row by itself, and the tokens it takes."""
    logits, cache = begin(model, prompt)
    seen, tokens = [logits[0]], []
    for n in range(STEPS):
        tokens.append(int(seen[-1].argmax()))
        seen.append(step(model, cache, tokens[-1:], [len(prompt) + n])[0])
    return seen, tokens


@pytest.mark.parametrize("fast", [False, True], ids=["plain", "fast"])
@pytest.mark.parametrize("some", JOINED.values(), ids=JOINED.keys())
def test_rows_come_and_go(lively, some, fast):
    """Each goes on as if it were alone."""
    model = lively(some, max_position_embeddings=64)
    expected = [alone(model, prompt) for prompt in PROMPTS]
    if fast:
        model.enable_fast_decoding()
    live, cache, done = [], None, [0, 0, 0]
    arrivals, departures = {0: 0, 2: 1, 3: 2}, {5: 1}
    for time in range(STEPS):
        if time in departures:
            kept = [row for row in live if row != departures[time]]
            for layer in cache.layers:
                layer.batch_select_indices(torch.tensor([live.index(row) for row in kept]))
            live = kept
        if time in arrivals:
            row = arrivals[time]
            _, new = begin(model, PROMPTS[row])
            if cache is None:
                cache = new
            else:
                cache.join(new, len(live), 1)
            live.append(row)
        tokens = [expected[row][1][done[row]] for row in live]
        logits_BV = step(model, cache, tokens, [len(PROMPTS[row]) + done[row] for row in live])
        for row, logits_V in zip(live, logits_BV, strict=True):
            done[row] += 1
            torch.testing.assert_close(logits_V, expected[row][0][done[row]], atol=LOGIT_ROUNDING, rtol=0)
    assert done == [7, 3, 4]


def test_a_join_that_fails_changes_nothing(lively):
    model = lively({"keys": "routed"})
    seen, tokens = alone(model, PROMPTS[0])
    _, cache = begin(model, PROMPTS[0])
    _, foreign = begin(lively({"meta_router": False}), PROMPTS[1])
    _, other = begin(model, PROMPTS[1])
    other.layers[-1].state["unknown"] = torch.zeros(1)  # the layers before it can be joined
    for wrong in (foreign, other):
        with pytest.raises(InputError, match="different models"):
            cache.join(wrong, 1, 1)
    for n, token in enumerate(tokens):
        logits = step(model, cache, [token], [len(PROMPTS[0]) + n])[0]
        torch.testing.assert_close(logits, seen[n + 1], atol=LOGIT_ROUNDING, rtol=0)
