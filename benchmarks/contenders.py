"""The registry of everything `speed.py` can time."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from chiar import presets
from models import Setting, TimedChiar, TimedModel
from peers import BypassBlock, MixtureOfDepthsBlock, PeerModel, build_external, load_peer

MODES = ("train", "prefill", "decode")
BASELINE = "baseline"
# The best design of the family: in spectral coordinates the filter is an element-wise product and H a row reduction;
# light tokens have no keys.
DENSE = {"norm": "rmsnorm", "norm_position": "pre"}
BEST = {**DENSE, "basis": "identity", "gate_pool": "causal", "keys": "routed"}


@dataclass(frozen=True)
class Contender:
    """A model to time, with random weights. `build(setting, execution, whole)` makes it; `whole`: to be compiled as one
    graph."""

    name: str
    description: str
    build: Callable[[Setting, str, bool], TimedModel]
    execution: str = "dense"
    """The execution that is timed; parity compares it with "dense"."""
    modes: tuple[str, ...] = MODES
    takes_fraction: bool = True
    """Whether it depends on f; otherwise it is timed once per length."""
    fixed_capacity: bool = False
    """Whether f determines its shapes, so that every f needs its own model."""
    has_definition: bool = True
    """Whether dense execution is its definition. Models from a folder have none."""


def build_chiar(family: str, changes: dict[str, Any], setting: Setting, execution: str, whole: bool) -> TimedModel:
    fields: dict[str, Any] = {"dropout": 0.0, "execution": execution, **changes}
    if setting.layers is not None:
        fields["num_hidden_layers"] = setting.layers
    return TimedChiar(presets.get(f"{family}-{setting.size}", **fields), whole)


def chiar(name: str, description: str, execution: str, family: str = "v3", **changes: Any) -> Contender:
    takes_fraction = family != "baseline" and changes.get("router") != "static"
    build = partial(build_chiar, family, changes)
    return Contender(name, description, build, execution, takes_fraction=takes_fraction)


def peer(name: str, description: str, kind: Any) -> Contender:
    def build(setting: Setting, execution: str, whole: bool) -> TimedModel:
        return PeerModel(kind, setting, execution)

    return Contender(name, description, build, "sparse", modes=("train", "prefill"), fixed_capacity=True)


# The paper's gate cannot decode unless it is frozen after the prompt.
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
    peer("mod", "Mixture-of-Depths style: other tokens skip the block", MixtureOfDepthsBlock),
    peer("dtrnet", "DTRNet style: other tokens take V and O only", BypassBlock),
)
REGISTRY = {contender.name: contender for contender in ALL}


def external(folder: Path) -> Contender:
    """The model of FOLDER/peer.py, as docs/execution.md describes it."""
    module = load_peer(folder)

    def build(setting: Setting, execution: str, whole: bool) -> TimedModel:
        return build_external(module, setting)

    name, modes = folder.resolve().name, ("train", "prefill")
    return Contender(name, f"peer.py of {name}", build, modes=modes, takes_fraction=False, has_definition=False)
