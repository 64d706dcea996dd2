"""CHIAR-Former as transformers models, read top to bottom: decoder, language model, classifier."""

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GenerationMixin,
    PreTrainedModel,
)
from transformers import initialization as init

from chiar.cache import ChiarCache, check_cache
from chiar.config import AUTO_CLASSES, SHIM_MODULE, ChiarConfig
from chiar.errors import InputError
from chiar.layers.attention import rotary_tables
from chiar.layers.block import Block, make_norm
from chiar.layers.context import LayerMemory, TokenContext
from chiar.layers.derived import DerivedBuffers
from chiar.layers.meta_router import Gate, MetaRouter
from chiar.layers.rbf import RBFMixing
from chiar.layers.routers import EntropyRouter, Route, one_hot
from chiar.layers.spectral import SpectralBasis, SpectralFilter
from chiar.outputs import ChiarModelOutput, ChiarOutput
from chiar.routing.collapse import collapse_loss
from chiar.routing.trace import LayerTrace, RoutingTrace

SHIM = f"""# Lets transformers' Auto classes find the installed package: pip install chiar
from chiar.config import ChiarConfig
from chiar.modeling import {", ".join(name for name in AUTO_CLASSES.values() if name != "ChiarConfig")}
"""


class ChiarPreTrainedModel(PreTrainedModel):
    config_class = ChiarConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _no_split_modules = ["Block"]  # noqa: RUF012 (transformers reads it as a class attribute)

    def _init_weights(self, module: nn.Module) -> None:
        """N(0, 0.02), biases 0, norms and spectral filters 1; derived buffers are computed again."""
        std = self.config.initializer_range
        if isinstance(module, Gate) and self.config.gate_init == "biased":
            init.zeros_(module.weight)
            init.constant_(module.bias, self.config.gate_bias)
        elif isinstance(module, nn.Linear):
            init.normal_(module.weight, mean=0.0, std=std)
            if module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            init.normal_(module.weight, mean=0.0, std=std)
        elif isinstance(module, nn.LayerNorm | nn.RMSNorm):
            init.ones_(module.weight)
            if getattr(module, "bias", None) is not None:
                init.zeros_(module.bias)
        elif isinstance(module, SpectralFilter):
            init.ones_(module.weight)
        elif isinstance(module, RBFMixing):
            init.normal_(module.omega_Dm, std=(2.0 * module.gamma) ** 0.5)
        elif isinstance(module, DerivedBuffers):
            module.rebuild()

    def save_pretrained(self, save_directory: Any, **kwargs: Any) -> None:
        """As in transformers, plus the shim through which a process that never imported chiar can load the folder."""
        super().save_pretrained(save_directory, **kwargs)
        (Path(save_directory) / f"{SHIM_MODULE}.py").write_text(SHIM)

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoModel") -> None:
        """Exports always carry our shim instead of a copy of the source."""


