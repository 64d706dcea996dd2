"""Routing as data: what each layer did with each token."""

import json
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from chiar.errors import InputError, first_line
from chiar.layers.block import Block, LayerOutput
from chiar.layers.context import TokenContext
from chiar.layers.routers import EntropyRouter, Route, one_hot

FORMAT = "chiar-routing-trace/1"


@dataclass
class LayerTrace:
    """One layer's decisions for B×T tokens over K operators."""

    index: int
    kind: str
    operators: list[str]
    choice_BT: Tensor
    """Index into `operators`."""
    weights_BTK: Tensor
    """What each operator's output was multiplied by (one-hot unless routing is soft)."""
    entropy_BT: Tensor | None = None
    """H of the layer's input."""
    probabilities_BTK: Tensor | None = None
    """The learned router's softmax."""
    gate_BT: Tensor | None = None
    """The MetaRouter's g (layer 1 only)."""
    thresholds: list[float] | None = None


def trace_layer(index: int, layer: nn.Module, output: LayerOutput, context: TokenContext) -> LayerTrace:
    """What `layer` did; a layer without a router sends every token to its one operator."""
    assert isinstance(layer, Block)
    route, entropy_BT, gate_BT1 = output.route, output.entropy_BT, output.gate_BT1
    if route is None:
        choice_BT = torch.zeros_like(context.positions_BT)
        route = Route(choice_BT, one_hot(choice_BT, 1))
    return LayerTrace(
        index=index,
        kind=layer.kind,
        operators=list(layer.operators),
        choice_BT=route.choice_BT,
        weights_BTK=route.weights_BTK.detach(),
        entropy_BT=None if entropy_BT is None else entropy_BT.detach(),
        probabilities_BTK=None if route.probabilities_BTK is None else route.probabilities_BTK.detach(),
        gate_BT=None if gate_BT1 is None else gate_BT1.detach()[..., 0],
        thresholds=thresholds_of(layer, context),
    )


def thresholds_of(layer: Block, context: TokenContext) -> list[float] | None:
    """The entropies a layer's router cuts at."""
    if not isinstance(layer.router, EntropyRouter):
        return None
    if layer.router.follows:
        assert context.threshold is not None
        return [float(context.threshold)]
    return list(layer.router.values)


@dataclass
class RoutingTrace:
    """All layers of one forward pass."""

    layers: list[LayerTrace]
    real_BT: Tensor
    """False marks padding."""
    token_ids_BT: Tensor | None = None
    gate_pool: str | None = None

    @property
    def routed_layers(self) -> list[int]:
        return [layer.index for layer in self.layers if layer.kind == "routed"]

    def attention_fraction(self, layer: int) -> float:
        """The fraction f of real tokens layer `layer` sends to attention."""
        trace = self.layers[layer]
        if "attention" not in trace.operators:
            return 0.0
        dark_BT = trace.choice_BT == trace.operators.index("attention")
        return float(dark_BT[self.real_BT].float().mean())

    def operator_use(self, layer: int) -> dict[str, float]:
        """The fraction of real tokens each operator of `layer` gets."""
        chosen = self.layers[layer].choice_BT[self.real_BT]
        return {name: float((chosen == k).float().mean()) for k, name in enumerate(self.layers[layer].operators)}

    def to_dict(self) -> dict[str, Any]:
        def plain(value: Any) -> Any:
            if isinstance(value, Tensor):
                return value.detach().cpu().tolist()
            if isinstance(value, dict):
                return {key: plain(item) for key, item in value.items()}
            return [plain(item) for item in value] if isinstance(value, list) else value

        return {"format": FORMAT, **plain(asdict(self))}

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), allow_nan=False)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "RoutingTrace":
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise InputError(f"this is not a routing trace: it does not say format {FORMAT!r}.")
        if not isinstance(data.get("layers"), list):
            raise InputError("this routing trace has no layers: it is incomplete.")

        def tensors(record: dict[str, Any]) -> dict[str, Any]:
            suffixes = ("_BT", "_BTK")
            return {
                key: torch.tensor(value) if key.endswith(suffixes) and value is not None else value
                for key, value in record.items()
            }

        try:
            fields = tensors({key: value for key, value in data.items() if key != "format"})
            fields["layers"] = [LayerTrace(**tensors(layer)) for layer in data["layers"]]
            return cls(**fields)
        except (TypeError, ValueError, AttributeError) as error:
            raise InputError(f"this routing trace is damaged: {first_line(error)}") from error

    @classmethod
    def from_json(cls, text: str) -> "RoutingTrace":
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise InputError(f"this is not a routing trace: it is not JSON ({error}).") from error
        return cls.from_dict(data)
