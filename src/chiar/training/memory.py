"""Memory: runs that surely cannot fit are refused before they start, and failed allocations are explained."""

import os
from contextlib import suppress
from pathlib import Path

import torch

from chiar.config import ChiarConfig
from chiar.errors import InputError, failed_allocation, gigabytes, require
from chiar.training.distributed import Processes
from chiar.training.settings import TrainSettings


def machine_memory() -> float:
    """Bytes of host memory for all processes together: the machine's, or the container's limit."""
    limits = [float("inf")]
    with suppress(ValueError, OSError, AttributeError):
        limits.append(float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")))
    with suppress(ValueError, OSError):  # the file holds "max" where there is no limit
        limits.append(float(Path("/sys/fs/cgroup/memory.max").read_text()))
    return min(limits)


def device_memory(device: torch.device) -> float:
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else machine_memory()


def check_memory(config: ChiarConfig, settings: TrainSettings, parameters: int, processes: Processes) -> None:
    """InputError if even a low estimate of the memory in use at the same time is more than there is."""
    rows, length, steps = settings.micro_batch, settings.length, settings.steps
    device, host = device_memory(processes.device), machine_memory()
    # fp32 weights, gradients and two moments, which several processes may shard.
    state = 16 * parameters / (1 if settings.parallel == "ddp" else processes.count)
    row = length * config.hidden_size * len(config.layer_types or ()) * (2 if settings.precision == "bf16" else 4)
    prefetched = 32 * length  # ids and targets of a row, for this step and the next one, which is prefetched
    order = 32 * settings.batch / rows  # two draws for each micro-batch of each step, and what they decide
    for what, need, memory, way in (
        (f"a model of {parameters:,} parameters", state, device, "choose a smaller one"),
        (f"a pass of {rows:,} rows of {length:,} tokens", state + row * rows, device,
         f"--micro-batch may be {int((device - state) / row):,} at most"),
        (f"a step of {settings.batch:,} rows of {length:,} tokens", prefetched * settings.batch, host,
         f"--batch may be {int(host / prefetched):,} at most"),
        (f"the order of {steps:,} steps of {settings.batch:,} rows", order * steps, host,
         f"--steps may be {int(host / order):,} at most"),
    ):  # fmt: skip
        problem = f"{what} takes at least {gigabytes(need)} of memory, and there are {gigabytes(memory)}"
        require(need <= memory, f"{problem}: {way}.")


def out_of_memory(error: Exception, settings: TrainSettings) -> InputError | None:
    """An InputError that explains a failed allocation; None for other errors."""
    size, rows = failed_allocation(error), settings.micro_batch
    if size is None:
        return None
    on_gpu = isinstance(error, torch.OutOfMemoryError)
    memory = device_memory(torch.device("cuda" if on_gpu and torch.cuda.is_available() else "cpu"))
    what = f"a tensor of {gigabytes(size)}" if size else "a tensor"
    # Memory grows in proportion to a pass's rows; assume that four tensors of this size exist at the same time.
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
