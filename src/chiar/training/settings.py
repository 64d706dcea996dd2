"""Every choice of a training run that is not architecture: the one definition behind `chiar train` and `finetune`."""

import json
import math
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, get_args

from chiar.config_checks import ALL_SETTINGS, fits
from chiar.errors import require, unknown_name

CHOICES = {"precision": ("auto", "bf16", "fp32"), "mixing": ("weights", "added"), "parallel": ("auto", "ddp", "fsdp")}
MANY = 2**32 - 1
# From where to where numbers go, where that is not from 0 to MANY.
RANGES: dict[str, tuple[float, float]] = {
    **dict.fromkeys(("batch", "micro_batch", "steps", "evaluate_every", "save_every", "log_every", "keep"), (1, MANY)),
    **dict.fromkeys(("learning_rate", "final_learning_rate", "weight_decay"), (0, 1000)),
    **dict.fromkeys(("beta1", "beta2", "ema"), (0, 0.999999)),  # at 1 nothing would ever move
    "added_share": (0, 1),
    "length": (2, MANY),  # a row needs a token to predict
}
# What `chiar train` begins a tiny preset with on a CPU, where it should learn something within seconds.
TINY: dict[str, Any] = {"batch": 8, "learning_rate": 3e-3, "warmup": 20, "compile": False}


@dataclass
class TrainSettings:
    """Defaults are the paper's (16M): AdamW (0.9, 0.95), 128 × 256 tokens a step, cosine from 1e-4 to 1e-6."""

    data: Annotated[list[str], "Prepared corpus; several mix."] = field(default_factory=list)
    initial: Annotated[str, "Model folder whose weights the run starts from; empty: the seed's. Heads start anew."] = ""
    mixing: Annotated[str, "weights draw a micro-batch's corpus; added (paper): first, some with another."] = "weights"
    weights: Annotated[list[float] | None, "One a corpus; equal when not given."] = None
    added_share: Annotated[float, "Probability of a micro-batch beside the first corpus' one (mixing=added)."] = 0.25
    length: Annotated[int, "Tokens a row."] = 256
    batch: Annotated[int, "Rows a step, over all processes."] = 128
    micro_batch: Annotated[int, "Rows of one forward pass of one process; the rest is accumulated."] = 32
    steps: Annotated[int, "Optimiser steps."] = 1000
    learning_rate: Annotated[float, "Highest learning rate."] = 1e-4
    final_learning_rate: Annotated[float, "What the cosine ends at."] = 1e-6
    warmup: Annotated[int, "Steps of linear warm-up."] = 500
    weight_decay: Annotated[float, "On matrices only (the released code decays everything)."] = 0.01
    beta1: Annotated[float, "AdamW's decay of the first moment."] = 0.9
    beta2: Annotated[float, "AdamW's decay of the second moment."] = 0.95
    clip: Annotated[float, "Largest norm of the gradient; 0 does not clip."] = 1.0
    seed: Annotated[int, "Seed of weights, order and dropout."] = 0
    precision: Annotated[str, "fp32; bf16: autocast over fp32 weights; auto: bf16 where the device has it."] = "bf16"
    compile: Annotated[bool, "torch.compile the model."] = True
    compile_layers: Annotated[bool, "Layer by layer: ready much sooner, though steps may be slower."] = False
    cuda_graphs: Annotated[bool, "On one GPU: record text passes and replay them, unless deterministic."] = True
    parallel: Annotated[str, "ddp: each process has the whole model; fsdp: a part; auto: fsdp for 1B presets."] = "auto"
    deterministic: Annotated[bool, "Deterministic kernels: bit-exact resume on a GPU too."] = False
    gradient_checkpointing: Annotated[bool, "Compute layers again in the backward pass: less memory."] = False
    ema: Annotated[float, "Decay of an average of the weights, which is evaluated and exported; 0 is off."] = 0.0
    evaluate_every: Annotated[int, "Steps between evaluations."] = 250
    evaluate_rows: Annotated[int, "Validation rows read: a text's first, documents from all over; 0 reads all."] = 64
    save_every: Annotated[int, "Steps between checkpoints."] = 250
    keep: Annotated[int, "Newest checkpoints to keep, besides the best."] = 2
    log_every: Annotated[int, "Steps between records."] = 10
    tensorboard: Annotated[bool, "Also write what is measured to RUN/tensorboard."] = False
    peak_tflops: Annotated[float, "What one device can do, for MFU; 0 looks its name up."] = 0.0
    sample: Annotated[str, "Prompt continued at each evaluation; none when empty."] = ""
    recalibrate_every: Annotated[int, "Set per-layer thresholds from fresh entropies every so many steps; 0 never."] = 0

    def validate(self) -> None:
        """Raise InputError with the value received and what is allowed."""
        for setting in fields(self):
            name, value, kind = setting.name, getattr(self, setting.name), get_args(setting.type)[0]
            require(fits(value, kind), f"{name} must be {getattr(kind, '__name__', kind)}, got {value!r}.")
            if name in CHOICES and value not in CHOICES[name]:
                raise unknown_name(name, value, CHOICES[name])
            if kind in (int, float):
                least, most = RANGES.get(name, (0, MANY))
                require(least <= value <= most, f"{name} must lie between {least} and {most:,}, got {value}.")
                setattr(self, name, kind(value))  # torch wants no whole numbers among its floats
        require(self.data, "no data: name at least one prepared corpus with --data, or go on with --resume RUN.")
        weights, count = [1.0] * len(self.data) if self.weights is None else self.weights, len(self.data)
        require(len(weights) == count, f"{len(weights)} weights for {count} corpora.")
        drawn = weights[1:] if self.mixing == "added" and count > 1 else weights
        sound = all(0 <= weight <= MANY for weight in weights) and sum(drawn) > 0
        require(sound, f"weights must lie between 0 and {MANY:,}, and those drawn from not all be 0, got {weights}.")

    def accumulation(self, processes: int) -> int:
        """Micro-batches of one process in one step."""
        (each, over), size = divmod(self.batch, processes), self.micro_batch
        way = f"make --batch a multiple of {processes}" if over else f"--micro-batch {math.gcd(each, size)} would"
        rows = f"a batch of {self.batch} rows does not divide into micro-batches of {size}"
        require(not over and each % size == 0, f"{rows} on {processes} process(es): {way}.")
        return each // size

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "TrainSettings":
        names = [setting.name for setting in fields(cls)]
        for name in data.keys() - set(names):
            raise unknown_name("training setting", name, names, ALL_SETTINGS)
        settings = cls(**data)
        settings.validate()
        return settings


