"""Routers run with a moved parameter: thresholds shifted alike, or a share of the text sent to attention."""

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
FAR = (-1e4, 1e4)  # no lead of a logit is beyond


def ways_to_steer(config: ChiarConfig) -> list[str]:
    """Of a static router whole layers decide, of a user's own nothing is known."""
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
        return f"{config.router}, a router of your own: the page knows no number of it that could be moved."
    return None


@dataclass
class Steering:
    """`shift` is added to every cut; `share` puts each layer's where that share of the first pass's tokens lies above
    it, and leaves it there, in `cuts`, for tokens written later."""

    kind: str
    value: float
    cuts: dict[int, float] = field(default_factory=dict)


def move_cut(stack: ExitStack, steering: Steering, layer: int, router: Any, given: tuple[Any, ...]) -> None:
    """Before the router's forward with `given`: move its cut, until the stack is closed."""
    x_BTD, entropy_BT, context, _ = given

    def change(thing: Any, name: str, value: Any) -> None:
        stack.callback(setattr, thing, name, getattr(thing, name))
        setattr(thing, name, value)

    if isinstance(router, RandomRouter):
        return change(router, "fraction", steering.value)
    shifts, by_entropy = steering.kind == SHIFT, isinstance(router, EntropyRouter)
    own = [float(context.threshold)] if router.follows else router.values if by_entropy else [0.0]
    if not shifts and layer not in steering.cuts:
        unkept = replace(context, memory=None)  # what it remembers, it writes in its own pass
        scores = router.scores(x_BTD, entropy_BT, unkept)
        score_BT = scores if scores.ndim == 2 else lead(scores)
        steering.cuts[layer] = cut_at(score_BT, steering.value, (-2.0, 2.0) if by_entropy else FAR)
    cut = own[-1] + steering.value if shifts else steering.cuts[layer]
    if router.follows:  # in its place, where a trace reads it
        stack.callback(context.threshold.copy_, context.threshold.clone())
        context.threshold.fill_(cut)
    elif by_entropy:  # a shift moves both of two cuts, a share only pushes the other
        values = (*(t + steering.value if shifts else min(t, cut) for t in own[:-1]), cut)
        change(router, "values", values)
        change(router, "thresholds", router.thresholds.new_tensor(values))
    else:  # a lower logit of attention is a higher cut of its lead
        bias_K = router.score.bias.detach().clone()
        bias_K[-1] -= cut
        change(router.score, "bias", nn.Parameter(bias_K))


def lead(scores_BTK: Tensor) -> Tensor:
    """By how much attention, the last operator, is ahead of the others."""
    return scores_BTK[..., -1] - scores_BTK[..., :-1].amax(-1)


def cut_at(score_BT: Tensor, share: float, ends: tuple[float, float]) -> float:
    """The number that `share` of the scores, rounded to whole tokens, are above; `ends` are below and above any."""
    ordered = score_BT.double().flatten().sort().values
    light = len(ordered) - round(share * len(ordered))
    return ends[light > 0] if light in (0, len(ordered)) else float(ordered[light - 1] + ordered[light]) / 2


@contextmanager
def steered(decoder: Any, steering: Steering | None) -> Iterator[None]:
    """Passes of `decoder` inside the block are steered. Not for two threads at a time."""
    with ExitStack() as stack:
        if steering is not None:
            if steering.kind not in ways_to_steer(decoder.config):
                raise InputError(why_not(decoder.config) or f"{steering.kind} is no way to steer this model.")
            if steering.kind == SHARE and not 0.0 <= steering.value <= 1.0:
                raise InputError(f"a share lies between 0 and 1, got {steering.value:g}.")
            for index in decoder.config.routed_layers:
                router = (decoder.stacks[str(index)] if decoder.config.stacks else decoder.layers[index]).router
                stack.enter_context(router.register_forward_pre_hook(partial(move_cut, stack, steering, index)))
        yield
