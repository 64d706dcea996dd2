"""What every layer of one forward pass shares."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from chiar.kernels.transform import Transform
from chiar.layers.ragged import RaggedStore


class LayerMemory(Protocol):
    """What one layer keeps of the tokens it has seen, for cached decoding."""

    def get(self, name: str) -> Tensor | None: ...

    def put(self, name: str, value: Tensor) -> None:
        """In the place of what was there, where that is possible."""

    def ragged(self, name: str) -> RaggedStore:
        """Where an operator stores its keys: all real tokens, or those sent to it alone."""


@dataclass
class TokenContext:
    """The T new tokens of a forward pass; S counts cached and new ones."""

    transform: Transform
    """To the basis of the entropy and the filter, and back."""
    positions_BT: Tensor
    """Index of each token among the real tokens of its row."""
    real_BT: Tensor | None
    """True for real tokens, False for padding; None when all are real."""
    token_ids_BT: Tensor | None
    rope: tuple[Tensor, Tensor] | None
    """cos and sin, each (B, 1, T, head size)."""
    attention_implementation: str = "sdpa"
    sparse: bool = False
    """Routed layers run only the operators that were chosen."""
    room_is_made: bool = False
    """One token a row, and every store has room for it: nothing may look at values or change a Python object."""
    keep_entropy: bool = False
    """Compute H of every layer's input, also where no router reads it."""
    threshold: Tensor | None = None
    """The one the layer at hand has followed in training, under a target_fraction."""


def visible_keys(key_BS: Tensor, queries: int) -> Tensor:
    """Which keys the last `queries` tokens see, (B, 1, T, S): marked keys up to themselves, and always themselves."""
    keys = key_BS.shape[1]
    query_index_T1 = torch.arange(keys - queries, keys, device=key_BS.device)[:, None]
    key_index_S = torch.arange(keys, device=key_BS.device)
    earlier_TS = key_index_S <= query_index_T1
    itself_TS = key_index_S == query_index_T1
    return (earlier_TS & key_BS[:, None, None, :]) | itself_TS


def surely_none(key_BT: Tensor | None) -> bool:
    """Whether no token is a key, as far as the host knows: looking at a GPU's values would mean waiting for it."""
    if key_BT is None or key_BT.device.type != "cpu" or torch.compiler.is_compiling():
        return False
    return not bool(key_BT.any())
