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
EMBEDDING_EPS = 1e-10  # far below the mean square embeddings begin with (4e-4): only an embedding of 0 notices it
MaybeGate = MetaRouter | None
FIRST_WEIGHTS = 0.02  # standard deviation


class ChiarPreTrainedModel(PreTrainedModel):
    config_class = ChiarConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _keep_in_fp32_modules_strict = ["router_state"]  # noqa: RUF012
    # Saved by experiments that are gone; nothing depends on them.
    _keys_to_ignore_on_load_unexpected = [r"router_state\.(spread_L|progress)"]  # noqa: RUF012

    def _init_weights(self, module: nn.Module) -> None:
        """N(0, 0.02), biases 0, norms 1; operators set weights of their own."""
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
        given = {"use_reentrant": False, **(gradient_checkpointing_kwargs or {})}
        if given["use_reentrant"]:
            raise InputError("use_reentrant=True would lose the gradient of the collapse regulariser: leave it off.")
        super().gradient_checkpointing_enable(given, **kwargs)

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoModel") -> None:
        """Exports always carry our shim instead of a copy of the source."""


class ChiarModel(ChiarPreTrainedModel):
    """Embedding, layers, final norm. Layer 1 may be gated by the MetaRouter."""

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
        """Route with other thresholds from now on (None: white noise's); saved with the configuration."""
        if self.config.stacks:
            return self._set_cuts(thresholds)
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

    def _set_cuts(self, thresholds: float | list | None) -> None:
        """Of dark stacks: they are saved with the weights, where training left them."""
        if thresholds is None:
            return
        state, count = self.router_state, len(self.config.stacks)
        if state is None:
            raise InputError(f"router={self.config.router!r} has no threshold: nothing can be moved.")
        values = [thresholds] * count if isinstance(thresholds, int | float) else list(thresholds)
        numbers = all(fits(value, float) and math.isfinite(value) for value in values)
        require(numbers and len(values) == count, f"{count} dark stacks need a number each, got {thresholds}.")
        with torch.no_grad():
            state.threshold_L.copy_(torch.tensor(values, dtype=state.threshold_L.dtype))

    def layer_contexts(self, context: TokenContext) -> list[TokenContext]:
        """The context of each layer: a routed one's has the threshold it followed."""
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
        """Embedded tokens as the residual stream begins with them."""
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
        `output_routes` returns only the routes and the gate as they were used, for losses and averages in training.
        `attention_mask` is 1 for real tokens and 0 for padding, (B, cached + new tokens). Positions count real
        tokens unless `position_ids` are given."""
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
        # Sparse execution reads no stored keys. It can fill a cache, but one token alone has nothing to leave out.
        continues = cache is not None and (past > 0 or x_BTD.shape[1] == 1)
        context.sparse = self._runs_sparse(context, x_BTD) and not continues

        keep_hidden = config.output_hidden_states if output_hidden_states is None else output_hidden_states
        keep_attentions = config.output_attentions if output_attentions is None else output_attentions
        if keep_attentions and context.attention_implementation != "eager":
            raise InputError("attention weights are only kept with attn_implementation='eager'.")
        contexts, forced = self.layer_contexts(context), forced_routes or {}
        hidden_states: list[Tensor] = []
        done: list[LayerOutput] = []
        stacks: list[StackOutput] = []
        for i, layer in enumerate(self.layers):
            if keep_hidden:
                hidden_states.append(x_BTD)
            if layer.kind == "dark":
                if i in config.stacks:
                    x_BTD, stack_did, dids = self._run_stack(i, x_BTD, contexts[i], cache, forced.get(i))
                    stacks.append(stack_did)
                    done += dids
                continue
            gate, memory = self.meta_router if i == 0 else None, None if cache is None else cache.layers[i]
            x_BTD, did = self._run_layer(layer, gate, x_BTD, contexts[i], memory, forced.get(i))
            done.append(did)
        routes = [layer.route for layer in done if layer.route is not None]
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
            attentions=tuple(layer.attention_weights for layer in done) if keep_attentions else None,
            routing=self._trace(done, contexts) if output_routing else None,
            routing_loss=self._routing_loss(routes, stacks, context.real_BT),
            routes=tuple(routes) if output_routes else None,
            gate_BT1=done[0].gate_BT1 if output_routes else None,
            stacks=tuple(stacks) if output_routes else None,
        )

    def _check_cache(self, cache: Any, rows: int) -> None:
        """Raise where the cache is not ours, or cannot go on with this batch, gate or router."""
        config: ChiarConfig = self.config
        if not isinstance(cache, ChiarCache):  # transformers' general ones have no place for key marks and gate sums
            needed = "CHIAR-Former needs a chiar.model.cache.ChiarCache"
            raise TypeError(f"{needed}, got {type(cache).__name__}: pass none to have one made.")
        cache.check_rows(rows)
        self.check_gate_can_generate()
        both = config.routing == "hard" and config.hard_estimator == "both" and not config.stacks
        if config.keys == "routed" and both and self.training and torch.is_grad_enabled():
            needed = "hard_estimator='both' needs attention's output for light tokens"
            raise InputError(f"{needed}, which a cache under keys='routed' has not: train with use_cache=False.")

    def _runs_sparse(self, context: TokenContext, x_BTD: Tensor) -> bool:
        """Whether routed layers run only what was chosen; where `sparse` was asked for and cannot be, an error."""
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
        # What the last layer keeps, the backward pass needs first: computing it again would free nothing for long.
        if self.gradient_checkpointing and self.training and layer is not self.layers[-1]:
            run = partial(self._gradient_checkpointing_func, run)
        (y_BTD, _), done = run(layer, gate, *rest)
        return y_BTD, done

    def _run_stack(
        self, first: int, x_BTD: Tensor, context: TokenContext, cache: ChiarCache | None, forced_BT: Maybe
    ) -> tuple[Tensor, StackOutput, list[LayerOutput]]:
        """The dark layers from `first` on, with what stands around them. The first one's output has the route."""
        layers = self.config.stacks[first]
        dids: list[LayerOutput] = []

        def through(z_BTD: Tensor, inner: TokenContext) -> Tensor:
            for i in layers:
                memory = None if cache is None else cache.layers[i]
                z_BTD, did = self._run_layer(self.layers[i], None, z_BTD, inner, memory, None)
                dids.append(did)
            return z_BTD

        memory = None if cache is None else cache.layers[first]
        x_BTD, done = self.stacks[str(first)](x_BTD, context, memory, forced_BT, through)
        if cache is not None and not dids and not cache.seen:  # a prompt without a dark token leaves all as it begins
            for i in layers:
                self.layers[i].begin(cache.layers[i], len(x_BTD))
        dids = dids or [LayerOutput() for _ in layers]
        dids[0] = replace(dids[0], route=done.route, entropy_BT=done.entropy_BT)
        return x_BTD, done, dids

    def _routing_loss(self, routes: list[Route], stacks: list[StackOutput], real_BT: Maybe) -> Maybe:
        losses = [stack.ratio_loss(done, real_BT) for stack, done in zip(self.dark_stacks, stacks, strict=True)]
        losses.append(collapse_loss(routes, real_BT, self.config.collapse_regulariser))
        there = [loss for loss in losses if loss is not None]
        return torch.stack(there).sum() if there else None

    def early_loss(self, decoded: ChiarModelOutput, targets_BT: Tensor, head: nn.Linear) -> Tensor:
        """What stacks learn from the next tokens, beside the loss of the model: −100 where there is none."""
        final_BTD, total = decoded.last_hidden_state, targets_BT.new_zeros((), dtype=torch.float32)
        assert final_BTD is not None
        for stack, did in zip(self.dark_stacks, decoded.stacks or (), strict=True):
            total = total + stack.loss(did, targets_BT, final_BTD, head)
        return total

    @property
    def dark_stacks(self) -> list[DarkStack]:
        return [stack for stack in self.stacks.values() if isinstance(stack, DarkStack)]

    def _run_gated(self, *arguments: Any) -> tuple[Summands, LayerOutput]:
        """Layer 1 under the MetaRouter. A method, so that who compiles layer by layer can compile both as one."""
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
        """Tokens decoded one by one cannot know a mean over tokens that are not there yet."""
        config, pool = self.config, self.config.gate_pool
        if config.meta_router and pool != "causal" and config.gate_generation == "refuse":
            seen = f"gate_pool={pool!r} lets every token see the whole {pool}, so generation is not defined"
            raise InputError(f"{seen}: set config.gate_generation='prefill', or train with gate_pool='causal'.")


def run_layer(
    layer: nn.Module, gate: MaybeGate, x_BTD: Tensor, context: TokenContext, memory: Memory, forced_BT: Maybe
) -> tuple[Summands, LayerOutput]:
    """One layer; layer 1 under the MetaRouter: g · layer(x) + (1 − g) · x (Eq. 5)."""
    if gate is None:
        return layer(x_BTD, context, memory, forced_BT)
    gate_BT1 = gate(x_BTD, context, memory)
    # A fixed step looks at no values.
    unseen = not (context.keep_entropy or context.room_is_made or (layer.looks_back and memory is not None))
    if unseen and gate.shut(gate_BT1):
        return (x_BTD, None), LayerOutput(gate_BT1=gate_BT1)
    (y_BTD, more_BTD), done = layer(x_BTD, context, memory, forced_BT)
    done, gate_now_BT1 = replace(done, gate_BT1=gate_BT1), gate_BT1.to(x_BTD.dtype)
    rest_BTD = (1 - gate_now_BT1) * x_BTD
    # As the layers behind it: those of one kind then share one compiled step.
    if more_BTD is not None:
        return (gate_now_BT1 * (y_BTD + more_BTD), rest_BTD), done
    return (gate_now_BT1 * y_BTD + rest_BTD, None), done
