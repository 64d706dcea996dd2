"""Fast decoding: one token per row in a fixed step, whose shapes and addresses never change and which reads no values.

Such a step can be compiled layer by layer and, on a GPU, captured as a CUDA graph and replayed, which leaves the host a
few copies. On a CPU the same step runs eagerly. Before a dark stack the host does read whether any row is dark: such a
step is several graphs, and that of a stack is replayed only if needed."""

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
    """Input buffers of a step, at fixed addresses."""

    def __init__(self, rows: int, routed_layers: list[int], device: torch.device) -> None:
        self.rows, self.device = rows, device
        self.ids_B1, self.positions_B1 = (torch.zeros(rows, 1, dtype=torch.long, device=device) for _ in range(2))
        self.real_B1 = torch.ones(rows, 1, dtype=torch.bool, device=device)
        # Each layer's routes are aligned to 16 bytes: compiled code copies unaligned inputs in every step.
        spaced = torch.zeros(len(routed_layers), rows + rows % 2, 1, dtype=torch.long, device=device)
        self.routes = {layer: spaced[n, :rows] for n, layer in enumerate(routed_layers)}
        self.forced: Routes = {}

    def fill(self, ids_B1: Tensor, positions_B1: Tensor, real_B1: Maybe, routes: Routes) -> None:
        self.ids_B1.copy_(ids_B1)
        self.positions_B1.copy_(positions_B1)
        self.real_B1[:] = True if real_B1 is None else real_B1
        self.forced = {layer: buffer_B1 for layer, buffer_B1 in self.routes.items() if layer in routes}
        if self.forced:  # one kernel, not one for each layer
            torch._foreach_copy_(list(self.forced.values()), [routes[layer] for layer in self.forced])


class StepState:
    """Tensors that one part of a step passes to the next. Captured parts always find them at the same addresses."""

    contexts: list[TokenContext]
    x_B1D: Tensor
    more_B1D: Maybe = None  # second summand of x, if any
    route: Route  # of the current stack
    dark_B1: Tensor
    any_dark: Tensor
    change_B1D: Tensor  # the stack's change: 0 until it has run
    logits_B1V: Tensor


@dataclass
class Captured:
    """A step as CUDA graphs, valid until a tensor of its cache moves."""

    valid_for: tuple[weakref.ref[ChiarCache], int, set[int]]  # the cache, its moves, the layers with forced routes
    graphs: list[torch.cuda.CUDAGraph] = field(default_factory=list)
    states: list[StepState] = field(default_factory=list)  # after each graph


