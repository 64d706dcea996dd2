"""Routed layers that take turns: of every G of them each token has attention in exactly one.

Every token then has the same depth, and a group is a mixture of G blocks of which a token passes one.
"""

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor


@dataclass
class Turn:
    """What is left to choose for one layer of a group."""

    waiting_BT: Tensor | None
    """Tokens that had no attention in this group yet; None: all of them."""
    last: bool
    """Whoever still waits has it now."""

    def choice(self, choice_BT: Tensor) -> Tensor:
        """What becomes of a router's choice between light (0) and attention (1)."""
        if self.waiting_BT is None:
            return choice_BT
        return self.waiting_BT.long() if self.last else choice_BT * self.waiting_BT


class Turns:
    """Of one forward pass. `group` 0: the layers choose without each other."""

    def __init__(self, group: int, routed_layers: list[int]) -> None:
        self.group = group
        self.place = {layer: n % group for n, layer in enumerate(routed_layers)} if group else {}
        self.waiting_BT: Tensor | None = None

    def context(self, layer: int, context: Any) -> Any:
        """With what is left to choose: a context of its own, for a checkpointed layer reads it again later."""
        if layer not in self.place:
            return context
        place = self.place[layer]
        return replace(context, turn=Turn(self.waiting_BT if place else None, place == self.group - 1))

    def took(self, layer: int, choice_BT: Tensor) -> None:
        """Note the choice a layer used, which may have been forced."""
        if layer in self.place:
            light_BT = choice_BT == 0
            self.waiting_BT = (
                light_BT if self.waiting_BT is None or not self.place[layer] else self.waiting_BT & light_BT
            )


def counted_tokens(real_BT: Tensor | None, turn: Turn | None) -> Tensor | None:
    """Tokens a layer had something to choose for; None: all."""
    waiting_BT = None if turn is None else turn.waiting_BT
    if real_BT is None or waiting_BT is None:
        return waiting_BT if real_BT is None else real_BT
    return real_BT & waiting_BT


def shares(group: int, layers: int) -> list[float]:
    """Of the tokens that wait, how many each layer should take: all of a group's layers take as many. The last one
    takes who is left, and where it cuts says only how much its output weighs."""
    return [0.5 if n % group == group - 1 else 1 / (group - n % group) for n in range(layers)]
