"""Small models of every router option, for the tests that hold for all of them."""

BASE = {
    "layer_types": ["attention", "routed", "routed", "attention"],
    "norm_position": "pre",
    "norm": "rmsnorm",
    "meta_router": False,
}
HARD = {"routing": "hard", "hard_estimator": "selected"}
STRAIGHT = {"entropy_gradient": "straight_through"}

OPTIONS = {
    "quantile": {"target_fraction": [0.3, 0.6]},
    "quantile post": {"target_fraction": 0.5, "norm_position": "post", "norm": "layernorm"},
    "learned quantile": {**HARD, "target_fraction": 0.4},
    "straight": {**STRAIGHT, "router_temperature": 0.5},
    "straight post": {**STRAIGHT, "target_fraction": 0.5, "norm_position": "post"},
    "straight scaled": {**STRAIGHT, "router_scale": "probability", "target_fraction": 0.5, "light_ffn": False},
    "learned weights": {**STRAIGHT, "entropy_weights": "learned", "target_fraction": 0.5},
    "learned scaled": {**HARD, "router_scale": "probability"},
    "two layers": {**HARD, "router_hidden": 8, "router_reads": "state", "budget_weight": 1.0, "target_fraction": 0.3},
    "mixture of depths": {
        **HARD,
        "operators": ["skip", "attention"],
        "light_ffn": False,
        "keys": "routed",
        "router_scale": "probability",
        "router_reads": "state",
        "target_fraction": 0.4,
    },
    "dtrnet": {**HARD, "operators": ["bypass", "attention"], "keys": "routed", "router_hidden": 8},
    "bypass": {"operators": ["bypass", "attention"], "light_ffn": False},
    "skip": {"operators": ["skip", "attention"]},
    "turns": {**HARD, "turns": 2, "router_scale": "probability", "keys": "routed", "light_ffn": False},
    "turns by entropy": {"turns": 2},
    "together": {**HARD, "together": 2, "router_scale": "probability", "target_fraction": 0.4, "light_ffn": False},
    "together by entropy": {**STRAIGHT, "together": 2, "target_fraction": 0.4, "keys": "routed"},
    "own network": {**HARD, "own_ffn": True, "router_scale": "probability", "keys": "routed"},
    "own network post": {**STRAIGHT, "own_ffn": True, "target_fraction": 0.5, "norm_position": "post"},
    "settled": {**HARD, "target_fraction": 0.4, "settle": 0.5},
}
"""What can be computed sparsely in training too."""
ANNEALED = {
    "annealed entropy": {**STRAIGHT, "anneal": 0.5, "target_fraction": 0.5},
    "benefit": {**HARD, "benefit_weight": 0.5, "target_fraction": 0.5},
    "annealed learned": {"routing": "hard", "anneal": 0.5, "keys": "routed", "router_scale": "one"},
}
"""What needs every operator's output in training."""


def options(name: str) -> dict:
    return {**BASE, **({**OPTIONS, **ANNEALED}[name])}
