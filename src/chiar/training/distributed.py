"""One process or many: the few places where that matters."""

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from chiar.errors import InputError


@dataclass
class Processes:
    """This process among the others."""

    rank: int
    count: int
    device: torch.device

    @property
    def main(self) -> bool:
        return self.rank == 0

    def barrier(self) -> None:
        if self.count > 1:
            dist.barrier()

    def mean(self, values: Tensor) -> Tensor:
        """The average over processes."""
        return self.total(values) / self.count

    def total(self, values: Tensor) -> Tensor:
        if self.count > 1:
            dist.all_reduce(values)
        return values

    def close(self) -> None:
        if self.count > 1 and dist.is_initialized():
            dist.destroy_process_group()


def start(device: str) -> Processes:
    """Join the group torchrun describes in the environment, or stand alone."""
    count, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise InputError("device cuda was asked for, but torch sees no GPU: use --device cpu or auto.")
    if device not in ("cpu", "cuda"):
        raise InputError(f"device must be auto, cpu or cuda, got {device!r}.")
    local = int(os.environ.get("LOCAL_RANK", "0"))
    chosen = torch.device("cuda", local) if device == "cuda" else torch.device("cpu")
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    if count > 1:
        dist.init_process_group("nccl" if chosen.type == "cuda" else "gloo")
    return Processes(rank, count, chosen)


def replicate(model: nn.Module, processes: Processes) -> nn.Module:
    """DDP. Dense execution keeps every parameter in the graph, so none is reported unused under hard routing."""
    if processes.count == 1:
        return model
    ids = [processes.device.index] if processes.device.type == "cuda" else None
    return DistributedDataParallel(model, device_ids=ids, broadcast_buffers=False)
