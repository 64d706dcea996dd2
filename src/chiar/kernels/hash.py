"""A fixed pseudo-random number for an integer key: the same on every device and in every process."""

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF


def _mix(h: Tensor) -> Tensor:
    h = (h ^ (h >> 16)) * 0x85EBCA6B & _MASK
    h = (h ^ (h >> 13)) * 0xC2B2AE35 & _MASK
    return h ^ (h >> 16)


def uniform_hash(keys: Tensor, *salts: int) -> Tensor:
    """Uniform numbers in [0, 1) from integer keys and salts (seed, layer, …)."""
    h = _mix(keys.to(torch.int64) & _MASK)
    for salt in salts:
        h = _mix((h + (0x9E3779B9 * (salt + 1) & _MASK)) & _MASK)
    return (h >> 8).float() / (1 << 24)
