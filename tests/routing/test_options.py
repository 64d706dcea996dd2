"""Router options that do not go together are refused in one sentence."""

import pytest

from chiar import presets
from chiar.errors import InputError

PRE = {"norm_position": "pre", "meta_router": False}
HARD = {"routing": "hard", "hard_estimator": "selected"}
STRAIGHT = {"entropy_gradient": "straight_through"}
THREE = {"operators": ["spectral", "rbf", "attention"]}

REFUSED = {
    "fraction of a random router": ({"router": "random", "target_fraction": 0.5}, "got router='random'"),
    "fraction of three operators": ({**THREE, "target_fraction": 0.5}, "needs two operators"),
    "fraction of soft routing": ({"routing": "soft", "target_fraction": 0.5}, "routing='soft'"),
    "fraction and thresholds": ({"thresholds": 0.9, "target_fraction": 0.5}, "leave thresholds out"),
    "fraction of 1": ({"target_fraction": 1.0}, "strictly between 0 and 1, got 1.0"),
    "fractions for other layers": ({"target_fraction": [0.5]}, "1 entries for 2 routed layers"),
    "fraction that is no number": ({"target_fraction": "half"}, "target_fraction must be"),
    "gradient of a learned router": ({**HARD, **STRAIGHT}, "needs the entropy router with two operators"),
    "gradient of three operators": ({**THREE, **STRAIGHT}, "'rbf'"),
    "gradient misspelt": ({"entropy_gradient": "straight"}, "Did you mean 'straight_through'"),
    "temperature alone": ({"router_temperature": 2.0}, "nothing else reads it"),
    "temperature of 0": ({**STRAIGHT, "router_temperature": 0.0}, "must be positive"),
    "hidden without a learned router": ({"router_hidden": 8}, "router_hidden=8 needs router='learned'"),
    "negative hidden": ({**HARD, "router_hidden": -1}, "must not be negative"),
    "state without a learned router": ({"router_reads": "state"}, "needs router='learned'"),
    "weights without a gradient": ({"entropy_weights": "learned"}, "needs a gradient through H"),
    "weights nobody reads": ({**HARD, "router_reads": "state", "entropy_weights": "learned"}, "gradient through H"),
    "annealed threshold": ({"anneal": 0.5}, "needs probabilities"),
    "annealed soft": ({"routing": "soft", "anneal": 0.5}, "needs probabilities"),
    "annealed beyond the end": ({**STRAIGHT, "anneal": 1.5}, "between 0 and 1, got 1.5"),
    "budget without a target": ({**HARD, "budget_weight": 1.0}, "needs a target_fraction"),
    "budget of an entropy router": ({"budget_weight": 1.0, "target_fraction": 0.5}, "needs router='learned'"),
    "benefit of an entropy router": ({"benefit_weight": 1.0}, "benefit_weight=1.0 needs router='learned'"),
    "benefit of soft routing": ({"routing": "soft", "benefit_weight": 1.0}, "needs routing='hard'"),
    "scale after a norm": ({**HARD, "router_scale": "probability"}, "norm_position='pre'"),
    "scale of a threshold": ({**PRE, "router_scale": "probability"}, "entropy_gradient='straight_through'"),
    "scale of both": ({**PRE, "routing": "hard", "router_scale": "probability"}, "hard_estimator='selected'"),
    "skip after a norm": ({"operators": ["skip", "attention"]}, "the operator 'skip' needs norm_position='pre'"),
    "bypass after a norm": ({"operators": ["bypass", "attention"]}, "the operator 'bypass' needs"),
    "skip as the dark path": ({**PRE, "operators": ["attention", "skip"]}, r"use \['spectral', 'attention'\] or"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    changes, message = REFUSED[case]
    with pytest.raises(InputError, match=message) as caught:
        presets.get("v3-tiny", **changes)
    assert "\n" not in str(caught.value)
    assert str(caught.value).endswith((".", "?"))


def test_a_static_router_alternates_with_the_light_operator_there_is():
    config = presets.get("v3-tiny", router="static", operators=["bypass", "attention"], **PRE)
    assert config.static_operators == ["attention", "bypass"]


def test_one_fraction_is_that_of_every_routed_layer():
    assert presets.get("v3-tiny", target_fraction=0.25).layer_fractions() == [0.25, 0.25]
    assert presets.get("v3-tiny").layer_fractions() is None
