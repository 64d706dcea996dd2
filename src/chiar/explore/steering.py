"""Runs a model with moved routes: all thresholds shifted by a number, or a given share of the text sent to attention.

A cut is the number a router compares scores with: a threshold, 0 for a learned router's logits."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from chiar.config import ChiarConfig
from chiar.errors import InputError
from chiar.layers.routers import EntropyRouter, RandomRouter
from chiar.registry import built_in

SHIFT, SHARE = KINDS = ("shift", "share")
FAR = (-1e4, 1e4)  # below and above any difference of logits


def ways_to_steer(config: ChiarConfig) -> list[str]:
    """Empty for a static router, which decides by layer, and for a custom one, whose parameters are unknown."""
    if not config.routed_layers:
        return []
    if config.router_kind.can_follow:
        return [SHIFT, SHARE]
    return [SHARE] if config.router_kind.fraction else []


def why_not(config: ChiarConfig) -> str | None:
    if not config.routed_layers:
        return "No layer of this model routes: every token takes the same path, so there is nothing to move."
    if config.router_kind.decides_by_layer:
        return "A static router: whole layers decide, whatever the token, so there is no threshold to move."
    if built_in(config.router_kind) and not ways_to_steer(config):
        return f"The {config.router} router compares nothing with a threshold, so there is nothing to move."
    if not ways_to_steer(config):
        return f"{config.router}, a router of your own: the page knows no parameter of it that could be moved."
    return None


@dataclass
class Steering:
    """`shift` is added to every cut. `share` sets each layer's cut so that this share of the first pass's tokens lies
    above it, and keeps it in `cuts` for tokens written later."""

    kind: str
    value: float
    cuts: dict[int, float] = field(default_factory=dict)


def move_cut(stack: ExitStack, steering: Steering, layer: int, router: Any, inputs: tuple[Any, ...]) -> None:
    """A forward pre-hook of the router that moves its cut until the stack is closed."""
    x_BTD, entropy_BT, context, _ = inputs

    def change(owner: Any, name: str, value: Any) -> None:
        stack.callback(setattr, owner, name, getattr(owner, name))
        setattr(owner, name, value)

    if isinstance(router, RandomRouter):
        return change(router, "fraction", steering.value)
    shifts, by_entropy = steering.kind == SHIFT, isinstance(router, EntropyRouter)
    own = [float(context.threshold)] if router.follows else router.values if by_entropy else [0.0]
    if not shifts and layer not in steering.cuts:
        uncached = replace(context, memory=None)  # only the router's own pass may write to the cache
        scores = router.scores(x_BTD, entropy_BT, uncached)
        score_BT = scores if scores.ndim == 2 else lead(scores)
        steering.cuts[layer] = cut_at(score_BT, steering.value, (-2.0, 2.0) if by_entropy else FAR)
    cut = own[-1] + steering.value if shifts else steering.cuts[layer]
    if router.follows:  # in place, because a trace reads the same tensor
        stack.callback(context.threshold.copy_, context.threshold.clone())
        context.threshold.fill_(cut)
    elif by_entropy:  # of two cuts a shift moves both; a share sets the upper, and the lower stays at most there
        values = (*(t + steering.value if shifts else min(t, cut) for t in own[:-1]), cut)
        change(router, "values", values)
        change(router, "thresholds", router.thresholds.new_tensor(values))
    else:  # lowering the logit of attention raises the cut of its lead
        bias_K = router.score.bias.detach().clone()
        bias_K[-1] -= cut
        change(router.score, "bias", nn.Parameter(bias_K))


def lead(scores_BTK: Tensor) -> Tensor:
    """The logit of attention, the last operator, minus the highest other."""
    return scores_BTK[..., -1] - scores_BTK[..., :-1].amax(-1)


def cut_at(score_BT: Tensor, share: float, ends: tuple[float, float]) -> float:
    """The cut with `share` of the scores, rounded to whole tokens, above it; `ends` lie below and above all scores."""
    ordered = score_BT.double().flatten().sort().values
    light = len(ordered) - round(share * len(ordered))
    return ends[light > 0] if light in (0, len(ordered)) else float(ordered[light - 1] + ordered[light]) / 2


@contextmanager
def steered(decoder: Any, steering: Steering | None) -> Iterator[None]:
    """Steers passes of `decoder` inside the block. Not thread-safe."""
    with ExitStack() as stack:
        if steering is not None:
            if steering.kind not in ways_to_steer(decoder.config):
                raise InputError(why_not(decoder.config) or f"{steering.kind} is not a way to steer this model.")
            if steering.kind == SHARE and not 0.0 <= steering.value <= 1.0:
                raise InputError(f"a share lies between 0 and 1, got {steering.value:g}.")
            for index in decoder.config.routed_layers:
                router = (decoder.stacks[str(index)] if decoder.config.stacks else decoder.layers[index]).router
                stack.enter_context(router.register_forward_pre_hook(partial(move_cut, stack, steering, index)))
        yield