class ChiarModel(ChiarPreTrainedModel):
    """Embedding, layers, final norm. Layer 1 may be gated by the MetaRouter."""

    def __init__(self, config: ChiarConfig) -> None:
        super().__init__(config)
        config.validate()
        assert config.layer_types is not None
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.embed_positions = (
            nn.Embedding(config.max_position_embeddings, config.hidden_size) if config.positions == "learned" else None
        )
        self.basis = SpectralBasis(config.basis, config.hidden_size, config.basis_seed)
        self.meta_router = (
            MetaRouter(config.hidden_size, config.gate_pool, config.gate_skip_below) if config.meta_router else None
        )
        self.layers = nn.ModuleList(Block(config, i) for i in range(len(config.layer_types)))
        self.norm = make_norm(config)
        self.gradient_checkpointing = False
        self.post_init()

    def set_thresholds(self, thresholds: float | list | None) -> None:
        """Route with other thresholds from now on (None: white noise's); saved with the configuration."""
        before = self.config.thresholds
        self.config.thresholds = thresholds
        try:
            self.config.validate()
        except InputError:
            self.config.thresholds = before
            raise
        for layer, values in zip(self.config.routed_layers, self.config.layer_thresholds(), strict=True):
            router = self.layers[layer].router
            if isinstance(router, EntropyRouter):
                router.values = values
                router.rebuild()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: ChiarCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        output_routing: bool = False,
        forced_routes: dict[int, Tensor] | None = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> ChiarModelOutput | tuple:
        """`output_routing` returns a RoutingTrace; `forced_routes` maps a routed layer to a (B, T) choice of operator.

        `attention_mask` is 1 for real tokens and 0 for padding, (B, cached + new tokens). Positions count real
        tokens unless `position_ids` are given.
        """
        config: ChiarConfig = self.config
        if use_cache and past_key_values is None:
            past_key_values = ChiarCache(len(self.layers))
        if past_key_values is not None:
            past_key_values = check_cache(past_key_values)
            self.check_gate_can_generate()
        x_BTD = self._embed(input_ids, inputs_embeds)
        context = self._context(x_BTD, input_ids, attention_mask, position_ids, past_key_values)
        context.keep_entropy = output_routing
        if self.embed_positions is not None:
            x_BTD = x_BTD + self.embed_positions(context.positions_BT)
        x_BTD = F.dropout(x_BTD, config.dropout, self.training)

        keep_hidden = config.output_hidden_states if output_hidden_states is None else output_hidden_states
        keep_attentions = config.output_attentions if output_attentions is None else output_attentions
        if keep_attentions and context.attention_implementation != "eager":
            raise InputError("attention weights are only kept with attn_implementation='eager'.")
        hidden_states, attentions, traces, routes = [], [], [], []
        for i, layer in enumerate(self.layers):
            assert isinstance(layer, Block)
            if keep_hidden:
                hidden_states.append(x_BTD)
            memory = None if past_key_values is None else past_key_values.layers[i]
            forced_BT = None if forced_routes is None else forced_routes.get(i)
            gate_BT1 = None
            if i == 0 and self.meta_router is not None:
                gate_BT1 = self.meta_router(x_BTD, context, memory)
            y_BTD, route, entropy_BT, weights = self._run(layer, x_BTD, context, memory, forced_BT, gate_BT1)
            if gate_BT1 is not None:
                gate = gate_BT1.to(x_BTD.dtype)
                y_BTD = gate * y_BTD + (1 - gate) * x_BTD
            if output_routing:
                traces.append(self._trace(i, layer, route, entropy_BT, gate_BT1, x_BTD))
            routes.append(route)
            attentions.append(weights)
            x_BTD = y_BTD
        x_BTD = self.norm(x_BTD)
        if keep_hidden:
            hidden_states.append(x_BTD)
        if past_key_values is not None:
            past_key_values.seen += x_BTD.shape[1]

        trace = None
        if output_routing:
            real_BT = torch.ones(x_BTD.shape[:2], dtype=torch.bool) if context.real_BT is None else context.real_BT
            pool = config.gate_pool if self.meta_router is not None else None
            trace = RoutingTrace(traces, real_BT.to(x_BTD.device), input_ids, pool, config.routed_layers)
        output = ChiarModelOutput(
            last_hidden_state=x_BTD,
            past_key_values=past_key_values,
            hidden_states=tuple(hidden_states) if keep_hidden else None,
            attentions=tuple(attentions) if keep_attentions else None,
            routing=trace,
            routing_loss=collapse_loss(routes, context.real_BT, config.collapse_regulariser),
        )
        return output if return_dict is not False else output.to_tuple()

    def _embed(self, input_ids: Tensor | None, inputs_embeds: Tensor | None) -> Tensor:
        if (input_ids is None) == (inputs_embeds is None):
            raise InputError("give exactly one of input_ids and inputs_embeds.")
        given = input_ids if inputs_embeds is None else inputs_embeds
        assert given is not None
        if given.shape[0] == 0 or given.shape[1] == 0:
            raise InputError(f"the input is empty: shape {tuple(given.shape)}.")
        if inputs_embeds is not None:
            return inputs_embeds
        assert input_ids is not None
        # On a GPU the check would wait for the device, and the embedding's own assertion stops the kernel anyway.
        if input_ids.device.type == "cpu" and not torch.compiler.is_compiling():
            low, high = int(input_ids.min()), int(input_ids.max())
            size = self.embed_tokens.num_embeddings
            if low < 0 or high >= size:
                raise InputError(
                    f"token id {low if low < 0 else high} is outside the vocabulary 0..{size - 1}: "
                    "was the text encoded with this model's tokenizer?"
                )
        return self.embed_tokens(input_ids)

    def _context(
        self,
        x_BTD: Tensor,
        input_ids: Tensor | None,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        cache: ChiarCache | None,
    ) -> TokenContext:
        B, T, _ = x_BTD.shape
        past = 0 if cache is None else cache.get_seq_length()
        real_BS = None
        if attention_mask is not None:
            if attention_mask.shape != (B, past + T):
                raise InputError(
                    f"attention_mask has shape {tuple(attention_mask.shape)}, expected {(B, past + T)}: "
                    "one entry for each cached and new token."
                )
            real_BS = attention_mask.bool()
        if position_ids is not None:
            positions_BT = position_ids.expand(B, T)
        elif real_BS is not None:
            positions_BT = (real_BS.long().cumsum(1) - 1).clamp_min(0)[:, past:]
        else:
            positions_BT = torch.arange(past, past + T, device=x_BTD.device).expand(B, T)
        if self.embed_positions is not None and past + T > self.embed_positions.num_embeddings:
            raise InputError(
                f"{past + T} tokens, but the model has {self.embed_positions.num_embeddings} learned positions: "
                "shorten the text or use a model with RoPE."
            )
        rope = None
        if self.config.positions == "rope":
            rope = rotary_tables(positions_BT, self.config.head_size, self.config.rope_base)
        return TokenContext(
            basis_DD=self.basis.matrix_DD,
            positions_BT=positions_BT,
            real_BT=None if real_BS is None else real_BS[:, past:],
            token_ids_BT=input_ids,
            rope=rope,
            attention_implementation=self.config._attn_implementation or "sdpa",
            past=past,
        )

    def _run(
        self,
        layer: Block,
        x_BTD: Tensor,
        context: TokenContext,
        memory: LayerMemory | None,
        forced_BT: Tensor | None,
        gate_BT1: Tensor | None,
    ) -> tuple[Tensor, Route | None, Tensor | None, Tensor | None]:
        skipping = gate_BT1 is not None and self.config.gate_skip_below is not None and not self.training
        if skipping and not context.keep_entropy and not bool(gate_BT1.any()):  # type: ignore[union-attr]
            return x_BTD, None, None, None
        if self.gradient_checkpointing and self.training:
            return self._gradient_checkpointing_func(layer.__call__, x_BTD, context, memory, forced_BT)
        return layer(x_BTD, context, memory, forced_BT)

    def _trace(
        self,
        index: int,
        layer: Block,
        route: Route | None,
        entropy_BT: Tensor | None,
        gate_BT1: Tensor | None,
        x_BTD: Tensor,
    ) -> LayerTrace:
        operators = list(layer.operators)
        if route is None:
            choice_BT = torch.zeros(x_BTD.shape[:2], dtype=torch.long, device=x_BTD.device)
            route = Route(choice_BT, one_hot(choice_BT, 1))
        return LayerTrace(
            index=index,
            kind=layer.kind,
            operators=operators,
            choice_BT=route.choice_BT.detach(),
            weights_BTK=route.weights_BTK.detach(),
            entropy_BT=None if entropy_BT is None else entropy_BT.detach(),
            probabilities_BTK=None if route.probabilities_BTK is None else route.probabilities_BTK.detach(),
            gate_BT=None if gate_BT1 is None else gate_BT1.detach()[..., 0],
            thresholds=list(layer.router.values) if isinstance(layer.router, EntropyRouter) else None,
        )

    def check_gate_can_generate(self) -> None:
        """Tokens decoded one by one cannot know a mean over tokens that are not there yet."""
        config = self.config
        if config.meta_router and config.gate_pool != "causal" and config.gate_generation == "refuse":
            raise InputError(
                f"gate_pool={config.gate_pool!r} lets every token see the whole {config.gate_pool}, so generation is "
                "not defined: set config.gate_generation='prefill' to freeze the gate at the prompt, or train with "
                "gate_pool='causal'."
            )


