"""Routers and operators by name: the built-in ones, and those of your own (docs/extending.md).

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
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chiar.errors import InputError, first_line, require

if TYPE_CHECKING:
    from chiar.config import ChiarConfig

PLUGINS = "CHIAR_PLUGINS"
PARTS = ("router", "spectral", "temporal", "rbf", "projections", "scores", "ffn", "carry", "gate", "logits")
"""What FLOPs are counted under, beside operators of one's own."""


@dataclass(frozen=True)
class Work:
    """What an operator of one layer has to do, per token of the text."""

    share: float  # of tokens it runs on
    key_share: float  # of tokens that give it keys
    pairs: float  # of queries and keys
    transform: float  # FLOPs of one transform of a token to the basis or back


@dataclass(frozen=True)
class RouterKind:
    build: "str | Callable[[ChiarConfig, int], Any]"
    """From configuration and layer number to a module that returns a `Route`; or the place of a class, module:class."""
    reads_entropy: bool = False
    reads_state: bool = False  # more of x than its shape
    has_gradient: bool = False  # the weight of the chosen operator depends on a score
    routings: tuple[str, ...] = ("threshold",)
    has_thresholds: bool = False  # cuts H at the configuration's thresholds, which can be calibrated
    can_follow: bool = False  # cuts a score, and the cut may follow its quantile in training
    decides_by_layer: bool = False  # whatever the token
    reads_prediction: bool = False  # H is that of an early head's prediction of the next token
    score: str | None = None  # the entropy that is compared with a threshold, by name
    of_layers: bool = True  # chooses in routed layers
    of_stacks: bool = True  # chooses what passes a dark stack
    room: float = 1.0  # a training pass on a GPU has places for so many times f; a cut at its quantile needs 1
    fraction: "Callable[[ChiarConfig], float] | None" = None  # f, where a field of the configuration says it
    flops: "Callable[[ChiarConfig], float] | None" = None  # of one token in one layer, without those of H

    def make(self, config: "ChiarConfig", layer: int) -> Any:
        return adopted("router", config.router, resolve(self.build)(config, layer))

    def count(self, config: "ChiarConfig") -> float:
        return 0.0 if self.flops is None else self.flops(config)


@dataclass(frozen=True)
class OperatorKind:
    build: "str | Callable[[ChiarConfig], Any]"
    """From the configuration to a module that maps (…, D) to (…, D); or module:class of an `Operator`."""
    light: bool = True  # takes the tokens that need no attention: the first operator of a routed layer
    is_layer: bool = False  # a whole layer may consist of it: its name is a layer type
    in_basis: bool = False  # multiplies coefficients of the basis: `filter_gamma` is about its norm
    has_fixed_step: bool = True  # decodes a token without looking at values or changing a Python object
    compiles_in_bf16: bool = True  # and its gradient is right, on a CPU too
    of_stacks: bool = False  # what light tokens get of a dark stack
    flops: "Callable[[ChiarConfig], float] | None" = None  # of one token

    def make(self, name: str, config: "ChiarConfig") -> Any:
        return adopted("operator", name, resolve(self.build)(config))

    def count(self, name: str, config: "ChiarConfig", work: Work) -> dict[str, float]:
        """FLOPs per token of the text, by part."""
        if isinstance(self.build, str):
            return resolve(self.build).flops(config, work)
        return {name: work.share * self.flops(config)} if self.flops is not None else {}


ROUTERS: dict[str, RouterKind] = {
    "entropy": RouterKind(
        "chiar.layers.routers:EntropyRouter",
        reads_entropy=True,
        has_thresholds=True,
        can_follow=True,
        score="spectral entropy",
        of_stacks=False,
    ),
    "learned": RouterKind(
        "chiar.layers.routers:LearnedRouter",
        routings=("hard", "soft"),
        can_follow=True,
        reads_entropy=True,
        reads_state=True,
        has_gradient=True,
        flops=lambda config: 2.0 * (config.hidden_size + 1) * len(config.operators or []),
    ),
    "random": RouterKind(
        "chiar.layers.routers:RandomRouter", fraction=lambda config: config.random_fraction, room=1.25
    ),
    "static": RouterKind("chiar.layers.routers:StaticRouter", decides_by_layer=True, of_stacks=False),
    "rise": RouterKind(
        "chiar.layers.stack_routers:RiseRouter",
        reads_prediction=True,
        can_follow=True,
        score="rise of the predictive entropy",
        of_layers=False,
    ),
    "predictive": RouterKind(
        "chiar.layers.routers:EntropyRouter",
        reads_prediction=True,
        can_follow=True,
        score="predictive entropy",
        of_layers=False,
    ),
    "forecast": RouterKind(
        "chiar.layers.stack_routers:ForecastRouter",
        reads_state=True,
        can_follow=True,
        score="forecast entropy",
        of_layers=False,
        flops=lambda config: 2.0 * FORECAST_WIDTH * (config.hidden_size + 1),
    ),
    "boundary": RouterKind(
        "chiar.layers.stack_routers:BoundaryRouter",
        reads_state=True,
        has_gradient=True,
        of_layers=False,
        room=2.0,
        flops=lambda config: 4.0 * config.hidden_size**2,
    ),
    "spectral": RouterKind(
        "chiar.layers.routers:EntropyRouter",
        reads_entropy=True,
        can_follow=True,
        score="spectral entropy",
        of_layers=False,
    ),
    "space": RouterKind("chiar.layers.stack_routers:SpaceRouter", of_layers=False, room=1.25),
    "stride": RouterKind("chiar.layers.stack_routers:StrideRouter", of_layers=False, room=1.25),
}
FORECAST_WIDTH = 64
OPERATORS: dict[str, OperatorKind] = {
    "spectral": OperatorKind("chiar.layers.spectral:SpectralFilter", is_layer=True, in_basis=True),
    "temporal": OperatorKind("chiar.layers.temporal:TemporalFilter", is_layer=True),
    "rbf": OperatorKind("chiar.layers.rbf:RBFMixing", light=False, has_fixed_step=False, compiles_in_bf16=False),
    "attention": OperatorKind("chiar.layers.attention:CausalAttention", light=False, is_layer=True),
    "carry": OperatorKind("chiar.layers.dark:Carry", of_stacks=True),
}
DRAWN = "LayerNorm", "RMSNorm", "Linear", "Embedding"
"""torch's modules whose weights are drawn as everywhere in the model."""


