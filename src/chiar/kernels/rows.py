"""Moving rows of a matrix about where the host knows how many there are. Every gradient is a move too: that of torch's
index_select would add row by row."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class Take(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x_ND: Tensor, place_P: Tensor) -> Tensor:
        context.save_for_backward(place_P)
        context.rows = len(x_ND)
        return x_ND.index_select(0, place_P)

    @staticmethod
    def backward(context: Any, *grads: Tensor) -> Any:
        (place_P,) = context.saved_tensors
        return put(grads[0], place_P, context.rows), None


def take(x_ND: Tensor, place_P: Tensor) -> Tensor:
    """x[places]; no place comes twice."""
    return Take.apply(x_ND, place_P)


def put(x_PD: Tensor, place_P: Tensor, rows: int) -> Tensor:
    """A matrix of `rows` rows with x at the places and 0 elsewhere."""
    return x_PD.new_zeros(rows, x_PD.shape[1]).index_copy(0, place_P, x_PD)


class Ragged:
    """Rows of `counts` entries each, end to end, and the same as a (B, L) batch, filled up with zeros behind."""

    def __init__(self, counts: list[int]) -> None:
        self.batch, self.longest = len(counts), max(counts)
        self.slot_P: Tensor | None = None
        if len(set(counts)) > 1:
            counts_B = torch.tensor(counts)
            shift_B = torch.arange(self.batch) * self.longest - (counts_B.cumsum(0) - counts_B)
            self.slot_P = torch.arange(sum(counts)) + shift_B.repeat_interleave(counts_B)

    def batched(self, x_PK: Tensor) -> Tensor:
        """(B, L, K)"""
        if self.slot_P is not None:
            x_PK = put(x_PK, self.slot_P, self.batch * self.longest)
        return x_PK.view(self.batch, self.longest, x_PK.shape[1])

    def flat(self, x_BLK: Tensor) -> Tensor:
        """(P, K) again."""
        x_NK = x_BLK.reshape(self.batch * self.longest, x_BLK.shape[2])
        return x_NK if self.slot_P is None else take(x_NK, self.slot_P)


LONG = 256  # rows from here on are computed one by one: a call costs little then, and filling up would cost much


def causal_attention(q_PHd: Tensor, k_PHd: Tensor, v_PHd: Tensor, counts: list[int]) -> Tensor:
    """softmax(QKᵀ/√d) V of rows that lie end to end, each over itself; (P, H·d)."""
    if not len(q_PHd):
        return v_PHd.flatten(1)
    parts = [x.flatten(1) for x in (q_PHd, k_PHd, v_PHd)]
    if len(set(counts)) > 1 and max(counts) >= LONG:
        split = zip(*(x.split(counts) for x in parts), strict=True)
        return torch.cat([over_batch([x[None] for x in row], q_PHd.shape[1])[0] for row in split])
    ragged = Ragged(counts)
    return ragged.flat(over_batch([ragged.batched(x) for x in parts], q_PHd.shape[1]))


def over_batch(qkv_BLD: list[Tensor], heads: int) -> Tensor:
    """Causal attention of (B, L, D). Zeros behind the end of a row are seen by nothing that counts."""
    q, k, v = (x.unflatten(2, (heads, -1)).transpose(1, 2) for x in qkv_BLD)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
