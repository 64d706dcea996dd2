"""One process or many: the few places where that matters."""

import gc
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from chiar.errors import InputError

T = TypeVar("T")


@dataclass
class Processes:
    """This process among the others."""

    rank: int
    count: int
    device: torch.device

    @property
    def main(self) -> bool:
        return self.rank == 0

    @property
    def backend(self) -> str:
        return "nccl" if self.device.type == "cuda" else "gloo"

    def total(self, values: Tensor) -> Tensor:
        if self.count > 1:
            dist.all_reduce(values)
        return values

    def mean(self, values: Tensor) -> Tensor:
        return self.total(values) / self.count

    def all(self, value: Any) -> list[Any]:
        """What each process has, in order of rank."""
        values: list[Any] = [value] * self.count
        if self.count > 1:
            dist.all_gather_object(values, value)
        return values

    def from_main(self, work: Callable[[], T]) -> T:
        """What `work` gives in the main process, in all of them; an InputError too."""
        result, complaint = None, None
        if self.main:
            try:
                result = work()
            except InputError as error:
                complaint = str(error)
        result, complaint = self.all((result, complaint))[0]
        if complaint is not None:
            raise InputError(complaint)
        return result

    def close(self) -> None:
        if dist.is_initialized():
            gc.collect()  # DDP's reducer must go before its group does: the other way round it may wait for ever
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
    processes = Processes(rank, count, torch.device(device))
    if device == "cuda":
        processes.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(processes.device)
    if count > 1:
        # torchrun may keep its store when it starts the processes again: without a prefix they find dead addresses.
        store, _, _ = next(dist.rendezvous("env://", rank, count))
        store = dist.PrefixStore(f"attempt-{attempt()}", store)
        dist.init_process_group(processes.backend, store=store, rank=rank, world_size=count)
    return processes


def attempt() -> int:
    """How often torchrun has started these processes again because one died."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def replicate(model: nn.Module, processes: Processes) -> nn.Module:
    """DDP. Dense execution keeps every parameter in the graph, so none is reported unused under hard routing."""
    if processes.count == 1:
        return model
    ids = [processes.device.index] if processes.device.type == "cuda" else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of broadcast_buffers, which torch 2.11 still needs
        return DistributedDataParallel(model, device_ids=ids, broadcast_buffers=False)


def average_state(state: nn.Module | None, processes: Processes) -> None:
    """Buffers that each process has moved by its own tokens become the mean over processes, in all of them."""
    if state is None or processes.count == 1:
        return
    for buffer in state.state_dict().values():
        buffer.copy_(processes.mean(buffer.clone()))


@cache
def register_outputs() -> None:
    """FSDP looks for tensors in what a module returns, and before torch 2.13 does not look into dataclasses: it would
    miss where their backward pass begins, and weights would not be there."""
    from torch.export import register_dataclass

    from chiar.layers.block import LayerOutput
    from chiar.layers.routers import Route
    from chiar.training.tasks import TaskResult

    for kind in (LayerOutput, Route, TaskResult):
        register_dataclass(kind)


def shard(model: Any, processes: Processes) -> None:
    """FSDP2 in place: each layer's weights, gradients and optimiser state are split by rows over the processes.

    Weights are gathered in fp32, so the numbers are DDP's.
    """
    if not dist.is_initialized():  # alone, without torchrun
        store = dist.TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False)
        dist.init_process_group(processes.backend, store=store, rank=0, world_size=1)
    register_outputs()
    mesh = dist.init_device_mesh(processes.device.type, (processes.count,))
    for part in (*model.language.model.layers, model):
        fully_shard(part, mesh=mesh)


def local_rows(tensor: Tensor) -> tuple[int, Tensor]:
    """The rows of a tensor that this process holds, and the number of the first. Whole tensors start at 0."""
    if not isinstance(tensor, DTensor):
        return 0, tensor.detach()
    rows_each = -(-tensor.shape[0] // tensor.device_mesh.size())
    start = min(tensor.device_mesh.get_local_rank() * rows_each, tensor.shape[0])
    return start, tensor.to_local().detach()