def micro_batch_of(batch: int) -> int:
    """Rows of one pass where nobody said: at most 32 that divide the batch."""
    return batch if batch <= 32 else math.gcd(batch, 32)


def finetune_settings(chosen: dict[str, Any], length: int, documents: int, epochs: float) -> TrainSettings:
    """Settings of a run on labelled documents: those `chosen`, else what suits (lengths vary: nothing is compiled)."""
    require(0.0 < epochs < math.inf, f"epochs must be more than 0, got {epochs}.")
    asked = TrainSettings.from_dict({"batch": 32, **chosen})
    epoch = math.ceil(documents / asked.batch)
    steps = chosen.get("steps", math.ceil(epochs * documents / asked.batch))
    asked = replace(
        asked, micro_batch=micro_batch_of(asked.batch), length=length, steps=steps, warmup=round(0.06 * steps)
    )
    asked = replace(asked, learning_rate=1e-4 if asked.initial else 5e-4, final_learning_rate=0.0)
    asked = replace(asked, precision="auto", compile=False, evaluate_rows=0, evaluate_every=epoch, save_every=epoch)
    return replace(asked, **chosen)


def train_arguments(model: str, changes: dict[str, Any], settings: TrainSettings, out: Path) -> list[str]:
    """A run as the command that trains it, `train MODEL …`: what differs from its defaults and from MODEL."""
    default = asdict(TrainSettings(data=settings.data, precision="auto"))  # as the command has it
    sure = default.keys() - (TINY.keys() | {"micro_batch"} if model.endswith("-tiny") else set())
    changed = {n: value for n, value in asdict(settings).items() if n not in sure or value != default[n]} | changes
    parts = ["train", model, *(word for path in settings.data for word in ("--data", path))]
    for name, value in changed.items():
        parts += ["--set", f"{name}={value if isinstance(value, str) else json.dumps(value)}"]
    return [*parts, "--out", str(out)]
