"""What layers share: the context of one forward pass, and buffers that follow from the configuration."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, Self

import torch
from torch import Tensor, nn

from chiar.kernels.transform import Transform
from chiar.layers.ragged import RaggedStore


class LayerMemory(Protocol):
    """What one layer keeps of the tokens it has seen, for cached decoding."""

    def get(self, name: str) -> Tensor | None: ...
    def put(self, name: str, value: Tensor) -> None: ...  # in the place of what was there, where that is possible
    def ragged(self, name: str) -> RaggedStore: ...  # where an operator stores its keys: all real tokens, or its own


Maybe = Tensor | None
Memory = LayerMemory | None


@dataclass
class TokenContext:
    """The T new tokens of a forward pass; S counts cached and new ones."""

    transform: Transform  # to the basis of the entropy and the filter, and back
    positions_BT: Tensor  # index of each token among the real tokens of its row
    real_BT: Tensor | None  # true for real tokens, False for padding; None when all are real
    token_ids_BT: Tensor | None
    rope: tuple[Tensor, Tensor] | None  # cos and sin, each (B, 1, T, head size)
    attention_implementation: str = "sdpa"
    sparse: bool = False  # routed layers run only the operators that were chosen
    room_is_made: bool = False
    """One token a row, and every store has room for it: nothing may look at values or change a Python object."""
    keep_entropy: bool = False  # compute H of every layer's input, also where no router reads it
    threshold: Tensor | None = None  # the one the layer at hand has followed in training, under a target_fraction


def visible_keys(key_BS: Tensor, queries: int) -> Tensor:
    """Which keys the last `queries` tokens see, (B, 1, T, S): marked keys up to themselves, and always themselves."""
    keys = key_BS.shape[1]
    query_T1 = torch.arange(keys - queries, keys, device=key_BS.device)[:, None]
    key_S = torch.arange(keys, device=key_BS.device)
    return ((key_S <= query_T1) & key_BS[:, None, None, :]) | (key_S == query_T1)


def surely_none(key_BT: Maybe) -> bool:
    """Whether no token is a key, as far as the host knows: looking at a GPU's values would mean waiting for it."""
    if key_BT is None or key_BT.device.type != "cpu" or torch.compiler.is_compiling():
        return False
    return not bool(key_BT.any())


class DerivedBuffers(nn.Module):
    """A module whose buffers are computed, never saved, and stay in fp32 (float64 in a float64 model).
    `model.to(torch.bfloat16)` casts ordinary buffers; a threshold of 0.8954 would become 0.8945, a fifth of a
    standard deviation away at width 1024. These are computed again instead, on whatever device they moved to."""

    def derive(self) -> dict[str, Tensor]:
        """Name and CPU value of each buffer, in float64."""
        raise NotImplementedError

    def register_derived(self) -> None:
        for name, value in self.derive().items():
            self.register_buffer(name, value.to(stored_in(torch.get_default_dtype())), persistent=False)

    def rebuild(self) -> None:
        with torch.device("cpu"):
            values = self.derive()
        for name, value in values.items():
            before = getattr(self, name)
            if before.device.type == "meta":
                continue
            if before.dtype == stored_in(before.dtype) and before.shape == value.shape and not before.is_inference():
                before.copy_(value)  # in its place: a recorded graph reads it there
            else:
                setattr(self, name, value.to(stored_in(before.dtype)).to(before.device))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        self.rebuild()
        return self


def stored_in(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
