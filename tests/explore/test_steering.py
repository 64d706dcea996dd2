"""A moved router does what a model with moved parameters would, and stays as it was afterwards."""

import re

import pytest
import torch

from chiar.errors import InputError
from chiar.explore.steering import Steering, steered, ways_to_steer, why_not
from helpers import refused

IDS = torch.randint(0, 200, (1, 24), generator=torch.Generator().manual_seed(1))
SCORED = {
    "entropy": {"thresholds": 0.8},
    "entropy-3": {"operators": ["spectral", "rbf", "attention"], "thresholds": [[0.77, 0.82], [0.75, 0.81]]},
    "hard": {"router": "learned", "routing": "hard"},
    "hard-3": {"preset": "v1-tiny"},
    "soft": {"router": "learned", "routing": "soft"},
    "followed": {"target_fraction": 0.4},
    "followed-learned": {"router": "learned", "routing": "hard", "target_fraction": 0.4},
}
SCALED = {"router": "learned", "routing": "hard", "hard_estimator": "selected", "norm_position": "pre"}
SCORED["scaled"] = {**SCALED, "router_scale": "probability"}
STACKS = {"preset": "v5-tiny", "layer_types": ["attention", "dark", "dark", "attention", "dark", "attention"]}
SCORED |= {router: {**STACKS, "router": router} for router in ("rise", "predictive", "forecast", "spectral", "learned")}
scored = pytest.mark.parametrize("option", SCORED.values(), ids=SCORED.keys())


@torch.no_grad()
def run(model, steering=None):
    with steered(model.model, steering):
        return model(IDS, output_routing=True)


def fractions(trace):
    return [trace.attention_fraction(layer) for layer in trace.routed_layers]


@scored
def test_a_share_is_what_attention_gets_a_higher_cut_means_less_and_the_model_is_left_as_it_was(lively, option):
    model = lively(option)
    before, weights = run(model).logits, {name: value.clone() for name, value in model.state_dict().items()}
    assert torch.equal(run(model, Steering("shift", 0.0)).logits, before)
    for share in (0.0, 0.25, 0.5, 1.0):
        # A learned router's cut goes through a fp32 bias: a token beside it may fall on either side.
        assert fractions(run(model, Steering("share", share)).routing) == pytest.approx([share] * 2, abs=1 / 24)
    reach = 1e3 if model.config.stacks else 0.05 if model.config.router == "entropy" else 1.0  # stacks have no τ yet
    low, high = (fractions(run(model, Steering("shift", way * reach)).routing)[0] for way in (-1, 1))
    assert low > high
    assert (run(model, Steering("share", 0.9)).logits - before).abs().max() > 0.01
    assert torch.equal(run(model).logits, before)
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


def test_a_shift_is_a_model_with_other_thresholds_or_another_bias(lively):
    model = lively({"thresholds": [0.79, 0.81]})
    moved = run(model, Steering("shift", 0.013))
    model.model.set_thresholds([0.803, 0.823])
    expected = run(model)
    assert torch.equal(moved.logits, expected.logits)
    assert [moved.routing.layers[i].thresholds[0] for i in (1, 2)] == pytest.approx([0.803, 0.823], abs=1e-12)
    model = lively(SCORED["scaled"])  # weights follow too, not the choice alone
    moved = run(model, Steering("shift", 0.7)).logits
    with torch.no_grad():
        for layer in model.config.routed_layers:
            model.model.layers[layer].router.score.bias[-1] -= 0.7
    assert torch.equal(moved, run(model).logits)


def test_a_moved_stack_is_one_with_another_threshold_and_its_trace_says_so(lively):
    model = lively({**STACKS, "target_fraction": 0.4})
    moved = run(model, Steering("shift", 0.02))
    before = model.model.router_state.threshold_L.tolist()
    model.model.set_thresholds([threshold + 0.02 for threshold in before])
    expected = run(model)
    assert torch.equal(moved.logits, expected.logits)
    told = [[trace.layers[i].thresholds for i in (1, 2, 4)] for trace in (moved.routing, expected.routing)]
    assert told[0] == told[1] and told[0][0] == pytest.approx([before[0] + 0.02], abs=1e-6)


def test_a_random_router_takes_a_share_and_what_has_no_cut_says_so(lively):
    model = lively({"router": "random"})
    shares = [sum(fractions(run(model, Steering("share", share)).routing)) for share in (0.0, 0.5, 1.0)]
    assert shares[0] == 0.0 < shares[1] < shares[2] == 2.0
    refused("way to steer", run, model, Steering("shift", 0.1))
    stack = lively({**STACKS, "router": "random"})
    shares = [sum(fractions(run(stack, Steering("share", share)).routing)) for share in (0.0, 0.5, 1.0)]
    assert shares[0] == 0.0 < shares[1] < shares[2] == 2.0
    rules = [{**STACKS, "router": name, "vocab_size": 257} for name in ("space", "stride", "boundary")]
    for option in ({"preset": "baseline-tiny"}, {"router": "static"}, *rules):
        model = lively(option)
        assert ways_to_steer(model.config) == []
        refused(re.escape(why_not(model.config)), run, model, Steering("share", 0.5))


@pytest.mark.parametrize("router", ["rise", "predictive"])
def test_a_share_of_a_prompt_cuts_what_is_written_behind_it(lively, router):
    """The router remembers the prompt, and looking for the cut leaves that alone."""
    model, steering = lively({**STACKS, "router": router}), Steering("share", 0.3)
    with steered(model.model, steering), torch.no_grad():
        first = model(IDS[:, :6], use_cache=True)
        steps = [model(IDS[:, t : t + 1], past_key_values=first.past_key_values).logits for t in range(6, 10)]
    model.model.set_thresholds([steering.cuts[layer] for layer in model.config.routed_layers])
    torch.testing.assert_close(torch.cat([first.logits, *steps], 1), run(model).logits[:, :10])


def test_cuts_found_on_a_text_stay_and_an_error_inside_leaves_the_routers(lively):
    model, steering = lively({"thresholds": 0.8}), Steering("share", 0.5)
    run(model, steering)
    found = dict(steering.cuts)
    with steered(model.model, steering), torch.no_grad():
        model(IDS[:, :3])
    assert steering.cuts == found and len(found) == 2
    before = run(model).logits
    with pytest.raises(InputError), steered(model.model, Steering("shift", 0.1)):
        model(torch.full((1, 3), 10**6))
    assert torch.equal(run(model).logits, before)
