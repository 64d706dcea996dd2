"""Flipped routes: one choice changes and nothing else, and the loss changes by what a whole forward pass says."""

import pytest
import torch
import torch.nn.functional as F

from chiar.nulltest.flips import Flip, Mean, flip_routes, summarise
from helpers import random_model, small_config, token_ids

ROWS, T = 6, 10
OPTIONS = {
    "v3": {"gate_pool": "batch"},
    "v1": {"preset": "v1-tiny"},
    "random": {"router": "random"},
    "keys-routed": {"keys": "routed", "light_ffn": False},
    "pre": {"norm": "rmsnorm", "norm_position": "pre"},
}


def flipped(option, flips=12, **settings):
    config = small_config(**option)
    model = random_model(config, seed=3)
    ids = token_ids(ROWS, T + 1, seed=4)
    done = []
    found = flip_routes(model, lambda rows: ids.numpy()[rows], ROWS, flips, 3, 0, done.append)
    assert sum(done) == len(found) == flips * len(config.routed_layers)
    return model, ids, found


@pytest.mark.parametrize("option", OPTIONS.values(), ids=OPTIONS.keys())
def test_changes_are_those_of_whole_passes(option):
    model, ids, found = flipped({"preset": "v3-tiny", **option})
    operators = model.config.operators
    dark = operators.index("attention")
    # The gate of pool "batch" sees all rows of a pass, so the same three rows must be run together.
    order = [
        [flip.row for flip in found if flip.layer == model.config.routed_layers[0]][i : i + 3] for i in range(0, 12, 3)
    ]
    for number, flip in enumerate(found):
        batch = order[number // (3 * len(model.config.routed_layers))]
        rows = ids[batch]
        trace = model(rows[:, :-1], output_routing=True).routing
        routes = {layer: trace.layers[layer].choice_BT.clone() for layer in model.config.routed_layers}
        b = number % 3
        assert batch[b] == flip.row
        before = int(routes[flip.layer][b, flip.position])
        assert flip.was_dark == (before == dark)
        assert flip.entropy == pytest.approx(float(trace.layers[flip.layer].entropy_BT[b, flip.position]))
        plain = model(rows[:, :-1]).logits[b]
        routes[flip.layer][b, flip.position] = 0 if before == dark else dark
        changed = model(rows[:, :-1], forced_routes=routes).logits[b]
        losses = [F.cross_entropy(logits, rows[b, 1:], reduction="none") for logits in (plain, changed)]
        difference = (losses[1] - losses[0]).detach()
        # The tool's losses pass through fp32 logits.
        assert flip.own == pytest.approx(float(difference[flip.position]), abs=2e-5)
        assert flip.later == pytest.approx(float(difference[flip.position + 1 :].sum()), abs=1e-4)
        assert float(difference[: flip.position].abs().max() if flip.position else 0.0) == pytest.approx(0, abs=1e-9)


def test_light_and_dark_tokens_are_flipped_by_turns():
    _, _, found = flipped({"router": "random"}, flips=24)
    for layer in {flip.layer for flip in found}:
        dark = sum(flip.was_dark for flip in found if flip.layer == layer)
        assert 9 <= dark <= 15
    assert len({(flip.row, flip.position) for flip in found}) > 20
    assert any(abs(flip.change) > 1e-3 for flip in found)


def test_a_layer_without_choice_is_flipped_one_way():
    _, _, found = flipped({"router": "static", "static_operators": ["spectral", "attention"]})
    first, second = sorted({flip.layer for flip in found})
    assert not any(flip.was_dark for flip in found if flip.layer == first)
    assert all(flip.was_dark for flip in found if flip.layer == second)


def planted(count=400):
    """Attention's benefit is 0 below H = 0.5 and 1 above, with noise."""
    generator = torch.Generator().manual_seed(0)
    entropy, noise = torch.rand(count, generator=generator), 0.3 * torch.randn(count, generator=generator)
    flips = []
    for number, (h, e) in enumerate(zip(entropy.tolist(), noise.tolist(), strict=True)):
        dark = number % 2 == 0
        benefit = float(h > 0.5) + e
        change = benefit if dark else -benefit
        flips.append(Flip(1, number // 4, 0, h, dark, change / 4, change * 3 / 4))
    return flips


def test_a_planted_benefit_is_found_by_bin():
    flips = planted()
    worth = summarise(flips, [int(flip.entropy * 4) for flip in flips], [flip.entropy for flip in flips], 4)
    for found, truth in zip(worth.benefit, (0, 0, 1, 1), strict=True):
        assert abs(found.mean - truth) < 4 * found.error
        assert found.error == pytest.approx(0.3 * found.flips**-0.5, rel=0.25)
    assert worth.to_filter.mean > 0.4 and worth.to_attention.mean < -0.4
    assert worth.own_to_filter.mean == pytest.approx(worth.to_filter.mean / 4)
    assert worth.to_filter.flips == worth.to_attention.flips == 200
    # r of a step of height 1 at the middle with noise 0.3: √3/2 · 0.5 / √(0.25 + 0.09).
    assert worth.pearson == pytest.approx(0.743, abs=0.06)
    assert worth.spearman > 0.6 and worth.correlation_error == pytest.approx(0.05, abs=0.001)


def test_empty_and_single_bins():
    assert Mean.of([], []) == Mean(0, None, None)
    assert Mean.of([2.0, 4.0], [7, 7]) == Mean(2, 3.0, None)
