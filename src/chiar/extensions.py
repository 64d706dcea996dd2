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
    from chiar.config import ROUTINGS_OF_ROUTER

    check_name("router", name, ROUTINGS_OF_ROUTER)
    ROUTERS[name] = RouterKind(build, reads_entropy, reads_state, has_gradient, flops)


def register_operator(name: str, build: Callable[[Any], Any], *, flops: Callable[[Any], float] = no_flops) -> None:
    """A light operator, to stand before attention in `operators`. It sees one token at a time, so any execution may
    give it any selection of them. `flops`: of one token."""
    from chiar.config import LAYER_TYPES
    from chiar.config import OPERATORS as KNOWN

    check_name("operator", name, (*KNOWN, *LAYER_TYPES))
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
    for name in names:
        if "," in name:
            raise InputError(f"a plugin's name may not have a comma in it, got {name!r}.")
        load_plugin(name)
    known = [name for name in os.environ.get(PLUGINS, "").split(",") if name]
    full = [str(Path(name).resolve()) if name.endswith(".py") else name for name in names]
    os.environ[PLUGINS] = ",".join([*known, *full])


def load_plugin(name: str) -> None:
    try:
        if not name.endswith(".py"):
            importlib.import_module(name)
            return
        path = Path(name).resolve()
        called = f"chiar_plugin_{path.stem}"
        if called in sys.modules:
            return
        spec = importlib.util.spec_from_file_location(called, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        sys.modules[called] = module
    except InputError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise InputError(f"the plugin {name} cannot be imported: {reason}") from error
