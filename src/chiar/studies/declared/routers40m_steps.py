"""The same routers with a quarter of the tokens a step and four times the steps.

With 32,768 tokens a step, one epoch of 44M tokens is 1,345 steps, and depth is worth little: 0.009 nats from 6 layers
to 12 with a filter along time. What spends depth sparingly has little to win there. Shorter steps train models further.
"""

from dataclasses import replace

from chiar.studies.declared.routers40m import STUDY as WIDE

STUDY = replace(
    WIDE,
    name="routers40m_steps",
    title="Routers at 40M parameters, 8,192 tokens a step",
    settings={
        **WIDE.settings,
        "batch": 32,
        "micro_batch": 32,
        "warmup": 400,
        "evaluate_every": 1000,
        "save_every": 1400,
        "log_every": 100,
    },
)