class FastDecoder:
    """Runs decoding steps of a language model as fixed steps where that is possible. `compile`: compile the layers,
    which takes about a minute at first. `graph`: capture and replay CUDA graphs; None: on a GPU."""

    def __init__(self, compile: bool = False, graph: bool | None = None) -> None:
        self.compile, self.graph = compile, graph
        compiled = torch.compile(dynamic=False) if compile else lambda function: function
        self.embed, self.step_layer, self.logits = compiled(embed), compiled(step_layer), compiled(logits)
        self.decide, self.combine = compiled(decide), compiled(combine)
        self.inputs: Inputs | None = None
        self.captured: Captured | None = None
        self.prepared: tuple[Any, ...] | None = None  # the cache last made writable, and its state then
        self.steps = 0  # tokens per row decoded this way

    def __reduce__(self) -> Any:
        """Copies start without graphs, which belong to the weights they were captured with."""
        return FastDecoder, (self.compile, self.graph)

    def forget(self) -> None:
        """Drop buffers and graphs, because the weights have moved."""
        self.inputs = self.captured = self.prepared = None

    def applies(self, model: Any, ids_BT: Tensor | None, cache: Any, options: dict[str, Any]) -> bool:
        """Whether this pass is a fixed step: one token per row after a prompt, and only logits are requested."""
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
        """Logits of the next token of each row, (B, 1, V)."""
        model, rows = language.model, len(ids_B1)
        cache.check_rows(rows)
        check_tokens(ids_B1, None, model.embed_tokens.num_embeddings)
        check_routes(routes, model.config, tuple(ids_B1.shape))
        positions_B1, real_B1 = place_tokens(model.config, ids_B1, mask_BS, place_B1, cache.seen)
        if self.inputs is None or (self.inputs.rows, self.inputs.device) != (rows, ids_B1.device):
            with torch.inference_mode(False):  # later steps may run outside of inference mode
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
        """The first step after tensors moved runs without capture, as a warm-up; the second is captured."""
        if not (inputs.device.type == "cuda" if self.graph is None else self.graph):
            return self.run(language, inputs, cache)
        captured = self.captured
        if captured is None or captured.valid_for != (weakref.ref(cache), cache.shelf.moves, set(inputs.forced)):
            self.captured = None
            logits_B1V = self.run(language, inputs, cache, whole=True)
            self.captured = Captured((weakref.ref(cache), cache.shelf.moves, set(inputs.forced)))
            return logits_B1V
        if not captured.graphs and not self.capture(captured, language, inputs, cache):
            return self.run(language, inputs, cache)
        for number, graph in enumerate(captured.graphs):
            if number % 2 == 0 or bool(captured.states[number - 1].any_dark):
                graph.replay()
        return captured.states[-1].logits_B1V.clone()  # the next replay overwrites them

    def capture(self, captured: Captured, language: "ChiarForCausalLM", inputs: Inputs, cache: ChiarCache) -> bool:
        """Capture the step without running it. If that fails, all later steps run without graphs."""
        state = StepState()
        try:
            for part in Step(self, language, inputs, cache).parts:
                graph = torch.cuda.CUDAGraph()
                # Other threads, a server's or a streamer's, may use the device meanwhile.
                with torch.cuda.device(inputs.device), torch.cuda.graph(graph, capture_error_mode="thread_local"):
                    part(state)
                captured.graphs.append(graph)
                captured.states.append(copy(state))
        except RuntimeError as error:
            self.graph, self.captured = False, None
            logger.warning(f"decoding cannot be captured as a CUDA graph and runs without one: {first_line(error)}")
        return self.captured is not None

    def run(self, language: "ChiarForCausalLM", inputs: Inputs, cache: ChiarCache, whole: bool = False) -> Tensor:
        """Run the step without graphs. `whole`: also the stacks that no row passes, which then change nothing."""
        state = StepState()
        for number, part in enumerate(Step(self, language, inputs, cache).parts):
            if number % 2 == 0 or whole or bool(state.any_dark):
                part(state)
        return state.logits_B1V


class Step:
    """Parts that every token passes, in turn with dark stacks, each of which is skipped if no row is dark."""

    def __init__(self, decoder: FastDecoder, language: "ChiarForCausalLM", inputs: Inputs, cache: ChiarCache) -> None:
        self.decoder, self.language, self.inputs, self.memories = decoder, language, inputs, cache.layers
        self.model: Any = language.model
        self.parts: list[Callable[[StepState], None]] = []
        stacks, layers = self.model.config.stacks, len(self.model.layers)
        previous = range(0)
        for stack in stacks.values():
            self.parts += [partial(self.pass_all, previous, stack), partial(self.pass_stack, stack)]
            previous = stack
        self.parts.append(partial(self.pass_all, previous, range(layers, layers)))

    def pass_all(self, previous: range, following: range, state: StepState) -> None:
        """The embedding, or the previous stack's change; the layers up to the next stack; its routing, or logits."""
        decoder, model, inputs = self.decoder, self.model, self.inputs
        if not previous:
            state.x_B1D, rope = decoder.embed(model, inputs.ids_B1, inputs.positions_B1)
            tokens = inputs.positions_B1, inputs.real_B1, inputs.ids_B1
            context = TokenContext(model.basis.transform(), *tokens, rope, room_is_made=True)
            state.contexts = model.layer_contexts(context)
        else:
            change = state.x_B1D, state.dark_B1, state.change_B1D
            state.x_B1D = decoder.combine(*self.stack(previous, state), *change, state.route)
            state.more_B1D = None
        state.x_B1D, state.more_B1D = self.run(
            range(previous.stop, following.start), state.x_B1D, state.more_B1D, state.contexts
        )
        x = state.x_B1D, state.more_B1D
        if not following:
            state.logits_B1V = decoder.logits(model.norm, self.language.lm_head, *x)
            return
        decided = decoder.decide(*self.stack(following, state), *x, inputs.forced.get(following.start))
        state.x_B1D, state.route, state.dark_B1, state.any_dark, state.change_B1D, _ = decided

    def pass_stack(self, layers: range, state: StepState) -> None:
        stack, context, memory = self.stack(layers, state)
        layout = stack.make_layout(state.x_B1D, state.dark_B1, context, memory)
        z_in = stack.stack_input(layout, state.x_B1D)
        z_out = add(*self.run(layers, z_in, None, [layout.context] * layers.stop))
        state.change_B1D.copy_(stack.stack_change(layout, z_in, z_out, state.route))

    def stack(self, layers: range, state: StepState) -> tuple[DarkStack, TokenContext, LayerState]:
        first = layers.start
        return self.model.stacks[str(first)], state.contexts[first], self.memories[first]

    def run(self, layers: range, x: Tensor, more: Maybe, contexts: list[TokenContext]) -> tuple[Tensor, Maybe]:
        decoder, model = self.decoder, self.model
        with many_graphs() if decoder.compile else nullcontext():
            for i in layers:
                memory, gate = self.memories[i], model.meta_router if i == 0 else None
                if decoder.compile:
                    expect_growth(memory)
                rest = contexts[i], memory, self.inputs.forced.get(i)
                x, more, _ = decoder.step_layer(model.layers[i], gate, x, more, *rest)
        return x, more


