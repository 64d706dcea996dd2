"""Experimental routers and an experimental stack: `chiar --plugin research/leads.py study run leads …`."""

import math
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from chiar.config import ChiarConfig
from chiar.errors import require
from chiar.kernels.carry import last_marked
from chiar.layers.context import Maybe, Memory, TokenContext, stored_in
from chiar.layers.dark import Carry, DarkStack, DenseLayout, Layout, StackOutput
from chiar.layers.routers import EntropyRouter, Route
from chiar.layers.stack_routers import SpaceRouter, predictive_entropy
from chiar.model import decoder
from chiar.registry import ROUTERS, RouterKind

LEAST, MOST = 0.05, 0.6  # f that a pass of `dial` draws from
GAP = 8


class Part(EntropyRouter):
    """Dark where H_t − λ · H_{t−1} > τ; with λ = 1 this is the router `rise`."""

    def __init__(self, config: ChiarConfig, layer: int, before: float) -> None:
        super().__init__(config, layer)
        self.before = before

    def scores(self, x_BTD: Tensor, entropy_BT: Tensor, context: TokenContext) -> Tensor:
        return entropy_BT - self.before * context.past("entropy", entropy_BT, 1)[..., 0]


class Dial(Part):
    """In training every pass draws another f. Evaluation uses the τ of the configuration's f, or a calibrated one. The
    configuration's f must be 0.2, of which `room` is a multiple; training costs as much as at the mean f, 0.325."""

    def forward(self, x_BTD: Tensor, entropy_BT: Maybe, context: TokenContext, forced_BT: Maybe) -> Route:
        assert entropy_BT is not None
        if context.share is not None and forced_BT is None:
            score_BT = self.scores(x_BTD, entropy_BT, context)
            sorted_N = score_BT.detach().flatten().sort().values
            fraction = LEAST + (MOST - LEAST) * torch.rand((), device=score_BT.device)
            place = (len(sorted_N) * (1 - fraction)).long().clamp(0, len(sorted_N) - 1)
            forced_BT = (score_BT > sorted_N.gather(0, place[None])).long()
        return super().forward(x_BTD, entropy_BT, context, forced_BT)


class OrGap(Part):
    """Dark where the score exceeds τ, and every GAP bytes after the last such byte, so that no long stretch of text is
    without a key. The configuration's f is that of the score; the others come on top. Without a cache."""

    def forward(self, x_BTD: Tensor, entropy_BT: Maybe, context: TokenContext, forced_BT: Maybe) -> Route:
        assert entropy_BT is not None
        require(context.memory is None, "rise_or_gap is experimental and has no cache: use_cache=False.")
        if forced_BT is None:
            score_BT = self.scores(x_BTD, entropy_BT, context)
            dark_BT, place_BT = score_BT > context.cut(score_BT), context.positions_BT
            last_BT = torch.where(dark_BT, place_BT, -1).cummax(1).values
            forced_BT = ((place_BT - last_BT) % GAP == 0).long()
        return super().forward(x_BTD, entropy_BT, context, forced_BT)


class SpaceOrEntropy(EntropyRouter):
    """Dark at the word ends of the whitespace rule, then where H is high."""

    def __init__(self, config: ChiarConfig, layer: int, _: float) -> None:
        super().__init__(config, layer)
        self.rule = SpaceRouter(config, layer)

    def scores(self, x_BTD: Tensor, entropy_BT: Tensor, context: TokenContext) -> Tensor:
        return entropy_BT + self.rule.choose(x_BTD, None, context)


class ExperimentalStack(DarkStack):
    """With routers named pooled_…, which have no cache, the mean of all bytes since the previous dark one, itself
    included, is added to a dark byte's input, so that a word without a dark byte is not lost to the stack. The routers
    `benefit` and `forecast_rise` learn other targets than `forecast`."""

    def __init__(self, config: ChiarConfig, first: int) -> None:
        super().__init__(config, first)
        self.name = config.router or ""
        pools = self.name.startswith("pooled_")
        require(self.gap > 0 or not pools, "a pooled stack reads the gaps after rows: set temporal_everywhere.")
        self.pool = Carry(config.hidden_size, config.hidden_size, bias=False) if pools else None

    def forward(self, x_BTD: Tensor, context: TokenContext, memory: Memory, *rest: Any) -> tuple[Tensor, StackOutput]:
        require(
            self.pool is None or memory is None, "a pooled stack is experimental, without a cache: use_cache=False."
        )
        return super().forward(x_BTD, context, memory, *rest)

    def forecast_target(self, done: StackOutput, final_BTV: Tensor) -> Tensor:
        if self.name == "benefit":
            assert self.early is not None
            log_early_BTV, log_p_BTV = (
                logits_BTV.to(stored_in(logits_BTV.dtype)).log_softmax(-1)
                for logits_BTV in (self.early(done.router_input_BTD), final_BTV)
            )
            return (log_p_BTV.exp() * (log_p_BTV - log_early_BTV)).sum(-1) / math.log(final_BTV.shape[-1])
        entropy_BT = predictive_entropy(final_BTV)
        return entropy_BT - F.pad(entropy_BT, (1, 0))[:, :-1] if self.name == "forecast_rise" else entropy_BT

    def stack_input(self, layout: Layout, x_BTD: Tensor) -> Tensor:
        if self.pool is None:
            return super().stack_input(layout, x_BTD)
        (B, T, _), dtype = x_BTD.shape, stored_in(x_BTD.dtype)
        place_BT1 = torch.arange(1, T + 1, device=x_BTD.device, dtype=dtype).expand(B, T)[..., None]
        sums, counts = (self.since_last(layout, up_to) for up_to in (x_BTD.to(dtype).cumsum(1), place_BT1))
        mean = sums / counts.clamp_min(1)
        z_in = layout.gather(x_BTD) + layout.mask(self.pool(mean.to(x_BTD.dtype)))
        return z_in if self.widen is None else self.widen(z_in)

    def since_last(self, layout: Layout, up_to_BTC: Tensor) -> Tensor:
        """Turn sums over all tokens so far into sums since the previous dark token."""
        now = layout.gather(up_to_BTC)
        if isinstance(layout, DenseLayout):
            return now - F.pad(last_marked(up_to_BTC, layout.dark_BT), (0, 0, 1, 0))[:, :-1]
        return now - F.pad(now, (0, 0, 1, 0))[:, :-1]  # the gap after each row holds zeros


decoder.DarkStack = ExperimentalStack  # type: ignore[misc]  # there is no registry of stacks: one user is too few


def add(name: str, kind: type[Part] | type[SpaceOrEntropy], before: float, room: float = 1.0) -> None:
    ROUTERS[name] = RouterKind(
        lambda config, layer: kind(config, layer, before),
        reads_prediction=True,
        can_follow=True,
        score="rise of the predictive entropy" if before else "predictive entropy",
        of_layers=False,
        room=room,
    )


add("half_rise", Part, 0.5)
add("dial", Dial, 1.0, room=MOST / 0.2)
add("rise_or_gap", OrGap, 1.0, room=1.5)
add("pooled_predictive", Part, 0.0)
add("pooled_rise", Part, 1.0)
add("space_or_entropy", SpaceOrEntropy, 0.0)
# Like `forecast`, small regressions on the detached state: of KL(final ‖ early prediction) / log V, the change by the
# layers after the router, and of H_t − H_{t−1} of the final prediction.
for name, score in (("benefit", "forecast benefit"), ("forecast_rise", "forecast rise of the entropy")):
    ROUTERS[name] = replace(ROUTERS["forecast"], score=score)
