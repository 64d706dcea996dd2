"""Buffers that follow from the configuration."""

from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor, nn


class DerivedBuffers(nn.Module):
    """A module whose buffers are computed, never saved, and stay in fp32.

    `model.to(torch.bfloat16)` casts ordinary buffers; a threshold of 0.8954 would become 0.8945, a fifth of a
    standard deviation away at width 1024. These are computed again instead, on whatever device they moved to.
    """

    def derive(self) -> dict[str, Tensor]:
        """Name and fp32 CPU value of each buffer."""
        raise NotImplementedError

    def register_derived(self) -> None:
        for name, value in self.derive().items():
            self.register_buffer(name, value, persistent=False)

    def rebuild(self) -> None:
        with torch.device("cpu"):
            values = self.derive()
        for name, value in values.items():
            device = getattr(self, name).device
            if device.type != "meta":
                setattr(self, name, value.to(device))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        self.rebuild()
        return self

    def extra_repr(self) -> str:
        return ", ".join(f"{name}{tuple(value.shape)}" for name, value in self.named_buffers())
