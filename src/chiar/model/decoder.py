"""The decoder: embedding, layers, final norm."""

import inspect
import math
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.utils import can_return_tuple, logging

from chiar.config import ChiarConfig
from chiar.config_checks import fits
from chiar.errors import InputError, refuse_misspelt, require
from chiar.kernels.flash import has_flash
from chiar.layers.block import Block, LayerOutput, Summands, make_norm
from chiar.layers.context import DerivedBuffers, Maybe, Memory, TokenContext
from chiar.layers.dark import DarkStack, StackOutput
from chiar.layers.gate import BIAS, Gate, MetaRouter
from chiar.layers.routers import EntropyRouter, Route, RouterState, collapse_loss
from chiar.layers.sparse import sparse_pays
from chiar.layers.spectral import SpectralBasis
from chiar.model.cache import ChiarCache
from chiar.model.inputs import ChiarModelOutput, Routes, check_routes, check_tokens, make_context
from chiar.model.trace import RoutingTrace, trace_layer, trace_stack

logger = logging.get_logger(__name__)
EMBEDDING_EPS = 1e-10  # far below the mean square of initial embeddings (4e-4): it only matters for a zero vector
MaybeGate = MetaRouter | None
FIRST_WEIGHTS = 0.02  # standard deviation


class ChiarPreTrainedModel(PreTrainedModel):
    config_class = ChiarConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _keep_in_fp32_modules_strict = ["router_state"]  # noqa: RUF012
    # Buffers of removed experiments, in older checkpoints.
    _keys_to_ignore_on_load_unexpected = [r"router_state\.(spread_L|progress)"]  # noqa: RUF012

    def _init_weights(self, module: nn.Module) -> None:
        """N(0, 0.02), biases 0, norms 1. Operators initialise their own weights."""
        std = FIRST_WEIGHTS
        if getattr(module, "sets_own_weights", False):
            with torch.no_grad():
                module.reset_parameters()  # type: ignore[operator]
        elif isinstance(module, Gate) and self.config.gate_init == "biased":
            init.zeros_(module.weight)
            init.constant_(module.bias, BIAS)
        elif isinstance(module, nn.Linear | nn.Embedding | nn.LayerNorm | nn.RMSNorm):
            if isinstance(module, nn.Linear | nn.Embedding):
                init.normal_(module.weight, mean=0.0, std=std)
            elif module.weight is not None:
                init.ones_(module.weight)
            if getattr(module, "bias", None) is not None:
                init.zeros_(module.bias)
        if isinstance(module, DerivedBuffers):
            module.rebuild()
        if isinstance(module, RouterState):
            for name, value in module.initial().items():
                init.copy_(getattr(module, name), value)

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: dict | None = None, **kwargs: Any) -> None:
        options = {"use_reentrant": False, **(gradient_checkpointing_kwargs or {})}
        if options["use_reentrant"]:
            raise InputError("use_reentrant=True would lose the gradient of the collapse regulariser: leave it off.")
        super().gradient_checkpointing_enable(options, **kwargs)

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoModel") -> None:
        """Does nothing: exports contain our shim instead of a copy of the source."""


