"""The language model and the classifier: a decoder and a head each, registered with transformers' Auto classes."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.generation import GenerationMixin
from transformers.utils import can_return_tuple, logging

from chiar.config import ChiarConfig
from chiar.errors import InputError, require
from chiar.layers.context import Maybe
from chiar.model.cache import ChiarCache
from chiar.model.decoder import ChiarModel, ChiarPreTrainedModel
from chiar.model.decoding import FastDecoder
from chiar.model.inputs import ChiarModelOutput, ChiarOutput

logger = logging.get_logger(__name__)


class ChiarForCausalLM(ChiarPreTrainedModel, GenerationMixin):
    """The decoder with its output projection tied to the token embedding."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: ChiarConfig) -> None:
        super().__init__(config)
        self.model = ChiarModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.fast_decoder: FastDecoder | None = None
        self.post_init()

    def enable_fast_decoding(self, compile: bool = False, graph: bool | None = None) -> None:
        """Decode in fixed steps from now on, captured as CUDA graphs on a GPU, and compiled on request. Other passes
        (prompts, gradients, traces, eager attention, RBF mixing) run as before."""
        self.fast_decoder = FastDecoder(compile, graph)

    def disable_fast_decoding(self) -> None:
        self.fast_decoder = None

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        if self.fast_decoder is not None:
            self.fast_decoder.forget()
        return super()._apply(*args, **kwargs)

    @can_return_tuple
    def forward(
        self, input_ids: Maybe = None, attention_mask: Maybe = None, position_ids: Maybe = None,
        past_key_values: ChiarCache | None = None, inputs_embeds: Maybe = None, labels: Maybe = None,
        use_cache: bool | None = None, logits_to_keep: int = 0, num_items_in_batch: int | Tensor | None = None,
        **kwargs: Any,
    ) -> ChiarOutput:  # fmt: skip
        """Arguments of ChiarModel, and `labels` (input ids, not shifted; −100 is ignored) for the next-token loss, a
        mean over labels. Training adds the losses of routers and dark stacks. With `num_items_in_batch` it is this
        batch's share of a mean over that many labels (transformers' Trainer counts all accumulated batches)."""
        # generate() inspects this signature for the arguments the model takes.
        fast, plain = self.fast_decoder, labels is None and inputs_embeds is None
        if fast is not None and plain and fast.applies(self.model, input_ids, past_key_values, kwargs):
            assert input_ids is not None and past_key_values is not None
            forced = kwargs.get("forced_routes")
            logits_B1V = fast.step(self, input_ids, attention_mask, position_ids, past_key_values, forced)
            return ChiarOutput(logits=logits_B1V, past_key_values=past_key_values)
        given = input_ids, attention_mask, position_ids, past_key_values, inputs_embeds, use_cache
        learns = self.training and labels is not None
        decoded = self.model(*given, return_dict=True, **(kwargs | ({"output_routes": True} if learns else {})))
        states_BTD = decoded.last_hidden_state
        logits_BTV = self.lm_head(states_BTD[:, -logits_to_keep:] if logits_to_keep else states_BTD)
        loss = None
        if labels is not None:
            require(not logits_to_keep, "labels need the logits of every token: leave logits_to_keep at 0.")
            targets = labels[:, 1:].flatten().to(logits_BTV.device)
            loss = F.cross_entropy(logits_BTV[:, :-1].flatten(0, 1).float(), targets)
            if self.training and decoded.routing_loss is not None:
                loss = loss + decoded.routing_loss
            if learns and self.model.stacks:
                shifted_BT = F.pad(labels[:, 1:], (0, 1), value=-100).to(logits_BTV.device)
                loss = loss + self.model.early_loss(decoded, shifted_BT, self.lm_head)
            if num_items_in_batch is not None:
                loss = loss * (targets != -100).sum() / num_items_in_batch
        return to_output(decoded, loss, logits_BTV)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """As in transformers, which warns of texts beyond the trained length. A gate that sees later tokens needs
        `gate_generation="prefill"` and a cache: it then keeps the value the prompt gave it, with one warning."""
        self.model.check_gate_can_generate()
        frozen = self.config.meta_router and self.config.gate_pool != "causal"
        settings = kwargs.get("generation_config") or self.generation_config
        if frozen and kwargs.get("use_cache", settings.use_cache) is False:
            raise InputError("gate_generation='prefill' keeps the gate in the cache: generate with use_cache=True.")
        if frozen:
            pool = self.config.gate_pool
            logger.warning_once(
                f"the gate pools over the {pool}, later tokens included: g keeps its value of the prompt."
            )
        return super().generate(*args, **kwargs)

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        """The model makes its own cache on the first step: transformers' DynamicCache cannot hold its state."""
        return False


class ChiarForSequenceClassification(ChiarPreTrainedModel):
    """The decoder with a linear classifier of one state per row."""

    accepts_loss_kwargs = False  # the loss is a mean over rows; Trainer divides it by the accumulation steps

    def __init__(self, config: ChiarConfig) -> None:
        super().__init__(config)
        if config.problem_type == "multi_label_classification":
            raise InputError("problem_type='multi_label_classification' is not supported: a row has one label.")
        self.num_labels = config.num_labels
        self.model = ChiarModel(config)
        self.score = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    @can_return_tuple
    def forward(
        self, input_ids: Maybe = None, attention_mask: Maybe = None, labels: Maybe = None, **kwargs: Any
    ) -> ChiarOutput:
        """Arguments of ChiarModel, and `labels` (B,): class numbers, or targets when there is one label."""
        decoded = self.model(input_ids, attention_mask=attention_mask, return_dict=True, **kwargs)
        logits = self.score(pool_states(decoded.last_hidden_state, attention_mask, self.config.classifier_pool))
        loss = None
        if labels is not None:
            labels = labels.to(logits.device)
            one = self.num_labels == 1
            loss = F.mse_loss(logits[:, 0].float(), labels.float()) if one else F.cross_entropy(logits.float(), labels)
            if self.training and decoded.routing_loss is not None:
                loss = loss + decoded.routing_loss
        return to_output(decoded, loss, logits)


def pool_states(states_BTD: Tensor, mask_BT: Maybe, how: str) -> Tensor:
    """The state a row is classified by: that of its last real token, or the mean over its real tokens."""
    B, T, _ = states_BTD.shape
    if mask_BT is None:
        mask_BT = torch.ones(B, T, dtype=torch.long, device=states_BTD.device)
    if how == "mean":
        real_BT1 = mask_BT[..., None].to(states_BTD.dtype)
        return (states_BTD * real_BT1).sum(1) / real_BT1.sum(1).clamp_min(1)
    last_B = (mask_BT.long() * torch.arange(T, device=states_BTD.device)).argmax(1)
    return states_BTD[torch.arange(B, device=states_BTD.device), last_B]


def to_output(decoded: ChiarModelOutput, loss: Maybe, logits: Tensor) -> ChiarOutput:
    kept = decoded.past_key_values, decoded.hidden_states, decoded.attentions, decoded.routing, decoded.routing_loss
    return ChiarOutput(loss, logits, *kept)


AutoConfig.register("chiar", ChiarConfig, exist_ok=True)
AutoModel.register(ChiarConfig, ChiarModel, exist_ok=True)
AutoModelForCausalLM.register(ChiarConfig, ChiarForCausalLM, exist_ok=True)
AutoModelForSequenceClassification.register(ChiarConfig, ChiarForSequenceClassification, exist_ok=True)
