"""Every choice of a training run that is not architecture: the one definition behind `chiar train` and `finetune`."""

import json
import math
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from chiar.errors import InputError, unknown_name

CHOICES = {"precision": ("auto", "bf16", "fp32"), "mixing": ("weights", "added"), "parallel": ("auto", "ddp", "fsdp")}
LEAST = {
    **dict.fromkeys(("batch", "micro_batch", "steps", "evaluate_every", "save_every", "log_every", "keep"), 1),
    **dict.fromkeys(("learning_rate", "final_learning_rate", "weight_decay", "clip", "warmup", "recalibrate_every"), 0),
    **dict.fromkeys(("evaluate_rows", "peak_tflops", "ema", "added_share"), 0),
    "length": 2,  # a row needs a token to predict
}
SHARD_FROM = 600_000_000
"""Parameters from which `auto` shards."""


@dataclass
class TrainSettings:
    """Defaults are the paper's (16M): AdamW (0.9, 0.95), 128 × 256 tokens a step, cosine from 1e-4 to 1e-6."""

    data: list[str] = field(default_factory=list)
    """Prepared corpus; several mix."""
    initial: str = ""
    """Model folder whose weights the run starts from; the seed's when empty. Heads always start anew."""
    mixing: str = "weights"
    """weights: each micro-batch comes from one corpus, drawn by weight. added: the first corpus always, and with
    probability `added_share` a micro-batch of another one beside it (the paper's mixed training)."""
    weights: list[float] | None = None
    """One a corpus; equal when not given."""
    added_share: float = 0.25
    """Probability of a micro-batch beside the first corpus' one, under mixing=added."""
    length: int = 256
    """Tokens a row."""
    batch: int = 128
    """Rows a step, over all processes."""
    micro_batch: int = 32
    """Rows of one forward pass of one process; the rest is accumulated."""
    steps: int = 1000
    """Optimiser steps."""
    learning_rate: float = 1e-4
    """Highest learning rate."""
    final_learning_rate: float = 1e-6
    """What the cosine ends at."""
    warmup: int = 500
    """Steps of linear warm-up."""
    weight_decay: float = 0.01
    """On matrices only (the released code decays everything)."""
    beta1: float = 0.9
    """AdamW's decay of the first moment."""
    beta2: float = 0.95
    """AdamW's decay of the second moment."""
    clip: float = 1.0
    """Largest norm of the gradient; 0 does not clip."""
    seed: int = 0
    """Seed of weights, order and dropout."""
    precision: str = "bf16"
    """bf16: autocast over fp32 weights. auto, as commands have it: bf16 where the device multiplies it, else fp32."""
    compile: bool = True
    """torch.compile the model."""
    compile_layers: bool = False
    """Layer by layer: layers that are alike are compiled once, so it is ready much sooner; steps may be slower."""
    cuda_graphs: bool = True
    """On one GPU: record the pass of a text micro-batch after four of them and replay it. Not where `deterministic`."""
    parallel: str = "auto"
    """Several processes: ddp gives each the whole model, fsdp a part of it; auto shards the 1B presets."""
    deterministic: bool = False
    """Deterministic kernels: bit-exact resume on a GPU too."""
    gradient_checkpointing: bool = False
    """All layers but the last are computed again in the backward pass: less memory, more time."""
    ema: float = 0.0
    """Decay of an exponential average of the weights, evaluated and exported beside them; 0 is off."""
    evaluate_every: int = 250
    """Steps between evaluations."""
    evaluate_rows: int = 64
    """Validation rows an evaluation reads, the same each time: a text's first ones, documents from all over the split
    (files are often sorted by label). 0 reads all."""
    save_every: int = 250
    """Steps between checkpoints."""
    keep: int = 2
    """Newest checkpoints to keep, besides the best."""
    log_every: int = 10
    """Steps between records."""
    tensorboard: bool = False
    """Also write what is measured to RUN/tensorboard."""
    peak_tflops: float = 0.0
    """What one device can do, for MFU; 0 looks its name up."""
    sample: str = ""
    """Prompt continued at each evaluation; none when empty."""
    recalibrate_every: int = 0
    """Set per-layer thresholds from fresh entropies every so many steps; 0 (the paper's presets) never."""

    def validate(self) -> None:
        """Raise InputError with the value received and what is allowed."""
        for setting in fields(self):
            name, value, default = setting.name, getattr(self, setting.name), setting.default
            number = isinstance(default, float) and type(value) is int
            if default not in (None, MISSING) and type(value) is not type(default) and not number:
                raise InputError(f"{name} must be {type(default).__name__}, got {value!r}.")
            if name in CHOICES and value not in CHOICES[name]:
                raise unknown_name(name, value, CHOICES[name])
            if name in LEAST and not LEAST[name] <= value < math.inf:
                limit = f"be at least {LEAST[name]}" if LEAST[name] else "not be negative or nan"
                raise InputError(f"{name} must {limit}, got {value}.")
        if self.ema >= 1.0:
            raise InputError(f"ema must be less than 1, got {self.ema}.")
        if self.added_share > 1.0:
            raise InputError(f"added_share must be at most 1, got {self.added_share}.")
        if not self.data:
            raise InputError("no data: name at least one prepared corpus.")
        if self.weights is not None:
            if len(self.weights) != len(self.data):
                raise InputError(f"{len(self.weights)} weights for {len(self.data)} corpora.")
            if min(self.weights) < 0 or sum(self.weights) == 0:
                raise InputError(f"weights must not be negative and not all zero, got {self.weights}.")

    def accumulation(self, processes: int) -> int:
        """Micro-batches of one process in one step."""
        if self.batch % (self.micro_batch * processes):
            each, over = divmod(self.batch, processes)
            smaller = math.gcd(each, self.micro_batch)
            way = f"--micro-batch {smaller} would" if smaller and not over else f"make it a multiple of {processes}"
            raise InputError(
                f"a batch of {self.batch} rows does not divide into micro-batches of {self.micro_batch} on {processes} "
                f"process(es): {way}."
            )
        return self.batch // (self.micro_batch * processes)

    def shards(self, parameters: int, processes: int) -> bool:
        """Whether a model of this size is split over the processes."""
        return self.parallel == "fsdp" or (self.parallel == "auto" and processes > 1 and parameters >= SHARD_FROM)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "TrainSettings":
        names = [f.name for f in fields(cls)]
        for name in data:
            if name not in names:
                raise unknown_name("training setting", name, names)
        return cls(**data)


