"""Rows that come and go while others are decoded: each goes on as if it were alone."""

import pytest
import torch

from chiar.errors import InputError
from chiar.model.cache import ChiarCache
from helpers import ALONG_TIME

SOME = {
    "baseline": {"preset": "baseline-tiny"},
    "v1-routed-keys": {"preset": "v1-tiny", "keys": "routed"},
    "v2": {"preset": "v2-tiny"},
    "v3-routed-keys": {"keys": "routed"},
    "v3-paper-gate": {"gate_pool": "batch", "gate_generation": "prefill"},
    "hard-gate": {"gate_skip_below": 0.5},
    "random-position": {"router": "random", "random_key": "position"},
    "temporal": ALONG_TIME["temporal-all"],
}
PROMPTS = [[5, 9, 200, 31, 7, 7, 88], [1, 2], [250, 3, 17, 90, 41, 6, 6, 6, 12, 13, 14]]
STEPS = 7
# As in test_cache.py: logits reach 25, and a batch sums in another order than one row.
LOGIT_ROUNDING = 2e-4


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
@pytest.mark.parametrize("some", SOME.values(), ids=SOME.keys())
def test_rows_come_and_go(lively, some, fast):
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


def test_caches_of_different_models(lively):
    _, one = begin(lively({}), PROMPTS[0])
    _, other = begin(lively({"meta_router": False}), PROMPTS[1])
    with pytest.raises(InputError, match="different models"):
        one.join(other, 1, 1)


def test_a_join_that_fails_changes_nothing(lively):
    model = lively({"keys": "routed"})
    seen, tokens = alone(model, PROMPTS[0])
    _, cache = begin(model, PROMPTS[0])
    _, other = begin(model, PROMPTS[1])
    other.layers[-1].state["unknown"] = torch.zeros(1)  # the layers before it can be joined
    with pytest.raises(InputError, match="different models"):
        cache.join(other, 1, 1)
    for n, token in enumerate(tokens):
        logits = step(model, cache, [token], [len(PROMPTS[0]) + n])[0]
        torch.testing.assert_close(logits, seen[n + 1], atol=0, rtol=0)
