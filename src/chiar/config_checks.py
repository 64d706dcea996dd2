"""Checks of a configuration: one clear sentence for each mistake."""

from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, get_args, get_origin

from chiar import registry
from chiar.errors import InputError, require, unknown_name

if TYPE_CHECKING:
    from chiar.config import ChiarConfig

LIGHT_LAYERS = tuple(name for name, kind in registry.OPERATORS.items() if kind.is_layer and kind.light)
DARK_LAYERS = tuple(name for name, kind in registry.OPERATORS.items() if kind.is_layer and not kind.light)
LAYER_TYPES = (*LIGHT_LAYERS, "routed", "dark", *DARK_LAYERS)
CHOICES = {
    "routing": ("threshold", "hard", "soft"),
    "hard_estimator": ("both", "selected"),
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
    "random_key": ("token", "position", "both"),
    "carry": ("linear", "smoothed", "none"),
    "classifier_pool": ("last", "mean"),
    "execution": ("dense", "sparse", "auto"),
}
ALL_SETTINGS = "chiar train --settings lists all."
REMOVED: dict[str, Any] = {
    "settle": 0.0, "turns": 0, "together": 0, "entropy_gradient": "none", "router_temperature": 1.0,
    "entropy_weights": "none", "router_reads": "state_and_entropy", "router_hidden": 0, "anneal": 0.0,
    "budget_weight": 0.0, "benefit_weight": 0.0, "own_ffn": False, "signal": "features", "temporal_channels": 16,
    "rbf_gamma": 1.0, "rbf_features": 64, "gate_bias": 2.0, "norm_eps": 1e-5, "basis_seed": 0,
    "rope_base": 10000.0, "initializer_range": 0.02,
}  # fmt: skip
"""Fields of failed experiments (docs/log.md), or never varied, with the only value that is still supported."""
REMOVED_OPERATORS = ("skip", "bypass")
STACK_OPERATORS = ["carry", "attention"]
SIZES = ("vocab_size", "hidden_size", "num_attention_heads", "intermediate_size", "max_position_embeddings")
# Upper bounds below 2⁴⁰: the bytes of a matrix must fit 63 bits, and all layers are built before memory is estimated.
LARGEST = {**dict.fromkeys(SIZES, 2**28), "num_hidden_layers": 10_000}
LAST_COMMIT = "bde4d4f"
"""The last commit that runs the removed fields and operators."""


def without_removed(fields: dict[str, Any]) -> dict[str, Any]:
    """Saved fields without the removed ones; InputError if one of these has an unsupported value."""
    for name, default in REMOVED.items():
        # temporal_channels never mattered under the supported value of signal.
        if name in fields and fields[name] != default and name != "temporal_channels":
            raise InputError(f"{name}={fields[name]!r} was removed (docs/log.md): commit {LAST_COMMIT} runs it.")
    return {name: value for name, value in fields.items() if name not in REMOVED}


def check(config: "ChiarConfig") -> None:
    """Raise InputError with the value received and those allowed."""
    for part in (check_types, check_names, check_sizes, check_routing, check_thresholds, check_combinations):
        part(config)


def check_types(config: "ChiarConfig") -> None:
    """Check that every field has its type, and no number is too large."""
    from chiar.config import ChiarConfig

    for name, hint in ChiarConfig.__annotations__.items():
        if not fits(getattr(config, name), hint):
            raise InputError(f"{name} must be {describe_type(hint)}, got {getattr(config, name)!r}.")
        most = LARGEST.get(name, 2**40)
        if isinstance(value := getattr(config, name), int | float) and abs(value) > most:
            raise InputError(f"{name} must be a number of at most {most:,}, got {value}.")


def describe_type(hint: Any) -> str:
    """The type in words, as JSON has it."""
    if isinstance(hint, UnionType):
        return " or ".join(map(describe_type, get_args(hint)))
    if hint is list or get_origin(hint) is list:
        return 'a list such as ["a", "b"]' if get_args(hint) == (str,) else "a list such as [1, 2]"
    words = {bool: "true or false", int: "a whole number", float: "a number", str: "text", dict: "a table"}
    return (words | {NoneType: "null"})[hint]


def fits(value: Any, hint: Any) -> bool:
    if isinstance(hint, UnionType):
        return any(fits(value, part) for part in get_args(hint))
    if hint is list or get_origin(hint) is list:
        return isinstance(value, list | tuple) and all(fits(v, entry) for v in value for entry in get_args(hint))
    if isinstance(value, bool):
        return hint is bool
    return isinstance(value, int | float if hint is float else hint)


