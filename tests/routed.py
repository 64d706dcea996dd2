"""Small models of every router option, for the tests that hold for all of them."""

BASE = {
    "layer_types": ["attention", "routed", "routed", "attention"],
    "norm_position": "pre",
    "norm": "rmsnorm",
    "meta_router": False,
}
HARD = {"routing": "hard", "hard_estimator": "selected"}

OPTIONS = {
    "quantile": {"target_fraction": [0.3, 0.6]},
    "quantile post": {"target_fraction": 0.5, "norm_position": "post", "norm": "layernorm"},
    "learned quantile": {**HARD, "target_fraction": 0.4},
    "learned quantile post": {**HARD, "target_fraction": 0.5, "norm_position": "post"},
    "learned scaled": {**HARD, "router_scale": "probability", "target_fraction": 0.4, "light_ffn": False},
    "routed keys": {**HARD, "router_scale": "probability", "target_fraction": 0.4, "keys": "routed"},
}


def options(name: str) -> dict:
    return {**BASE, **OPTIONS[name]}
