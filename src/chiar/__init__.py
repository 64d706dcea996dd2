"""CHIAR-Former: spectral entropy routes each token to a spectral filter (light) or to attention (dark)."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Loaded on first use, so that `import chiar` and `chiar --help` stay fast.
_MODULES = {
    "ChiarConfig": "chiar.config", "RoutingTrace": "chiar.model.trace", "presets": "chiar.presets",
    **dict.fromkeys(["ChiarModel", "ChiarForCausalLM", "ChiarForSequenceClassification"], "chiar.modeling"),
    **dict.fromkeys(["register_operator", "register_router"], "chiar.registry"),
    **dict.fromkeys(["check_operator", "check_router"], "chiar.model.plugin_checks"),
}  # fmt: skip
__all__ = ["ChiarConfig", "ChiarForCausalLM", "ChiarForSequenceClassification", "ChiarModel", "RoutingTrace"]
__all__ += ["check_operator", "check_router", "presets", "register_operator", "register_router"]

if TYPE_CHECKING:
    from chiar import presets
    from chiar.config import ChiarConfig
    from chiar.model.plugin_checks import check_operator, check_router
    from chiar.model.trace import RoutingTrace
    from chiar.modeling import ChiarForCausalLM, ChiarForSequenceClassification, ChiarModel
    from chiar.registry import register_operator, register_router


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'chiar' has no attribute {name!r}")
    module = import_module(_MODULES[name])
    return module if _MODULES[name] == f"chiar.{name}" else getattr(module, name)
