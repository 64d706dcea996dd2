"""A study of seconds on a CPU, to see how studies work; it teaches nothing about routers."""

from chiar.studies.declaration import Study, Variant

STUDY = Study(
    name="tiny",
    title="Tiny models, to see how a study works",
    preset="v3-tiny",
    baseline="dense",
    tokens=16_384,
    test_rows=32,
    config={
        "norm": "rmsnorm",
        "norm_position": "pre",
        "meta_router": False,
        "layer_types": ["routed"] * 4,
        "dropout": 0.0,
    },
    settings={
        "batch": 8,
        "micro_batch": 8,
        "length": 64,
        "learning_rate": 3e-3,
        "warmup": 5,
        "compile": False,
        "evaluate_every": 16,
        "evaluate_rows": 16,
        "save_every": 8,
        "keep": 1,
    },
    variants=(
        Variant("dense", "control", "dense, pre-norm", {"layer_types": ["attention"] * 4}),
        Variant("dense-3", "control", "dense, 3 layers", {"layer_types": ["attention"] * 3}),
        Variant("static", "control", "attention in every other layer", {"router": "static"}),
        Variant("hash", "control", "random hash of the token id", {"router": "random"}),
        Variant("entropy", "candidate", "entropy, recalibrated", {"keys": "routed"}, {"recalibrate_every": 8}),
        Variant(
            "learned",
            "candidate",
            "learned linear, only the chosen operator runs",
            {"router": "learned", "routing": "hard", "hard_estimator": "selected", "light_ffn": False},
            rank=2,
        ),
    ),
)
