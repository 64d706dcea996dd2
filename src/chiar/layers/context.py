"""What layers share: the context of one forward pass, and buffers that follow from the configuration."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from chiar.errors import require
from chiar.kernels.transform import Transform
from chiar.layers.ragged import RaggedStore


class LayerMemory(Protocol):
    """What one layer keeps of the tokens it has seen, for cached decoding."""

    @property
    def slack(self) -> int:
        """How many of the latest tokens may still be taken back."""
        ...

    def get(self, name: str) -> Tensor | None: ...

    def put(self, name: str, value: Tensor) -> None:
        """Replaces the value, in place where that is possible."""
        ...

    def put_line(self, name: str, line_BSC: Tensor) -> None:
        """The same for values in the order of tokens."""
        ...

    def ragged(self, name: str, window: int | None = None) -> RaggedStore:
        """Where an operator stores its keys: of all real tokens or its own, or the last `window` of them."""
        ...


Maybe = Tensor | None
Memory = LayerMemory | None


@dataclass
class TokenContext:
    """The T new tokens of a forward pass. S counts cached and new tokens."""

    transform: Transform  # to the basis of the entropy and the filter, and back
    positions_BT: Tensor  # of each token among the real tokens of its row
    real_BT: Tensor | None  # true for real tokens, False for padding; None when all are real
    token_ids_BT: Tensor | None
    rope: tuple[Tensor, Tensor] | None  # cos and sin, each (B, 1, T, head size)
    attention_implementation: str = "sdpa"
    sparse: bool = False  # routed layers run only the chosen operators
    room_is_made: bool = False
    """A fixed decoding step: one token per row, and every store has room for it. Nothing may read values on the host or
    change a Python object."""
    keep_entropy: bool = False  # also compute H where no router reads it
    threshold: Tensor | None = None  # of this layer, as followed in training under target_fraction
    share: float | None = None  # in training a dark stack cuts at the pass's own (1 − share)-quantile
    rows: Tensor | None = None  # int32 offsets of texts concatenated in one row
    longest: int = 0  # upper bound on the length of these texts
    used_BT: Tensor | None = None  # False for places between texts
    padding_behind: bool = False  # all padding follows the real tokens of its row, so no token sees it
    owner: str | None = None  # the router or operator that may call `past`
    memory: Memory = None  # of this layer

    def of(self, owner: str, memory: Memory) -> "TokenContext":
        """As a part of a layer sees it."""
        return replace(self, owner=owner, memory=memory)

    def cut(self, score_BT: Tensor) -> Tensor:
        """The threshold for these scores. With `share` it is this pass's own quantile, so that at most that share of
        the real tokens lies above it."""
        if self.share is None:
            assert self.threshold is not None
            return self.threshold
        score_N = score_BT.detach().flatten()
        if self.real_BT is None:
            return score_N.sort().values[max(len(score_N) - int(self.share * len(score_N)), 1) - 1]
        # Padding gets the lowest score. The number of real tokens stays on the device.
        score_N = score_N.masked_fill(~self.real_BT.flatten(), -torch.inf)
        dark = (self.real_BT.sum() * self.share).long()
        place_1 = (len(score_N) - dark).clamp(1, len(score_N))[None] - 1
        return score_N.sort().values.gather(0, place_1)[0]

    def past(self, name: str, values: Tensor, reach: int, missing: float = 0) -> Tensor:
        """The values of the `reach` real tokens before each token, nearest last: (B, T, …) → (B, T, reach, …), with
        `missing` where there are fewer. A cache keeps them under `name`: call this in every pass, once per name, with
        the same reach."""
        require(self.owner is not None, "only a router, or an Operator in its forward, may ask for the past.")
        require(reach >= 1, f"a look back of {reach} tokens under {name!r}: give at least 1.")
        values_BTC = values.reshape(*values.shape[:2], -1)
        line_BSC = with_past(values_BTC, reach, self.real_BT, self.memory, f"{self.owner}.{name}", missing)
        before_BTRC = line_BSC.unfold(1, reach, 1)[:, :-1].transpose(2, 3)
        before_BTC = put_back(before_BTRC.flatten(2), self.real_BT)
        return before_BTC.reshape(*values.shape[:2], reach, *values.shape[2:])


def with_past(x_BTC: Tensor, reach: int, real_BT: Maybe, memory: Memory, name: str, missing: float = 0) -> Tensor:
    """The last `reach` real tokens stored under `name` (`missing` where there are none), then the real tokens of x,
    then its padding: (B, reach + T, C). So no real token looks back on padding; `put_back` restores the order. The
    memory then holds the last `reach` real tokens, in the same tensor if possible."""
    T = x_BTC.shape[1]
    if real_BT is not None and T > 1:
        order_BT = (~real_BT).int().argsort(dim=1, stable=True)
        x_BTC = x_BTC.gather(1, order_BT[..., None].expand_as(x_BTC))
    past_BRC = None if memory is None else memory.get(name)
    if past_BRC is None:
        line_BSC = F.pad(x_BTC, (0, 0, reach, 0), value=missing)
    else:
        line_BSC = torch.cat([past_BRC.to(x_BTC.dtype), x_BTC], dim=1)
    if memory is not None:
        kept = reach + memory.slack
        if line_BSC.shape[1] < kept + T:
            line_BSC = F.pad(line_BSC, (0, 0, kept + T - line_BSC.shape[1], 0), value=missing)
        memory.put_line(name, last_real(line_BSC, kept, real_BT))
    return line_BSC[:, line_BSC.shape[1] - T - reach :]


def last_real(line_BSC: Tensor, reach: int, real_BT: Maybe) -> Tensor:
    """The last `reach` real tokens of each row."""
    T = line_BSC.shape[1] - reach
    if real_BT is None:
        return line_BSC[:, T:]
    if T == 1:
        return torch.where(real_BT[..., None], line_BSC[:, 1:], line_BSC[:, :-1])
    place_BR = real_BT.sum(1, keepdim=True) + torch.arange(reach, device=line_BSC.device)
    return line_BSC.gather(1, place_BR[..., None].expand(-1, -1, line_BSC.shape[2]))


def put_back(y_BTC: Tensor, real_BT: Maybe) -> Tensor:
    """Undoes the order of `with_past`: each real token's output at its own place. Padding gets some other token's."""
    if real_BT is None or y_BTC.shape[1] == 1:
        return y_BTC
    place_BT = (real_BT.cumsum(1) - 1).clamp_min(0)
    return y_BTC.gather(1, place_BT[..., None].expand_as(y_BTC))


def visible_keys(key_BS: Tensor, queries: int, window: int | None = None) -> Tensor:
    """Attention mask of the last `queries` tokens, (B, 1, T, S): marked keys up to the token, or the last `window` of
    these, and always the token itself."""
    keys = key_BS.shape[1]
    query_T1 = torch.arange(keys - queries, keys, device=key_BS.device)[:, None]
    key_S = torch.arange(keys, device=key_BS.device)
    seen = (key_S <= query_T1) & key_BS[:, None, None, :]
    if window is not None:
        number_BS = key_BS.cumsum(1)
        seen = seen & (number_BS[:, None, keys - queries :, None] - number_BS[:, None, None, :] < window)
    return seen | (key_S == query_T1)


def surely_none(key_BT: Maybe) -> bool:
    """Whether no token is a key, as far as the host can tell without waiting for a GPU."""
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
