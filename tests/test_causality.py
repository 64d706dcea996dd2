"""A token's output depends on the real tokens before it in its row, and on nothing else."""

import pytest
import torch

from chiar import ChiarModel

ROWS, TOKENS, VOCABULARY = 3, 12, 257
LENGTHS = (12, 8, 5)
# Between calls of other shapes the sums inside matrix products run in another order. Logits reach 25, where fp32
# resolves 2e-6: the largest difference seen is 3e-5. Entropies, weights and gates lie in [0, 1]: 3e-7 was seen.
LOGIT_ROUNDING, UNIT_ROUNDING = 2e-4, 5e-6
LEAK = 1e-2
# Many times the rounding of an entropy: a decision this far from the boundary cannot flip.
MARGIN = 1e-4

PADDED_SIDES = pytest.mark.parametrize("side", ["left", "right"])


@pytest.fixture
def ids():
    return torch.randint(0, VOCABULARY, (ROWS, TOKENS), generator=torch.Generator().manual_seed(19))


def run(model, ids, mask=None):
    with torch.no_grad():
        return model(ids, attention_mask=mask, output_routing=True)


def observed(output, where):
    """Everything the model says about the tokens `where`: logits, and for each layer H, choice, weights, gate."""
    values = {"logits": output.logits[where]}
    for layer in output.routing.layers:
        values[f"H of layer {layer.index}"] = layer.entropy_BT[where]
        values[f"choice of layer {layer.index}"] = layer.choice_BT[where]
        values[f"weights of layer {layer.index}"] = layer.weights_BTK[where]
        if layer.gate_BT is not None:
            values["gate"] = layer.gate_BT[where]
    return values


def assert_identical(first, second):
    assert first.keys() == second.keys()
    for name in first:
        assert torch.equal(first[name], second[name]), name


def assert_near(first, second):
    assert first.keys() == second.keys()
    for name in first:
        if name.startswith("choice"):
            assert torch.equal(first[name], second[name]), name
        else:
            tolerance = LOGIT_ROUNDING if name == "logits" else UNIT_ROUNDING
            assert (first[name] - second[name]).abs().max() < tolerance, name


def margin(output):
    """How far the closest decision of a real token is from going the other way."""
    routing = output.routing
    distances = [torch.tensor(1.0)]
    for layer in (routing.layers[i] for i in routing.routed_layers):
        for threshold in layer.thresholds or []:
            distances.append((layer.entropy_BT - threshold).abs()[routing.real_BT].min())
        if layer.probabilities_BTK is not None:
            largest = layer.probabilities_BTK[routing.real_BT].topk(2).values
            distances.append((largest[:, 0] - largest[:, 1]).min())
    return min(distances)


def other_tokens(ids):
    """Ids that differ from `ids` everywhere."""
    return (ids + torch.randint(1, VOCABULARY, ids.shape)) % VOCABULARY


def pad(ids, side, filler=None):
    """The first LENGTHS[b] tokens of each row, padded to the full length, with the mask of real tokens."""
    padded = other_tokens(ids) if filler is None else torch.full_like(ids, filler)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(LENGTHS):
        place = slice(TOKENS - length, TOKENS) if side == "left" else slice(0, length)
        padded[row, place] = ids[row, :length]
        mask[row, place] = 1
    return padded, mask


def test_every_operator_gets_tokens_and_no_decision_is_close(lively, option, ids):
    output = run(lively(option), ids)
    assert margin(output) > MARGIN
    if option.get("router") != "static":
        for layer in output.routing.routed_layers:
            assert min(output.routing.operator_use(layer).values()) > 0.05


def test_the_suffix_changes_nothing_before_it(lively, option, ids):
    model, cut = lively(option), 6
    changed = ids.clone()
    changed[:, cut:] = other_tokens(ids[:, cut:])
    before, after = run(model, ids), run(model, changed)
    assert_identical(observed(before, (slice(None), slice(cut))), observed(after, (slice(None), slice(cut))))
    assert (before.logits[:, cut:] - after.logits[:, cut:]).abs().amax((1, 2)).min() > LEAK


def test_an_earlier_token_changes_later_logits(lively, option, ids):
    """The sanity check of the suffix test: in this model information does travel between tokens."""
    model = lively(option)
    changed = ids.clone()
    changed[:, 0] = other_tokens(ids[:, 0])
    change = (run(model, ids).logits - run(model, changed).logits).abs().amax(-1)
    assert change[:, 1:].max() > 1.0
    assert change[:, -1].max() > LEAK


def test_a_later_call_with_fewer_tokens_agrees(lively, option, ids):
    model = lively(option)
    whole, prefix = run(model, ids), run(model, ids[:, :7])
    assert margin(whole) > MARGIN
    assert_near(observed(whole, (slice(None), slice(7))), observed(prefix, (slice(None), slice(7))))


