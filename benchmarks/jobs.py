"""What is timed: a model with its input. `step` does the work once; routes are forced unless asked otherwise."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from chiar.routing.calibration import calibrate
from chiar.training.compiling import GraphedPasses
from models import Routes, TimedChiar, TimedModel, exact_routes
from timing import Times, measure, no_waiting, synchronize

BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
OTHERS = (SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)


def autocast(device: str) -> Any:
    """As in training: bf16 over fp32 weights. On a CPU fp32, which is faster there."""
    return torch.autocast(device, torch.bfloat16, enabled=device == "cuda")


@dataclass
class Job:
    """A model with its input: `step` does what is timed once."""

    model: TimedModel
    call: Callable[..., Any]
    ids_BT: Tensor
    routes: Routes
    device: str
    graphs: bool = False
    """Whether steps are recorded as CUDA graphs, as training does on one GPU."""
    recorder: GraphedPasses | None = None
    waits: bool | None = None
    """Whether a plain step waits for the device."""
    peak_bytes: int = 0
    """The most memory in use while steps ran plainly: what a graph uses, torch does not count again."""

    def start(self) -> None:
        """Before its turns begin."""

    def force(self, routes: Routes) -> None:
        """Other routes, in the place of those before: a recorded graph reads them there."""
        for layer, route_BT in routes.items():
            if layer in self.routes:
                self.routes[layer].copy_(route_BT)
        self.routes = self.routes or routes

    def step(self) -> None:
        raise NotImplementedError

    def cache_bytes(self) -> int | None:
        return None


@dataclass
class TrainJob(Job):
    """Forward, loss, backward; no optimiser."""

    loss: Tensor | None = None

    def __post_init__(self) -> None:
        self.targets_BT = self.ids_BT.roll(-1, 1)
        self.recorder = GraphedPasses(self.both, self.model.parameters()) if self.graphs else None

    def both(self, ids_BT: Tensor, targets_BT: Tensor) -> tuple[Tensor, ...]:
        with autocast(self.device):
            loss, _ = self.call(ids_BT, targets_BT, self.routes)
        loss.backward()
        return (loss.detach(),)

    def step(self) -> None:
        (self.loss,) = (self.recorder or self.both)(self.ids_BT, self.targets_BT)
        self.model.zero_grad(set_to_none=True)


@dataclass
class PrefillJob(Job):
    """Forward without gradients, logits of the last token."""

    logits_BV: Tensor | None = None

    def __post_init__(self) -> None:
        self.recorder = GraphedPasses(self.forward) if self.graphs else None

    def forward(self, ids_BT: Tensor) -> tuple[Tensor, ...]:
        with torch.no_grad(), autocast(self.device):
            return (self.call(ids_BT, None, self.routes)[0],)

    def step(self) -> None:
        (self.logits_BV,) = (self.recorder or self.forward)(self.ids_BT)


@dataclass
class DecodeJob(Job):
    """One greedy token for every row from the cache of the whole input, through fast decoding: captured as a graph on a
    GPU, and compiled if asked for. Weights are in the precision that is timed, so there is no autocast."""

    attending: float = 0.5
    most: int = 0
    """Steps that will be asked for: routes are drawn for as many, the exact fraction of each row's."""
    own: bool = False
    """The model routes itself, by thresholds calibrated on the prompt for the fraction. Steps then read drawn tokens,
    not their own: random weights repeat one token, and one token has one route."""
    prompt_keys: int = 0
    cache: Any = None
    next_B1: Tensor | None = None
    taken: int = 0
    drawn: list[dict[int, Tensor]] = field(default_factory=list)

    def start(self) -> None:
        assert isinstance(self.model, TimedChiar)
        rows, layers = len(self.ids_BT), self.model.routed_layers
        table = exact_routes(rows, self.most, max(1, round(self.attending * self.most)), layers, self.device, seed=1)
        self.drawn = [{i: table[i][:, n : n + 1].contiguous() for i in layers} for n in range(self.most)]
        self.cache, self.taken = None, 0
        if self.own and layers:
            model = self.model.language.model
            with torch.no_grad():
                found = calibrate(model, [{"input_ids": self.ids_BT}], fraction=self.attending)
            model.set_thresholds(found.thresholds(len(layers)))
            self.drawn = [{}] * self.most
        self.advance(self.ids_BT, {} if self.own else {i: self.routes[i] for i in layers})
        self.prompt_keys = self.keys()

    def keys(self) -> int:
        """In the cache, of all routed layers and rows."""
        assert isinstance(self.model, TimedChiar)
        stores = [self.cache.layers[i].ragged("attention") for i in self.model.routed_layers]
        return sum(int(store.length_B.sum()) for store in stores if store.length_B is not None)

    def chosen(self) -> float | None:
        """The share of attention in the steps so far, where the model routed itself and keys tell."""
        assert isinstance(self.model, TimedChiar)
        layers = len(self.model.routed_layers)
        if not (self.own and layers and self.taken and self.model.config.keys == "routed"):
            return None
        return (self.keys() - self.prompt_keys) / (layers * len(self.ids_BT) * self.taken)

    def step(self) -> None:
        assert self.next_B1 is not None
        place = self.taken % self.ids_BT.shape[1]
        read_B1 = self.ids_BT[:, place : place + 1] if self.own else self.next_B1
        self.advance(read_B1, self.drawn[self.taken])
        self.taken += 1

    def advance(self, ids_BT: Tensor, routes: Mapping[int, Tensor]) -> None:
        assert isinstance(self.model, TimedChiar)
        with torch.no_grad():
            done = self.model.language(
                ids_BT, past_key_values=self.cache, use_cache=True, logits_to_keep=1, forced_routes=dict(routes) or None
            )
        self.cache, self.next_B1 = done.past_key_values, done.logits[:, -1].argmax(-1, keepdim=True)

    def cache_bytes(self) -> int:
        """As allocated, room for more tokens included."""
        return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors(self.cache)}.values())


