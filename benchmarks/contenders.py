"""The registry: everything `speed.py` can time, by name."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from chiar import presets
from models import Setting, TimedChiar, TimedModel
from peers import BypassBlock, MixtureOfDepthsBlock, PeerModel, build_foreign, load_peer

MODES = ("train", "prefill", "decode")
BASELINE = "baseline"
# The best design of the family: the filter is an element-wise product and H a row reduction, because the residual
# stream lives in spectral coordinates; light tokens give no keys.
DENSE = {"norm": "rmsnorm", "norm_position": "pre"}
BEST = {**DENSE, "basis": "identity", "gate_pool": "causal", "keys": "routed"}


@dataclass(frozen=True)
class Contender:
    """A model to time. `build(setting, execution, whole)` makes it, `whole` for compiling it as one graph; weights are
    random, routes are forced unless asked otherwise."""

    name: str
    what: str
    build: Callable[[Setting, str, bool], TimedModel]
    execution: str = "dense"
    """How it is timed; parity compares it with "dense"."""
    modes: tuple[str, ...] = MODES
    takes_fraction: bool = True
    """Whether f changes it; where not, it is timed once a length."""
    capacity_is_built_in: bool = False
    """Whether f is part of its shapes, so that each needs a model of its own."""
    defined: bool = True
    """Whether dense execution is its definition. Other people's models have none but themselves."""


def build_chiar(family: str, changes: dict[str, Any], setting: Setting, execution: str, whole: bool) -> TimedModel:
    fields: dict[str, Any] = {"dropout": 0.0, "execution": execution, **changes}
    if setting.layers is not None:
        fields["num_hidden_layers"] = setting.layers
    return TimedChiar(presets.get(f"{family}-{setting.size}", **fields), whole)


def chiar(name: str, what: str, execution: str, family: str = "v3", **changes: Any) -> Contender:
    takes_fraction = family != "baseline" and changes.get("router") != "static"
    return Contender(name, what, partial(build_chiar, family, changes), execution, takes_fraction=takes_fraction)


def peer(name: str, what: str, kind: Any) -> Contender:
    def build(setting: Setting, execution: str, whole: bool) -> TimedModel:
        return PeerModel(kind, setting, execution)

    return Contender(name, what, build, "sparse", modes=("train", "prefill"), capacity_is_built_in=True)


# The paper's gate cannot decode; frozen at the prompt it can.
PAPER = {"gate_generation": "prefill"}
ALL = (
    chiar(BASELINE, "attention in every layer, post-norm LayerNorm", "dense", "baseline"),
    chiar("baseline-pre", "attention in every layer, pre-norm RMSNorm", "dense", "baseline", **DENSE),
    chiar("routed", "best design, routed keys, shared FFN", "sparse", **BEST),
    chiar("routed-light", "best design, light tokens skip the FFN", "sparse", **BEST, light_ffn=False),
    chiar("routed-all-keys", "best design, all tokens are keys", "sparse", **{**BEST, "keys": "all"}),
    chiar("routed-dense", "best design, every operator on every token", "dense", **BEST),
    chiar("v3", "v3 as in the paper: post-norm, DCT, all keys", "sparse", **PAPER),
    chiar("v3-routed-keys", "v3 as in the paper, routed keys", "sparse", **PAPER, keys="routed"),
    chiar("v3-dense", "v3 as in the paper, every operator on every token", "dense", **PAPER),
    chiar("half-layers", "best design, attention in every other layer", "sparse", **BEST, router="static"),
    peer("mod", "Mixture-of-Depths style: others skip the block", MixtureOfDepthsBlock),
    peer("dtrnet", "DTRNet style: others take V and O only", BypassBlock),
)
REGISTRY = {contender.name: contender for contender in ALL}


def foreign(folder: Path) -> Contender:
    """The model of FOLDER/peer.py; see docs/execution.md."""
    module = load_peer(folder)

    def build(setting: Setting, execution: str, whole: bool) -> TimedModel:
        return build_foreign(module, setting)

    what = f"peer.py of {folder.resolve().name}"
    modes = ("train", "prefill")
    return Contender(folder.resolve().name, what, build, modes=modes, takes_fraction=False, defined=False)
