"""Routing as data: what each layer did with each token."""

import json
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from chiar.errors import InputError

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


@dataclass
class RoutingTrace:
    """All layers of one forward pass."""

    layers: list[LayerTrace]
    real_BT: Tensor
    """False marks padding."""
    token_ids_BT: Tensor | None = None
    gate_pool: str | None = None
    routed_layers: list[int] = field(default_factory=list)

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
        if data.get("format") != FORMAT:
            raise InputError(f"this is not a routing trace: format {data.get('format')!r}, expected {FORMAT!r}.")

        def tensors(record: dict[str, Any]) -> dict[str, Any]:
            suffixes = ("_BT", "_BTK")
            return {
                key: torch.tensor(value) if key.endswith(suffixes) and value is not None else value
                for key, value in record.items()
            }

        fields = tensors({key: value for key, value in data.items() if key != "format"})
        fields["layers"] = [LayerTrace(**tensors(layer)) for layer in data["layers"]]
        return cls(**fields)

    @classmethod
    def from_json(cls, text: str) -> "RoutingTrace":
        return cls.from_dict(json.loads(text))
