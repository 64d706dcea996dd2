"""The tokens before: what an operator along time reads of a row, in one pass or token by token."""

import torch
import torch.nn.functional as F
from torch import Tensor

from chiar.layers.context import LayerMemory


def with_past(x_BTC: Tensor, reach: int, real_BT: Tensor | None, memory: LayerMemory | None, name: str) -> Tensor:
    """The last `reach` real tokens stored under `name` (zeros where there were none), then the real ones of x in order,
    (B, reach + T, C); padding goes behind them, so that no real token looks back on it. `put_back` undoes the order.

    The memory then holds the last `reach` real tokens, at the place where it held the ones before.
    """
    T = x_BTC.shape[1]
    if real_BT is not None and T > 1:
        order_BT = (~real_BT).int().argsort(dim=1, stable=True)
        x_BTC = x_BTC.gather(1, order_BT[..., None].expand_as(x_BTC))
    past_BRC = None if memory is None else memory.get(name)
    if past_BRC is None:
        line_BSC = F.pad(x_BTC, (0, 0, reach, 0))
    else:
        line_BSC = torch.cat([past_BRC.to(x_BTC.dtype), x_BTC], dim=1)
    if memory is not None:
        memory.put(name, last_real(line_BSC, reach, real_BT))
    return line_BSC


def last_real(line_BSC: Tensor, reach: int, real_BT: Tensor | None) -> Tensor:
    """The last `reach` real tokens of each row."""
    T = line_BSC.shape[1] - reach
    if real_BT is None:
        return line_BSC[:, T:]
    if T == 1:
        return torch.where(real_BT[..., None], line_BSC[:, 1:], line_BSC[:, :-1])
    place_BR = real_BT.sum(1, keepdim=True) + torch.arange(reach, device=line_BSC.device)
    return line_BSC.gather(1, place_BR[..., None].expand(-1, -1, line_BSC.shape[2]))


def put_back(y_BTC: Tensor, real_BT: Tensor | None) -> Tensor:
    """Each real token's output at its own place again, (B, T, …); padding gets that of some other token."""
    if real_BT is None or y_BTC.shape[1] == 1:
        return y_BTC
    place_BT = (real_BT.cumsum(1) - 1).clamp_min(0)
    if y_BTC.ndim == 2:
        return y_BTC.gather(1, place_BT)
    return y_BTC.gather(1, place_BT[..., None].expand_as(y_BTC))
