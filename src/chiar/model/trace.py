"""Routing as data: where each layer sent each token."""

import json
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from chiar.config_checks import STACK_OPERATORS
from chiar.errors import errors_as
from chiar.layers.block import Block, LayerOutput
from chiar.layers.context import TokenContext
from chiar.layers.routers import EntropyRouter, Route, one_hot
from chiar.registry import RouterKind

FORMAT = "chiar-routing-trace/1"


@dataclass
class LayerTrace:
    """One layer's decisions for B×T tokens over K operators."""

    index: int
    kind: str
    operators: list[str]
    choice_BT: Tensor  # index into `operators`
    weights_BTK: Tensor  # what each operator's output was multiplied by (one-hot unless routing is soft)
    entropy_BT: Tensor | None = None  # H of the layer's input; of a dark stack see `trace_stack`
    probabilities_BTK: Tensor | None = None  # the learned router's softmax
    gate_BT: Tensor | None = None  # the MetaRouter's g (layer 1 only)
    thresholds: list[float] | None = None
    entropy_name: str = "spectral entropy"  # which H


def trace_layer(index: int, layer: nn.Module, output: LayerOutput, context: TokenContext) -> LayerTrace:
    """The trace of `layer`. A layer without a router sends every token to its one operator."""
    assert isinstance(layer, Block)
    route, gate_BT1, thresholds = output.route, output.gate_BT1, None
    if route is None:
        choice_BT = torch.zeros_like(context.positions_BT)
        route = Route(choice_BT, one_hot(choice_BT, 1))
    if isinstance(layer.router, EntropyRouter):
        followed = context.threshold if layer.router.follows else None
        thresholds = list(layer.router.values) if followed is None else [float(followed)]
    optional = (output.entropy_BT, route.probabilities_BTK, None if gate_BT1 is None else gate_BT1[..., 0])
    entropy_BT, probabilities_BTK, gate_BT = (value if value is None else value.detach() for value in optional)
    chosen = (list(layer.operators), route.choice_BT, route.weights_BTK.detach())
    return LayerTrace(index, layer.kind, *chosen, entropy_BT, probabilities_BTK, gate_BT, thresholds)


def trace_stack(trace: LayerTrace, output: LayerOutput, context: TokenContext, router: RouterKind) -> LayerTrace:
    """The trace shared by all layers of a dark stack: light tokens got the carry, dark ones passed the stack. H is the
    score that was compared with τ, or else what the router read, or else the early head's."""
    route = output.route
    assert route is not None
    p_BTK = None if route.probabilities_BTK is None else route.probabilities_BTK.detach()
    entropy_BT, thresholds = output.entropy_BT, None
    name = router.score or ("spectral entropy" if router.reads_entropy else "predictive entropy")
    if router.score:
        assert route.score_BT is not None
        entropy_BT = route.score_BT.detach()
        thresholds = None if context.threshold is None else [float(context.threshold)]
    chosen = list(STACK_OPERATORS), route.choice_BT, route.weights_BTK.detach()
    return LayerTrace(trace.index, trace.kind, *chosen, entropy_BT, p_BTK, None, thresholds, name)


@dataclass
class RoutingTrace:
    """All layers of one forward pass."""

    layers: list[LayerTrace]
    real_BT: Tensor  # False marks padding
    token_ids_BT: Tensor | None = None
    gate_pool: str | None = None

    @property
    def routed_layers(self) -> list[int]:
        """Layers that routed tokens. A dark stack counts once, as its first layer."""
        return [part[0] for part in self.parts if self.layers[part[0]].kind in ("routed", "dark")]

    @property
    def parts(self) -> list[list[int]]:
        """Layers in groups that share a route: each dark stack, and every other layer by itself."""
        groups: list[list[int]] = []
        for layer in self.layers:
            if layer.kind == "dark" and groups and self.layers[groups[-1][0]].kind == "dark":
                groups[-1].append(layer.index)
            else:
                groups.append([layer.index])
        return groups

    @property
    def coloured_by(self) -> LayerTrace | None:
        """The layer whose H colours the text: the first of a dark stack with a known H, if any."""
        known = (layer for layer in self.layers if layer.kind == "dark" and layer.entropy_BT is not None)
        return next(known, None)

    def operator_use(self, layer: int) -> dict[str, float]:
        """The fraction of real tokens each operator of `layer` gets."""
        chosen = self.layers[layer].choice_BT[self.real_BT]
        return {name: float((chosen == k).float().mean()) for k, name in enumerate(self.layers[layer].operators)}

    def attention_fraction(self, layer: int) -> float:
        """The fraction f of real tokens layer `layer` sends to attention."""
        return self.operator_use(layer).get("attention", 0.0)

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT, **asdict(self)}, default=Tensor.tolist, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> "RoutingTrace":
        def tensors(record: dict[str, Any]) -> dict[str, Any]:
            is_tensor = {key: key.endswith(("_BT", "_BTK")) and value is not None for key, value in record.items()}
            return {key: torch.tensor(value) if is_tensor[key] else value for key, value in record.items()}

        with errors_as("this is not a routing trace, or damaged", TypeError, ValueError, KeyError, AttributeError):
            data = json.loads(text)
            if data.pop("format") != FORMAT:
                raise ValueError(f"it does not say format {FORMAT!r}")
            return cls(**tensors(data) | {"layers": [LayerTrace(**tensors(layer)) for layer in data["layers"]]})
