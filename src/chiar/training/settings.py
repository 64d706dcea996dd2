"""Every choice of a training run that is not architecture."""

import math
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from chiar.errors import InputError, unknown_name

PRECISIONS = ("auto", "bf16", "fp32")
MIXINGS = ("weights", "added")
PARALLELS = ("auto", "ddp", "fsdp")
SHARD_FROM = 600_000_000
"""Parameters from which `auto` shards."""


@dataclass
class TrainSettings:
    """Defaults are the paper's (16M): AdamW (0.9, 0.95), 128 × 256 tokens a step, cosine from 1e-4 to 1e-6."""

    data: list[str] = field(default_factory=list)
    """Prepared corpora; with several, `weights` or `added` says how they mix."""
    initial: str = ""
    """Model folder whose weights the run starts from; the seed's when empty. Heads always start anew."""
    mixing: str = "weights"
    """weights: each micro-batch comes from one corpus, drawn by weight. added: the first corpus always, and with
    probability `added_share` a micro-batch of another one beside it (the paper's mixed training)."""
    weights: list[float] | None = None
    """One a corpus; equal when not given."""
    added_share: float = 0.25
    length: int = 256
    batch: int = 128
    """Rows of one optimiser step, over all processes."""
    micro_batch: int = 32
    """Rows of one forward pass of one process; the rest is accumulated."""
    steps: int = 1000
    learning_rate: float = 1e-4
    final_learning_rate: float = 1e-6
    warmup: int = 500
    weight_decay: float = 0.01
    """On matrices only (the released code decays everything)."""
    beta1: float = 0.9
    beta2: float = 0.95
    clip: float = 1.0
    seed: int = 0
    precision: str = "bf16"
    """bf16: autocast over fp32 weights. auto, as commands have it: bf16 where the device multiplies it, else fp32."""
    compile: bool = True
    compile_layers: bool = False
    """Layer by layer: layers that are alike are compiled once, so it is ready much sooner; steps may be slower."""
    cuda_graphs: bool = True
    """On one GPU: record the pass of a text micro-batch after four of them and replay it. Not where `deterministic`."""
    parallel: str = "auto"
    """Several processes: ddp gives each the whole model, fsdp a part of it; auto shards the 1B presets."""
    deterministic: bool = False
    """On a GPU: deterministic kernels, so that resuming is bit-exact there too."""
    gradient_checkpointing: bool = False
    """All layers but the last are computed again in the backward pass: less memory, more time."""
    ema: float = 0.0
    """Decay of an exponential average of the weights, evaluated and exported beside them; 0 is off."""
    evaluate_every: int = 250
    evaluate_rows: int = 64
    """Validation rows an evaluation reads, the same each time: a text's first ones, documents from all over the split
    (files are often sorted by label). 0 reads all."""
    save_every: int = 250
    keep: int = 2
    """Newest checkpoints to keep, besides the best."""
    log_every: int = 10
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
        for name, allowed in (("precision", PRECISIONS), ("mixing", MIXINGS), ("parallel", PARALLELS)):
            if getattr(self, name) not in allowed:
                raise unknown_name(name, getattr(self, name), allowed)
        for name in ("length", "batch", "micro_batch", "steps", "evaluate_every", "save_every", "log_every", "keep"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} must be at least 1, got {getattr(self, name)}.")
        rates = ("weight_decay", "clip", "learning_rate", "final_learning_rate")
        for name in (*rates, "warmup", "recalibrate_every", "evaluate_rows", "peak_tflops"):
            if not 0 <= getattr(self, name) < math.inf:
                raise InputError(f"{name} must not be negative or nan, got {getattr(self, name)}.")
        if self.length < 2:
            raise InputError("length must be at least 2: a row needs a token to predict.")
        if not 0.0 <= self.ema < 1.0:
            raise InputError(f"ema must lie between 0 and 1 (exclusive), got {self.ema}.")
        if not 0.0 <= self.added_share <= 1.0:
            raise InputError(f"added_share must lie between 0 and 1, got {self.added_share}.")
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
