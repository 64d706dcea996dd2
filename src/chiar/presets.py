"""The paper's models by name, and our own v4 and v5."""

from typing import Any

from chiar.config import ChiarConfig
from chiar.config_checks import ALL_SETTINGS, REMOVED
from chiar.errors import InputError, unknown_name

SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 4, "vocab_size": 257},
    "16m": {"hidden_size": 256, "num_attention_heads": 4, "num_hidden_layers": 4},
    "400m": {"hidden_size": 1024, "num_attention_heads": 16, "num_hidden_layers": 28},
    "1b": {"hidden_size": 2048, "num_attention_heads": 16, "num_hidden_layers": 20},
}
END_TOKENS = ("bos_token_id", "eos_token_id")
# Options of every transformers model that are not fields of ChiarConfig.
GENERAL_FIELDS = ("num_labels", "attn_implementation", "output_attentions")
# Reasons: docs/architecture.md.
V4: dict[str, Any] = {
    "norm": "rmsnorm",
    "norm_position": "pre",
    "basis": "identity",
    "filter_gamma": False,
    "filter_init": 0.0,
    "embedding_norm": True,
    "temporal_everywhere": True,
    "router": "learned",
    "routing": "hard",
    "hard_estimator": "selected",
    "router_scale": "probability",
    "target_fraction": 1 / 8,
    "keys": "routed",
    "light_ffn": False,
    "meta_router": False,
    "dropout": 0.0,
    "execution": "auto",
}
# On bytes, with a dark stack for those at which the next byte becomes uncertain: docs/bytes.md.
V5: dict[str, Any] = {
    "vocab_size": 257,
    "norm": "rmsnorm",
    "norm_position": "pre",
    "embedding_norm": True,
    "temporal_everywhere": True,
    "temporal_window": 4,
    "tie_word_embeddings": False,
    "router": "rise",
    "target_fraction": 0.2,
    "keys": "routed",
    "light_ffn": False,
    "meta_router": False,
    "dropout": 0.0,
    "execution": "auto",
}
V5_SIZES: dict[str, dict[str, Any]] = {
    "tiny": {},
    "16m": {"num_hidden_layers": 16, "max_position_embeddings": 1024},
    "50m": {"hidden_size": 512, "num_attention_heads": 8, "num_hidden_layers": 16, "max_position_embeddings": 1024},
    "400m": {"max_position_embeddings": 2048},
}
OUTER = {"tiny": 1, "16m": 2, "50m": 2, "400m": 3}  # layers before the dark stack, and as many after it
FAMILIES: dict[str, dict[str, Any]] = {
    "baseline": {},
    "v1": {"operators": ["spectral", "rbf", "attention"], "positions": "learned", "router": "learned"},
    "v2": {"positions": "learned"},
    "v3": {},
    "v4": V4,
    "v5": V5,
}
# Layer types, repeated so that the last layer has the last one. Other families use the default of `layer_types`.
PATTERNS = {"baseline": ["attention"], "v4": ["routed", "attention"]}
# The paper trained v1 and v2 at 16M only; v2's learned positions and v1's RBF were dropped before scaling up.
NAMES = (
    *(f"{family}-{size}" for size in ("tiny", "16m") for family in FAMILIES),
    "v5-50m",
    *(f"{family}-400m" for family in ("baseline", "v3", "v4", "v5")),
    *(f"{family}-1b" for family in ("baseline", "v3", "v4")),
)


def get(name: str, **changes: Any) -> ChiarConfig:
    """The configuration of preset `name`, with any field changed: get("v3-16m", gate_pool="causal")."""
    if name not in NAMES:
        raise unknown_name("preset", name, NAMES)
    for field in changes:
        if field not in (*ChiarConfig.__dataclass_fields__, *GENERAL_FIELDS, *REMOVED):
            raise unknown_name("configuration field", field, ChiarConfig.__annotations__, ALL_SETTINGS)
    family, size = name.split("-")
    fields = {"vocab_size": 50257, **SIZES.get(size, {}), **FAMILIES[family]}
    fields |= {**(V5_SIZES[size] if family == "v5" else {}), **dict.fromkeys(END_TOKENS, fields["vocab_size"] - 1)}
    if "routing" in changes and "router" not in changes:
        fields.pop("router", None)
    if "layer_types" in changes and "num_hidden_layers" not in changes:
        fields.pop("num_hidden_layers")
    elif "layer_types" not in changes and family == "v5":
        outer, layers = OUTER[size], changes.get("num_hidden_layers", fields["num_hidden_layers"])
        if layers <= 2 * outer:
            raise InputError(f"num_hidden_layers={layers} is too few for {name}: {2 * outer} are outside its stack.")
        fields["layer_types"] = [*["attention"] * outer, *["dark"] * (layers - 2 * outer), *["attention"] * outer]
    elif "layer_types" not in changes and family in PATTERNS:
        pattern, layers = PATTERNS[family], changes.get("num_hidden_layers", fields["num_hidden_layers"])
        if layers < len(pattern):
            raise InputError(f"num_hidden_layers={layers} is too few for {family}, which repeats {', '.join(pattern)}.")
        fields["layer_types"] = [pattern[(layer - layers) % len(pattern)] for layer in range(layers)]
    return ChiarConfig(**{**fields, **changes})
