"""Routed layers that choose with an eye on each other, G in a row.

Where they take turns, each token has attention in exactly one of them: all tokens have the same depth, and a group is a
mixture of G blocks of which a token passes one. Where they go together, the first chooses for all: dark tokens are a
shorter text that passes the whole group, and light ones pass it by.
"""

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor


@dataclass
class Turn:
    """What is left to choose for one layer of a group that takes turns."""

    waiting_BT: Tensor | None
    """Tokens that had no attention in this group yet; None: all of them."""
    last: bool
    """Whoever still waits has it now."""

    def choice(self, choice_BT: Tensor) -> Tensor:
        """What becomes of a router's choice between light (0) and attention (1)."""
        if self.waiting_BT is None:
            return choice_BT
        return self.waiting_BT.long() if self.last else choice_BT * self.waiting_BT


class Groups:
    """Of one forward pass: what each layer is told of those before it."""

    def __init__(self, config: Any) -> None:
        self.group, self.turns = config.turns or config.together, bool(config.turns)
        self.place = {layer: n % self.group for n, layer in enumerate(config.routed_layers)} if self.group else {}
        self.waiting_BT: Tensor | None = None
        self.led: Any = None

    def context(self, layer: int, context: Any) -> Any:
        """One of the layer's own: a checkpointed layer reads it again later."""
        if layer not in self.place:
            return context
        place = self.place[layer]
        if self.turns:
            return replace(context, turn=Turn(self.waiting_BT if place else None, place == self.group - 1))
        return replace(context, led=self.led) if place else context

    def took(self, layer: int, route: Any) -> None:
        """Note the route a layer used, whose choice may have been forced."""
        if layer not in self.place:
            return
        first, light_BT = self.place[layer] == 0, route.choice_BT == 0
        self.waiting_BT = light_BT if first or self.waiting_BT is None else self.waiting_BT & light_BT
        self.led = route if first else self.led


def leads(config: Any, layer: int) -> bool:
    """Whether a routed layer chooses for itself."""
    return not config.together or config.routed_layers.index(layer) % config.together == 0


def counted_tokens(real_BT: Tensor | None, turn: Turn | None) -> Tensor | None:
    """Tokens a layer had something to choose for; None: all."""
    waiting_BT = None if turn is None else turn.waiting_BT
    if real_BT is None or waiting_BT is None:
        return waiting_BT if real_BT is None else real_BT
    return real_BT & waiting_BT


def shares(group: int, layers: int) -> list[float]:
    """Of the tokens that wait for a turn, how many each layer should take: all of a group's layers take as many. The
    last one takes who is left, and where it cuts says only how much its output weighs."""
    return [0.5 if n % group == group - 1 else 1 / (group - n % group) for n in range(layers)]