def tensors(thing: Any, seen: set[int] | None = None) -> list[Tensor]:
    """All tensors an object holds, however deep."""
    seen = set() if seen is None else seen
    if isinstance(thing, Tensor) or id(thing) in seen:
        return [thing] if isinstance(thing, Tensor) else []
    seen.add(id(thing))
    if not isinstance(thing, list | tuple):
        thing = list((thing if isinstance(thing, Mapping) else getattr(thing, "__dict__", {})).values())
    return [tensor for part in thing for tensor in tensors(part, seen)]


@dataclass
class Finished:
    """A job that had the device to itself and has left it."""

    model: TimedModel
    """Without its weights."""
    times: Times
    bytes: int | None

    def cache_bytes(self) -> int | None:
        return self.bytes


def waits(job: Job) -> bool | None:
    """Whether a step waits for the device; None on a CPU, where the question has no meaning."""
    if job.device != "cuda":
        return None
    synchronize(job.device)
    try:
        with no_waiting(job.device):
            job.step()
    except RuntimeError as error:
        if "synchroniz" not in str(error):
            raise
        return True
    finally:
        job.model.zero_grad(set_to_none=True)
    return False


def best_backend(rows: int, heads: int, length: int, head_size: int, training: bool) -> str:
    """The faster of cuDNN and flash for plain causal attention of this shape."""
    found = {}
    q, k, v = (torch.randn(rows, heads, length, head_size, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    for tensor in (q, k, v):
        tensor.requires_grad_(training)

    def step() -> None:
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        if training:
            torch.autograd.grad(mixed, (q, k, v), v.detach())

    for name, backend in BACKENDS.items():
        try:
            with sdpa_kernel(backend):
                found[name] = measure(step, 5).median
        except RuntimeError:  # this torch or this device has not got it
            continue
    return min(found, key=found.__getitem__) if found else "default"


@contextmanager
def preferring(backend: str) -> Iterator[None]:
    """Inside, attention takes `backend` where it can and the others where it cannot (masks).

    torch's cache of compiled graphs does not ask which attention was chosen (pytorch issue 185449): without the tag, a
    graph compiled for one would be taken for the other, also by another process.
    """
    first = [BACKENDS[backend]] if backend in BACKENDS else []
    rest = [other for other in (*BACKENDS.values(), *OTHERS) if other not in first]
    with torch.compiler.config.patch(cache_key_tag=f"sdpa-{backend}"), sdpa_kernel([*first, *rest], set_priority=True):
        yield
