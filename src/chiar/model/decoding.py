"""One token for every row, as a step that is the same each time: fixed shapes, fixed addresses, no look at values.

Such a step can be compiled layer by layer and, on a GPU, captured as one CUDA graph and replayed: the host's part of a
step is then a few copies. On a CPU the same step runs plainly."""

import weakref
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.utils import logging

from chiar.errors import first_line
from chiar.layers.attention import compute_rotary_tables
from chiar.layers.context import Maybe, Memory, TokenContext
from chiar.model.cache import ChiarCache, LayerState
from chiar.model.decoder import ChiarModel, MaybeGate, run_layer
from chiar.model.inputs import Routes, check_routes, check_tokens, place_tokens
from chiar.registry import OPERATORS

if TYPE_CHECKING:
    from chiar.model.modeling import ChiarForCausalLM

logger = logging.get_logger(__name__)


class Inputs:
    """Where a step finds its tokens, always in the same place."""

    def __init__(self, rows: int, routed_layers: list[int], device: torch.device) -> None:
        self.rows, self.device = rows, device
        self.ids_B1, self.positions_B1 = (torch.zeros(rows, 1, dtype=torch.long, device=device) for _ in range(2))
        self.real_B1 = torch.ones(rows, 1, dtype=torch.bool, device=device)
        # Each layer's on a boundary of 16 bytes: compiled code copies what lies elsewhere, in every step.
        spaced = torch.zeros(len(routed_layers), rows + rows % 2, 1, dtype=torch.long, device=device)
        self.routes = {layer: spaced[n, :rows] for n, layer in enumerate(routed_layers)}
        self.forced: Routes = {}

    def fill(self, ids_B1: Tensor, positions_B1: Tensor, real_B1: Maybe, routes: Routes) -> None:
        self.ids_B1.copy_(ids_B1)
        self.positions_B1.copy_(positions_B1)
        self.real_B1[:] = True if real_B1 is None else real_B1
        self.forced = {layer: place_B1 for layer, place_B1 in self.routes.items() if layer in routes}
        if self.forced:  # one kernel, not one for each layer
            torch._foreach_copy_(list(self.forced.values()), [routes[layer] for layer in self.forced])


@dataclass
class Captured:
    """A step as a CUDA graph, good while its cache keeps all tensors where they were."""

    fits: tuple[weakref.ref[ChiarCache], int, set[int]]  # the cache, its moves, the layers with forced routes
    graph: torch.cuda.CUDAGraph | None = None
    logits_B1V: Tensor | None = None


