"""Routers and light operators of your own, under names that configurations then use (docs/extending.md).

    register_router("rare", lambda config, layer: RareWords(config))
    presets.get("v3-16m", router="rare")

A model's folder holds the name, not the code: register it again before loading. `chiar --plugin FILE.py …` imports a
file that does so, here and in every process this one starts.
"""

import importlib
import importlib.util
import os
import sys
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chiar.errors import InputError, first_line

PLUGINS = "CHIAR_PLUGINS"


def no_flops(config: Any) -> float:
    return 0.0


@dataclass(frozen=True)
class RouterKind:
    build: Callable[[Any, int], Any]
    """From the configuration and the number of the layer to a module that gives a `Route`."""
    reads_entropy: bool
    reads_state: bool
    has_gradient: bool
    flops: Callable[[Any], float]


@dataclass(frozen=True)
class OperatorKind:
    build: Callable[[Any], Any]
    """From the configuration to a module that maps (…, D) to (…, D), each token by itself."""
    flops: Callable[[Any], float]


ROUTERS: dict[str, RouterKind] = {}
OPERATORS: dict[str, OperatorKind] = {}
DRAWN = "LayerNorm", "RMSNorm", "Linear", "Embedding"
"""torch's modules whose weights are drawn as everywhere in the model."""


def make_router(config: Any, layer: int) -> Any:
    return adopted("router", config.router, ROUTERS[config.router].build(config, layer))


def make_operator(name: str, config: Any) -> Any:
    return adopted("operator", name, OPERATORS[name].build(config))


def adopted(kind: str, name: str, module: Any) -> Any:
    """The module, if its weights can be drawn and loaded: models are made without memory and filled later."""
    for part in module.modules():
        unsaved = list(part._non_persistent_buffers_set)
        if unsaved and not hasattr(part, "derive"):
            raise InputError(
                f"the {kind} {name!r} has a buffer that is not saved ({unsaved[0]}): register it with persistent=True, "
                "or make the module a DerivedBuffers (src/chiar/layers/derived.py)."
            )
        tensors = [*dict(part.named_parameters(recurse=False)), *dict(part.named_buffers(recurse=False))]
        own = [tensor for tensor in tensors if tensor not in unsaved]
        if not own or type(part).__name__ in DRAWN:
            continue
        if not hasattr(part, "reset_parameters"):
            raise InputError(
                f"the {kind} {name!r} has weights of its own ({own[0]}) and no reset_parameters() that sets their "
                "first values: define it."
            )
        part.sets_own_weights = True
    return module


def register_router(
    name: str,
    build: Callable[[Any, int], Any],
    *,
    reads_entropy: bool = False,
    reads_state: bool = False,
    has_gradient: bool = False,
    flops: Callable[[Any], float] = no_flops,
) -> None:
    """`reads_entropy`: H is computed for it. `reads_state`: under pre-norm it gets what attention would read.
    `has_gradient`: the weight of the chosen operator depends on a score. `flops`: of one token in one layer.
    """
    from chiar.config_checks import ROUTINGS_OF_ROUTER

    check_name("router", name, ROUTINGS_OF_ROUTER)
    ROUTERS[name] = RouterKind(build, reads_entropy, reads_state, has_gradient, flops)


def register_operator(name: str, build: Callable[[Any], Any], *, flops: Callable[[Any], float] = no_flops) -> None:
    """A light operator, to stand before attention in `operators`. It sees one token at a time, so any execution may
    give it any selection of them. `flops`: of one token."""
    from chiar.config_checks import LAYER_TYPES
    from chiar.config_checks import OPERATORS as KNOWN
    from chiar.routing.flops import PARTS

    check_name("operator", name, (*KNOWN, *LAYER_TYPES, *PARTS))
    OPERATORS[name] = OperatorKind(build, flops)


def check_name(kind: str, name: str, taken: Any) -> None:
    if not isinstance(name, str) or not name.isidentifier():
        raise InputError(f"a {kind}'s name must be letters, digits and underscores, got {name!r}.")
    if name in taken:
        raise InputError(f"{name!r} is one of the project's own names: call your {kind} something else.")


def load_plugins() -> None:
    """Import what the environment names: files ending in .py, or modules, with commas between."""
    for name in filter(None, os.environ.get(PLUGINS, "").split(",")):
        load_plugin(name)


def add_plugins(names: list[str]) -> None:
    """Import these, and let processes that are started from here import them too."""
    full = [str(Path(name).resolve()) if name.endswith(".py") else name for name in names]
    for name in full:
        if "," in name:
            raise InputError(f"a plugin's name may not have a comma in it, got {name!r}.")
        load_plugin(name)
    known = [name for name in os.environ.get(PLUGINS, "").split(",") if name]
    os.environ[PLUGINS] = ",".join([*known, *full])


def load_plugin(name: str) -> None:
    try:
        if not name.endswith(".py"):
            importlib.import_module(name)
            return
        path = Path(name).resolve()
        if not path.is_file():
            raise InputError(f"there is no plugin {name}.")
        called = f"chiar_plugin_{path.stem}_{zlib.crc32(str(path).encode()):08x}"
        if called in sys.modules:
            return
        spec = importlib.util.spec_from_file_location(called, path)
        assert spec is not None and spec.loader is not None
        sys.modules[called] = module = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[called]
            raise
    except InputError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise InputError(f"the plugin {name} cannot be imported: {reason}") from error
