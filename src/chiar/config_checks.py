"""What a configuration may be: one sentence for each mistake. Router options have theirs in routing/options.py."""

from types import NoneType, UnionType
from typing import Any, get_args, get_origin

from chiar import registry
from chiar.errors import InputError, unknown_name
from chiar.layers.context import LIGHT_OPERATORS
from chiar.routing.options import check_router_options

LIGHT_LAYERS = ("spectral", "temporal")
LAYER_TYPES = (*LIGHT_LAYERS, "routed", "attention")
OPERATORS = (*LIGHT_OPERATORS, "rbf", "attention")
OPERATOR_SETS = (
    *([light, "attention"] for light in LIGHT_OPERATORS),
    *([light, "rbf", "attention"] for light in LIGHT_LAYERS),
)
ROUTINGS_OF_ROUTER = {
    "entropy": ("threshold",),
    "learned": ("hard", "soft"),
    "random": ("threshold",),
    "static": ("threshold",),
}
CHOICES = {
    "router": tuple(ROUTINGS_OF_ROUTER),
    "routing": ("threshold", "hard", "soft"),
    "hard_estimator": ("both", "selected"),
    "entropy_gradient": ("none", "straight_through"),
    "entropy_weights": ("none", "learned"),
    "router_reads": ("state_and_entropy", "state"),
    "router_scale": ("one", "probability"),
    "keys": ("all", "routed"),
    "spectral_form": ("sublayer", "equation"),
    "norm": ("layernorm", "rmsnorm"),
    "norm_position": ("post", "pre"),
    "positions": ("rope", "learned"),
    "gate_pool": ("batch", "sequence", "causal"),
    "gate_init": ("biased", "neutral"),
    "gate_generation": ("refuse", "prefill"),
    "basis": ("dct", "identity", "random"),
    "signal": ("features", "temporal"),
    "random_key": ("token", "position"),
    "classifier_pool": ("last", "mean"),
    "execution": ("dense", "sparse", "auto"),
}


def check(config: Any) -> None:
    """Raise InputError with the value received and what is allowed."""
    check_types(config)
    check_names(config)
    check_sizes(config)
    check_routing(config)
    check_router_options(config)
    check_combinations(config)


def check_types(config: Any) -> None:
    """Whether every field has its type."""
    from chiar.config import ChiarConfig

    for name, hint in ChiarConfig.__annotations__.items():
        if not fits(getattr(config, name), hint):
            expected = getattr(hint, "__name__", str(hint)) if isinstance(hint, type) else str(hint)
            raise InputError(f"{name} must be {expected}, got {getattr(config, name)!r}.")


def check_names(config: Any) -> None:
    """Whether every choice is one of those there are."""
    for name, allowed in CHOICES.items():
        if name == "router":
            allowed = (*allowed, *registry.ROUTERS)
        if getattr(config, name) not in allowed:
            own = "A router of your own? Import it first, or give its file with --plugin." if name == "router" else ""
            raise unknown_name(name, getattr(config, name), allowed, own)
    for kind in config.layer_types:
        if kind not in LAYER_TYPES:
            raise unknown_name("layer type", kind, LAYER_TYPES)
    for operator in config.operators:
        if operator not in (*OPERATORS, *registry.OPERATORS):
            own = "An operator of your own? Import it first, or give its file with --plugin."
            raise unknown_name("operator", operator, (*OPERATORS, *registry.OPERATORS), own)


def check_sizes(config: Any) -> None:
    """Numbers that can be, and fit together."""
    for name in (
        "vocab_size",
        "hidden_size",
        "num_attention_heads",
        "intermediate_size",
        "max_position_embeddings",
        "rbf_features",
        "temporal_coefficients",
        "temporal_channels",
    ):
        if getattr(config, name) < 1:
            raise InputError(f"{name} must be a positive whole number, got {getattr(config, name)!r}.")
    if config.hidden_size < 2:
        raise InputError("hidden_size must be at least 2: the entropy of one coefficient is undefined.")
    if not config.layer_types:
        raise InputError("layer_types is empty: a model needs at least one layer.")
    if config.num_hidden_layers != len(config.layer_types):
        raise InputError(
            f"num_hidden_layers={config.num_hidden_layers} but layer_types has {len(config.layer_types)} entries: "
            "give one of the two, or make them agree."
        )
    if config.hidden_size % config.num_attention_heads:
        raise InputError(
            f"hidden_size={config.hidden_size} is not divisible by num_attention_heads={config.num_attention_heads}."
        )
    if config.positions == "rope" and config.head_size % 2:
        raise InputError(f"RoPE rotates pairs of features: the head size {config.head_size} must be even.")
    check_temporal_sizes(config)
    for name in ("dropout", "random_fraction", "gate_skip_below", "anneal", "settle", "filter_init"):
        value = getattr(config, name)
        if value is not None and not 0.0 <= value <= 1.0:
            raise InputError(f"{name} must lie between 0 and 1, got {value!r}.")
    for name in (
        "entropy_eps",
        "entropy_dc_weight",
        "collapse_regulariser",
        "norm_eps",
        "initializer_range",
        "router_hidden",
        "budget_weight",
        "benefit_weight",
    ):
        if not getattr(config, name) >= 0:
            raise InputError(f"{name} must not be negative, got {getattr(config, name)!r}.")
    for name in ("rbf_gamma", "rope_base", "router_temperature"):
        if not getattr(config, name) > 0:
            raise InputError(f"{name} must be positive, got {getattr(config, name)!r}.")


