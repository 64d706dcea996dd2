"""What is timed: a training step, a prefill or a decoding step of one model."""

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
from timing import Times, forbid_sync, measure, synchronize

BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
OTHERS = (SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)


def autocast(device: str) -> Any:
    """As in training: bf16 with fp32 weights; fp32 on a CPU, where it is faster."""
    return torch.autocast(device, torch.bfloat16, enabled=device == "cuda")


@dataclass
class Workload:
    """A model with its input; `step` is timed."""

    model: TimedModel
    call: Callable[..., Any]
    ids_BT: Tensor
    routes: Routes
    device: str
    graphs: bool = False
    """Whether steps are recorded as CUDA graphs, as in training on one GPU."""
    recorder: GraphedPasses | None = None
    synchronizes: bool | None = None
    """Whether a step that is not recorded synchronises with the device."""
    peak_bytes: int = 0
    """Peak memory of steps that are not recorded: torch does not count the memory that a graph uses."""
    result: Tensor | None = None
    """The loss or the logits of the last step, except in decoding."""

    def start(self) -> None:
        """Prepare for the first step."""

    def force(self, routes: Routes) -> None:
        """Force these routes, in the memory of earlier ones, where a recorded graph reads them."""
        for layer, route_BT in routes.items():
            if layer in self.routes:
                self.routes[layer].copy_(route_BT)
        self.routes = self.routes or routes

    def step(self) -> None:
        raise NotImplementedError

    def cache_bytes(self) -> int | None:
        return None


@dataclass
class TrainWorkload(Workload):
    """Forward, loss and backward, without the optimiser."""

    def __post_init__(self) -> None:
        self.targets_BT = self.ids_BT.roll(-1, 1)
        self.recorder = GraphedPasses(self.run, self.model.parameters()) if self.graphs else None

    def run(self, ids_BT: Tensor, targets_BT: Tensor) -> tuple[Tensor, ...]:
        with autocast(self.device):
            loss, _ = self.call(ids_BT, targets_BT, self.routes)
        loss.backward()
        return (loss.detach(),)

    def step(self) -> None:
        (self.result,) = (self.recorder or self.run)(self.ids_BT, self.targets_BT)
        self.model.zero_grad(set_to_none=True)


@dataclass
class PrefillWorkload(Workload):
    """Forward without gradients; logits of the last token."""

    def __post_init__(self) -> None:
        self.recorder = GraphedPasses(self.forward) if self.graphs else None

    def forward(self, ids_BT: Tensor) -> tuple[Tensor, ...]:
        with torch.no_grad(), autocast(self.device):
            return (self.call(ids_BT, None, self.routes)[0],)

    def step(self) -> None:
        (self.result,) = (self.recorder or self.forward)(self.ids_BT)


