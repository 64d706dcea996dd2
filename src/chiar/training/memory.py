"""What a run needs at least and what there is: plans that cannot be are refused, and failed allocations explained."""

import os
from contextlib import suppress
from pathlib import Path

import torch

from chiar.config import ChiarConfig
from chiar.errors import InputError, failed_allocation, gigabytes, require
from chiar.training.distributed import Processes
from chiar.training.settings import TrainSettings


def machine_memory() -> float:
    """Bytes that all processes together may ever have."""
    found = [float("inf")]
    with suppress(ValueError, OSError, AttributeError):
        found.append(float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")))
    with suppress(ValueError, OSError):  # it says "max" where a container has no limit
        found.append(float(Path("/sys/fs/cgroup/memory.max").read_text()))
    return min(found)


def device_memory(device: torch.device) -> float:
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else machine_memory()


def check_memory(config: ChiarConfig, settings: TrainSettings, parameters: int, processes: Processes) -> None:
    """InputError where what is in memory at the same time, counted low, is more than there is."""
    rows, length, steps = settings.micro_batch, settings.length, settings.steps
    there, here = device_memory(processes.device), machine_memory()
    # Weights, gradients and two moments, which several processes may share.
    held = 16 * parameters / (1 if settings.parallel == "ddp" else processes.count)
    row = length * config.hidden_size * len(config.layer_types or ()) * (2 if settings.precision == "bf16" else 4)
    ahead = 32 * length  # ids and targets of a row of this step, or of the next, which is read meanwhile
    order = 32 * settings.batch / rows  # for each micro-batch of each step two draws and what they decide
    for what, need, memory, way in (
        (f"a model of {parameters:,} parameters", held, there, "choose a smaller one"),
        (f"a pass of {rows:,} rows of {length:,} tokens", held + row * rows, there,
         f"--micro-batch may be {int((there - held) / row):,} at most"),
        (f"a step of {settings.batch:,} rows of {length:,} tokens", ahead * settings.batch, here,
         f"--batch may be {int(here / ahead):,} at most"),
        (f"the order of {steps:,} steps of {settings.batch:,} rows", order * steps, here,
         f"--steps may be {int(here / order):,} at most"),
    ):  # fmt: skip
        told = f"{what} takes at least {gigabytes(need)} of memory, and there are {gigabytes(memory)}"
        require(need <= memory, f"{told}: {way}.")


def explained(error: Exception, settings: TrainSettings) -> InputError | None:
    """The sentence for an allocation that failed; None where the error is another one."""
    size, rows = failed_allocation(error), settings.micro_batch
    if size is None:
        return None
    on_gpu = isinstance(error, torch.OutOfMemoryError)
    memory = device_memory(torch.device("cuda" if on_gpu and torch.cuda.is_available() else "cpu"))
    what = f"a tensor of {gigabytes(size)}" if size else "a tensor"
    # A pass takes in proportion to its rows; several tensors of this size are there at the same time.
    fits = rows // 2
    while fits > 1 and (settings.batch % fits or 4 * size * fits > memory * rows):
        fits //= 2
    ways = [f"--micro-batch {fits} instead of {rows}"] if fits else []
    ways += [f"a --length below {settings.length}"]
    ways += [] if settings.gradient_checkpointing else ["--set gradient_checkpointing=true"]
    where = f"the {'GPU' if on_gpu else 'machine'}'s {gigabytes(memory)}"
    return InputError(
        f"{what} did not fit into {where} any more: begin again, in a new --out, with {' or '.join(ways)}."
    )