class FastDecoder:
    """Takes over the decoding steps of a language model wherever a fixed step can stand in for them. `compile`: layers
    run compiled, which takes a minute at first. `graph`: steps are captured and replayed; None means on a GPU."""

    def __init__(self, compile: bool = False, graph: bool | None = None) -> None:
        self.compile, self.graph = compile, graph
        compiled = torch.compile(dynamic=False) if compile else lambda function: function
        self.enter, self.step_layer, self.leave = compiled(enter), compiled(step_layer), compiled(leave)
        self.inputs: Inputs | None = None
        self.captured: Captured | None = None
        self.prepared: tuple[Any, ...] | None = None  # the cache, and its state, last seen to be fit for writing
        self.steps = 0  # tokens a row decoded this way

    def __reduce__(self) -> Any:
        """A copy of a model begins anew: graphs belong to the weights they were captured with."""
        return FastDecoder, (self.compile, self.graph)

    def forget(self) -> None:
        """Weights have moved."""
        self.inputs = self.captured = self.prepared = None

    def applies(self, model: Any, ids_BT: Tensor | None, cache: Any, options: dict[str, Any]) -> bool:
        """Whether this pass is a step: one token a row, behind a prompt, and nothing asked for but logits."""
        config = model.config
        if ids_BT is None or ids_BT.ndim != 2 or ids_BT.shape[1] != 1 or not isinstance(cache, ChiarCache):
            return False
        unfit = (
            torch.is_grad_enabled() or model.training or torch.compiler.is_compiling(),
            torch.is_autocast_enabled(ids_BT.device.type) or config._attn_implementation == "eager",
            config.output_hidden_states or config.output_attentions,
            not all(OPERATORS[name].has_fixed_step for name in config.operators),
            any(value for name, value in options.items() if name != "forced_routes"),
        )
        return cache.seen > 0 and not any(unfit)

    @torch.no_grad()
    def step(
        self, language: "ChiarForCausalLM", ids_B1: Tensor, mask_BS: Maybe, place_B1: Maybe, cache: ChiarCache,
        routes: Routes | None,
    ) -> Tensor:  # fmt: skip
        """The logits of the token behind each row's, (B, 1, V)."""
        model, rows = language.model, len(ids_B1)
        cache.check_rows(rows)
        check_tokens(ids_B1, None, model.embed_tokens.num_embeddings)
        check_routes(routes, model.config, tuple(ids_B1.shape))
        positions_B1, real_B1 = place_tokens(model.config, ids_B1, mask_BS, place_B1, cache.seen)
        if self.inputs is None or (self.inputs.rows, self.inputs.device) != (rows, ids_B1.device):
            with torch.inference_mode(False):  # later steps may come from outside of it
                self.inputs = Inputs(rows, model.config.routed_layers, ids_B1.device)
            self.captured = None
        self.inputs.fill(ids_B1, positions_B1, real_B1, routes or {})
        state = weakref.ref(cache), cache.shelf.moves, torch.is_inference_mode_enabled()
        if state != self.prepared:
            for layer, memory in zip(model.layers, cache.layers, strict=True):
                layer.begin(memory, rows)  # type: ignore[operator]
                memory.make_writable()
            self.prepared = state[0], cache.shelf.moves, state[2]
        cache.shelf.make_room()
        logits_B1V = self.replay(language, self.inputs, cache)
        cache.seen += 1
        self.steps += 1
        return logits_B1V

    def replay(self, language: "ChiarForCausalLM", inputs: Inputs, cache: ChiarCache) -> Tensor:
        """The first step after tensors moved runs plainly, which also warms up; the second is captured."""
        if not (inputs.device.type == "cuda" if self.graph is None else self.graph):
            return self.run(language, inputs, cache)
        captured = self.captured
        if captured is None or captured.fits != (weakref.ref(cache), cache.shelf.moves, set(inputs.forced)):
            self.captured = None
            logits_B1V = self.run(language, inputs, cache)
            self.captured = Captured((weakref.ref(cache), cache.shelf.moves, set(inputs.forced)))
            return logits_B1V
        if captured.graph is None and not self.capture(captured, language, inputs, cache):
            return self.run(language, inputs, cache)
        assert captured.graph is not None and captured.logits_B1V is not None
        captured.graph.replay()
        return captured.logits_B1V.clone()  # the next replay writes into the same place

    def capture(self, captured: Captured, language: "ChiarForCausalLM", inputs: Inputs, cache: ChiarCache) -> bool:
        """Record the step, which runs nothing. Where that fails, steps run plainly from here on."""
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads, a server's or a streamer's, may use the device meanwhile.
            with torch.cuda.device(inputs.device), torch.cuda.graph(graph, capture_error_mode="thread_local"):
                captured.logits_B1V = self.run(language, inputs, cache)
            captured.graph = graph
        except RuntimeError as error:
            self.graph, self.captured = False, None
            logger.warning(f"decoding cannot be captured as a CUDA graph and runs plainly: {first_line(error)}")
        return captured.graph is not None

    def run(self, language: "ChiarForCausalLM", inputs: Inputs, cache: ChiarCache) -> Tensor:
        """All of a step on the device."""
        model = language.model
        x_B1D, rope = self.enter(model, inputs.ids_B1, inputs.positions_B1)
        tokens = inputs.positions_B1, inputs.real_B1, inputs.ids_B1
        contexts = model.layer_contexts(TokenContext(model.basis.transform(), *tokens, rope, room_is_made=True))
        more_B1D: Maybe = None
        with many_graphs() if self.compile else nullcontext():
            for i, (layer, memory) in enumerate(zip(model.layers, cache.layers, strict=True)):
                if self.compile:
                    expect_growth(memory)
                gate, given = model.meta_router if i == 0 else None, (contexts[i], memory, inputs.forced.get(i))
                x_B1D, more_B1D, _ = self.step_layer(layer, gate, x_B1D, more_B1D, *given)
        return self.leave(model.norm, language.lm_head, x_B1D, more_B1D)


def many_graphs() -> Any:
    """Layers of one kind share one, unless a router knows the number of its layer: none may run uncompiled unseen."""
    from torch._dynamo import config

    return config.patch({"recompile_limit": 256, "accumulated_recompile_limit": 4096})


def expect_growth(memory: LayerState) -> None:
    """Tell the compiler that capacities change; the same graph then serves all of them."""
    from torch._dynamo import maybe_mark_dynamic

    for store in memory.stores.values():
        for part in store.parts.values():
            maybe_mark_dynamic(part, 2)


def enter(model: ChiarModel, ids_B1: Tensor, positions_B1: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
    """Embedded tokens, and RoPE's tables for all layers."""
    config, x_B1D = model.config, model.embed(ids_B1, None, positions_B1)
    if config.positions == "learned":
        return x_B1D, None
    return x_B1D, compute_rotary_tables(positions_B1, config.head_size)


def step_layer(
    layer: nn.Module, gate: MaybeGate, x: Tensor, more: Maybe, context: TokenContext, memory: Memory, forced: Maybe
) -> tuple[Tensor, Maybe, Maybe]:
    """A layer's output, and the H its router read: returned, so that forced routes do not let a compiler drop it.
    Compiled, states go from layer to layer as two summands where they are a sum: adding them is then no kernel of its
    own, but part of the next layer's norm."""
    (y_B1D, rest_B1D), done = run_layer(layer, gate, add(x, more), context, memory, forced)
    if not torch.compiler.is_compiling():
        y_B1D, rest_B1D = add(y_B1D, rest_B1D), None
    return y_B1D, rest_B1D, done.entropy_BT


def add(x_B1D: Tensor, more_B1D: Maybe) -> Tensor:
    return x_B1D if more_B1D is None else x_B1D + more_B1D


def leave(norm: nn.Module, head: nn.Module, x_B1D: Tensor, more_B1D: Maybe) -> Tensor:
    return head(norm(add(x_B1D, more_B1D)))
