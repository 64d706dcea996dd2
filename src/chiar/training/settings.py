"""Every choice of a training run that is not architecture, for `chiar train` and `chiar finetune` alike."""

import json
import math
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, get_args

from chiar.config_checks import ALL_SETTINGS, describe_type, fits
from chiar.errors import require, unknown_name

CHOICES = {"precision": ("auto", "bf16", "fp32"), "mixing": ("weights", "added"), "parallel": ("auto", "ddp", "fsdp")}
MANY = 2**32 - 1
# Least and most of numbers, where these are not 0 and MANY.
RANGES: dict[str, tuple[float, float]] = {
    **dict.fromkeys(("batch", "micro_batch", "steps", "evaluate_every", "save_every", "log_every", "keep"), (1, MANY)),
    **dict.fromkeys(("learning_rate", "final_learning_rate", "weight_decay"), (0, 1000)),
    **dict.fromkeys(("beta1", "beta2", "ema"), (0, 0.999999)),  # at 1 an average would never change
    "added_share": (0, 1),
    "length": (2, MANY),  # a row needs a token to predict
}
# Defaults of `chiar train` for tiny presets on a CPU, where they should learn something within seconds.
TINY: dict[str, Any] = {"batch": 8, "learning_rate": 3e-3, "warmup": 20, "compile": False}
# Defaults of `chiar finetune`, besides those that depend on the model and the corpus. Lengths vary: not compiled.
FINETUNE: dict[str, Any] = {"batch": 32, "final_learning_rate": 0.0, "compile": False, "evaluate_rows": 0}


@dataclass
class TrainSettings:
    """Defaults are the paper's (16M): AdamW (0.9, 0.95), 128 × 256 tokens a step, cosine from 1e-4 to 1e-6."""

    data: Annotated[list[str], "Prepared corpus; repeat to mix several."] = field(default_factory=list)
    initial: Annotated[str, "Model folder with initial weights; empty: random. Classifier heads are always new."] = ""
    mixing: Annotated[
        str,
        "weights: each micro-batch comes from a corpus drawn by weight; added (the paper): from the first corpus, "
        "sometimes followed by one from another.",
    ] = "weights"
    weights: Annotated[
        list[float] | None, "Sampling weight of each corpus; null: equal. mixing=added ignores the first."
    ] = None
    added_share: Annotated[float, "Probability of an extra micro-batch from another corpus, with mixing=added."] = 0.25
    length: Annotated[int, "Tokens per row (sequence); longer documents are truncated."] = 256
    batch: Annotated[int, "Rows per optimiser step over all processes; mixing=added adds to them."] = 128
    micro_batch: Annotated[int, "Rows per forward pass of a process; gradients accumulate over the batch."] = 32
    steps: Annotated[int, "Optimiser steps."] = 1000
    learning_rate: Annotated[float, "Peak learning rate, reached at the end of warm-up."] = 1e-4
    final_learning_rate: Annotated[float, "Learning rate at the end of the cosine."] = 1e-6
    warmup: Annotated[int, "Steps of linear learning rate warm-up."] = 500
    weight_decay: Annotated[float, "Matrices and embeddings only (the released code decays everything)."] = 0.01
    beta1: Annotated[float, "AdamW's decay of the first moment."] = 0.9
    beta2: Annotated[float, "AdamW's decay of the second moment."] = 0.95
    clip: Annotated[float, "Maximum gradient norm; 0: no clipping."] = 1.0
    seed: Annotated[int, "Seed of initial weights, data order and dropout."] = 0
    precision: Annotated[str, "fp32; bf16: autocast over fp32 weights; auto: bf16 if natively supported."] = "bf16"
    compile: Annotated[bool, "Compile the model with torch.compile."] = True
    compile_layers: Annotated[
        bool, "Compile layer by layer, which starts sooner; always so if sharded, and for v5 on a CPU."
    ] = False
    cuda_graphs: Annotated[bool, "Replay passes on text as CUDA graphs; one GPU only, and not if deterministic."] = True
    parallel: Annotated[
        str,
        "ddp: whole model per process; fsdp: sharded; auto: fsdp from 600M parameters, if there are several processes.",
    ] = "auto"
    deterministic: Annotated[bool, "Use deterministic kernels, so that resuming is bit-exact on a GPU too."] = False
    gradient_checkpointing: Annotated[bool, "Recompute layers in the backward pass to save memory."] = False
    ema: Annotated[float, "Decay of a moving average of the weights, used in evaluation and export; 0: off."] = 0.0
    evaluate_every: Annotated[int, "Steps between evaluations."] = 250
    evaluate_rows: Annotated[
        int, "Validation rows per corpus: the first of a text, or evenly spread documents; 0: all."
    ] = 64
    save_every: Annotated[int, "Steps between checkpoints."] = 250
    keep: Annotated[int, "Newest checkpoints to keep, in addition to that of the best step."] = 2
    log_every: Annotated[int, "Steps between records in metrics.jsonl."] = 10
    tensorboard: Annotated[bool, "Also write metrics to RUN/tensorboard."] = False
    peak_tflops: Annotated[float, "Peak TFLOP/s of one device, for MFU; 0: looked up by GPU name."] = 0.0
    sample: Annotated[str, "Prompt to continue at each evaluation; empty: none."] = ""
    recalibrate_every: Annotated[
        int, "Steps between recalibrations of the per-layer thresholds on training rows; 0: never."
    ] = 0

    def validate(self) -> None:
        """Raise InputError with the value received and what is allowed."""
        for setting in fields(self):
            name, value, kind = setting.name, getattr(self, setting.name), get_args(setting.type)[0]
            require(fits(value, kind), f"{name} must be {describe_type(kind)}, got {value!r}.")
            if name in CHOICES and value not in CHOICES[name]:
                raise unknown_name(name, value, CHOICES[name])
            if kind in (int, float):
                least, most = RANGES.get(name, (0, MANY))
                require(least <= value <= most, f"{name} must lie between {least} and {most:,}, got {value}.")
                setattr(self, name, kind(value))  # torch rejects ints where it wants floats
        require(self.data, "no data: name at least one prepared corpus with --data, or go on with --resume RUN.")
        weights, count = [1.0] * len(self.data) if self.weights is None else self.weights, len(self.data)
        require(len(weights) == count, f"{len(weights)} weights for {count} corpora.")
        sampled = weights[1:] if self.mixing == "added" and count > 1 else weights
        valid = all(0 <= weight <= MANY for weight in weights) and sum(sampled) > 0
        require(valid, f"weights must lie between 0 and {MANY:,}, and those drawn from not all be 0, got {weights}.")

    def accumulation(self, processes: int) -> int:
        """Micro-batches per process and step."""
        (each, over), size = divmod(self.batch, processes), self.micro_batch
        way = f"make --batch a multiple of {processes}" if over else f"--micro-batch {math.gcd(each, size)} would"
        rows = f"a batch of {self.batch} rows does not divide into micro-batches of {size}"
        require(not over and each % size == 0, f"{rows} on {processes} process{'es' * (processes > 1)}: {way}.")
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
    """The default: the whole batch up to 32 rows, else its greatest common divisor with 32."""
    return batch if batch <= 32 else math.gcd(batch, 32)