class ChiarForCausalLM(ChiarPreTrainedModel, GenerationMixin):
    """The decoder with its output projection tied to the token embedding."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: ChiarConfig) -> None:
        super().__init__(config)
        self.model = ChiarModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        labels: Tensor | None = None,
        logits_to_keep: int = 0,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> ChiarOutput | tuple:
        """Arguments of ChiarModel, and `labels` (the ids themselves; −100 is ignored) for the next-token loss."""
        decoded = self.model(input_ids, **kwargs)
        states_BTD = decoded.last_hidden_state
        logits_BTV = self.lm_head(states_BTD[:, -logits_to_keep:] if logits_to_keep else states_BTD)
        loss = None
        if labels is not None:
            loss = F.cross_entropy(
                logits_BTV[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten().to(logits_BTV.device)
            )
        return finish(decoded, loss, logits_BTV, return_dict)

    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        self.model.check_gate_can_generate()
        return super().prepare_inputs_for_generation(*args, **kwargs)

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        """The model makes its own cache on the first step: transformers' general one cannot hold our state."""
        return False


class ChiarForSequenceClassification(ChiarPreTrainedModel):
    """The decoder with a linear classifier over one state a row."""

    def __init__(self, config: ChiarConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        self.model = ChiarModel(config)
        self.score = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> ChiarOutput | tuple:
        """Arguments of ChiarModel, and `labels` (B,): class numbers, or targets when there is one label."""
        decoded = self.model(input_ids, attention_mask=attention_mask, **kwargs)
        logits = self.score(self._pool(decoded.last_hidden_state, attention_mask))
        loss = None
        if labels is not None:
            labels = labels.to(logits.device)
            if self.num_labels == 1:
                loss = F.mse_loss(logits[:, 0].float(), labels.float())
            else:
                loss = F.cross_entropy(logits.float(), labels)
        return finish(decoded, loss, logits, return_dict)

    def _pool(self, states_BTD: Tensor, attention_mask: Tensor | None) -> Tensor:
        B, T, _ = states_BTD.shape
        if attention_mask is None:
            attention_mask = torch.ones(B, T, dtype=torch.long, device=states_BTD.device)
        if self.config.classifier_pool == "mean":
            real_BT1 = attention_mask[..., None].to(states_BTD.dtype)
            return (states_BTD * real_BT1).sum(1) / real_BT1.sum(1).clamp_min(1)
        last_B = (attention_mask.long() * torch.arange(T, device=states_BTD.device)).argmax(1)
        return states_BTD[torch.arange(B, device=states_BTD.device), last_B]


def finish(
    decoded: ChiarModelOutput, loss: Tensor | None, logits: Tensor, return_dict: bool | None
) -> ChiarOutput | tuple:
    if loss is not None and decoded.routing_loss is not None:
        loss = loss + decoded.routing_loss
    output = ChiarOutput(
        loss=loss,
        logits=logits,
        past_key_values=decoded.past_key_values,
        hidden_states=decoded.hidden_states,
        attentions=decoded.attentions,
        routing=decoded.routing,
        routing_loss=decoded.routing_loss,
    )
    return output if return_dict is not False else output.to_tuple()


AutoConfig.register("chiar", ChiarConfig, exist_ok=True)
AutoModel.register(ChiarConfig, ChiarModel, exist_ok=True)
AutoModelForCausalLM.register(ChiarConfig, ChiarForCausalLM, exist_ok=True)
AutoModelForSequenceClassification.register(ChiarConfig, ChiarForSequenceClassification, exist_ok=True)
