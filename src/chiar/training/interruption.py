"""What a person is told when a run ends early for a reason outside it."""

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch

from chiar.errors import InputError
from chiar.training import checkpoint
from chiar.training.run_folder import RUN, RunFolder
from chiar.training.settings import TrainSettings

P = ParamSpec("P")
R = TypeVar("R")
Training = Callable[Concatenate[Any, TrainSettings, Path, P], R]


class Interrupted(KeyboardInterrupt):
    """Ctrl-C; the message says how to go on."""


def explained(train: Training[P, R]) -> Training[P, R]:
    """A function that trains, with sentences for Ctrl-C and for a GPU that is too small."""

    @wraps(train)
    def run(config: Any, settings: TrainSettings, out: Path, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return train(config, settings, out, *args, **kwargs)
        except KeyboardInterrupt:
            raise Interrupted(how_to_resume(RunFolder(out))) from None
        except torch.OutOfMemoryError as error:
            advice = what_to_reduce(settings)
            raise InputError(f"the GPU's memory does not suffice: {advice}, with a new --out.") from error

    return run


def how_to_resume(folder: RunFolder) -> str:
    saved = checkpoint.steps(folder.checkpoints)
    if saved:
        return f"the same command with --resume goes on after {saved[0].name}."
    if (folder.path / RUN).is_file():
        return "no checkpoint was saved yet: the same command with --resume starts again."
    return "nothing was written yet."


def what_to_reduce(settings: TrainSettings) -> str:
    ways = [f"make --length smaller than {settings.length}"]
    if not settings.gradient_checkpointing:
        ways.insert(0, "add --set gradient_checkpointing=true")
    if settings.micro_batch > 1:
        ways.insert(0, f"make --micro-batch smaller than {settings.micro_batch} (the batch stays, accumulated)")
    return ", or ".join(ways)
