"""Routers of a dark stack that are on trial: `chiar --plugin research/leads.py study run leads …`."""

import torch
from torch import Tensor

from chiar.config import ChiarConfig
from chiar.layers.context import Maybe, TokenContext
from chiar.layers.routers import EntropyRouter, Route
from chiar.registry import ROUTERS, RouterKind

LEAST, MOST = 0.05, 0.6  # f that a pass of `dial` draws from


class Rise(EntropyRouter):
    """Dark is where H_t − λ · H_{t−1} is high: where uncertainty begins, rather than where it lasts."""

    def __init__(self, config: ChiarConfig, layer: int, before: float) -> None:
        super().__init__(config, layer)
        self.before = before

    def forward(self, x_BTD: Tensor, entropy_BT: Maybe, context: TokenContext, forced_BT: Maybe) -> Route:
        assert entropy_BT is not None
        rise_BT = entropy_BT - self.before * context.past("entropy", entropy_BT, 1)[..., 0]
        chosen_BT = self.drawn(rise_BT, context) if forced_BT is None else forced_BT
        return super().forward(x_BTD, rise_BT, context, chosen_BT)

    def drawn(self, score_BT: Tensor, context: TokenContext) -> Maybe:
        """The choice, where it is not a cut at τ."""
        return None


class Dial(Rise):
    """Every pass in training has another f. Evaluation cuts at the τ of the configuration's f, or a calibrated one."""

    def drawn(self, score_BT: Tensor, context: TokenContext) -> Maybe:
        if context.share is None:
            return None
        sorted_N = score_BT.detach().flatten().sort().values
        fraction = LEAST + (MOST - LEAST) * torch.rand((), device=score_BT.device)
        place = (len(sorted_N) * (1 - fraction)).long().clamp(0, len(sorted_N) - 1)
        return (score_BT > sorted_N.gather(0, place[None])).long()


def add(name: str, kind: type[Rise], before: float, room: float = 1.0) -> None:
    ROUTERS[name] = RouterKind(
        lambda config, layer: kind(config, layer, before),
        reads_prediction=True,
        can_follow=True,
        score="rise of the predictive entropy" if before else "predictive entropy",
        of_layers=False,
        room=room,
    )


add("rise", Rise, 1.0)
add("half_rise", Rise, 0.5)
add("dial", Dial, 0.0, room=MOST / 0.2)
add("rise_dial", Dial, 1.0, room=MOST / 0.2)