def check_names(config: "ChiarConfig") -> None:
    """Check that every name is a known one."""
    own = "of your own? Import it first, or pass its file with --plugin."
    given = [(name, getattr(config, name), allowed, "") for name, allowed in CHOICES.items()]
    given.append(("router", config.router, tuple(registry.ROUTERS), f"A router {own}"))
    given += [("layer type", kind, LAYER_TYPES, "") for kind in config.layer_types or []]
    given += [("operator", name, tuple(registry.OPERATORS), f"An operator {own}") for name in config.operators or []]
    for what, name, allowed, hint in given:
        if what == "operator" and name in REMOVED_OPERATORS and name not in allowed:
            raise InputError(f"the operator {name!r} was removed (docs/log.md): commit {LAST_COMMIT} runs it.")
        if name not in allowed:
            raise unknown_name(what, name, allowed, hint)


def check_sizes(config: "ChiarConfig") -> None:
    """Check the range of numbers, and that sizes match each other."""
    for name in (*SIZES, "temporal_coefficients"):
        require(getattr(config, name) >= 1, f"{name} must be a positive whole number, got {getattr(config, name)!r}.")
    for name in ("dropout", "random_fraction", "gate_skip_below", "filter_init"):
        value = getattr(config, name)
        if value is not None and not 0.0 <= value <= 1.0:
            raise InputError(f"{name} must lie between 0 and 1, got {value!r}.")
    for name in ("entropy_eps", "entropy_dc_weight", "collapse_regulariser", "early_weight"):
        require(getattr(config, name) >= 0, f"{name} must not be negative, got {getattr(config, name)!r}.")
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        ids = given if isinstance(given := getattr(config, name), list) else [given or 0]
        require(ids, f"{name} is an empty list: give a token id, or null.")
        require(min(ids) >= 0, f"{name} must not be negative, got {given}.")
    require(config.hidden_size >= 2, "hidden_size must be at least 2: the entropy of one coefficient is undefined.")
    if config.hidden_size % (heads := config.num_attention_heads):
        raise InputError(f"hidden_size={config.hidden_size} is not divisible by num_attention_heads={heads}.")
    if config.positions == "rope" and config.head_size % 2:
        raise InputError(f"RoPE rotates pairs of features: the head size {config.head_size} must be even.")
    if (window := config.temporal_window) < 2:
        raise InputError(f"temporal_window must be at least 2, got {window}: with 1 it sees no earlier token.")
    if config.temporal_coefficients > window:
        raise InputError(f"temporal_coefficients={config.temporal_coefficients} is more than temporal_window={window}.")
    require(
        config.window is None or config.window >= 1, f"window must be a positive whole number, got {config.window!r}."
    )
    require(layers := config.layer_types or [], "layer_types is empty: a model needs at least one layer.")
    if (count := config.num_hidden_layers) != len(layers):
        raise InputError(f"num_hidden_layers={count} but layer_types has {len(layers)} entries: give only one of them.")


def operator_sets() -> list[list[str]]:
    """All values of `operators` that routed layers support."""
    kinds = registry.OPERATORS
    between = [name for name, kind in kinds.items() if not (kind.light or kind.is_layer)]
    pairs = [
        [light, dark] for light, kind in kinds.items() if kind.light and not kind.of_stacks for dark in DARK_LAYERS
    ]
    built_in_pairs = [pair for pair in pairs if registry.built_in(kinds[pair[0]])]
    return pairs + [[light, middle, dark] for light, dark in built_in_pairs for middle in between]


def check_routing(config: "ChiarConfig") -> None:
    """Check that operators, router and routing match each other."""
    assert config.operators is not None
    check_stacks(config)
    if not config.stacks and config.operators not in operator_sets():
        allowed = " or ".join(str(names) for names in operator_sets())
        raise InputError(f"operators={config.operators} is not supported: use {allowed}.")
    if config.routing not in (routings := config.router_kind.routings):
        allowed = " or ".join(routings)
        raise InputError(f"routing={config.routing!r} does not work with router={config.router!r}: use {allowed}.")
    if config.router_kind.decides_by_layer:
        check_entries(config, "static_operators")
        for operator in config.static_operators or []:
            if operator not in config.operators:
                raise unknown_name("static operator", operator, config.operators)


