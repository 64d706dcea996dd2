"""The paper's models by name, and v4, which is ours."""

from typing import Any

from chiar.config import ChiarConfig
from chiar.config_checks import REMOVED
from chiar.errors import InputError, unknown_name

SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 4, "vocab_size": 257},
    "16m": {"hidden_size": 256, "num_attention_heads": 4, "num_hidden_layers": 4},
    "400m": {"hidden_size": 1024, "num_attention_heads": 16, "num_hidden_layers": 28},
    "1b": {"hidden_size": 2048, "num_attention_heads": 16, "num_hidden_layers": 20},
}
# Settings of any transformers model that are not stored as fields.
GENERAL_FIELDS = ("num_labels", "attn_implementation", "output_attentions")
# docs/architecture.md says why.
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
FAMILIES: dict[str, dict[str, Any]] = {
    "baseline": {},
    "v1": {"operators": ["spectral", "rbf", "attention"], "positions": "learned", "router": "learned"},
    "v2": {"positions": "learned"},
    "v3": {},
    "v4": V4,
}
# Layers that are repeated up to the last; the configuration's own are spectral, routed, …, attention.
PATTERNS = {"baseline": ["attention"], "v4": ["routed", "attention"]}
# The paper trained v1 and v2 at 16M only; v2's learned positions and v1's RBF were dropped before scaling up.
NAMES = (
    *(f"{family}-{size}" for size in ("tiny", "16m") for family in FAMILIES),
    *(f"{family}-{size}" for size in ("400m", "1b") for family in ("baseline", "v3", "v4")),
)


def get(name: str, **changes: Any) -> ChiarConfig:
    """The configuration of preset `name`, with any field changed: get("v3-16m", gate_pool="causal")."""
    if name not in NAMES:
        raise unknown_name("preset", name, NAMES)
    for field in changes:
        if field not in (*ChiarConfig.__dataclass_fields__, *GENERAL_FIELDS, *REMOVED):
            raise unknown_name("configuration field", field, ChiarConfig.__annotations__)
    family, size = name.split("-")
    end_of_text = SIZES[size].get("vocab_size", 50257) - 1
    fields = {**SIZES[size], **FAMILIES[family], "bos_token_id": end_of_text, "eos_token_id": end_of_text}
    if "routing" in changes and "router" not in changes:
        fields.pop("router", None)
    if "layer_types" in changes and "num_hidden_layers" not in changes:
        fields.pop("num_hidden_layers")
    elif "layer_types" not in changes and family in PATTERNS:
        pattern, layers = PATTERNS[family], changes.get("num_hidden_layers", fields["num_hidden_layers"])
        if layers < len(pattern):
            raise InputError(f"num_hidden_layers={layers} is too few for {family}, which repeats {', '.join(pattern)}.")
        fields["layer_types"] = [pattern[(layer - layers) % len(pattern)] for layer in range(layers)]
    return ChiarConfig(**{**fields, **changes})
