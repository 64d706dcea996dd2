"""Routers of a dark stack that are on trial: `chiar --plugin research/leads.py study run leads …`."""

from torch import Tensor

from chiar.config import ChiarConfig
from chiar.layers.context import Maybe, TokenContext
from chiar.layers.routers import EntropyRouter, Route
from chiar.registry import ROUTERS, RouterKind


class Rise(EntropyRouter):
    """Dark is where H_t − λ · H_{t−1} is high: where uncertainty begins, rather than where it lasts."""

    def __init__(self, config: ChiarConfig, layer: int, before: float) -> None:
        super().__init__(config, layer)
        self.before = before

    def forward(self, x_BTD: Tensor, entropy_BT: Maybe, context: TokenContext, forced_BT: Maybe) -> Route:
        assert entropy_BT is not None
        last_BT = context.past("entropy", entropy_BT, 1)[..., 0]
        return super().forward(x_BTD, entropy_BT - self.before * last_BT, context, forced_BT)


for name, before in (("rise", 1.0), ("half_rise", 0.5)):
    ROUTERS[name] = RouterKind(
        lambda config, layer, before=before: Rise(config, layer, before),
        reads_prediction=True,
        can_follow=True,
        score="rise of the predictive entropy",
        of_layers=False,
    )
