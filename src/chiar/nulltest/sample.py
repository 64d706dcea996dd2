"""The tokens looked at, and the states every layer sees of them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from chiar.data.shards import Split
from chiar.errors import InputError


@dataclass(frozen=True)
class Rows:
    """Rows of text spread evenly over a split. One id more than is fed belongs to each, as the last one's target."""

    split: Split
    starts: np.ndarray
    length: int

    @classmethod
    def spread(cls, split: Split, tokens: int, length: int) -> "Rows":
        available = (split.tokens - 1) // length
        rows = min(tokens // length, available)
        if rows < 2:
            few = f"--tokens {tokens}" if available >= 2 else f"split {split.name!r}, which has {split.tokens} tokens,"
            raise InputError(f"{few} gives fewer than two rows of {length}: give more tokens or a smaller --length.")
        return cls(split, np.arange(rows) * available // rows * length, length)

    def read(self, rows: np.ndarray) -> np.ndarray:
        return self.split.rows(self.starts[rows], self.length + 1)

    @property
    def tokens(self) -> int:
        return len(self.starts) * self.length


@dataclass(frozen=True)
class LayerSample:
    """What one layer saw of N tokens, row after row."""

    layer: int
    kind: str
    operators: list[str]
    states_ND: Tensor
    """Its input, fp32, on the CPU."""
    choice_N: Tensor
    """Index into `operators`."""
    thresholds: list[float] | None

    @property
    def dark_N(self) -> Tensor | None:
        """Which tokens took attention; None where the layer has no choice."""
        if self.kind != "routed" or "attention" not in self.operators:
            return None
        return self.choice_N == self.operators.index("attention")


@torch.no_grad()
def collect(
    model: Any, rows: Rows, batch_size: int, advance: Callable[[int], None] = lambda tokens: None
) -> list[LayerSample]:
    """Run the model over the rows. Takes 4 bytes × tokens × width × layers of memory."""
    states: list[list[Tensor]] = [[] for _ in model.model.layers]
    choices: list[list[Tensor]] = [[] for _ in states]
    for part in np.split(np.arange(len(rows.starts)), np.arange(batch_size, len(rows.starts), batch_size)):
        ids_BT = torch.from_numpy(rows.read(part)[:, :-1]).to(model.device)
        output = model.model(ids_BT, output_hidden_states=True, output_routing=True)
        for layer, trace in enumerate(output.routing.layers):
            states[layer].append(output.hidden_states[layer].flatten(0, 1).float().cpu())
            choices[layer].append(trace.choice_BT.flatten().cpu())
        advance(ids_BT.numel())
    samples = []
    for layer, trace in enumerate(output.routing.layers):
        states_ND = torch.cat(states[layer])
        states[layer].clear()
        if not bool(states_ND.isfinite().all()):
            raise InputError(f"layer {layer + 1} sees states that are not finite: the model's weights are damaged.")
        choice_N = torch.cat(choices[layer])
        samples.append(LayerSample(layer, trace.kind, trace.operators, states_ND, choice_N, trace.thresholds))
    return samples