def many_graphs() -> Any:
    """Raise the compiler's limits, so that no layer silently runs uncompiled. Layers of one kind share a graph, unless
    a router depends on the number of its layer."""
    from torch._dynamo import config

    return config.patch({"recompile_limit": 256, "accumulated_recompile_limit": 4096})


def expect_growth(memory: LayerState) -> None:
    """Mark the capacity of stores as dynamic for the compiler, so that one graph serves all."""
    from torch._dynamo import maybe_mark_dynamic

    for store in memory.stores.values():
        for part in store.parts.values():
            maybe_mark_dynamic(part, 2)


def embed(model: ChiarModel, ids_B1: Tensor, positions_B1: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
    """Embedded tokens, and RoPE's tables for all layers."""
    config, x_B1D = model.config, model.embed(ids_B1, None, positions_B1)
    if config.positions == "learned":
        return x_B1D, None
    return x_B1D, compute_rotary_tables(positions_B1, config.head_size)


def step_layer(
    layer: nn.Module, gate: MaybeGate, x: Tensor, more: Maybe, context: TokenContext, memory: Memory, forced: Maybe
) -> tuple[Tensor, Maybe, Maybe]:
    """A layer's output and the H its router read, which is returned so that compilers keep it under forced routes. If
    compiled, the output may be two summands: the next layer then adds them in the kernel of its norm."""
    (y_B1D, rest_B1D), output = run_layer(layer, gate, add(x, more), context, memory, forced)
    if not torch.compiler.is_compiling():
        y_B1D, rest_B1D = add(y_B1D, rest_B1D), None
    return y_B1D, rest_B1D, output.entropy_BT


def decide(
    stack: DarkStack, context: TokenContext, memory: Memory, x: Tensor, more: Maybe, forced: Maybe
) -> tuple[Tensor, Route, Tensor, Tensor, Tensor, Maybe]:
    """x, its route, which rows are dark, whether any is, zeros for the stack's change, and H as in `step_layer`."""
    x_B1D = add(x, more)
    decided = stack.decide(x_B1D, context, memory, forced)
    return x_B1D, decided.route, decided.dark_BT, decided.dark_BT.any(), torch.zeros_like(x_B1D), decided.entropy_BT


def combine(
    stack: DarkStack, context: TokenContext, memory: Memory, x_B1D: Tensor, dark_B1: Tensor, change_B1D: Tensor,
    route: Route,
) -> Tensor:  # fmt: skip
    return stack.combine(stack.make_layout(x_B1D, dark_B1, context, memory), x_B1D, change_B1D, route, memory)


def add(x_B1D: Tensor, more_B1D: Maybe) -> Tensor:
    return x_B1D if more_B1D is None else x_B1D + more_B1D


def logits(norm: nn.Module, head: nn.Module, x_B1D: Tensor, more_B1D: Maybe) -> Tensor:
    return head(norm(add(x_B1D, more_B1D)))
