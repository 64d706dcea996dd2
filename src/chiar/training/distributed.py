"""One process or many: collectives, the process group, DDP and FSDP."""

import gc
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import SUPPORTED_NODES

from chiar.errors import InputError
from chiar.layers.block import LayerOutput
from chiar.layers.routers import Route
from chiar.model.load import choose_device

T = TypeVar("T")
BACKENDS = {"cuda": "nccl", "cpu": "gloo"}


@dataclass
class Processes:
    rank: int
    count: int
    device: torch.device

    @property
    def main(self) -> bool:
        return self.rank == 0

    def total(self, values: Tensor) -> Tensor:
        if self.count > 1:
            dist.all_reduce(values)
        return values

    def all(self, value: Any) -> list[Any]:
        """The value of each process, in order of rank."""
        values: list[Any] = [value] * self.count
        if self.count > 1:
            dist.all_gather_object(values, value)
        return values

    def from_main(self, work: Callable[[], T]) -> T:
        """Runs `work` in the main process and returns its result, or raises its InputError, in all of them."""
        try:
            result: Any = work() if self.main else None
        except InputError as error:
            result = error
        result = self.all(result)[0]
        if isinstance(result, InputError):
            raise result
        return result

    def close(self) -> None:
        if dist.is_initialized():
            gc.collect()  # DDP's reducer must be freed before its process group, or this may hang
            dist.destroy_process_group()


def start(device: str) -> Processes:
    """Join the process group that torchrun describes in the environment, if it does."""
    rank, local, count = (int(os.environ.get(name, 0)) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
    if (chosen := choose_device(device)).type == "cuda":
        chosen = torch.device("cuda", local)
        torch.cuda.set_device(chosen)
    if count > 1:
        # torchrun may keep its store when it restarts the processes: without a prefix they find stale addresses.
        store, _, _ = next(dist.rendezvous("env://", rank, count))
        store = dist.PrefixStore(f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
        dist.init_process_group(BACKENDS[chosen.type], store=store, rank=rank, world_size=count)
    return Processes(rank, max(count, 1), chosen)


def replicate(model: nn.Module, processes: Processes) -> nn.Module:
    """DDP. Dense execution keeps every parameter in the graph, so none is reported unused under hard routing."""
    if processes.count == 1:
        return model
    ids = [processes.device.index] if processes.device.type == "cuda" else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # about broadcast_buffers, which torch 2.11 still needs
        return DistributedDataParallel(model, device_ids=ids, broadcast_buffers=False)


def shard(model: Any, processes: Processes) -> None:
    """FSDP2 in place, sharded by rows over the processes. Weights are gathered in fp32, so the numbers are DDP's."""
    if not dist.is_initialized():  # one process without torchrun
        dist.init_process_group(BACKENDS[processes.device.type], store=dist.HashStore(), rank=0, world_size=1)
    # Before torch 2.13 FSDP does not look for tensors in dataclasses, and would miss where the backward pass starts.
    for kind in {LayerOutput, Route} - SUPPORTED_NODES.keys():
        torch.export.register_dataclass(kind)
    mesh = dist.init_device_mesh(processes.device.type, (processes.count,))
    for part in (*model.language.model.layers, model):
        fully_shard(part, mesh=mesh)


def local_rows(tensor: Tensor) -> tuple[int, Tensor]:
    """The index of the first row of a tensor that this process holds, and its rows; 0 and all if it is not sharded."""
    if not isinstance(tensor, DTensor):
        return 0, tensor.detach()
    rows_each = -(-tensor.shape[0] // tensor.device_mesh.size())
    return min(tensor.device_mesh.get_local_rank() * rows_each, tensor.shape[0]), tensor.to_local().detach()