def check_temporal_sizes(config: Any) -> None:
    """Windows, coefficients and channels of spectra along time."""
    if config.temporal_window < 2:
        raise InputError(f"temporal_window must be at least 2, got {config.temporal_window}: 1 is no look back.")
    if config.temporal_coefficients > config.temporal_window:
        raise InputError(
            f"temporal_coefficients={config.temporal_coefficients} is more than temporal_window="
            f"{config.temporal_window} tokens have."
        )
    if config.signal == "temporal" and config.temporal_channels > config.hidden_size:
        raise InputError(
            f"temporal_channels={config.temporal_channels} orthonormal directions do not fit into "
            f"hidden_size={config.hidden_size}."
        )


def check_routing(config: Any) -> None:
    """Operators, router, routing and thresholds that go together."""
    sets = [*OPERATOR_SETS, *([light, "attention"] for light in registry.OPERATORS)]
    if list(config.operators) not in sets:
        allowed = " or ".join(str(names) for names in sets)
        raise InputError(f"operators={config.operators} is not supported: use {allowed}.")
    routings = ROUTINGS_OF_ROUTER.get(config.router, ("threshold",))
    if config.routing not in routings:
        raise InputError(
            f"routing={config.routing!r} does not go with router={config.router!r}: it takes {' or '.join(routings)}."
        )
    count = len(config.routed_layers)
    if config.router == "static":
        chosen = config.static_operators or []
        if len(chosen) != count:
            raise InputError(f"static_operators has {len(chosen)} entries for {count} routed layers.")
        for operator in chosen:
            if operator not in config.operators:
                raise unknown_name("static operator", operator, config.operators)
    if config.thresholds is None:
        return
    if isinstance(config.thresholds, list | tuple) and len(config.thresholds) != count:
        raise InputError(f"thresholds has {len(config.thresholds)} entries for {count} routed layers.")
    boundaries = len(config.operators) - 1
    for values in config.layer_thresholds():
        if len(values) != boundaries:
            raise InputError(
                f"{len(config.operators)} operators need {boundaries} threshold(s) a layer, got {list(values)}."
            )
        if not all(fits(v, float) and 0.0 <= v <= 1.0 for v in values):
            raise InputError(f"thresholds are entropies between 0 and 1, got {list(values)}.")
        if list(values) != sorted(values):
            raise InputError(f"thresholds of a layer must rise (τ_low, τ_high), got {list(values)}.")


def check_combinations(config: Any) -> None:
    """Choices that exclude each other."""
    if config.execution == "sparse" and not config.can_run_sparse:
        needs = "soft routing" if config.routing == "soft" else "hard_estimator='both'"
        raise InputError(f"{needs} needs every operator's output, so execution='sparse' cannot be: use 'auto'.")
    if config.norm_position == "pre" and config.spectral_form == "equation":
        raise InputError("spectral_form='equation' is a post-norm form: use norm_position='post' or 'sublayer'.")
    if config.own_ffn and not config.light_ffn:
        raise InputError("own_ffn=True needs light_ffn=True: light tokens cannot skip a network of their own.")
    if config.own_ffn and (config.router == "static" or not config.routed_layers):
        raise InputError(
            "own_ffn=True needs routed layers whose router is not static: one network would never be used."
        )
    if config.spectral_form == "equation" and not config.light_ffn:
        raise InputError("light_ffn=False needs spectral_form='sublayer': in the equation the FFN is the light path.")
    if not config.filter_gamma and config.norm_position == "post":
        raise InputError("filter_gamma=False needs norm_position='pre': post-norm layers scale the stream by γ.")
    if config.meta_router and config.layer_types[0] not in LIGHT_LAYERS:
        raise InputError(
            f"the MetaRouter gates a spectral or temporal layer 1, but layer 1 is {config.layer_types[0]!r}."
        )


def fits(value: Any, hint: Any) -> bool:
    if isinstance(hint, UnionType):
        return any(fits(value, part) for part in get_args(hint))
    if hint is None or hint is NoneType:
        return value is None
    if hint is list:
        return isinstance(value, list | tuple)
    if get_origin(hint) is list:
        return isinstance(value, list | tuple) and all(fits(v, get_args(hint)[0]) for v in value)
    if isinstance(value, bool):
        return hint is bool
    return isinstance(value, int | float) if hint is float else isinstance(value, hint)
