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
FAMILIES = ("baseline", "v1", "v2", "v3", "v4")
# The paper trained v1 and v2 at 16M only; v2's learned positions and v1's RBF were dropped before scaling up.
NAMES = (
    *(f"{family}-tiny" for family in FAMILIES),
    *(f"{family}-16m" for family in FAMILIES),
    "baseline-400m",
    "v3-400m",
    "v4-400m",
    "baseline-1b",
    "v3-1b",
    "v4-1b",
)
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


def _family(family: str, layers: int) -> dict[str, Any]:
    if family == "baseline":
        return {"layer_types": ["attention"] * layers}
    if family == "v1":
        return {"operators": ["spectral", "rbf", "attention"], "positions": "learned", "router": "learned"}
    if family == "v2":
        return {"positions": "learned"}
    if family == "v4":
        if layers < 2:
            raise InputError(f"num_hidden_layers={layers} is too few for v4, which routes every other layer.")
        return {**V4, "layer_types": [("attention", "routed")[(layers - layer) % 2 == 0] for layer in range(layers)]}
    return {}


def get(name: str, **changes: Any) -> ChiarConfig:
    """The configuration of preset `name`, with any field changed: get("v3-16m", gate_pool="causal")."""
    if name not in NAMES:
        raise unknown_name("preset", name, NAMES)
    for field in changes:
        if field not in (*ChiarConfig.__dataclass_fields__, *GENERAL_FIELDS, *REMOVED):
            raise unknown_name("configuration field", field, ChiarConfig.__annotations__)
    family, size = name.split("-")
    end_of_text = SIZES[size].get("vocab_size", 50257) - 1
    fields = {
        **SIZES[size],
        **_family(family, SIZES[size]["num_hidden_layers"]),
        "bos_token_id": end_of_text,
        "eos_token_id": end_of_text,
    }
    if "routing" in changes and "router" not in changes:
        fields.pop("router", None)
    if "layer_types" in changes and "num_hidden_layers" not in changes:
        fields.pop("num_hidden_layers")
    if "num_hidden_layers" in changes and family in ("baseline", "v4") and "layer_types" not in changes:
        fields.update(_family(family, changes["num_hidden_layers"]))
    return ChiarConfig(**{**fields, **changes})