def test_other_rows_change_nothing(lively, option, ids):
    model, row = lively(option), 1
    changed = other_tokens(ids)
    changed[row] = ids[row]
    assert_identical(observed(run(model, ids), row), observed(run(model, changed), row))


def test_a_row_alone_equals_the_row_in_a_batch(lively, option, ids):
    model = lively(option)
    together = run(model, ids)
    assert margin(together) > MARGIN
    for row in range(ROWS):
        assert_near(observed(together, row), observed(run(model, ids[row : row + 1]), 0))


@PADDED_SIDES
def test_padding_changes_no_real_token(lively, option, ids, side):
    model = lively(option)
    padded, mask = pad(ids, side)
    output = run(model, padded, mask)
    assert margin(output) > MARGIN
    for row, length in enumerate(LENGTHS):
        alone = run(model, ids[row : row + 1, :length])
        assert_near(observed(output, (row, mask[row].bool())), observed(alone, 0))


@PADDED_SIDES
def test_the_content_of_padding_does_not_matter(lively, option, ids, side):
    model = lively(option)
    padded, mask = pad(ids, side)
    zeros, _ = pad(ids, side, filler=0)
    real = mask.bool()
    assert_identical(observed(run(model, padded, mask), real), observed(run(model, zeros, mask), real))


def test_a_mask_of_ones_equals_no_mask(lively, option, ids):
    model = lively(option)
    assert_near(observed(run(model, ids), ...), observed(run(model, ids, torch.ones_like(ids)), ...))


def test_a_row_of_padding_stays_finite(lively, option, ids):
    mask = torch.ones_like(ids)
    mask[1] = 0
    output = run(lively(option), ids, mask)
    assert all(value.isfinite().all() for value in observed(output, ...).values())


@pytest.mark.parametrize("pool", ["batch", "sequence"])
def test_gate_pools_that_see_the_future(lively, ids, pool):
    model = lively({}, gate_pool=pool)
    changed = ids.clone()
    changed[:, -1] = other_tokens(ids[:, -1])
    before, after = run(model, ids), run(model, changed)
    assert (before.logits[:, :-1] - after.logits[:, :-1]).abs().max() > LEAK
    gates = before.routing.layers[0].gate_BT, after.routing.layers[0].gate_BT
    assert (gates[0] - gates[1]).abs()[:, :-1].max() > 1e-3


def test_the_batch_pool_sees_other_rows(lively, ids):
    model = lively({}, gate_pool="batch")
    changed = other_tokens(ids)
    changed[0] = ids[0]
    assert (run(model, ids).logits[0] - run(model, changed).logits[0]).abs().max() > LEAK


def test_the_sequence_pool_does_not_see_other_rows(lively, ids):
    model = lively({}, gate_pool="sequence")
    changed = other_tokens(ids)
    changed[0] = ids[0]
    assert_identical(observed(run(model, ids), 0), observed(run(model, changed), 0))


@PADDED_SIDES
@pytest.mark.parametrize("pool", ["batch", "sequence", "causal"])
def test_gate_pools_do_not_count_padding(lively, ids, side, pool):
    model = lively({}, ChiarModel, gate_pool=pool)
    padded, mask = pad(ids, side, filler=0)
    with torch.no_grad():
        gates = model(padded, attention_mask=mask, output_routing=True).routing.layers[0].gate_BT
        states, real = model.embed_tokens(padded), mask.bool()
        for row, length in enumerate(LENGTHS):
            of_row = states[row][real[row]]
            pooled = {
                "batch": states[real].mean(0).expand_as(of_row),
                "sequence": of_row.mean(0).expand_as(of_row),
                "causal": of_row.cumsum(0) / torch.arange(1, length + 1)[:, None],
            }[pool]
            expected = torch.sigmoid(model.meta_router.gate(pooled))[:, 0]
            # Means of the same fp32 numbers in another order.
            assert torch.allclose(gates[row][real[row]], expected, atol=1e-6, rtol=0)
        counting_padding = torch.sigmoid(
            model.meta_router.gate(states[2].mean(0) if pool != "batch" else states.mean((0, 1)))
        )
    assert (gates[2][real[2]][-1] - counting_padding).abs() > 1e-3


@PADDED_SIDES
def test_attention_fraction_does_not_count_padding(lively, router_option, ids, side):
    model = lively(router_option)
    padded, mask = pad(ids, side)
    routing = run(model, padded, mask).routing
    alone = [run(model, ids[row : row + 1, :length]).routing for row, length in enumerate(LENGTHS)]
    assert routing.routed_layers
    for layer in routing.routed_layers:
        dark = sum(round(trace.attention_fraction(layer) * n) for trace, n in zip(alone, LENGTHS, strict=True))
        # A ratio of two whole numbers below 2**24, rounded to fp32.
        assert routing.attention_fraction(layer) == pytest.approx(dark / sum(LENGTHS), abs=1e-7)
