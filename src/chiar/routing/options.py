"""Which router options go together: one sentence for each mistake."""

from typing import Any

from chiar.errors import InputError


def check_router_options(config: Any) -> None:
    """Raise InputError where an option has nothing to act on."""
    router, two = config.router, len(config.operators) == 2
    straight = config.entropy_gradient == "straight_through"
    if straight and (router != "entropy" or not two):
        raise InputError(
            f"entropy_gradient='straight_through' needs the entropy router with two operators, got router={router!r} "
            f"and operators={config.operators}."
        )
    if config.router_temperature != 1.0 and not straight:
        raise InputError("router_temperature needs entropy_gradient='straight_through': nothing else reads it.")
    for name in ("router_hidden", "budget_weight", "benefit_weight"):
        if getattr(config, name) and router != "learned":
            raise InputError(f"{name}={getattr(config, name)} needs router='learned', got {router!r}.")
    if config.router_reads == "state" and router != "learned":
        raise InputError(f"router_reads='state' needs router='learned', got {router!r}.")
    if config.entropy_weights == "learned" and not (
        straight or (router == "learned" and config.router_reads == "state_and_entropy")
    ):
        raise InputError(
            "entropy_weights='learned' needs a gradient through H: use entropy_gradient='straight_through', or "
            "router='learned' with router_reads='state_and_entropy'."
        )
    if config.entropy_weights == "learned" and config.signal != "features":
        raise InputError(f"entropy_weights='learned' weighs features: signal={config.signal!r} has none to weigh.")
    if config.anneal and not (straight or config.routing == "hard"):
        raise InputError(
            f"anneal={config.anneal} needs probabilities to begin with: use routing='hard' or "
            "entropy_gradient='straight_through'."
        )
    if config.benefit_weight and (config.routing == "soft" or not two):
        raise InputError(
            f"benefit_weight={config.benefit_weight} needs routing='hard' and two operators, got "
            f"routing={config.routing!r} and operators={config.operators}."
        )
    check_turns(config, two)
    check_together(config, two)
    check_fraction(config, two)
    check_light_operator(config)
    if config.router_scale == "probability":
        selected = config.routing == "hard" and config.hard_estimator == "selected"
        if not (two and config.norm_position == "pre" and (straight or selected)):
            raise InputError(
                "router_scale='probability' needs two operators, norm_position='pre' and a router with a gradient "
                "through the chosen operator: hard_estimator='selected' with routing='hard', or "
                "entropy_gradient='straight_through'."
            )


def check_fraction(config: Any, two: bool) -> None:
    if config.target_fraction is None:
        for name in ("budget_weight", "settle"):
            if getattr(config, name):
                raise InputError(f"{name}={getattr(config, name)} needs a target_fraction to aim at.")
        return
    if config.settle and (config.turns or config.budget_weight):
        raise InputError(f"settle={config.settle} needs thresholds that follow an f: set turns and budget_weight to 0.")
    if config.router not in ("entropy", "learned") or config.routing == "soft" or not two:
        raise InputError(
            "target_fraction needs two operators and the entropy router or a hard learned one, got "
            f"router={config.router!r}, routing={config.routing!r} and operators={config.operators}."
        )
    if config.thresholds is not None:
        raise InputError("target_fraction moves the thresholds in training: leave thresholds out, or target_fraction.")
    fractions, count = config.layer_fractions(), len(config.routed_layers)
    if len(fractions) != count:
        raise InputError(f"target_fraction has {len(fractions)} entries for {count} routed layers.")
    if not all(0.0 < fraction < 1.0 for fraction in fractions):
        raise InputError(f"target_fraction must lie strictly between 0 and 1, got {config.target_fraction!r}.")


def check_group(name: str, size: int, layers: int) -> None:
    if size < 2 or layers % size:
        raise InputError(f"{name}={size} must be 0, or 2 or more and divide the {layers} routed layers.")


def check_turns(config: Any, two: bool) -> None:
    turns = config.turns
    if turns == 0:
        return
    check_group("turns", turns, len(config.routed_layers))
    if config.router not in ("entropy", "learned", "random") or config.routing == "soft" or not two:
        raise InputError(
            "turns needs two operators and the entropy, random or hard learned router, got "
            f"router={config.router!r}, routing={config.routing!r} and operators={config.operators}."
        )
    if config.budget_weight:
        raise InputError(f"budget_weight={config.budget_weight} has nothing to hold: under turns f is 1/{turns}.")
    if config.anneal or (config.routing == "hard" and config.hard_estimator == "both"):
        raise InputError(
            "turns gives a token one layer, but anneal and hard_estimator='both' train with all: set anneal=0 and "
            "hard_estimator='selected'."
        )
    name = "random_fraction" if config.router == "random" else "target_fraction"
    given = [config.random_fraction] if config.router == "random" else config.layer_fractions() or ()
    if any(abs(fraction - 1 / turns) > 1e-9 for fraction in given):
        raise InputError(f"turns={turns} makes f 1/{turns}: {name}={getattr(config, name)} cannot be, leave it out.")


def check_together(config: Any, two: bool) -> None:
    together, count = config.together, len(config.routed_layers)
    if together == 0:
        return
    check_group("together", together, count)
    if config.turns:
        raise InputError("layers either take turns or go together: set turns or together to 0.")
    if config.router == "static" or config.routing == "soft" or not two or config.benefit_weight:
        raise InputError(
            "together needs two operators and one choice a token, without benefit_weight, got "
            f"router={config.router!r}, routing={config.routing!r} and operators={config.operators}."
        )
    if config.router == "entropy" and config.target_fraction is None:
        raise InputError(
            "together needs a target_fraction with the entropy router: only leading layers have thresholds."
        )
    for first in range(0, count, together):
        group = (config.layer_fractions() or [0.5] * count)[first : first + together]
        if len(set(group)) > 1:
            raise InputError(f"layers that go together have one f, got target_fraction={group} for one group.")


def check_light_operator(config: Any) -> None:
    light = config.operators[0]
    if light in ("skip", "bypass") and config.norm_position != "pre":
        raise InputError(f"the operator {light!r} needs norm_position='pre': a post-norm layer changes every token.")
