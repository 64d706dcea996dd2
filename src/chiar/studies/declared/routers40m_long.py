"""Attention for few tokens at T 2048, and mostly feed-forward networks for all.

Where texts are long, attention is a third of a 40M model's FLOPs, and under routed keys its scores cost f². What static
choice spends on one full layer buys seven layers at f = 1/4. Leaving out feed-forward networks lost to fewer layers at
T 256 (routers40m_steps), so in most variants every token has them, and a filter along time sees to the neighbours.

`deep-eighth` is v4: the six layers of its closest rival, `dense-6-time`, and between them six for one token in eight.
"""

from dataclasses import replace

from chiar.studies.declared.routers40m import (
    EVERYWHERE,
    FEW_KEYS,
    GRADIENT,
    HALF,
    HASH,
    LAYERS,
    LEAN,
    SANDWICH,
    SANDWICH_ALL,
    SCALED,
    P,
    candidate,
    control,
    dense,
)
from chiar.studies.declared.routers40m import STUDY as SHORT
from chiar.studies.declared.routers40m_even import DEEP, EIGHTH, EVEN

QUARTER = {"target_fraction": 0.25}
ONE_FULL = {"layer_types": ["routed", "attention"] + ["routed"] * (LAYERS - 2)}
TIME = {**EVERYWHERE, **FEW_KEYS}
SIGNAL = {"signal": "temporal", "entropy_dc_weight": 0.0}


def few(*places: int, of: int = LAYERS, others: str = "spectral") -> dict[str, list[str]]:
    """Full attention in these layers only; the others filter and feed forward, or route."""
    return {"layer_types": ["attention" if layer in places else others for layer in range(of)]}


OWN = {"own_ffn": True}
TWO_FULL = few(1, 5, of=8, others="routed")
SEVEN = few(1, 3, 5, of=7, others="routed")
FOUR_FULL = few(1, 3, 5, 7, of=8, others="routed")
QUARTER_HASH = {**HASH, "random_fraction": 0.25}


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
        control("static-4-of-8-time", "8 layers, attention in every other", few(1, 3, 5, 7, of=8), EVERYWHERE),
        control("half-8-hash-own", "8 layers, two full, f = 1/2 by a hash, own networks", HASH, TIME, TWO_FULL, OWN),
        candidate("half-8", "8 layers, two full, f = 1/2, learned", SCALED, TIME, TWO_FULL, HALF),
        control(
            "alternate-hash-own", "8 layers, four full, f = 1/4 by a hash, own", QUARTER_HASH, TIME, FOUR_FULL, OWN
        ),
        control("alternate-half-hash", "8 layers, four full, f = 1/2 by a hash, shared", HASH, TIME, FOUR_FULL),
        control("alternate-half-hash-own", "8 layers, four full, f = 1/2 by a hash, own", HASH, TIME, FOUR_FULL, OWN),
        control("seven-half-hash-own", "7 layers, three full, f = 1/2 by a hash, own", HASH, TIME, SEVEN, OWN),
        candidate("alternate", "8 layers, four full, f = 1/4 in the others", SCALED, TIME, FOUR_FULL, QUARTER),
        *DEEP,
        candidate("quarter-8-all", "8 layers, two full, f = 1/4, all keys", SCALED, EVERYWHERE, TWO_FULL, QUARTER),
        candidate(
            "sandwich-time", "f = 1/3 between full layers, light tokens skip the FFN", SCALED, TIME, LEAN, SANDWICH
        ),
        candidate(
            "sandwich-time-all",
            "f = 0.27 between full layers, all keys, light tokens skip the FFN",
            SCALED,
            EVERYWHERE,
            LEAN,
            SANDWICH_ALL,
        ),
        candidate("quarter", "f = 1/4, learned, no filter along time", SCALED, FEW_KEYS, QUARTER, rank=3),
    ),
)
