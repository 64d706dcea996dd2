"""One token for every row, as a step that is the same each time: fixed shapes, fixed addresses, no look at values.

Such a step can be compiled layer by layer and, on a GPU, captured as one CUDA graph and replayed: the host's part of a
step is then a few copies. On a CPU the same step runs plainly. Before a dark stack the host looks whether any row is
dark, so such a step has several graphs, and those of stacks run only where they are needed."""

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.utils import logging

from chiar.errors import first_line
from chiar.layers.attention import compute_rotary_tables
from chiar.layers.context import Maybe, Memory, TokenContext
from chiar.layers.dark import DarkStack
from chiar.layers.routers import Route
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


class Handed:
    """What parts of a step hand to each other: captured ones always find it in the same place."""

    contexts: list[TokenContext]
    x_B1D: Tensor
    more_B1D: Maybe = None  # x may be a sum of two
    route: Route  # of the stack at hand
    dark_B1: Tensor
    any_dark: Tensor
    change_B1D: Tensor  # what the stack did: 0 until it has run
    logits_B1V: Tensor


@dataclass
class Captured:
    """A step as CUDA graphs, good while its cache keeps all tensors where they were."""

    fits: tuple[weakref.ref[ChiarCache], int, set[int]]  # the cache, its moves, the layers with forced routes
    graphs: list[torch.cuda.CUDAGraph] = field(default_factory=list)
    handed: list[Handed] = field(default_factory=list)  # by each of them


class FastDecoder:
    """Takes over the decoding steps of a language model wherever a fixed step can stand in for them. `compile`: layers
    run compiled, which takes a minute at first. `graph`: steps are captured and replayed; None means on a GPU."""

    def __init__(self, compile: bool = False, graph: bool | None = None) -> None:
        self.compile, self.graph = compile, graph
        compiled = torch.compile(dynamic=False) if compile else lambda function: function
        self.enter, self.step_layer, self.leave = compiled(enter), compiled(step_layer), compiled(leave)
        self.decide, self.tell = compiled(decide), compiled(tell)
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
            logits_B1V = self.run(language, inputs, cache, whole=True)
            self.captured = Captured((weakref.ref(cache), cache.shelf.moves, set(inputs.forced)))
            return logits_B1V
        if not captured.graphs and not self.capture(captured, language, inputs, cache):
            return self.run(language, inputs, cache)
        for number, graph in enumerate(captured.graphs):
            if number % 2 == 0 or bool(captured.handed[number - 1].any_dark):
                graph.replay()
        return captured.handed[-1].logits_B1V.clone()  # the next replay writes into the same place

    def capture(self, captured: Captured, language: "ChiarForCausalLM", inputs: Inputs, cache: ChiarCache) -> bool:
        """Record the step, which runs nothing. Where that fails, steps run plainly from here on."""
        handed = Handed()
        try:
            for part in Step(self, language, inputs, cache).parts:
                graph = torch.cuda.CUDAGraph()
                # Other threads, a server's or a streamer's, may use the device meanwhile.
                with torch.cuda.device(inputs.device), torch.cuda.graph(graph, capture_error_mode="thread_local"):
                    part(handed)
                captured.graphs.append(graph)
                captured.handed.append(copy(handed))
        except RuntimeError as error:
            self.graph, self.captured = False, None
            logger.warning(f"decoding cannot be captured as a CUDA graph and runs plainly: {first_line(error)}")
        return self.captured is not None

    def run(self, language: "ChiarForCausalLM", inputs: Inputs, cache: ChiarCache, whole: bool = False) -> Tensor:
        """All of a step on the device; `whole`: stacks too that nothing passes, where it leaves no trace."""
        handed = Handed()
        for number, part in enumerate(Step(self, language, inputs, cache).parts):
            if number % 2 == 0 or whole or bool(handed.any_dark):
                part(handed)
        return handed.logits_B1V