def check_stacks(config: "ChiarConfig") -> None:
    """Check that the router is one for routed layers or for dark stacks, and what dark stacks need."""
    kind, dark = config.router_kind, bool(config.stacks)
    if config.routed_layers and not (kind.of_stacks if dark else kind.of_layers):
        takes, other = ("dark stacks take", "routed layers") if dark else ("routed layers take", "dark stacks")
        known = [name for name, one in registry.ROUTERS.items() if (one.of_stacks if dark else one.of_layers)]
        raise InputError(f"router={config.router!r} is for {other}: {takes} {', '.join(known)}.")
    if not dark:
        require("carry" not in (config.operators or []), "the operator carry needs dark layers: there are none.")
        return
    if config.operators != STACK_OPERATORS:
        raise InputError(f"operators={config.operators} is not supported with dark layers: use {STACK_OPERATORS}.")
    if config.thresholds is not None:
        raise InputError("dark stacks store thresholds with the weights: set them with chiar calibrate --fraction.")
    require("routed" not in (config.layer_types or []), "a model has routed layers or dark stacks, not both.")
    require(config.routing != "soft", "soft routing runs everything on every token: dark stacks need hard routing.")
    require(config.norm_position == "pre", "dark layers need norm_position='pre': they add to the residual stream.")
    if config.router == "space" and config.vocab_size < 256:
        raise InputError(f"router='space' reads bytes: vocab_size must be at least 256, got {config.vocab_size}.")
    if config.inner_size is not None and (config.inner_size < 1 or config.inner_size % config.head_size):
        raise InputError(f"inner_size={config.inner_size} must be a positive multiple of head size {config.head_size}.")


def check_entries(config: "ChiarConfig", name: str) -> None:
    """Check that a field that is a list has one entry per routed layer."""
    values, count = getattr(config, name), len(config.routed_layers)
    if isinstance(values, list | tuple) and len(values) != count:
        raise InputError(f"{name} has {len(values)} entries for {count} routed layers.")


def check_thresholds(config: "ChiarConfig") -> None:
    """Check the thresholds, or the target_fraction that sets them."""
    count, fractions = len(config.operators or []), config.layer_fractions()
    if fractions is not None:
        follows = config.router_kind.can_follow or config.stacks  # a fixed rule only sizes its packed tokens by f
        if not follows or config.routing == "soft" or count != 2:
            got = f"router={config.router!r}, routing={config.routing!r} and operators={config.operators}"
            raise InputError(f"target_fraction needs two operators and an entropy or hard learned router, got {got}.")
        if config.thresholds is not None:
            raise InputError("target_fraction sets the thresholds in training: give only one of the two.")
        check_entries(config, "target_fraction")
        if not all(0.0 < fraction < 1.0 for fraction in fractions):
            raise InputError(f"target_fraction must lie strictly between 0 and 1, got {config.target_fraction!r}.")
        if config.router == "stride" and max(fractions) > 0.5:
            got = f"target_fraction must be at most 0.5, got {config.target_fraction!r}"
            raise InputError(f"router='stride' takes at most every second token: {got}.")
    check_entries(config, "thresholds")
    for values in map(list, config.layer_thresholds() if config.thresholds is not None else ()):
        needed = f"{count} operators need {count - 1} threshold{'s' * (count > 2)} per layer"
        require(len(values) == count - 1, f"{needed}, got {values}.")
        if not all(fits(value, float) and 0.0 <= value <= 1.0 for value in values):
            raise InputError(f"thresholds are entropies between 0 and 1, got {values}.")
        require(values == sorted(values), f"thresholds of a layer must be ascending (τ_low, τ_high), got {values}.")


def check_combinations(config: "ChiarConfig") -> None:
    """Check for choices that exclude each other."""
    if config.execution == "sparse" and not config.can_run_sparse:
        needs = "soft routing" if config.routing == "soft" else "hard_estimator='both'"
        raise InputError(f"{needs} needs every operator's output, so execution='sparse' is impossible: use 'auto'.")
    if config.norm_position == "pre" and config.spectral_form == "equation":
        raise InputError("spectral_form='equation' is a post-norm form: use norm_position='post' or 'sublayer'.")
    if config.spectral_form == "equation" and not config.light_ffn:
        raise InputError("light_ffn=False needs spectral_form='sublayer': in the equation the FFN is the light path.")
    if not config.filter_gamma and config.norm_position == "post":
        raise InputError("filter_gamma=False needs norm_position='pre': post-norm layers scale the stream by γ.")
    if config.meta_router and (first := (config.layer_types or [""])[0]) not in LIGHT_LAYERS:
        raise InputError(f"the MetaRouter gates a spectral or temporal layer 1, but layer 1 is {first!r}.")
    selected = config.routing == "hard" and config.hard_estimator == "selected"
    scalable = selected and config.norm_position == "pre" and len(config.operators or []) == 2
    if config.router_scale == "probability" and not scalable:
        needed = "two operators, norm_position='pre', routing='hard' and hard_estimator='selected'"
        raise InputError(f"router_scale='probability' needs {needed}.")
