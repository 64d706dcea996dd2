"""Routers moved while one looks at them: every threshold shifted alike, or a share of the text sent to attention.

Each router is run with a moved parameter of its own, so weights and choices are what such a model would compute.
Nothing stays moved after a pass.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from chiar.config import ChiarConfig
from chiar.errors import InputError, unknown_name
from chiar.layers.context import TokenContext
from chiar.layers.routers import EntropyRouter, LearnedRouter, RandomRouter, Route
from chiar.model.trace import RoutingTrace
from chiar.registry import ROUTERS

SHIFT, SHARE = KINDS = ("shift", "share")


def ways_to_steer(config: ChiarConfig) -> list[str]:
    """What can be moved in models of this configuration; nothing where no token's route depends on a number."""
    if why_not(config) is not None:
        return []
    return [SHARE] if config.router == "random" else [SHIFT, SHARE]


def why_not(config: ChiarConfig) -> str | None:
    """What to tell somebody who looks for a slider."""
    if not config.routed_layers:
        return "No layer of this model routes: every token takes the same path, so there is nothing to move."
    if config.router == "static":
        return "A static router: whole layers decide, whatever the token, so there is no threshold to move."
    if config.router in ROUTERS:
        return f"{config.router}, a router of your own: the page knows no number of it that could be moved."
    return None


@dataclass
class Steering:
    """`shift` is added to every cut. `share` puts each layer's cut where that share of the tokens of the first pass
    lies above it, and leaves it there, in `cuts`: tokens written later are compared with the same numbers."""

    kind: str
    value: float
    cuts: dict[int, float] = field(default_factory=dict)

    def check(self, config: ChiarConfig) -> None:
        ways = ways_to_steer(config)
        if not ways:
            raise InputError(str(why_not(config)))
        if self.kind not in ways:
            raise unknown_name("way to steer this model", self.kind, ways)
        if self.kind == SHARE and not 0.0 <= self.value <= 1.0:
            raise InputError(f"a share lies between 0 and 1, got {self.value:g}.")

    def moved(self, own: list[float], cut: float) -> list[float]:
        """All cuts of a layer, given the one below attention: a shift moves both of two, a share only pushes one."""
        return [*(t + cut - own[-1] if self.kind == SHIFT else min(t, cut) for t in own[:-1]), cut]


class SteeredRouter(nn.Module):
    """Runs another router with its cut moved."""

    def __init__(self, router: nn.Module, steering: Steering, layer: int) -> None:
        super().__init__()
        self.router, self.steering, self.layer = router, steering, layer

    def forward(
        self, x_BTD: Tensor, entropy_BT: Tensor | None, context: TokenContext, forced_BT: Tensor | None
    ) -> Route:
        router, steering = self.router, self.steering
        given = x_BTD, entropy_BT, context, forced_BT
        if isinstance(router, RandomRouter):
            with changed(router, "fraction", steering.value):
                return router(*given)
        assert isinstance(router, EntropyRouter | LearnedRouter)
        if isinstance(router, EntropyRouter):
            assert entropy_BT is not None
            own, score_BT, ends = list(router.values), entropy_BT, (0.0, 1.0)
        else:
            assert entropy_BT is not None
            scores_BTK = router.scores(x_BTD, entropy_BT)
            own, score_BT, ends = [0.0], scores_BTK[..., -1] - scores_BTK[..., :-1].amax(-1), (-1e4, 1e4)
        threshold = context.threshold if router.follows else None
        own = own if threshold is None else [float(threshold)]
        if self.layer not in steering.cuts:
            found = own[-1] + steering.value if steering.kind == SHIFT else cut_at(score_BT, steering.value, ends)
            steering.cuts[self.layer] = found
        cut = steering.cuts[self.layer]
        if threshold is not None:
            near = replace(context, threshold=torch.full_like(threshold, cut))
            return router(x_BTD, entropy_BT, near, forced_BT)
        if isinstance(router, LearnedRouter):
            # A lower logit of attention is a higher cut of its lead.
            bias_K = router.score.bias.detach().clone()
            bias_K[-1] -= cut
            with changed(router.score, "bias", nn.Parameter(bias_K)):
                return router(*given)
        values = torch.tensor(steering.moved(own, cut), dtype=torch.float64, device=x_BTD.device)
        with changed(router, "thresholds", values):
            return router(*given)


def cut_at(score_BT: Tensor, share: float, ends: tuple[float, float]) -> float:
    """The number that `share` of the scores, rounded to whole tokens, are above; `ends` are below and above any."""
    ordered = score_BT.double().flatten().sort().values
    light = len(ordered) - round(share * len(ordered))
    if light in (0, len(ordered)):
        return ends[light > 0]
    return float(ordered[light - 1] + ordered[light]) / 2


@contextmanager
def changed(thing: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(thing, name)
    setattr(thing, name, value)
    try:
        yield
    finally:
        setattr(thing, name, before)


@contextmanager
def steered(decoder: Any, steering: Steering | None) -> Iterator[None]:
    """Passes of `decoder` inside the block are steered. Not for two threads at a time."""
    with ExitStack() as stack:
        if steering is not None:
            steering.check(decoder.config)
            for index in decoder.config.routed_layers:
                layer = decoder.layers[index]
                stack.enter_context(changed(layer, "router", SteeredRouter(layer.router, steering, index)))
        yield


def moved_thresholds(config: ChiarConfig, steering: Steering | None, trace: RoutingTrace) -> RoutingTrace:
    """The trace of a steered pass with the cuts in force, which it knows of an entropy router alone."""
    if steering is not None and config.router == "entropy":
        for own, index in zip(config.layer_thresholds(), config.routed_layers, strict=True):
            trace.layers[index].thresholds = steering.moved(list(own), steering.cuts[index])
    return trace
