"""Buffers that follow from the configuration."""

from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor, nn


class DerivedBuffers(nn.Module):
    """A module whose buffers are computed, never saved, and stay in fp32 (float64 in a float64 model).

    `model.to(torch.bfloat16)` casts ordinary buffers; a threshold of 0.8954 would become 0.8945, a fifth of a
    standard deviation away at width 1024. These are computed again instead, on whatever device they moved to.
    """

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

    def extra_repr(self) -> str:
        return ", ".join(f"{name}{tuple(value.shape)}" for name, value in self.named_buffers())


def stored_in(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
