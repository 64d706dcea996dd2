"""A model's inputs, checked and turned into the context that all layers share; and its outputs."""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.utils import ModelOutput

from chiar.config import ChiarConfig
from chiar.errors import InputError
from chiar.kernels.transform import Transform
from chiar.layers.attention import rotary_tables
from chiar.layers.context import Maybe, TokenContext
from chiar.layers.dark import StackOutput
from chiar.layers.routers import Route
from chiar.model.cache import ChiarCache
from chiar.model.trace import RoutingTrace

Routes = dict[int, Tensor]  # by layer, (B, T): the number of each token's operator


def check_tokens(input_ids: Maybe, inputs_embeds: Maybe, vocabulary: int) -> Tensor:
    """Return the one that is given. InputError unless exactly one is, as rows of tokens inside the vocabulary."""
    given = input_ids if inputs_embeds is None else inputs_embeds
    if given is None or (input_ids is not None and inputs_embeds is not None):
        raise InputError("give exactly one of input_ids and inputs_embeds.")
    if given.ndim != (2 if inputs_embeds is None else 3):
        raise InputError(f"the input has shape {tuple(given.shape)}: expected rows of tokens, (B, T) or (B, T, D).")
    if given.numel() == 0:
        raise InputError(f"the input is empty: shape {tuple(given.shape)}.")
    # On a GPU the check would wait for the device, and the embedding's own assertion stops the kernel anyway.
    if input_ids is not None and input_ids.device.type == "cpu" and not torch.compiler.is_compiling():
        low, high = int(input_ids.min()), int(input_ids.max())
        if low < 0 or high >= vocabulary:
            bad = f"token id {low if low < 0 else high} is outside the vocabulary 0..{vocabulary - 1}"
            raise InputError(f"{bad}: was the text encoded with this model's tokenizer?")
    return given


def check_routes(routes: Routes | None, config: ChiarConfig, shape: tuple[int, ...]) -> None:
    """Raise InputError unless forced routes name routed layers and give an operator for every token."""
    assert config.operators is not None
    if routes and config.routing == "soft":
        raise InputError("routes cannot be forced under soft routing: it blends all operators.")
    for layer, choice_BT in (routes or {}).items():
        if layer not in config.routed_layers:
            raise InputError(f"layer {layer} is not routed: routes can be forced in {config.routed_layers}.")
        if tuple(choice_BT.shape) != shape or choice_BT.dtype != torch.int64:
            got = f"{choice_BT.dtype} {tuple(choice_BT.shape)}"
            raise InputError(f"forced routes of layer {layer} are {got}, expected int64 {shape}: one per token.")
        on_cpu = choice_BT.device.type == "cpu" and not torch.compiler.is_compiling()
        if on_cpu and not 0 <= int(choice_BT.min()) <= int(choice_BT.max()) < len(config.operators):
            raise InputError(f"forced routes of layer {layer} must be below {len(config.operators)} operators.")


def place_tokens(
    config: ChiarConfig, new_BT: Tensor, attention_mask: Maybe, position_ids: Maybe, past: int
) -> tuple[Tensor, Maybe]:
    """Positions of T new tokens after `past` cached ones, and which of them are real (None: all)."""
    B, T = new_BT.shape[:2]
    real_BS = None
    if attention_mask is not None:
        if attention_mask.shape != (B, past + T):
            got = tuple(attention_mask.shape)
            raise InputError(f"attention_mask has shape {got}, expected {(B, past + T)}: cached and new tokens.")
        real_BS = attention_mask.bool()
    if position_ids is not None:
        positions_BT = position_ids.expand(B, T)
    elif real_BS is not None:
        positions_BT = (real_BS.long().cumsum(1) - 1).clamp_min(0)[:, past:]
    else:
        positions_BT = torch.arange(past, past + T, device=new_BT.device).expand(B, T)
    if config.positions == "learned":
        # Padding takes no position, but counting real tokens means reading values.
        looked_at = positions_BT.device.type == "cpu" and not torch.compiler.is_compiling()
        needed = int(positions_BT.max()) + 1 if looked_at else past + T
        if needed > config.max_position_embeddings:
            most = config.max_position_embeddings
            raise InputError(f"{needed} tokens, but the model has {most} learned positions: shorten the text.")
    return positions_BT, None if real_BS is None else real_BS[:, past:]


def make_context(
    config: ChiarConfig, transform: Transform, new_BT: Tensor, ids_BT: Maybe, mask_BS: Maybe, place_BT: Maybe, past: int
) -> TokenContext:
    """Positions, padding and RoPE's angles for T new tokens after `past` cached ones."""
    positions_BT, real_BT = place_tokens(config, new_BT, mask_BS, place_BT, past)
    alike = place_BT is None and mask_BS is None  # then all rows share one row of angles
    rope = None
    if config.positions == "rope":
        rope = rotary_tables(positions_BT[:1] if alike else positions_BT, config.head_size)
    return TokenContext(transform, positions_BT, real_BT, ids_BT, rope, config._attn_implementation or "sdpa")


@dataclass
class ChiarModelOutput(ModelOutput):
    """Output of the decoder."""

    last_hidden_state: Maybe = None
    past_key_values: ChiarCache | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Maybe, ...] | None = None
    routing: RoutingTrace | None = None
    routing_loss: Maybe = None
    routes: tuple[Route, ...] | None = None  # the routed layers' decisions, with their gradients
    gate_BT1: Maybe = None  # the MetaRouter's g
    stacks: tuple[StackOutput, ...] | None = None  # of the dark stacks, likewise


@dataclass
class ChiarOutput(ModelOutput):
    """Output of the language model and the classifier."""

    loss: Maybe = None
    logits: Maybe = None
    past_key_values: ChiarCache | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Maybe, ...] | None = None
    routing: RoutingTrace | None = None
    routing_loss: Maybe = None
