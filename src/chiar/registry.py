"""Routers and operators by name: built-in ones, and those of plugins (docs/extending.md).

    register_router("rare", lambda config, layer: RareWords(config))
    presets.get("v3-16m", router="rare")

A model folder stores the name, not the code, so register it again before loading. `chiar --plugin FILE.py …` imports a
file that does so, here and in every process started from here.
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
"""Names under which FLOPs are counted, besides those of custom operators."""


@dataclass(frozen=True)
class Work:
    """Workload of an operator in one layer, per token of the text."""

    share: float  # fraction of tokens it runs on
    key_share: float  # fraction of tokens that are its keys
    pairs: float  # query-key pairs
    transform: float  # FLOPs to transform one token to the basis or back


@dataclass(frozen=True)
class RouterKind:
    build: "str | Callable[[ChiarConfig, int], Any]"
    """Builds, from configuration and layer index, a module that returns a `Route`; or names a class, module:class."""
    reads_entropy: bool = False
    reads_state: bool = False  # reads the values of x, not only its shape
    has_gradient: bool = False  # the weight of the chosen operator depends on a score
    routings: tuple[str, ...] = ("threshold",)
    has_thresholds: bool = False  # compares H with the configuration's thresholds, which can be calibrated
    can_follow: bool = False  # compares a score with a threshold, which may follow a quantile in training
    decides_by_layer: bool = False  # the same for all tokens of a layer
    reads_prediction: bool = False  # H is the entropy of an early head's next-token prediction
    score: str | None = None  # name of the entropy that is compared with a threshold
    of_layers: bool = True  # can route in routed layers
    of_stacks: bool = True  # can route before a dark stack
    room: float = 1.0  # packed capacity in GPU training, as a multiple of f; 1 suffices for a quantile threshold
    fraction: "Callable[[ChiarConfig], float] | None" = None  # f, if a field of the configuration sets it
    flops: "Callable[[ChiarConfig], float] | None" = None  # per token and layer, without computing H

    def make(self, config: "ChiarConfig", layer: int) -> Any:
        return checked_module("router", config.router, resolve(self.build)(config, layer))

    def count(self, config: "ChiarConfig") -> float:
        return 0.0 if self.flops is None else self.flops(config)


@dataclass(frozen=True)
class OperatorKind:
    build: "str | Callable[[ChiarConfig], Any]"
    """Builds, from the configuration, a module that maps (…, D) to (…, D); or names an `Operator`, module:class."""
    light: bool = True  # for tokens that need no attention: the first operator of a routed layer
    is_layer: bool = False  # can make up a whole layer: its name is also a layer type
    in_basis: bool = False  # filters coefficients in the basis, so `filter_gamma` applies to its norm
    has_fixed_step: bool = True  # decodes a token without reading values on the host or changing Python objects
    compiles_in_bf16: bool = True  # with correct gradients, on a CPU too
    of_stacks: bool = False  # gives light tokens what they get from a dark stack
    flops: "Callable[[ChiarConfig], float] | None" = None  # per token

    def make(self, name: str, config: "ChiarConfig") -> Any:
        return checked_module("operator", name, resolve(self.build)(config))

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
STANDARD_MODULES = "LayerNorm", "RMSNorm", "Linear", "Embedding"
"""torch modules that the model initialises itself, wherever they are."""


def is_light(operator: str) -> bool:
    return OPERATORS[operator].light


def built_in(kind: RouterKind | OperatorKind) -> bool:
    return isinstance(kind.build, str)


def resolve(build: str | Callable) -> Any:
    """The class named module:class. Imported only here, so that names can be checked without importing layers."""
    if not isinstance(build, str):
        return build
    module, name = build.split(":")
    return getattr(importlib.import_module(module), name)


def own_tensors(module: Any) -> list[str]:
    """Names of a module's own parameters and saved buffers, without those of submodules."""
    tensors = [*dict(module.named_parameters(recurse=False)), *dict(module.named_buffers(recurse=False))]
    return [name for name in tensors if name not in module._non_persistent_buffers_set]


