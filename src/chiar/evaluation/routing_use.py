"""What the routers and the gate of a model did, added up over batches."""

from typing import Any

import torch
from torch import Tensor

from chiar.evaluation.report import LayerUse, RoutingUse
from chiar.model.trace import RoutingTrace


class RoutingTally:
    """Counts stay on the device until the end: reading one would wait for the batch."""

    def __init__(self, config: Any, device: torch.device) -> None:
        self.config = config
        self.tokens = torch.zeros((), dtype=torch.int64, device=device)
        self.gate = torch.zeros((), dtype=torch.float64, device=device)
        self.counts_LK = torch.zeros(len(config.routed_layers), len(config.operators), dtype=torch.int64, device=device)

    def add(self, trace: RoutingTrace, counted_BT: Tensor) -> None:
        """Adds the tokens where `counted_BT` holds."""
        self.tokens += counted_BT.sum()
        for counts_K, layer in zip(self.counts_LK, self.config.routed_layers, strict=True):
            chosen = trace.layers[layer].choice_BT[counted_BT]
            counts_K += torch.bincount(chosen, minlength=len(counts_K))
        gate_BT = trace.layers[0].gate_BT
        if gate_BT is not None:
            self.gate += gate_BT[counted_BT].double().sum()

    def use(self) -> RoutingUse:
        config, tokens = self.config, int(self.tokens)
        layers = [
            LayerUse(layer, {name: count / tokens for name, count in zip(config.operators, counts, strict=True)})
            for layer, counts in zip(config.routed_layers, self.counts_LK.tolist(), strict=True)
        ]
        if not config.meta_router:
            return RoutingUse(layers, None, None)
        return RoutingUse(layers, float(self.gate) / tokens, config.gate_pool)