def finetune_settings(chosen: dict[str, Any], length: int, documents: int, epochs: float) -> TrainSettings:
    """The settings of a run on labelled documents: those `chosen`, and what classification wants for the others.

    An epoch reads as many documents as the corpora have together. Lengths vary from batch to batch, so nothing is
    compiled unless asked for.
    """
    if not 0.0 < epochs < math.inf:
        raise InputError(f"epochs must be more than 0, got {epochs}.")
    asked = TrainSettings.from_dict({"batch": 32, **chosen})
    asked.validate()
    epoch = math.ceil(documents / asked.batch)
    steps = chosen.get("steps", math.ceil(epochs * documents / asked.batch))
    defaults: dict[str, Any] = {
        "batch": asked.batch,
        "micro_batch": min(asked.batch, 32),
        "length": length,
        "steps": steps,
        "learning_rate": 1e-4 if asked.initial else 5e-4,
        "final_learning_rate": 0.0,
        "warmup": round(0.06 * steps),
        "precision": "auto",
        "compile": False,
        "evaluate_every": epoch,
        "evaluate_rows": 0,
        "save_every": epoch,
    }
    return TrainSettings.from_dict({**defaults, **chosen})


def train_arguments(model: str, changes: dict[str, Any], settings: TrainSettings, out: Path) -> list[str]:
    """A run as the command that trains it by hand, `train MODEL …`: what differs from the defaults, and the
    configuration fields changed in MODEL."""
    default = TrainSettings(data=settings.data, precision="auto").to_dict()  # as the command has it
    changed = {name: value for name, value in settings.to_dict().items() if value != default[name]} | changes
    parts = ["train", model, *(word for path in settings.data for word in ("--data", path))]
    for name, value in changed.items():
        parts += ["--set", f"{name}={value if isinstance(value, str) else json.dumps(value)}"]
    return [*parts, "--out", str(out)]
