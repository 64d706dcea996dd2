"""What a run on labelled documents is told where nobody says otherwise."""

import math
from typing import Any

from chiar.config import ChiarConfig
from chiar.errors import InputError
from chiar.training.settings import TrainSettings

BATCH = 32
RATE_FROM_CHECKPOINT, RATE_FROM_SCRATCH = 1e-4, 5e-4
WARM_UP = 0.06


def classification_settings(
    config: ChiarConfig, corpora: list[Any], chosen: dict[str, Any], epochs: float
) -> tuple[ChiarConfig, TrainSettings]:
    """The configuration and settings of a fine-tuning run; `chosen` are the settings somebody asked for.

    An epoch reads as many documents as the corpora have together. Lengths vary from batch to batch, so nothing is
    compiled unless asked for.
    """
    for corpus in corpora:
        if corpus.kind != "classification":
            raise InputError(f"{corpus.folder} is a {corpus.kind} corpus without labels: train on it with chiar train.")
    if not 0.0 < epochs < math.inf:
        raise InputError(f"epochs must be more than 0, got {epochs}.")
    batch = chosen.get("batch", BATCH)
    if not isinstance(batch, int) or batch < 1:
        raise InputError(f"batch must be a whole number of at least 1, got {batch!r}.")
    documents = sum(corpus.split("train").documents for corpus in corpora)
    epoch = math.ceil(documents / batch)
    steps = chosen.get("steps", math.ceil(epochs * documents / batch))
    rate = RATE_FROM_CHECKPOINT if chosen["initial"] else RATE_FROM_SCRATCH
    defaults: dict[str, Any] = {
        "batch": batch,
        "micro_batch": min(batch, BATCH),
        "length": config.max_position_embeddings,
        "steps": steps,
        "learning_rate": rate,
        "final_learning_rate": 0.0,
        "warmup": round(WARM_UP * steps) if isinstance(steps, int) else 0,
        "precision": "auto",
        "compile": False,
        "evaluate_every": epoch,
        "evaluate_rows": 0,
        "save_every": epoch,
    }
    return config, TrainSettings.from_dict({**defaults, **chosen})