class ChiarModel(ChiarPreTrainedModel):
    """Embedding, layers, final norm. The MetaRouter may gate layer 1."""

    def __init__(self, config: ChiarConfig) -> None:
        super().__init__(config)
        config.validate()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        positions = config.max_position_embeddings, config.hidden_size
        self.embed_positions = nn.Embedding(*positions) if config.positions == "learned" else None
        self.basis = SpectralBasis(config.basis, config.hidden_size, config.router_seed)
        gate = config.hidden_size, config.gate_pool, config.gate_skip_below
        self.meta_router = MetaRouter(*gate) if config.meta_router else None
        self.layers = nn.ModuleList(Block(config, i) for i, _ in enumerate(config.layer_types or ()))
        self.stacks = nn.ModuleDict({str(first): DarkStack(config, first) for first in config.stacks})
        self.router_state = RouterState(config) if config.follows_quantile else None
        self.norm = make_norm(config)
        self.gradient_checkpointing = False
        self.post_init()

    def set_thresholds(self, thresholds: float | list | None) -> None:
        """Set the routing thresholds, which are saved with the configuration; None: those of white noise. Thresholds of
        dark stacks are saved with the weights; None leaves them unchanged."""
        if self.config.stacks:
            return self._set_stack_thresholds(thresholds)
        if thresholds is not None and self.config.target_fraction is not None:
            fraction = f"target_fraction={self.config.target_fraction}"
            raise InputError(f"{fraction} finds the thresholds in training: build the model without it.")
        changed = copy(self.config)
        changed.thresholds = thresholds
        changed.validate()
        self.config.thresholds = thresholds
        for layer, values in zip(self.config.routed_layers, self.config.layer_thresholds(), strict=True):
            router = self.layers[layer].router
            if isinstance(router, EntropyRouter):
                router.values = values
                router.rebuild()

    def _set_stack_thresholds(self, thresholds: float | list | None) -> None:
        if thresholds is None:
            return
        state, count = self.router_state, len(self.config.stacks)
        if state is None:
            raise InputError(f"router={self.config.router!r} has no threshold that could be set.")
        values = [thresholds] * count if isinstance(thresholds, int | float) else list(thresholds)
        numbers = all(fits(value, float) and math.isfinite(value) for value in values)
        require(numbers and len(values) == count, f"{count} dark stacks need a number each, got {thresholds}.")
        with torch.no_grad():
            state.threshold_L.copy_(torch.tensor(values, dtype=state.threshold_L.dtype))

    def layer_contexts(self, context: TokenContext) -> list[TokenContext]:
        """The context of each layer, with its threshold if that follows a quantile."""
        contexts = [context] * len(self.layers)
        if self.router_state is not None:
            for layer, threshold in zip(self.config.routed_layers, self.router_state.of_layers(), strict=True):
                contexts[layer] = replace(context, threshold=threshold)
        return contexts

    def embed(self, input_ids: Maybe, inputs_embeds: Maybe, positions_BT: Tensor) -> Tensor:
        x_BTD = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if self.embed_positions is not None:
            x_BTD = x_BTD + self.embed_positions(positions_BT)
        return F.dropout(self.begin_stream(x_BTD), self.config.dropout, self.training)

    def begin_stream(self, x_BTD: Tensor) -> Tensor:
        """The first state of the residual stream: token embeddings, normalised under `embedding_norm`."""
        config = self.config
        return F.rms_norm(x_BTD, (config.hidden_size,), eps=EMBEDDING_EPS) if config.embedding_norm else x_BTD

    @can_return_tuple
    def forward(
        self, input_ids: Maybe = None, attention_mask: Maybe = None, position_ids: Maybe = None,
        past_key_values: ChiarCache | None = None, inputs_embeds: Maybe = None, use_cache: bool | None = None,
        output_hidden_states: bool | None = None, output_attentions: bool | None = None,
        output_routing: bool = False, output_routes: bool = False, forced_routes: Routes | None = None, **kwargs: Any,
    ) -> ChiarModelOutput:  # fmt: skip
        """`output_routing` returns a RoutingTrace; `forced_routes` maps a routed layer to a (B, T) choice of operator.
        `output_routes` returns the routes, the gate and the outputs of dark stacks with their gradients, for losses and
        averages in training. `attention_mask` is 1 for real tokens and 0 for padding, (B, cached + new tokens).
        Positions count real tokens unless `position_ids` are given."""
        config: ChiarConfig = self.config
        cache = past_key_values
        if kwargs:
            refuse_misspelt("argument", kwargs, inspect.signature(ChiarModel.forward).parameters)
        if (use_cache or cache is not None) and self.gradient_checkpointing and self.training:
            logger.warning_once("a checkpointed layer runs twice, so no cache is kept while training.")
            use_cache, cache = False, None
        if use_cache and cache is None:
            cache = ChiarCache(len(self.layers))
        given = check_tokens(input_ids, inputs_embeds, self.embed_tokens.num_embeddings)
        if cache is not None:
            self._check_cache(cache, len(given))
        past = 0 if cache is None else cache.get_seq_length()
        context = make_context(config, self.basis.transform(), given, input_ids, attention_mask, position_ids, past)
        context.keep_entropy = output_routing
        check_routes(forced_routes, config, tuple(given.shape[:2]))
        x_BTD = self.embed(input_ids, inputs_embeds, context.positions_BT)
        # Sparse execution can fill a cache but not read one, and has nothing to save on a single token.
        continues = cache is not None and (past > 0 or x_BTD.shape[1] == 1)
        context.sparse = self._runs_sparse(context, x_BTD) and not continues

        keep_hidden = config.output_hidden_states if output_hidden_states is None else output_hidden_states
        keep_attentions = config.output_attentions if output_attentions is None else output_attentions
        if keep_attentions and context.attention_implementation != "eager":
            raise InputError("attention weights are only kept with attn_implementation='eager'.")
        contexts, forced = self.layer_contexts(context), forced_routes or {}
        hidden_states: list[Tensor] = []
        outputs: list[LayerOutput] = []
        stack_outputs: list[StackOutput] = []
        for i, layer in enumerate(self.layers):
            if keep_hidden:
                hidden_states.append(x_BTD)
            if layer.kind == "dark":
                if i in config.stacks:
                    x_BTD, stack_output, inner_outputs = self._run_stack(i, x_BTD, contexts[i], cache, forced.get(i))
                    stack_outputs.append(stack_output)
                    outputs += inner_outputs
                continue
            gate, memory = self.meta_router if i == 0 else None, None if cache is None else cache.layers[i]
            x_BTD, output = self._run_layer(layer, gate, x_BTD, contexts[i], memory, forced.get(i))
            outputs.append(output)
        routes = [output.route for output in outputs if output.route is not None]
        if self.router_state is not None and self.training:
            scores = [route.score_BT for route in routes if route.score_BT is not None]
            self.router_state.follow(scores, context.real_BT)
        x_BTD = self.norm(x_BTD)
        if cache is not None:
            cache.seen += x_BTD.shape[1]
        return ChiarModelOutput(
            last_hidden_state=x_BTD,
            past_key_values=cache,
            hidden_states=(*hidden_states, x_BTD) if keep_hidden else None,
            attentions=tuple(output.attention_weights for output in outputs) if keep_attentions else None,
            routing=self._trace(outputs, contexts) if output_routing else None,
            routing_loss=self._routing_loss(routes, stack_outputs, context.real_BT),
            routes=tuple(routes) if output_routes else None,
            gate_BT1=outputs[0].gate_BT1 if output_routes else None,
            stacks=tuple(stack_outputs) if output_routes else None,
        )

    def _check_cache(self, cache: Any, rows: int) -> None:
        """Raise if the cache is of another class or does not fit this batch, gate or router."""
        config: ChiarConfig = self.config
        if not isinstance(cache, ChiarCache):  # transformers' own cannot hold rows of different lengths or gate sums
            needed = "CHIAR-Former needs a chiar.model.cache.ChiarCache"
            raise TypeError(f"{needed}, got {type(cache).__name__}: pass none to have one made.")
        cache.check_rows(rows)
        self.check_gate_can_generate()
        both = config.routing == "hard" and config.hard_estimator == "both" and not config.stacks
        if config.keys == "routed" and both and self.training and torch.is_grad_enabled():
            needed = "hard_estimator='both' needs attention's output for light tokens"
            raise InputError(f"{needed}, which a cache under keys='routed' does not hold: train with use_cache=False.")

    def _runs_sparse(self, context: TokenContext, x_BTD: Tensor) -> bool:
        """Whether to run only the chosen operators. Raises if execution='sparse' is not possible here."""
        config: ChiarConfig = self.config
        if config.execution == "dense" or not config.routed_layers:
            return False
        obstacle = None
        if self.training and config.dropout > 0 and not config.stacks:
            obstacle = "it has no dropout of attention weights: set dropout=0.0"
        elif context.attention_implementation == "eager":
            obstacle = "it keeps no attention weights: leave attn_implementation at sdpa"
        if obstacle and config.execution == "sparse":
            raise InputError(f"execution='sparse' is not possible here: {obstacle}, or use 'auto'.")
        stacks_pay = bool(config.stacks) and (not x_BTD.is_cuda or has_flash(x_BTD))
        pays = config.execution == "sparse" or stacks_pay or (not config.stacks and sparse_pays(x_BTD, config.keys))
        return obstacle is None and config.can_run_sparse and pays

    def _run_layer(self, layer: nn.Module, gate: MaybeGate, *rest: Any) -> tuple[Tensor, LayerOutput]:
        run = self._run_gated if gate else run_layer
        # The backward pass begins with the last layer: recomputing its activations would hardly save memory.
        if self.gradient_checkpointing and self.training and layer is not self.layers[-1]:
            run = partial(self._gradient_checkpointing_func, run)
        (y_BTD, _), output = run(layer, gate, *rest)
        return y_BTD, output

    def _run_stack(
        self, first: int, x_BTD: Tensor, context: TokenContext, cache: ChiarCache | None, forced_BT: Maybe
    ) -> tuple[Tensor, StackOutput, list[LayerOutput]]:
        """Run the dark stack that begins at layer `first`. The output of that layer has the route."""
        layers = self.config.stacks[first]
        outputs: list[LayerOutput] = []

        def run_layers(z_BTD: Tensor, inner: TokenContext) -> Tensor:
            for i in layers:
                memory = None if cache is None else cache.layers[i]
                z_BTD, output = self._run_layer(self.layers[i], None, z_BTD, inner, memory, None)
                outputs.append(output)
            return z_BTD

        memory = None if cache is None else cache.layers[first]
        x_BTD, stack_output = self.stacks[str(first)](x_BTD, context, memory, forced_BT, run_layers)
        if cache is not None and not outputs and not cache.seen:  # a prompt without dark tokens: create empty stores
            for i in layers:
                self.layers[i].begin(cache.layers[i], len(x_BTD))
        outputs = outputs or [LayerOutput() for _ in layers]
        outputs[0] = replace(outputs[0], route=stack_output.route, entropy_BT=stack_output.entropy_BT)
        return x_BTD, stack_output, outputs

    def _routing_loss(self, routes: list[Route], stacks: list[StackOutput], real_BT: Maybe) -> Maybe:
        terms = [stack.ratio_loss(output, real_BT) for stack, output in zip(self.dark_stacks, stacks, strict=True)]
        terms.append(collapse_loss(routes, real_BT, self.config.collapse_regulariser))
        losses = [loss for loss in terms if loss is not None]
        return torch.stack(losses).sum() if losses else None

    def early_loss(self, decoded: ChiarModelOutput, targets_BT: Tensor, head: nn.Linear) -> Tensor:
        """Losses of the dark stacks' early heads and forecast routers. Targets are the next tokens, −100 for none."""
        final_BTD, total = decoded.last_hidden_state, targets_BT.new_zeros((), dtype=torch.float32)
        assert final_BTD is not None
        for stack, output in zip(self.dark_stacks, decoded.stacks or (), strict=True):
            total = total + stack.loss(output, targets_BT, final_BTD, head)
        return total

    @property
    def dark_stacks(self) -> list[DarkStack]:
        return [stack for stack in self.stacks.values() if isinstance(stack, DarkStack)]

    def _run_gated(self, *arguments: Any) -> tuple[Summands, LayerOutput]:
        """Layer 1 with the MetaRouter. A method, so that layer-by-layer compilation can compile both together."""
        return run_layer(*arguments)

    def _trace(self, outputs: list[LayerOutput], contexts: list[TokenContext]) -> RoutingTrace:
        first, layers = contexts[0], zip(self.layers, outputs, contexts, strict=True)
        traces = [trace_layer(i, *layer) for i, layer in enumerate(layers)]
        for at, stack in self.config.stacks.items():
            whole = trace_stack(traces[at], outputs[at], contexts[at], self.config.router_kind)
            for i in stack:
                traces[i] = replace(whole, index=i)
        real_BT = torch.ones_like(first.positions_BT, dtype=torch.bool) if first.real_BT is None else first.real_BT
        pool = self.config.gate_pool if self.meta_router is not None else None
        return RoutingTrace(traces, real_BT, first.token_ids_BT, pool)

    def check_gate_can_generate(self) -> None:
        """Raise if the gate averages over later tokens, which do not exist yet while decoding."""
        config, pool = self.config, self.config.gate_pool
        if config.meta_router and pool != "causal" and config.gate_generation == "refuse":
            seen = f"gate_pool={pool!r} lets every token see the whole {pool}, so generation is not defined"
            raise InputError(f"{seen}: set config.gate_generation='prefill', or train with gate_pool='causal'.")


