"""Routers at about 40M parameters (D 384, 12 layers): which of them earns its place beside the cheap rivals.

All layers are routed, so that a fraction f holds for the whole model and static choice means every other layer. In the
identity basis and pre-norm the residual stream lives in spectral coordinates: the filter and H cost no product.
"""

from typing import Any

from chiar.studies.declaration import Study, Variant

LAYERS = 12
SELECTED = {"router": "learned", "routing": "hard", "hard_estimator": "selected"}
BOTH = {"router": "learned", "routing": "hard", "hard_estimator": "both"}
FEW_KEYS, LEAN = {"keys": "routed"}, {"light_ffn": False}
RECALIBRATED = {"recalibrate_every": 50}


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
        candidate("learned", "learned linear", SELECTED, rank=2),
        candidate("learned-keys", "learned linear, routed keys", SELECTED, FEW_KEYS, rank=2),
        candidate("learned-lean", "learned linear, no light FFN", SELECTED, LEAN, rank=2),
        candidate("learned-keys-lean", "learned linear, routed keys, no light FFN", SELECTED, FEW_KEYS, LEAN, rank=2),
        candidate("entropy", "entropy, recalibrated", settings=RECALIBRATED, rank=2),
        candidate("entropy-keys", "entropy, routed keys", FEW_KEYS, settings=RECALIBRATED, rank=3),
        candidate("entropy-lean", "entropy, no light FFN", LEAN, settings=RECALIBRATED, rank=3),
        candidate(
            "entropy-keys-lean", "entropy, routed keys, no light FFN", FEW_KEYS, LEAN, settings=RECALIBRATED, rank=3
        ),
        candidate("both", "learned linear, straight-through over both operators", BOTH, rank=3),
    ),
)
