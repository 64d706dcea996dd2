"""The same routers in short steps, from residual streams of one scale.

With embeddings of scale 0.02 and filters that begin at 1 a light layer adds LN(x), fifty times as large as x, and a
dark one does not: in routers40m and routers40m_steps a token's scale depends on its first routes. Here streams begin at
scale 1 and light filters add nothing at first, in every variant, controls too.
"""

from dataclasses import replace

from chiar.studies.declared.routers40m_steps import STUDY as STEPS

EVEN = {"embedding_norm": True, "filter_init": 0.0}
STUDY = replace(
    STEPS,
    name="routers40m_even",
    title="Routers at 40M parameters, 8,192 tokens a step, streams of scale 1",
    config={**STEPS.config, **EVEN},
)