def run_layer(
    layer: nn.Module, gate: MaybeGate, x_BTD: Tensor, context: TokenContext, memory: Memory, forced_BT: Maybe
) -> tuple[Summands, LayerOutput]:
    """One layer; with a gate (layer 1 under the MetaRouter) g · layer(x) + (1 − g) · x (Eq. 5)."""
    if gate is None:
        return layer(x_BTD, context, memory, forced_BT)
    gate_BT1 = gate(x_BTD, context, memory)
    # A fixed step must not read the gate's values on the host.
    may_skip = not (context.keep_entropy or context.room_is_made or (layer.looks_back and memory is not None))
    if may_skip and gate.shut(gate_BT1):
        return (x_BTD, None), LayerOutput(gate_BT1=gate_BT1)
    (y_BTD, more_BTD), output = layer(x_BTD, context, memory, forced_BT)
    output, gate_now_BT1 = replace(output, gate_BT1=gate_BT1), gate_BT1.to(x_BTD.dtype)
    rest_BTD = (1 - gate_now_BT1) * x_BTD
    # Two summands if the layer gave two, as other layers do: layers of one kind then share one compiled step.
    if more_BTD is not None:
        return (gate_now_BT1 * (y_BTD + more_BTD), rest_BTD), output
    return (gate_now_BT1 * y_BTD + rest_BTD, None), output
