"""The same routers in short steps, from residual streams of one scale.

With embeddings of scale 0.02 and filters that begin at 1 a light layer adds LN(x), fifty times as large as x, and a
dark one does not: in routers40m and routers40m_steps a token's scale depends on its first routes. Here streams begin at
scale 1 and light filters add nothing at first, in every variant, controls too. v4 and what could stand in its place are
here besides.
"""

from dataclasses import replace

from chiar.studies.declared.routers40m import (
    EVERYWHERE,
    FEW_KEYS,
    GRADIENT,
    HASH,
    LAYERS,
    LEAN,
    SCALED,
    P,
    candidate,
    control,
    dense,
)
from chiar.studies.declared.routers40m_steps import STUDY as STEPS

EIGHTH = {"target_fraction": 0.125}
SIX_FULL = {"layer_types": ["routed", "attention"] * (LAYERS // 2), **EVERYWHERE, **FEW_KEYS, **LEAN}
DEEP = (
    dense("dense-7-time", "dense, 7 layers, filter along time", 7, temporal_everywhere=True),
    control(
        "deep-hash",
        "six of 12 layers full, f = 1/8 by a hash, light tokens skip the FFN",
        HASH,
        SIX_FULL,
        {"random_fraction": 0.125},
    ),
    candidate(
        "deep-eighth",
        "six of 12 layers full, f = 1/8 in the others, light tokens skip the FFN",
        SCALED,
        SIX_FULL,
        EIGHTH,
    ),
    candidate("deep-entropy", "the same by entropy with gradients", GRADIENT, P, SIX_FULL, EIGHTH),
)
"""v4 (`deep-eighth`), other choices in its place, and the dense model next to it in FLOPs."""
EVEN = {"embedding_norm": True, "filter_init": 0.0}
STUDY = replace(
    STEPS,
    name="routers40m_even",
    title="Routers at 40M parameters, 8,192 tokens a step, streams of scale 1",
    config={**STEPS.config, **EVEN},
    variants=(*STEPS.variants, *DEEP),
)