class Step:
    """Its parts are in turns what every token passes and a stack, which may be left out where no row is dark."""

    def __init__(self, decoder: FastDecoder, language: "ChiarForCausalLM", inputs: Inputs, cache: ChiarCache) -> None:
        self.decoder, self.language, self.inputs, self.memories = decoder, language, inputs, cache.layers
        self.model: Any = language.model
        self.parts: list[Callable[[Handed], None]] = []
        stacks, layers = self.model.config.stacks, len(self.model.layers)
        behind = range(0)
        for stack in stacks.values():
            self.parts += [partial(self.pass_all, behind, stack), partial(self.pass_stack, stack)]
            behind = stack
        self.parts.append(partial(self.pass_all, behind, range(layers, layers)))

    def pass_all(self, behind: range, before: range, handed: Handed) -> None:
        """Embeddings, or what a stack tells; the layers up to the next stack; and who is dark there, or logits."""
        decoder, model, inputs = self.decoder, self.model, self.inputs
        if not behind:
            handed.x_B1D, rope = decoder.enter(model, inputs.ids_B1, inputs.positions_B1)
            tokens = inputs.positions_B1, inputs.real_B1, inputs.ids_B1
            context = TokenContext(model.basis.transform(), *tokens, rope, room_is_made=True)
            handed.contexts = model.layer_contexts(context)
        else:
            made = handed.x_B1D, handed.dark_B1, handed.change_B1D
            handed.x_B1D = decoder.tell(*self.stack(behind, handed), *made, handed.route)
            handed.more_B1D = None
        handed.x_B1D, handed.more_B1D = self.run(
            range(behind.stop, before.start), handed.x_B1D, handed.more_B1D, handed.contexts
        )
        x = handed.x_B1D, handed.more_B1D
        if not before:
            handed.logits_B1V = decoder.leave(model.norm, self.language.lm_head, *x)
            return
        decided = decoder.decide(*self.stack(before, handed), *x, inputs.forced.get(before.start))
        handed.x_B1D, handed.route, handed.dark_B1, handed.any_dark, handed.change_B1D, _ = decided

    def pass_stack(self, layers: range, handed: Handed) -> None:
        stack, context, memory = self.stack(layers, handed)
        layout = stack.make_layout(handed.x_B1D, handed.dark_B1, context, memory)
        z_in = stack.stack_input(layout, handed.x_B1D)
        z_out = add(*self.run(layers, z_in, None, [layout.context] * layers.stop))
        handed.change_B1D.copy_(stack.stack_change(layout, z_in, z_out, handed.route))

    def stack(self, layers: range, handed: Handed) -> tuple[DarkStack, TokenContext, LayerState]:
        first = layers.start
        return self.model.stacks[str(first)], handed.contexts[first], self.memories[first]

    def run(self, layers: range, x: Tensor, more: Maybe, contexts: list[TokenContext]) -> tuple[Tensor, Maybe]:
        decoder, model = self.decoder, self.model
        with many_graphs() if decoder.compile else nullcontext():
            for i in layers:
                memory, gate = self.memories[i], model.meta_router if i == 0 else None
                if decoder.compile:
                    expect_growth(memory)
                given = contexts[i], memory, self.inputs.forced.get(i)
                x, more, _ = decoder.step_layer(model.layers[i], gate, x, more, *given)
        return x, more


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


def decide(
    stack: DarkStack, context: TokenContext, memory: Memory, x: Tensor, more: Maybe, forced: Maybe
) -> tuple[Tensor, Route, Tensor, Tensor, Tensor, Maybe]:
    """x, which rows are dark, whether any is, a place for what the stack will change, and H as above."""
    x_B1D = add(x, more)
    done = stack.decide(x_B1D, context, memory, forced)
    return x_B1D, done.route, done.dark_BT, done.dark_BT.any(), torch.zeros_like(x_B1D), done.entropy_BT


def tell(
    stack: DarkStack, context: TokenContext, memory: Memory, x_B1D: Tensor, dark_B1: Tensor, change_B1D: Tensor,
    route: Route,
) -> Tensor:  # fmt: skip
    return stack.combine(stack.make_layout(x_B1D, dark_B1, context, memory), x_B1D, change_B1D, route, memory)


def add(x_B1D: Tensor, more_B1D: Maybe) -> Tensor:
    return x_B1D if more_B1D is None else x_B1D + more_B1D


def leave(norm: nn.Module, head: nn.Module, x_B1D: Tensor, more_B1D: Maybe) -> Tensor:
    return head(norm(add(x_B1D, more_B1D)))
