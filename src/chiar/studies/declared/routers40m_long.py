"""Attention for few tokens at T 2048, feed-forward networks for all.

Where texts are long, attention is a third of a 40M model's FLOPs, and under routed keys its scores cost f². What static
choice spends on one full layer buys seven layers at f = 1/4. Leaving out feed-forward networks lost to fewer layers at
T 256 (routers40m_steps), so here every token has them, and a filter along time sees to the neighbours.
"""

from dataclasses import replace

from chiar.studies.declared.routers40m import (
    EVERYWHERE,
    FEW_KEYS,
    GRADIENT,
    HASH,
    LAYERS,
    SCALED,
    P,
    candidate,
    control,
    dense,
)
from chiar.studies.declared.routers40m import STUDY as SHORT
from chiar.studies.declared.routers40m_even import EVEN

QUARTER, EIGHTH = {"target_fraction": 0.25}, {"target_fraction": 0.125}
ONE_FULL = {"layer_types": ["routed", "attention"] + ["routed"] * (LAYERS - 2)}
TIME = {**EVERYWHERE, **FEW_KEYS}
SIGNAL = {"signal": "temporal", "entropy_dc_weight": 0.0}


def few(*places: int) -> dict[str, list[str]]:
    """Attention in these layers only; the others filter and feed forward."""
    return {"layer_types": ["attention" if layer in places else "spectral" for layer in range(LAYERS)]}


STUDY = replace(
    SHORT,
    name="routers40m_long",
    title="Attention for few tokens, T 2048",
    config={**SHORT.config, **EVEN},
    settings={
        **SHORT.settings,
        "length": 2048,
        "batch": 8,
        "micro_batch": 8,
        "warmup": 200,
        "evaluate_every": 500,
        "evaluate_rows": 64,
        "save_every": 900,
        "log_every": 50,
    },
    variants=(
        dense("dense", "dense, pre-norm"),
        dense("dense-time", "dense, filter along time in every layer", temporal_everywhere=True),
        dense("dense-8-time", "the same, 8 layers", 8, temporal_everywhere=True),
        dense("dense-6-time", "the same, 6 layers", 6, temporal_everywhere=True),
        control("static-0-time", "no attention at all, filter along time", few(), EVERYWHERE),
        control("static-1-time", "attention in layer 6 alone, filter along time", few(5), EVERYWHERE),
        control("static-2-time", "attention in layers 4 and 9", few(3, 8), EVERYWHERE),
        control("static-4-time", "attention in layers 2, 5, 8 and 11", few(1, 4, 7, 10), EVERYWHERE),
        control("hash-quarter-time", "f = 1/4 by a hash of the token id", HASH, TIME, {"random_fraction": 0.25}),
        candidate("quarter-time", "f = 1/4 in every layer, learned", SCALED, TIME, QUARTER),
        candidate("eighth-time", "f = 1/8 in every layer, learned", SCALED, TIME, EIGHTH),
        candidate("one-full-eighth-time", "attention in layer 2, f = 1/8 elsewhere", SCALED, TIME, ONE_FULL, EIGHTH),
        candidate("together-quarter-time", "one choice for all layers", SCALED, TIME, QUARTER, {"together": LAYERS}),
        candidate("entropy-quarter-time", "by entropy with gradients", GRADIENT, P, TIME, QUARTER),
        candidate("signal-quarter-time", "by temporal entropy with gradients", GRADIENT, P, SIGNAL, TIME, QUARTER),
        candidate("quarter", "f = 1/4, learned, no filter along time", SCALED, FEW_KEYS, QUARTER, rank=3),
    ),
)
