"""Routers at about 40M parameters (D 384, 12 layers): which of them earns its place beside the cheap rivals.

All layers are routed, so that a fraction f holds for the whole model and static choice means every other layer. In the
identity basis and pre-norm the residual stream lives in spectral coordinates: the filter and H cost no product.
"""

from typing import Any

from chiar.studies.declaration import Study, Variant

LAYERS = 12
HALF = {"target_fraction": 0.5}
LEARNED = {"router": "learned", "routing": "hard", "hard_estimator": "selected", **HALF}
BOTH = {"router": "learned", "routing": "hard", "hard_estimator": "both", **HALF}
P = {"router_scale": "probability"}
SCALED = {**LEARNED, **P}
FEW_KEYS, LEAN = {"keys": "routed"}, {"light_ffn": False}
SLIM = (FEW_KEYS, LEAN)
MOD = {"operators": ["skip", "attention"], "router_reads": "state", **FEW_KEYS, **LEAN}
ALTERNATE = {"layer_types": ["attention", "routed"] * (LAYERS // 2), "target_fraction": 0.25}
DTRNET = {**LEARNED, "operators": ["bypass", "attention"], "router_reads": "state", **FEW_KEYS}
GRADIENT = {"entropy_gradient": "straight_through"}
THROUGH = {**HALF, **GRADIENT}
BAND, ANNEALED, BENEFIT = {"entropy_weights": "learned"}, {"anneal": 0.5}, {"benefit_weight": 0.1}
TIME, EVERYWHERE = {"operators": ["temporal", "attention"]}, {"temporal_everywhere": True}
TEMPORAL = {**HALF, "signal": "temporal", "entropy_dc_weight": 0.0}
F30 = {"target_fraction": 0.3}
SANDWICH = {"layer_types": ["attention"] * 2 + ["routed"] * 9 + ["attention"], "target_fraction": 1 / 3}
SANDWICH_ALL = {**SANDWICH, "target_fraction": 0.27}
SANDWICH_HASH = {"layer_types": SANDWICH["layer_types"], "random_fraction": 1 / 3}
TOGETHER, SETTLED = {"together": 9}, {"settle": 0.4}
THIRDS = {"layer_types": SANDWICH["layer_types"], "turns": 3}
FIFTHS = {"layer_types": ["attention"] + ["routed"] * 10 + ["attention"], "turns": 5}
IN_TURN = {"router": "learned", "routing": "hard", "hard_estimator": "selected", "router_scale": "probability"}
DEEPER = {"target_fraction": [0.2 + 0.6 * layer / (LAYERS - 1) for layer in range(LAYERS)]}


def dense(name: str, title: str, layers: int = LAYERS, rank: int = 1, **config: Any) -> Variant:
    return Variant(name, "control", title, {"layer_types": ["attention"] * layers, **config}, rank=rank)


def narrow(width: int) -> Variant:
    """Heads stay 64 wide."""
    heads = width // 64
    return dense(f"dense-w{width}", f"dense, width {width}", hidden_size=width, num_attention_heads=heads)


def control(name: str, title: str, *config: dict[str, Any], rank: int = 1) -> Variant:
    return Variant(name, "control", title, merged(*config), rank=rank)


def candidate(
    name: str, title: str, *config: dict[str, Any], settings: dict[str, Any] | None = None, rank: int = 2
) -> Variant:
    return Variant(name, "candidate", title, merged(*config), settings or {}, rank=rank)


def merged(*parts: dict[str, Any]) -> dict[str, Any]:
    return {name: value for part in parts for name, value in part.items()}


STATIC, HASH = {"router": "static"}, {"router": "random", "random_key": "token"}
POSITION, SOFT = {"router": "random", "random_key": "position"}, {"router": "learned", "routing": "soft"}

STUDY = Study(
    name="routers40m",
    title="Routers at 40M parameters against their cheap rivals",
    preset="v3-16m",
    baseline="dense",
    epochs=1.0,
    config={
        "layer_types": ["routed"] * LAYERS,
        "hidden_size": 384,
        "num_attention_heads": 6,
        "norm": "rmsnorm",
        "norm_position": "pre",
        "basis": "identity",
        "filter_gamma": False,
        "meta_router": False,
        "dropout": 0.0,
        "execution": "auto",
    },
    settings={
        "length": 256,
        "batch": 128,
        "micro_batch": 128,
        "learning_rate": 1e-3,
        "final_learning_rate": 1e-5,
        "warmup": 100,
        "compile_layers": True,
        "evaluate_every": 250,
        "evaluate_rows": 512,
        "save_every": 500,
        "keep": 1,
        "log_every": 25,
    },
    variants=(
        dense("dense", "dense, pre-norm"),
        dense("dense-9", "dense, 9 layers", 9),
        dense("dense-8", "dense, 8 layers", 8),
        dense("dense-6", "dense, 6 layers", 6),
        narrow(320),
        narrow(256),
        dense("dense-post", "dense, post-norm LayerNorm", norm="layernorm", norm_position="post", filter_gamma=True),
        control("static", "attention in every other layer", STATIC),
        control("static-lean", "whole block off in every other layer", STATIC, LEAN),
        control("hash", "random hash of the token id", HASH),
        control("hash-keys-lean", "random hash of the token id, routed keys, no light FFN", HASH, FEW_KEYS, LEAN),
        control("position", "random hash of the position", POSITION),
        control("soft", "soft: both operators on every token", SOFT),
        dense("dense-time", "dense, filter along time in every layer", temporal_everywhere=True),
        dense("dense-8-time", "the same, 8 layers", 8, temporal_everywhere=True),
        dense("dense-6-time", "the same, 6 layers", 6, temporal_everywhere=True),
        dense("dense-4-time", "the same, 4 layers", 4, temporal_everywhere=True),
        control("static-time", "static choice, light path along time", STATIC, TIME),
        control("static-time-lean", "whole block off, filter along time in every layer", STATIC, LEAN, EVERYWHERE),
        control("hash-time-lean", "random hash, filter along time in every layer", HASH, *SLIM, EVERYWHERE),
        control(
            "thirds-hash-time", "one of three layers by a hash, filter along time", HASH, THIRDS, *SLIM, EVERYWHERE
        ),
        control("sandwich-hash-time", "f = 1/3 by a hash between full layers", HASH, *SLIM, EVERYWHERE, SANDWICH_HASH),
        candidate(
            "together-time",
            "f = 1/3 between full layers, one choice for all nine",
            SCALED,
            EVERYWHERE,
            *SLIM,
            SANDWICH,
            TOGETHER,
        ),
        candidate("settled-time", "f from 1 to 1/3 between full layers", SCALED, EVERYWHERE, *SLIM, SANDWICH, SETTLED),
        candidate("thirds-time", "one of three layers, learned, filter along time", IN_TURN, THIRDS, *SLIM, EVERYWHERE),
        candidate("halves-time", "one of two layers, learned", IN_TURN, {"turns": 2}, *SLIM, EVERYWHERE),
        candidate("fifths-time", "one of five layers, learned", IN_TURN, FIFTHS, *SLIM, EVERYWHERE),
        candidate("thirds-time-all", "one of three layers, learned, all keys", IN_TURN, THIRDS, LEAN, EVERYWHERE),
        candidate(
            "thirds-entropy-time",
            "one of three layers by entropy with gradients",
            GRADIENT,
            P,
            THIRDS,
            *SLIM,
            EVERYWHERE,
        ),
        candidate(
            "sandwich-time-all", "f = 0.27 between full layers, all keys", SCALED, EVERYWHERE, LEAN, SANDWICH_ALL
        ),
        candidate("learned-keys", "learned linear, routed keys", LEARNED, FEW_KEYS),
        candidate("learned-keys-lean", "learned linear, routed keys, no light FFN", LEARNED, FEW_KEYS, LEAN),
        candidate("learned-all-lean", "learned linear, all keys, no light FFN", LEARNED, LEAN),
        candidate("scaled-keys-lean", "learned linear, scaled by p, routed keys, no light FFN", SCALED, FEW_KEYS, LEAN),
        candidate("mod", "Mixture-of-Depths style: light tokens skip the layer", SCALED, MOD),
        candidate("mod-alternate", "the same in every other layer, f = 0.25", SCALED, MOD, ALTERNATE),
        candidate("entropy-keys", "entropy, routed keys", HALF, FEW_KEYS),
        candidate("through-keys", "entropy with gradients, routed keys", THROUGH, FEW_KEYS),
        candidate("through-keys-lean", "entropy with gradients, scaled, routed keys, no light FFN", THROUGH, P, *SLIM),
        candidate("time-keys", "learned linear, light path along time, routed keys", LEARNED, TIME, FEW_KEYS),
        candidate("time-keys-lean", "the same, scaled, no light FFN", SCALED, TIME, *SLIM),
        candidate("all-time-keys-lean", "filter along time everywhere, learned, scaled", SCALED, EVERYWHERE, *SLIM),
        candidate("sandwich-time", "the same, f = 1/3 between full layers", SCALED, EVERYWHERE, *SLIM, SANDWICH),
        candidate(
            "all-time-f30", "filter along time everywhere, f = 0.3: 37% fewer FLOPs", SCALED, EVERYWHERE, *SLIM, F30
        ),
        candidate("through-time-lean", "the same by entropy with gradients", THROUGH, P, EVERYWHERE, *SLIM),
        candidate("time-signal", "temporal entropy, light path along time", TEMPORAL, TIME, FEW_KEYS),
        candidate("time-signal-through", "the same with gradients, scaled", TEMPORAL, GRADIENT, P, TIME, *SLIM, rank=3),
        candidate("band-keys", "entropy over learned weights of the spectrum", THROUGH, BAND, FEW_KEYS, rank=3),
        candidate("annealed-keys", "entropy, soft to hard over half of training", THROUGH, ANNEALED, FEW_KEYS, rank=3),
        candidate("mlp-keys-lean", "two-layer router, scaled", SCALED, {"router_hidden": 64}, *SLIM, rank=3),
        candidate(
            "budget-keys", "learned linear with a budget loss", LEARNED, {"budget_weight": 1.0}, FEW_KEYS, rank=3
        ),
        candidate("benefit-keys", "learned linear, drawn to attention's benefit", LEARNED, BENEFIT, FEW_KEYS, rank=3),
        candidate("dtrnet", "DTRNet style: light tokens take value and output projections", DTRNET, rank=3),
        candidate("deeper-more", "learned linear, more attention the deeper", SCALED, DEEPER, *SLIM, rank=3),
        candidate("learned-both", "learned linear, straight-through over both operators", BOTH, rank=3),
    ),
)
