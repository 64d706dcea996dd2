"""Samples from a model: the input states of every layer on some text, and the loss after a route is flipped."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from chiar.data.shards import Split
from chiar.errors import InputError
from chiar.model.modeling import ChiarForCausalLM

DARK = "attention"
LIGHT = 0
"""Index of the light operator, always the first."""


@dataclass(frozen=True)
class Rows:
    """Rows of text spread evenly over a split; each is read with one more id, the last target."""

    split: Split
    starts: np.ndarray
    length: int

    @classmethod
    def spread(cls, split: Split, tokens: int, length: int) -> "Rows":
        available = (split.tokens - 1) // length
        rows = min(tokens // length, available)
        if rows < 2:
            few = f"--tokens {tokens}" if available >= 2 else f"split {split.name!r}, which has {split.tokens} tokens,"
            raise InputError(f"{few} gives fewer than two rows of {length}: raise --tokens or lower --length.")
        return cls(split, np.arange(rows) * available // rows * length, length)

    def read(self, rows: np.ndarray) -> np.ndarray:
        return self.split.rows(self.starts[rows], self.length + 1)

    @property
    def tokens(self) -> int:
        return len(self.starts) * self.length


@dataclass(frozen=True)
class LayerSample:
    """The input and the routes of one layer for N tokens, row by row."""

    layer: int
    kind: str
    operators: list[str]
    states_ND: Tensor
    """The layer's input, fp32, on the CPU."""
    choice_N: np.ndarray
    """Index into `operators`."""
    thresholds: list[float] | None

    @property
    def dark_N(self) -> np.ndarray | None:
        """Which tokens took attention; None if the layer does not choose."""
        if self.kind != "routed" or DARK not in self.operators:
            return None
        return self.choice_N == self.operators.index(DARK)


@torch.no_grad()
def collect(model: ChiarForCausalLM, rows: Rows, batch: int) -> list[LayerSample]:
    """Run the model on the rows. Takes 4 bytes × tokens × width × layers of memory."""
    states: list[list[Tensor]] = [[] for _ in model.model.layers]
    choices: list[list[Tensor]] = [[] for _ in states]
    for part in np.split(np.arange(len(rows.starts)), np.arange(batch, len(rows.starts), batch)):
        ids_BT = torch.from_numpy(rows.read(part)[:, :-1]).to(model.device)
        output = model.model(ids_BT, output_hidden_states=True, output_routing=True)
        for layer, trace in enumerate(output.routing.layers):
            states[layer].append(output.hidden_states[layer].flatten(0, 1).float().cpu())
            choices[layer].append(trace.choice_BT.flatten().cpu())
    samples = []
    for layer, trace in enumerate(output.routing.layers):
        states_ND = torch.cat(states[layer])
        states[layer].clear()
        if not bool(states_ND.isfinite().all()):
            raise InputError(f"the input of layer {layer + 1} is not finite: the weights of the model are damaged.")
        choice_N = torch.cat(choices[layer]).numpy()
        samples.append(LayerSample(layer, trace.kind, trace.operators, states_ND, choice_N, trace.thresholds))
    return samples


@dataclass(frozen=True)
class Flip:
    """One token in one layer takes the other operator, all other routes fixed. As a key in later layers the token also
    changes the predictions of later tokens."""

    layer: int
    row: int
    position: int
    entropy: float
    was_dark: bool
    own: float
    """Change of the loss of this token's own prediction in nats: flipped − as routed."""
    later: float
    """Change summed over the predictions of later tokens in the row."""

    @property
    def change(self) -> float:
        return self.own + self.later

    @property
    def benefit(self) -> float:
        """Loss with the filter − loss with attention, for flips in either direction."""
        return self.change if self.was_dark else -self.change


def token_losses(model: ChiarForCausalLM, states_BTD: Tensor, targets_BT: Tensor, first_B: Tensor) -> list[Tensor]:
    """The losses of each row from position `first_B` on, in float64."""
    losses = []
    for states_TD, targets_T, first in zip(states_BTD, targets_BT, first_B.tolist(), strict=True):
        logits = model.lm_head(states_TD[first:]).float()
        losses.append(F.cross_entropy(logits, targets_T[first:], reduction="none").double().cpu())
    return losses


@torch.no_grad()
def flip_routes(
    model: ChiarForCausalLM, read: Callable[[np.ndarray], np.ndarray], rows: int, flips: int, batch: int, seed: int
) -> list[Flip]:
    """`flips` flips per routed layer, alternately of light and dark tokens. `read` returns rows of ids, one more each.

    A pass flips one token per row. Rows come in random order, repeatedly if there are fewer than `flips`.
    """
    config, generator = model.config, torch.Generator().manual_seed(seed)
    dark = config.operators.index(DARK)
    order = torch.cat([torch.randperm(rows, generator=generator) for _ in range(-(-flips // rows))])[:flips]
    done: list[Flip] = []
    for number, chosen_B in enumerate(order.split(batch)):
        ids = torch.from_numpy(read(chosen_B.numpy())).to(model.device)
        inputs_BT, targets_BT = ids[:, :-1], ids[:, 1:]
        trace = model.model(inputs_BT, output_routing=True).routing
        routes = {layer: trace.layers[layer].choice_BT for layer in config.routed_layers}
        as_routed = model.model(inputs_BT, forced_routes=routes).last_hidden_state
        each_B = torch.arange(len(chosen_B))
        plain = token_losses(model, as_routed, targets_BT, torch.zeros_like(each_B))
        for nth, (layer, choice_BT) in enumerate(routes.items()):
            # A random token of each row on the wanted path, or on the other if the row has none there.
            wanted_BT = (choice_BT != dark).cpu() == ((each_B + number + nth) % 2 == 0)[:, None]
            wanted_BT |= ~wanted_BT.any(1, keepdim=True)
            position_B = torch.multinomial(wanted_BT.double(), 1, generator=generator)[:, 0]
            where = each_B.to(model.device), position_B.to(model.device)
            was_dark_B = choice_BT[where] == dark
            changed_BT = choice_BT.clone()
            changed_BT[where] = torch.where(was_dark_B, LIGHT, dark)
            states_BTD = model.model(inputs_BT, forced_routes={**routes, layer: changed_BT}).last_hidden_state
            losses = token_losses(model, states_BTD, targets_BT, position_B)
            entropies = trace.layers[layer].entropy_BT[where].tolist()
            for b, (position, was_dark) in enumerate(zip(position_B.tolist(), was_dark_B.tolist(), strict=True)):
                change = losses[b] - plain[b][position:]
                own, later = float(change[0]), float(change[1:].sum())
                done.append(Flip(layer, int(chosen_B[b]), position, entropies[b], was_dark, own, later))
    return done
