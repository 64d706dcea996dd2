"""A token's output depends on the real tokens before it in its row, and on nothing else."""

import pytest
import torch

ROWS, TOKENS, VOCABULARY = 3, 12, 257
LENGTHS = (12, 8, 5)
# With other shapes, or where a CPU blocks its products another way, sums run in another order. Logits reach 40, where
# fp32 resolves 4e-6: the largest difference seen is 3e-5. Entropies, weights and gates lie in [0, 1]: 3e-7.
LOGIT_ROUNDING, UNIT_ROUNDING = 2e-4, 5e-6
LEAK = 1e-2
# Many times the rounding of an entropy: a decision this far from the boundary cannot flip.
MARGIN = 1e-4


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
        for part in ("entropy_BT", "choice_BT", "weights_BTK", "gate_BT"):
            if getattr(layer, part) is not None:
                values[f"{part} of layer {layer.index}"] = getattr(layer, part)[where]
    return values


def assert_same(first, second):
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


def with_others(ids, kept):
    """Other tokens everywhere but where `kept` says."""
    changed = (ids + torch.randint(1, VOCABULARY, ids.shape)) % VOCABULARY
    changed[kept] = ids[kept]
    return changed


def pad(ids, side, filler=None):
    """The first LENGTHS[b] tokens of each row, padded to the full length, with the mask of real tokens."""
    padded = with_others(ids, slice(0)) if filler is None else torch.full_like(ids, filler)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(LENGTHS):
        place = slice(TOKENS - length, TOKENS) if side == "left" else slice(0, length)
        padded[row, place] = ids[row, :length]
        mask[row, place] = 1
    return padded, mask


def test_only_earlier_tokens_matter(lively, option, ids):
    """Neither other later ones nor fewer; and every operator gets tokens, no decision is close, tokens do matter."""
    model, before = lively(option), (slice(None), slice(7))
    whole, changed, prefix = run(model, ids), run(model, with_others(ids, before)), run(model, ids[:, :7])
    assert margin(whole) > MARGIN
    for layer in whole.routing.routed_layers if option.get("router") != "static" else ():
        assert min(whole.routing.operator_use(layer).values()) > 0.05
    assert_same(observed(whole, before), observed(changed, before))
    assert_same(observed(whole, before), observed(prefix, before))
    assert (whole.logits - changed.logits)[:, 7:].abs().amax((1, 2)).min() > LEAK
    first_changed = run(model, with_others(ids, (slice(None), slice(1, None))))
    change = (whole.logits - first_changed.logits).abs().amax(-1)
    assert change[:, 1:].max() > 1.0
    assert change[:, -1].max() > LEAK


def test_other_rows_do_not_matter(lively, option, ids):
    model = lively(option)
    together = run(model, ids)
    assert_same(observed(together, 1), observed(run(model, with_others(ids, 1)), 1))
    for row in range(ROWS):
        assert_same(observed(together, row), observed(run(model, ids[row : row + 1]), 0))


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_does_not_matter(lively, option, ids, side):
    model = lively(option)
    padded, mask = pad(ids, side)
    output, real = run(model, padded, mask), mask.bool()
    assert margin(output) > MARGIN
    assert_same(observed(output, real), observed(run(model, pad(ids, side, filler=0)[0], mask), real))
    alone = [run(model, ids[row : row + 1, :length]) for row, length in enumerate(LENGTHS)]
    for row, of_row in enumerate(alone):
        assert_same(observed(output, (row, real[row])), observed(of_row, 0))
    for layer in output.routing.routed_layers:
        dark = sum(round(each.routing.attention_fraction(layer) * n) for each, n in zip(alone, LENGTHS, strict=True))
        # A ratio of two whole numbers below 2**24, rounded to fp32.
        assert output.routing.attention_fraction(layer) == pytest.approx(dark / sum(LENGTHS), abs=1e-7)


def test_masks_of_ones_and_rows_of_padding(lively, option, ids):
    model, mask = lively(option), torch.ones_like(ids)
    assert_same(observed(run(model, ids), ...), observed(run(model, ids, mask), ...))
    mask[1] = 0
    assert all(value.isfinite().all() for value in observed(run(model, ids, mask), ...).values())


@pytest.mark.parametrize("pool", ["batch", "sequence"])
def test_gate_pools_that_see_the_future(lively, ids, pool):
    model = lively({}, gate_pool=pool)
    before, after = run(model, ids), run(model, with_others(ids, (slice(None), slice(-1))))
    assert (before.logits - after.logits)[:, :-1].abs().max() > LEAK
    gates = before.routing.layers[0].gate_BT, after.routing.layers[0].gate_BT
    assert (gates[0] - gates[1]).abs()[:, :-1].max() > 1e-3
    others = run(model, with_others(ids, 0))
    if pool == "batch":
        assert (before.logits - others.logits)[0].abs().max() > LEAK
    else:
        assert_same(observed(before, 0), observed(others, 0))