def is_light(operator: str) -> bool:
    return OPERATORS[operator].light


def built_in(kind: RouterKind | OperatorKind) -> bool:
    return isinstance(kind.build, str)


def resolve(build: str | Callable) -> Any:
    """The class at module:class. Imported when it is needed: names can be checked without the layers."""
    if not isinstance(build, str):
        return build
    module, name = build.split(":")
    return getattr(importlib.import_module(module), name)


def own_tensors(module: Any) -> list[str]:
    """Names of a module's weights and saved buffers, without those of modules inside."""
    tensors = [*dict(module.named_parameters(recurse=False)), *dict(module.named_buffers(recurse=False))]
    return [name for name in tensors if name not in module._non_persistent_buffers_set]


def adopted(kind: str, name: str | None, module: Any) -> Any:
    """The module, if its weights can be drawn and loaded: models are made without memory and filled later."""
    if not hasattr(module, "modules"):
        raise InputError(f"the {kind} {name!r} was built as {type(module).__name__}, expected a torch.nn.Module.")
    for part in module.modules():
        unsaved = list(part._non_persistent_buffers_set)
        if unsaved and not hasattr(part, "derive"):
            what = f"the {kind} {name!r} has a buffer that is not saved ({unsaved[0]})"
            raise InputError(f"{what}: register it with persistent=True, or derive it (layers/context.py).")
        own = own_tensors(part)
        if not own or type(part).__name__ in DRAWN:
            continue
        if not hasattr(part, "reset_parameters"):
            what = f"the {kind} {name!r} has weights of its own ({own[0]})"
            raise InputError(f"{what} and no reset_parameters() that sets their first values: define it.")
        part.sets_own_weights = True
    return module


def register_router(
    name: str, build: "Callable[[ChiarConfig, int], Any]", *, reads_entropy: bool = False, reads_state: bool = False,
    has_gradient: bool = False, flops: "Callable[[ChiarConfig], float] | None" = None,
) -> None:  # fmt: skip
    """`reads_entropy`: H is computed for it. `reads_state`: under pre-norm it gets what attention would read.
    `has_gradient`: the weight of the chosen operator depends on a score. `flops`: of one token in one layer."""
    check_name("router", name, [known for known, kind in ROUTERS.items() if built_in(kind)])
    ROUTERS[name] = RouterKind(build, reads_entropy, reads_state, has_gradient, flops=flops)


def register_operator(
    name: str, build: "Callable[[ChiarConfig], Any]", *, flops: "Callable[[ChiarConfig], float] | None" = None
) -> None:
    """A light operator, to stand before attention in `operators`. It sees one token at a time, so any execution may
    give it any selection of them; one that looks back is an `Operator` (layers/operator.py). `flops`: of one token."""
    taken = [known for known, kind in OPERATORS.items() if built_in(kind)]
    check_name("operator", name, [*taken, "routed", "dark", *PARTS])
    OPERATORS[name] = OperatorKind(build, flops=flops)


def check_name(kind: str, name: str, taken: Iterable[str]) -> None:
    if not isinstance(name, str) or not name.isidentifier():
        raise InputError(f"a {kind}'s name must be letters, digits and underscores, got {name!r}.")
    require(name not in taken, f"{name!r} is one of the project's own names: call your {kind} something else.")


def load_plugins() -> None:
    """Import what the environment names: files ending in .py, or modules, with commas between."""
    for name in plugin_names():
        load_plugin(name)


def plugin_names() -> list[str]:
    return [name for name in os.environ.get(PLUGINS, "").split(",") if name]


def add_plugins(names: list[str]) -> None:
    """Import these, and let processes that are started from here import them too."""
    full = [str(Path(name).resolve()) if name.endswith(".py") else name for name in names]
    for name in full:
        require("," not in name, f"a plugin's name may not have a comma in it, got {name!r}.")
        load_plugin(name)
    os.environ[PLUGINS] = ",".join([*plugin_names(), *full])


def load_plugin(name: str) -> None:
    try:
        if not name.endswith(".py"):
            importlib.import_module(name)
            return
        path = Path(name).resolve()
        require(path.is_file(), f"there is no plugin {name}.")
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