def checked_module(kind: str, name: str | None, module: Any) -> Any:
    """The module, if its weights can be initialised and loaded later: models are built without memory for weights."""
    if not hasattr(module, "modules"):
        raise InputError(f"the {kind} {name!r} was built as {type(module).__name__}, expected a torch.nn.Module.")
    for part in module.modules():
        unsaved = list(part._non_persistent_buffers_set)
        if unsaved and not hasattr(part, "derive"):
            what = f"the {kind} {name!r} has a buffer that is not saved ({unsaved[0]})"
            raise InputError(f"{what}: register it with persistent=True, or derive it (layers/context.py).")
        own = own_tensors(part)
        if not own or type(part).__name__ in STANDARD_MODULES:
            continue
        if not hasattr(part, "reset_parameters"):
            what = f"the {kind} {name!r} has weights of its own ({own[0]})"
            raise InputError(f"{what} but no reset_parameters() to initialise them: define it.")
        part.sets_own_weights = True
    return module


def register_router(
    name: str, build: "Callable[[ChiarConfig, int], Any]", *, reads_entropy: bool = False, reads_state: bool = False,
    has_gradient: bool = False, flops: "Callable[[ChiarConfig], float] | None" = None,
) -> None:  # fmt: skip
    """`reads_entropy`: H is computed for it. `reads_state`: under pre-norm its input is normed like that of attention.
    `has_gradient`: the weight of the chosen operator depends on a score. `flops`: per token and layer."""
    check_name("router", name, [known for known, kind in ROUTERS.items() if built_in(kind)])
    ROUTERS[name] = RouterKind(build, reads_entropy, reads_state, has_gradient, flops=flops)


def register_operator(
    name: str, build: "Callable[[ChiarConfig], Any]", *, flops: "Callable[[ChiarConfig], float] | None" = None
) -> None:
    """Register a light operator, to precede attention in `operators`. It treats each token alone, so it can run on any
    selection of tokens; one that looks back must be an `Operator` (layers/operator.py). `flops`: per token."""
    taken = [known for known, kind in OPERATORS.items() if built_in(kind)]
    check_name("operator", name, [*taken, "routed", "dark", *PARTS])
    OPERATORS[name] = OperatorKind(build, flops=flops)


def check_name(kind: str, name: str, taken: Iterable[str]) -> None:
    if not isinstance(name, str) or not name.isidentifier():
        allowed = "letters, digits and underscores, not starting with a digit"
        raise InputError(f"the name of the {kind} must consist of {allowed}, got {name!r}.")
    require(name not in taken, f"{name!r} is a built-in name: choose another one for your {kind}.")


def load_plugins() -> None:
    """Import the plugins that the environment lists: .py files or modules, separated by commas."""
    for name in plugin_names():
        load_plugin(name)


def plugin_names() -> list[str]:
    return [name for name in os.environ.get(PLUGINS, "").split(",") if name]


def add_plugins(names: list[str]) -> None:
    """Import plugins, here and in processes started from here."""
    absolute = [str(Path(name).resolve()) if name.endswith(".py") else name for name in names]
    for name in absolute:
        require("," not in name, f"a plugin's name must not contain a comma, got {name!r}.")
        load_plugin(name)
    os.environ[PLUGINS] = ",".join([*plugin_names(), *absolute])


def load_plugin(name: str) -> None:
    try:
        if not name.endswith(".py"):
            importlib.import_module(name)
            return
        path = Path(name).resolve()
        require(path.is_file(), f"there is no plugin file {name}.")
        module_name = f"chiar_plugin_{path.stem}_{zlib.crc32(str(path).encode()):08x}"
        if module_name in sys.modules:
            return
        spec = importlib.util.spec_from_file_location(module_name, path)
        assert spec is not None and spec.loader is not None
        sys.modules[module_name] = module = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[module_name]
            raise
    except InputError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise InputError(f"the plugin {name} cannot be imported: {reason}") from error