def finetune_settings(chosen: dict[str, Any], length: int, documents: int, epochs: float) -> TrainSettings:
    """Settings of a run on labelled documents: those `chosen`, else the defaults of `chiar finetune`."""
    require(0.0 < epochs < math.inf, f"epochs must be more than 0, got {epochs}.")
    result = TrainSettings.from_dict({**FINETUNE, "precision": "auto", **chosen})
    epoch = math.ceil(documents / result.batch)
    steps = chosen.get("steps", math.ceil(epochs * documents / result.batch))
    result = replace(
        result, micro_batch=micro_batch_of(result.batch), length=length, steps=steps, warmup=round(0.06 * steps),
        learning_rate=1e-4 if result.initial else 5e-4, evaluate_every=epoch, save_every=epoch,
    )  # fmt: skip
    return replace(result, **chosen)


def train_arguments(model: str, changes: dict[str, Any], settings: TrainSettings, out: Path) -> list[str]:
    """The command of this run, `train MODEL …`, with settings that are not, or need not be, the command's defaults."""
    default = asdict(TrainSettings(data=settings.data, precision="auto"))  # the defaults of the command
    reliable = default.keys() - (TINY.keys() | {"micro_batch"} if model.endswith("-tiny") else set())
    changed = {n: value for n, value in asdict(settings).items() if n not in reliable or value != default[n]} | changes
    parts = ["train", model, *(word for path in settings.data for word in ("--data", path))]
    for name, value in changed.items():
        parts += ["--set", f"{name}={value if isinstance(value, str) else json.dumps(value)}"]
    return [*parts, "--out", str(out)]
