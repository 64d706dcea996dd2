"""What a route is worth: the change of the loss when one token of one layer takes the other operator.

All other routes stay as they were, in every layer, so that nothing but this one choice changes. A flipped token changes
its own prediction and, as a key of later layers, those of later tokens: the change is summed over all of them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from chiar.nulltest.statistics import correlation, mean_and_error, ranks

LIGHT, DARK = "spectral", "attention"


@dataclass(frozen=True)
class Flip:
    layer: int
    row: int
    position: int
    entropy: float
    was_dark: bool
    own: float
    """Change of the loss of this token's own prediction, nats: flipped − as routed."""
    later: float
    """Change summed over the predictions of later tokens of the row."""

    @property
    def change(self) -> float:
        return self.own + self.later

    @property
    def benefit(self) -> float:
        """Loss with the filter − loss with attention, whichever of them was flipped to."""
        return self.change if self.was_dark else -self.change


def token_losses(model: Any, states_BTD: Tensor, targets_BT: Tensor, first_B: Tensor) -> list[Tensor]:
    """The losses of each row from position `first` on, in float64."""
    losses = []
    for states_TD, targets_T, first in zip(states_BTD, targets_BT, first_B.tolist(), strict=True):
        logits = model.lm_head(states_TD[first:]).float()
        losses.append(F.cross_entropy(logits, targets_T[first:], reduction="none").double().cpu())
    return losses


def pick_positions(light_BT: Tensor, wants_light_B: Tensor, generator: torch.Generator) -> Tensor:
    """One random token of each row on the wanted path, or on the other where the row has none."""
    wanted_BT = light_BT == wants_light_B[:, None]
    wanted_BT |= ~wanted_BT.any(1, keepdim=True)
    return torch.multinomial(wanted_BT.double(), 1, generator=generator)[:, 0]


@torch.no_grad()
def flip_routes(
    model: Any,
    read: Callable[[np.ndarray], np.ndarray],
    rows: int,
    flips: int,
    batch_size: int,
    seed: int,
    advance: Callable[[int], None] = lambda flips: None,
) -> list[Flip]:
    """`flips` flips a routed layer, light and dark tokens by turns. `read` gives the ids of rows, one more than is fed.

    One token a row is flipped in a pass; rows are gone through in a random order, again where there are few.
    """
    config, generator = model.config, torch.Generator().manual_seed(seed)
    light, dark = config.operators.index(LIGHT), config.operators.index(DARK)
    rounds = -(-flips // rows)
    order = torch.cat([torch.randperm(rows, generator=generator) for _ in range(rounds)])[:flips]
    found: list[Flip] = []
    for number, chosen_B in enumerate(order.split(batch_size)):
        ids = torch.from_numpy(read(chosen_B.numpy())).to(model.device)
        inputs_BT, targets_BT = ids[:, :-1], ids[:, 1:]
        trace = model.model(inputs_BT, output_routing=True).routing
        routes = {layer: trace.layers[layer].choice_BT for layer in config.routed_layers}
        as_routed = model.model(inputs_BT, forced_routes=routes).last_hidden_state
        each_B = torch.arange(len(chosen_B))
        plain = token_losses(model, as_routed, targets_BT, torch.zeros_like(each_B))
        for nth, (layer, choice_BT) in enumerate(routes.items()):
            wants_light_B = (each_B + number + nth) % 2 == 0
            position_B = pick_positions((choice_BT != dark).cpu(), wants_light_B, generator)
            where = each_B.to(model.device), position_B.to(model.device)
            was_dark_B = choice_BT[where] == dark
            changed_BT = choice_BT.clone()
            changed_BT[where] = torch.where(was_dark_B, light, dark)
            states_BTD = model.model(inputs_BT, forced_routes={**routes, layer: changed_BT}).last_hidden_state
            losses = token_losses(model, states_BTD, targets_BT, position_B)
            entropy_B = trace.layers[layer].entropy_BT[where]
            for b, position in enumerate(position_B.tolist()):
                change = losses[b] - plain[b][position:]
                found.append(
                    Flip(
                        layer=layer,
                        row=int(chosen_B[b]),
                        position=position,
                        entropy=float(entropy_B[b]),
                        was_dark=bool(was_dark_B[b]),
                        own=float(change[0]),
                        later=float(change[1:].sum()),
                    )
                )
            advance(len(chosen_B))
    return found


@dataclass(frozen=True)
class Mean:
    flips: int
    mean: float | None
    error: float | None
    """Standard error; flips in one row count as one sample."""

    @classmethod
    def of(cls, values: list[float], rows: list[int]) -> "Mean":
        if not values:
            return cls(0, None, None)
        mean, error = mean_and_error(torch.tensor(values, dtype=torch.float64), torch.tensor(rows))
        return cls(len(values), mean, None if error != error else error)


@dataclass(frozen=True)
class Worth:
    """What the flips of one layer, or of all, say; nats summed over the token's and later predictions."""

    to_attention: Mean
    """Change of the loss when a light token is sent to attention."""
    to_filter: Mean
    """Change of the loss when a dark token is sent to the filter."""
    own_to_attention: Mean
    """The part of it in the token's own prediction."""
    own_to_filter: Mean
    benefit: list[Mean]
    """Of attention over the filter, by bins of rising H."""
    pearson: float | None
    """Correlation of H (over all layers: its rank in its layer) with attention's benefit."""
    spearman: float | None
    correlation_error: float | None
    """Standard error of either, were they 0."""


def summarise(flips: list[Flip], bins: list[int], signal: list[float], count: int) -> Worth:
    """`bins` and `signal` give each flip's entropy bin and the H (or rank) it is correlated by."""

    def mean(of: str, keep: list[bool]) -> Mean:
        kept = [flip for flip, wanted in zip(flips, keep, strict=True) if wanted]
        return Mean.of([getattr(flip, of) for flip in kept], [flip.row for flip in kept])

    was_dark = [flip.was_dark for flip in flips]
    was_light = [not dark for dark in was_dark]
    h_N = torch.tensor(signal, dtype=torch.float64)
    benefit_N = torch.tensor([flip.benefit for flip in flips], dtype=torch.float64)
    return Worth(
        to_attention=mean("change", was_light),
        to_filter=mean("change", was_dark),
        own_to_attention=mean("own", was_light),
        own_to_filter=mean("own", was_dark),
        benefit=[mean("benefit", [number == wanted for number in bins]) for wanted in range(count)],
        pearson=correlation(h_N, benefit_N) if len(flips) > 2 else None,
        spearman=correlation(ranks(h_N), ranks(benefit_N)) if len(flips) > 2 else None,
        correlation_error=(len(flips) - 1) ** -0.5 if len(flips) > 2 else None,
    )
