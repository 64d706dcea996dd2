"""What the models return."""

from dataclasses import dataclass

from torch import Tensor
from transformers.utils import ModelOutput

from chiar.layers.routers import Route
from chiar.model.cache import ChiarCache
from chiar.model.trace import RoutingTrace


@dataclass
class ChiarModelOutput(ModelOutput):
    """What the decoder returns."""

    last_hidden_state: Tensor | None = None
    past_key_values: ChiarCache | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor | None, ...] | None = None
    routing: RoutingTrace | None = None
    routing_loss: Tensor | None = None
    routes: tuple[Route, ...] | None = None
    """The routed layers' decisions as they were used, with their gradients."""
    gate_BT1: Tensor | None = None
    """The MetaRouter's g."""


@dataclass
class ChiarOutput(ModelOutput):
    """What the language model and the classifier return."""

    loss: Tensor | None = None
    logits: Tensor | None = None
    past_key_values: ChiarCache | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor | None, ...] | None = None
    routing: RoutingTrace | None = None
    routing_loss: Tensor | None = None