@dataclass
class DecodeWorkload(Workload):
    """One greedy token for every row after the whole input, by fast decoding: captured as a CUDA graph on a GPU, and
    compiled if requested. The weights are in the precision of decoding, without autocast."""

    fraction: float = 0.5
    steps: int = 0
    """How many steps to draw routes for; exactly the fraction of a row's steps attends."""
    own_routes: bool = False
    """Whether the model routes itself, by thresholds calibrated on the prompt. Steps are then fed random tokens: random
    weights generate one token over and over, which always takes the same route."""
    prompt_keys: int = 0
    cache: Any = None
    next_B1: Tensor | None = None
    done: int = 0
    routes_of_step: list[dict[int, Tensor]] = field(default_factory=list)

    def start(self) -> None:
        assert isinstance(self.model, TimedChiar)
        rows, layers = len(self.ids_BT), self.model.routed_layers
        routes = exact_routes(rows, self.steps, max(1, round(self.fraction * self.steps)), layers, self.device, seed=1)
        self.routes_of_step = [{i: routes[i][:, n : n + 1].contiguous() for i in layers} for n in range(self.steps)]
        self.cache, self.done = None, 0
        if self.own_routes and layers:
            model = self.model.language.model
            with torch.no_grad():
                calibration = calibrate(model, [{"input_ids": self.ids_BT}], fraction=self.fraction)
            model.set_thresholds(calibration.thresholds(len(layers)))
            self.routes_of_step = [{}] * self.steps
        self.advance(self.ids_BT, {} if self.own_routes else {i: self.routes[i] for i in layers})
        self.prompt_keys = self.cached_keys()

    def cached_keys(self) -> int:
        """The keys in the cache, over all routed layers and rows."""
        assert isinstance(self.model, TimedChiar)
        stores = [self.cache.layers[i].ragged("attention") for i in self.model.routed_layers]
        return sum(int(store.length_B.sum()) for store in stores if store.length_B is not None)

    def attending_share(self) -> float | None:
        """The share of attending tokens so far, if the model routes itself and only attending tokens have keys."""
        assert isinstance(self.model, TimedChiar)
        layers = len(self.model.routed_layers)
        if not (self.own_routes and layers and self.done and self.model.config.keys == "routed"):
            return None
        return (self.cached_keys() - self.prompt_keys) / (layers * len(self.ids_BT) * self.done)

    def step(self) -> None:
        assert self.next_B1 is not None
        position = self.done % self.ids_BT.shape[1]
        ids_B1 = self.ids_BT[:, position : position + 1] if self.own_routes else self.next_B1
        self.advance(ids_B1, self.routes_of_step[self.done])
        self.done += 1

    def advance(self, ids_BT: Tensor, routes: Mapping[int, Tensor]) -> None:
        assert isinstance(self.model, TimedChiar)
        with torch.no_grad():
            output = self.model.language(
                ids_BT, past_key_values=self.cache, use_cache=True, logits_to_keep=1, forced_routes=dict(routes) or None
            )
        self.cache, self.next_B1 = output.past_key_values, output.logits[:, -1].argmax(-1, keepdim=True)

    def cache_bytes(self) -> int:
        """As allocated, including room for more tokens."""
        return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors(self.cache)}.values())


def tensors(value: Any, visited: set[int] | None = None) -> list[Tensor]:
    """All tensors in an object, at any depth."""
    visited = set() if visited is None else visited
    if isinstance(value, Tensor) or id(value) in visited:
        return [value] if isinstance(value, Tensor) else []
    visited.add(id(value))
    if not isinstance(value, list | tuple):
        value = list((value if isinstance(value, Mapping) else getattr(value, "__dict__", {})).values())
    return [tensor for part in value for tensor in tensors(part, visited)]


@dataclass
class Finished:
    """A workload that was timed alone and has freed the device."""

    model: TimedModel
    """Without its weights."""
    times: Times
    bytes: int | None

    def cache_bytes(self) -> int | None:
        return self.bytes


def synchronizes(workload: Workload) -> bool | None:
    """Whether a step synchronises with the device; None on a CPU."""
    if workload.device != "cuda":
        return None
    synchronize(workload.device)
    try:
        with forbid_sync(workload.device):
            workload.step()
    except RuntimeError as error:
        if "synchroniz" not in str(error):
            raise
        return True
    finally:
        workload.model.zero_grad(set_to_none=True)
    return False


def best_backend(rows: int, heads: int, length: int, head_size: int, training: bool) -> str:
    """The faster of cuDNN and flash for dense causal attention of this shape."""
    medians = {}
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
                medians[name] = measure(step, 5).median
        except RuntimeError:  # not available in this torch or on this device
            continue
    return min(medians, key=medians.__getitem__) if medians else "default"


@contextmanager
def preferring(backend: str) -> Iterator[None]:
    """A block in which attention prefers `backend`, and takes another only if it must (masks).

    The key of torch's cache of compiled graphs does not include the attention backend (pytorch issue 185449): without
    the tag, a graph compiled for one would be used for the other, even by another process.
    """
    first = [BACKENDS[backend]] if backend in BACKENDS else []
    rest = [other for other in (*BACKENDS.values(), *OTHERS) if other not in first]
    with torch.compiler.config.patch(cache_key_tag=f"sdpa-{backend}"), sdpa_kernel([*first, *rest], set_priority=True):
        yield
