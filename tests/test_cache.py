"""Decoding with a cache gives what the whole forward pass gives."""

import pytest
import torch
from transformers import DynamicCache, GenerationConfig

from chiar.errors import InputError
from chiar.model.cache import ChiarCache
from helpers import ALONG_TIME

ROWS, TOKENS, VOCABULARY = 3, 10, 257
LENGTHS = (10, 7, 4)
NEW = 6
# A decoding step multiplies matrices of another shape than the whole pass, so sums run in another order. Logits reach
# 25, where fp32 resolves 2e-6: differences seen are below 5e-5. Entropies, weights and gates lie in [0, 1]: 1e-6.
LOGIT_ROUNDING, UNIT_ROUNDING = 2e-4, 5e-6
# Decisions further than this from a tie survive the rounding.
ROUTE_MARGIN, TOKEN_MARGIN = 2 * UNIT_ROUNDING, 2 * LOGIT_ROUNDING

ONE_BY_ONE = [1] * TOKENS
CHUNKED = [4, 3, 1, 2]
REPRESENTATIVE = {
    "baseline": {"preset": "baseline-tiny"},
    "v1-routed-keys": {"preset": "v1-tiny", "keys": "routed"},
    "v2": {"preset": "v2-tiny"},
    "v3-routed-keys": {"keys": "routed"},
    "soft": {"router": "learned", "routing": "soft"},
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


def decode(model, ids, mask, chunks):
    """The outputs of feeding `ids` in pieces of the given sizes through one cache."""
    outputs, cache, start = [], None, 0
    for size in chunks:
        stop = start + size
        seen = None if mask is None else mask[:, :stop]
        with torch.no_grad():
            output = model(
                ids[:, start:stop], attention_mask=seen, past_key_values=cache, use_cache=True, output_routing=True
            )
        cache, start = output.past_key_values, stop
        assert cache.get_seq_length() == stop
        outputs.append(output)
    return outputs


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


@pytest.mark.parametrize("chunks", [ONE_BY_ONE, CHUNKED], ids=["one-by-one", "chunked"])
def test_decoding_equals_the_whole_pass(lively, option, ids, chunks):
    model = lively(option)
    assert_same_decisions(whole(model, ids), decode(model, ids, None, chunks), torch.ones_like(ids).bool())


@pytest.mark.parametrize("chunks", [ONE_BY_ONE, CHUNKED], ids=["one-by-one", "chunked"])
def test_decoding_left_padded_rows_equals_the_whole_pass(lively, option, ids, left_mask, chunks):
    model = lively(option)
    full, steps = whole(model, ids, left_mask), decode(model, ids, left_mask, chunks)
    assert_same_decisions(full, steps, left_mask.bool())


def test_decoding_depends_on_the_cache(lively, option, ids):
    """The sanity check of the tests above: without its past the last token gets other logits."""
    model = lively(option)
    with_past = whole(model, ids).logits[:, -1]
    without = whole(model, ids[:, -1:]).logits[:, -1]
    assert (with_past - without).abs().amax(-1).min() > 0.1


def greedy(model, prompt, **kwargs):
    return model.generate(prompt, max_new_tokens=NEW, do_sample=False, pad_token_id=0, **kwargs)


def clear_choices(model, prompt, **kwargs):
    """Greedy tokens of uncached decoding, each of them the best by a margin."""
    found = greedy(model, prompt, use_cache=False, output_logits=True, return_dict_in_generate=True, **kwargs)
    for logits in found.logits:
        best = logits.topk(2).values
        assert (best[:, 0] - best[:, 1]).min() > TOKEN_MARGIN
    return found.sequences


def test_greedy_generation_with_and_without_cache(lively, option, ids, left_mask):
    model = lively(option)
    expected = clear_choices(model, ids, attention_mask=left_mask)
    assert expected.shape == (ROWS, TOKENS + NEW)
    assert torch.equal(greedy(model, ids, attention_mask=left_mask, use_cache=True), expected)


@some_options
def test_greedy_generation_is_the_argmax_of_the_whole_pass(lively, some, ids):
    model = lively(some)
    sequence = ids
    for _ in range(NEW):
        sequence = torch.cat([sequence, whole(model, sequence).logits[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(greedy(model, ids), sequence)


@some_options
def test_a_left_padded_batch_generates_what_its_rows_do(lively, some, ids, left_mask):
    model = lively(some)
    together = greedy(model, ids, attention_mask=left_mask)
    for row, length in enumerate(LENGTHS):
        alone = clear_choices(model, ids[row : row + 1, -length:])
        assert torch.equal(together[row, -length - NEW :], alone[0])


@some_options
def test_sampling_with_a_seed(lively, some, ids, left_mask):
    model = lively(some)
    sequences = []
    for use_cache, seed in [(True, 3), (False, 3), (True, 4)]:
        torch.manual_seed(seed)
        kwargs = {"do_sample": True, "temperature": 3.0, "max_new_tokens": NEW, "pad_token_id": 0}
        sequences.append(model.generate(ids, attention_mask=left_mask, use_cache=use_cache, **kwargs))
    assert torch.equal(sequences[0], sequences[1])
    assert not torch.equal(sequences[0], sequences[2])


@some_options
def test_beam_search(lively, some, ids, left_mask, monkeypatch):
    model = lively(some)
    orders, reorder = [], ChiarCache.reorder_cache

    def recorded(cache, rows):
        orders.append(rows.tolist())
        reorder(cache, rows)

    monkeypatch.setattr(ChiarCache, "reorder_cache", recorded)
    kwargs = {"num_beams": 3, "num_return_sequences": 2, "return_dict_in_generate": True, "output_scores": True}
    cached = greedy(model, ids, attention_mask=left_mask, use_cache=True, **kwargs)
    assert any(order != list(range(3 * ROWS)) for order in orders)
    uncached = greedy(model, ids, attention_mask=left_mask, use_cache=False, **kwargs)
    assert torch.equal(cached.sequences, uncached.sequences)
    # Means over NEW log-probabilities, each with the rounding of a logit.
    assert torch.allclose(cached.sequences_scores, uncached.sequences_scores, atol=LOGIT_ROUNDING, rtol=0)


@some_options
def test_generation_from_embeddings(lively, some, ids, left_mask):
    model = lively(some)
    embeddings = model.get_input_embeddings()(ids)
    generated = greedy(model, None, inputs_embeds=embeddings, attention_mask=left_mask)
    assert torch.equal(generated, clear_choices(model, ids, attention_mask=left_mask)[:, TOKENS:])


def test_generation_from_embeddings_needs_ids_for_token_hashing(lively, ids):
    model = lively({"router": "random", "random_key": "token"})
    with pytest.raises(InputError, match="random_key='token' hashes token ids"):
        greedy(model, None, inputs_embeds=model.get_input_embeddings()(ids))


@pools_seeing_the_future
def test_a_gate_that_sees_the_future_refuses_to_generate(lively, ids, pool):
    model = lively({}, gate_pool=pool)
    reason = f"gate_pool='{pool}' lets every token see the whole {pool}.*gate_generation='prefill'"
    with pytest.raises(InputError, match=reason):
        greedy(model, ids)
    with pytest.raises(InputError, match=reason):
        greedy(model, ids, use_cache=False)
    with pytest.raises(InputError, match=reason):
        model(ids, use_cache=True)
    with pytest.raises(InputError, match=reason):
        model(ids, past_key_values=ChiarCache(4))
    assert whole(model, ids).past_key_values is None


@pools_seeing_the_future
@pytest.mark.parametrize("chunks", [[6, 1, 1, 1, 1], [6, 3, 1]], ids=["one-by-one", "chunked"])
def test_prefill_freezes_the_gate(lively, ids, left_mask, pool, chunks):
    model = lively({}, gate_pool=pool, gate_generation="prefill")
    steps = decode(model, ids, left_mask, chunks)
    frozen = steps[0].routing.layers[0].gate_BT
    assert torch.equal(frozen, whole(model, ids[:, :6], left_mask[:, :6]).routing.layers[0].gate_BT)
    for step in steps[1:]:
        gate = step.routing.layers[0].gate_BT
        assert torch.equal(gate, frozen[:, :1].expand_as(gate))
    not_frozen = whole(model, ids, left_mask).routing.layers[0].gate_BT
    assert (not_frozen[:, 0] - frozen[:, 0]).abs().max() > 1e-3


@pools_seeing_the_future
def test_generation_with_a_frozen_gate(lively, ids, left_mask, pool):
    model = lively({}, gate_pool=pool, gate_generation="prefill")
    prompt, mask, sequence = ids, left_mask, ids
    cache = None
    for _ in range(NEW):
        with torch.no_grad():
            output = model(prompt, attention_mask=mask, past_key_values=cache, use_cache=True)
        prompt, cache = output.logits[:, -1:].argmax(-1), output.past_key_values
        sequence = torch.cat([sequence, prompt], dim=1)
        mask = torch.cat([mask, torch.ones_like(prompt)], dim=1)
    assert torch.equal(greedy(model, ids, attention_mask=left_mask), sequence)


@pools_seeing_the_future
def test_a_frozen_gate_needs_a_cache(lively, ids, pool):
    """Without a cache there is nowhere to keep g: it would move with every token."""
    model = lively({}, gate_pool=pool, gate_generation="prefill")
    with pytest.raises(InputError, match="cache"):
        greedy(model, ids, use_cache=False)


@pools_seeing_the_future
def test_a_frozen_gate_needs_a_cache_however_it_is_switched_off(lively, ids, pool):
    model = lively({}, gate_pool=pool, gate_generation="prefill")
    with pytest.raises(InputError, match="cache"):
        model.generate(ids, generation_config=GenerationConfig(max_new_tokens=2, use_cache=False))
    model.generation_config.use_cache = False
    with pytest.raises(InputError, match="cache"):
        greedy(model, ids)


def test_a_gate_frozen_per_row_follows_its_beam(lively, ids, left_mask):
    """Rows have different g, and every beam of a row keeps the row's."""
    model = lively({}, gate_pool="sequence", gate_generation="prefill")
    kwargs = {"num_beams": 3, "max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    together = model.generate(ids, attention_mask=left_mask, **kwargs)
    for row, length in enumerate(LENGTHS):
        alone = model.generate(ids[row : row + 1, -length:], **kwargs)
        assert torch.equal(together[row, -length - NEW :], alone[0])


def test_foreign_caches_are_refused(lively, ids):
    model = lively({})
    for cache, name in [(DynamicCache(), "DynamicCache"), (((),), "tuple")]:
        with pytest.raises(TypeError, match=f"needs a chiar.model.cache.ChiarCache, got .*{name}"):
            model(ids, past_key_values=cache)
    with pytest.raises(TypeError, match=r"needs a chiar\.model\.cache\.ChiarCache"):
        greedy(model, ids, past_key_values=DynamicCache())


@pytest.mark.parametrize("preset", ["v1-tiny", "v2-tiny"])
def test_more_tokens_than_learned_positions(lively, ids, preset):
    model = lively({"preset": preset}, max_position_embeddings=8)
    whole(model, ids[:, :8])
    reason = "tokens, but the model has 8 learned positions"
    with pytest.raises(InputError, match=f"10 {reason}"):
        model(ids)
    cache = decode(model, ids, None, [5, 3])[-1].past_key_values
    with pytest.raises(InputError, match=f"9 {reason}"):
        model(ids[:, 8:9], past_key_values=cache)
    with pytest.raises(InputError, match=f"9 {reason}"):
        greedy(model, ids[:, :5])


def test_rope_goes_beyond_the_trained_length(lively, ids):
    model = lively({}, max_position_embeddings=8)
    assert whole(model, ids).logits.isfinite().all()
    assert greedy(model, ids).shape == (ROWS, TOKENS + NEW)


def test_what_the_cache_holds(lively, option, ids):
    model = lively(option)
    cache = decode(model, ids, None, CHUNKED)[-1].past_key_values
    assert isinstance(cache, ChiarCache)
    assert cache.get_seq_length() == TOKENS
    for kind, layer, memory in zip(model.config.layer_types, model.model.layers, cache.layers, strict=True):
        kept = {"attention", "rbf"} & set(layer.operators)
        ragged = kind == "routed" and layer.routed_keys
        assert set(memory.stores) <= kept if ragged else set(memory.stores) == kept
        if not ragged:
            assert all(store.length_B.tolist() == [TOKENS] * ROWS for store in memory.stores.values())
    config = model.config
    for kind, layer, memory in zip(config.layer_types, model.model.layers, cache.layers, strict=True):
        expected = ({"everywhere"} if config.temporal_everywhere else set()) | ({"temporal"} & set(layer.operators))
        if kind in ("spectral", "temporal"):
            assert set(memory.state) == expected | ({"gate_total", "gate_count"} if config.meta_router else set())
        else:
            assert set(memory.state) == expected


def test_a_reset_cache_starts_over(lively, ids):
    model = lively({})
    first = decode(model, ids, None, [TOKENS])[0]
    cache = first.past_key_values
    cache.reset()
    assert cache.get_seq_length() == 0
    with torch.no_grad():
        again = model(ids, past_key_values=cache)
    assert torch.equal(first.logits, again.logits)


def test_a_cache_cannot_be_cropped(lively, ids):
    cache = decode(lively({}), ids, None, [TOKENS])[0].past_key_values
    with pytest.raises(NotImplementedError, match="cannot be cropped"):
        cache.crop(4)


def test_no_cache_unless_asked(lively, ids):
    assert whole(lively({}), ids).past_key_values is None


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("rows", [1, ROWS + 1])
def test_a_batch_of_another_size_is_refused(lively, ids, rows, fast):
    """It would be written into other rows, on a GPU beside the tensors."""
    model = lively({"preset": "baseline-tiny"}).eval()
    if fast:
        model.enable_fast_decoding()
    with torch.no_grad():
        cache = model(ids, use_cache=True).past_key_values
        with pytest.raises(InputError, match=f"holds {ROWS} rows and the input has {rows}"):
            model(ids[:1, :1].expand(rows, 1), past_key_values=cache, use_cache=True)
