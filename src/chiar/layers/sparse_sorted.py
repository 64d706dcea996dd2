"""Sparse execution where the host may look at the routes: on a CPU, outside compiled graphs.

Tokens are sorted by operator. Each operator then has a slice to itself, norms and the feed-forward network, which know
no order, run over slices or all, and the end puts tokens back: one move of rows in, one out, and nothing computed that
was not chosen.
"""

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from chiar.kernels.packed_attention import prefix_attention
from chiar.kernels.rows import Reorder, causal_attention, inverse_of, put, take
from chiar.layers.attention import CausalAttention, rotate
from chiar.layers.context import LayerMemory, TokenContext
from chiar.layers.operator import Operator
from chiar.layers.routers import Route

if TYPE_CHECKING:
    from chiar.layers.block import Block

LONG = 512
"""From here on, and where at most half of the tokens are dark, all keys get attention for dark queries only: torch's
causal attention of every query, in one call for all rows, is faster below."""


class SortedTokens:
    """One pass of one layer. Padding forms a last slice that nothing runs on."""

    def __init__(
        self, block: "Block", x_BTD: Tensor, context: TokenContext, route: Route, memory: LayerMemory | None
    ) -> None:
        self.block, self.context, self.memory, self.route = block, context, memory, route
        self.batch, self.length, _ = x_BTD.shape
        self.unsorted_ND = x_BTD.flatten(0, 1)
        choice_BT = route.choice_BT
        if context.real_BT is not None:
            choice_BT = torch.where(context.real_BT, choice_BT, len(block.names))
        self.choice_BT = choice_BT
        choice_N = choice_BT.flatten()
        counts: list[int] = choice_N.bincount(minlength=len(block.names) + 1).tolist()
        self.order_N = choice_N.argsort(stable=True)
        self.inverse_N = inverse_of(self.order_N)
        x_ND = Reorder.apply(self.unsorted_ND, self.order_N, self.inverse_N)
        *slices, self.padding_PD = x_ND.split(counts)
        self.x = x_ND[: len(x_ND) - len(self.padding_PD)]
        self.slices = dict(zip(block.names, slices, strict=True))
        self.places_of = dict(zip(block.names, self.order_N.split(counts), strict=False))

    def view(self, name: str) -> Tensor:
        return self.slices[name]

    def operate(self, name: str) -> Tensor:
        return self.block.runs[name].run_sorted(self, name, self.slices[name])

    def norm(self, norm: nn.Module, y: Tensor, name: str) -> Tensor:
        return norm(y)

    def feed(self, y: Tensor, name: str) -> Tensor:
        return self.block.ffn(y)

    def fused_ends(self) -> None:
        return None

    def select(self, parts: dict[str, Tensor]) -> Tensor:
        """Times the weight of the chosen operator: mostly 1, but a router gets its gradient through it."""
        y_ND = torch.cat(list(parts.values()))
        if not self.block.weights_have_gradient:
            return y_ND
        weight_N1 = self.route.weights_BTK.flatten(0, 1).gather(1, self.route.choice_BT.reshape(-1, 1))
        weight_N1 = Reorder.apply(weight_N1, self.order_N, self.inverse_N)
        return y_ND * weight_N1[: len(y_ND)].to(y_ND.dtype)

    def together(self, y_ND: Tensor) -> Tensor:
        if len(self.padding_PD):
            y_ND = torch.cat([y_ND, self.padding_PD.to(y_ND.dtype)])
        return Reorder.apply(y_ND, self.inverse_N, self.order_N).view(self.batch, self.length, -1)

    def seen(self, name: str, x_PD: Tensor) -> Tensor:
        return self.block.norms[name](x_PD) if self.block.pre_norm else x_PD

    def all_seen(self, name: str) -> Tensor:
        """What the operator reads of every token, in order, (B, T, D)."""
        return self.seen(name, self.unsorted_ND).view(self.batch, self.length, -1)

    def run_all(self, operator: Operator, name: str) -> Tensor:
        """The definition, for every token, (N, D)."""
        return operator(self.all_seen(name), self.context, self.context.real_BT, self.memory).flatten(0, 1)

    def taken(self, y_ND: Tensor, name: str) -> Tensor:
        return take(y_ND, self.places(name))

    def places(self, name: str) -> Tensor:
        """The numbers, among B·T, of the tokens sent to an operator."""
        return self.places_of[name]

    def sent_to(self, name: str) -> Tensor:
        return self.choice_BT == self.block.names.index(name)

    def counts_by_row(self, name: str) -> list[int]:
        return [len(self.slices[name])] if self.batch == 1 else self.sent_to(name).sum(1).tolist()

    def is_key(self) -> Tensor:
        real_BT = self.context.real_BT
        return torch.ones_like(self.choice_BT, dtype=torch.bool) if real_BT is None else real_BT

    def remember(self, name: str, parts_PHd: dict[str, Tensor]) -> None:
        """Store what the tokens sent to an operator give it."""
        if self.memory is None:
            return
        new = {}
        for part, x_PHd in parts_PHd.items():
            x_ND = put(x_PHd.flatten(1), self.places(name), self.batch * self.length)
            new[part] = x_ND.view(self.batch, self.length, *x_PHd.shape[1:]).transpose(1, 2)
        self.memory.ragged(name).append(new, self.sent_to(name))

    def attend(self, attention: CausalAttention, x_PD: Tensor) -> Tensor:
        """Attention of the dark tokens, over each other or over all, (P, D)."""
        if self.block.routed_keys:
            return attention.out(self.among_themselves(attention, self.seen("attention", x_PD)))
        return attention.out(self.over_all(attention, x_PD))

    def among_themselves(self, attention: CausalAttention, seen_PD: Tensor) -> Tensor:
        """Attention of the dark tokens over each other, (P, D)."""
        qkv_P3Hd = attention.qkv(seen_PD).unflatten(1, (3, attention.heads, -1))
        q_PHd, k_PHd = self.rotated(qkv_P3Hd[:, :2], self.places("attention")).unbind(1)
        v_PHd = qkv_P3Hd[:, 2]
        if len(seen_PD):
            self.remember("attention", {"key": k_PHd, "value": v_PHd})
        return causal_attention(q_PHd, k_PHd, v_PHd, self.counts_by_row("attention"))

    def over_all(self, attention: CausalAttention, x_PD: Tensor) -> Tensor:
        """Attention of the dark tokens over all keys, (P, D)."""
        if self.length >= LONG and 2 * len(x_PD) <= self.batch * self.length:
            return self.by_rows(attention, self.seen("attention", x_PD))
        x_BTD = self.all_seen("attention")
        mixed_BTD, _ = attention.mix(x_BTD, self.context, self.context.real_BT, self.memory)
        return take(mixed_BTD.flatten(0, 1), self.places("attention"))

    def by_rows(self, attention: CausalAttention, seen_PD: Tensor) -> Tensor:
        """The same without the queries of other tokens."""
        heads, width = attention.heads, seen_PD.shape[1]
        weight, bias = attention.qkv.weight, attention.qkv.bias
        q_PHd = F.linear(seen_PD, weight[:width], bias[:width]).unflatten(1, (heads, -1))
        q_PHd = self.rotated(q_PHd, self.places("attention"))
        kv_BTD = F.linear(self.all_seen("attention"), weight[width:], bias[width:])
        k_BHTd, v_BHTd = kv_BTD.unflatten(2, (2, heads, -1)).permute(2, 0, 3, 1, 4)
        if self.context.rope is not None:
            k_BHTd = rotate(k_BHTd, self.context.rope)
        if self.memory is not None:
            self.memory.ragged("attention").append({"key": k_BHTd, "value": v_BHTd}, self.is_key())
        dark_BT, is_key_BT = self.sent_to("attention"), self.is_key()
        limit_P = is_key_BT.cumsum(1).flatten().int()[self.places("attention")]
        skip_M = (dark_BT.cumsum(1) - dark_BT.long()).flatten().int()
        k_MHd, v_MHd = (x.transpose(1, 2).flatten(0, 1) for x in (k_BHTd, v_BHTd))
        if self.context.real_BT is not None:
            key_M = is_key_BT.flatten().nonzero()[:, 0]
            k_MHd, v_MHd = (take(x.flatten(1), key_M).view(-1, *x.shape[1:]) for x in (k_MHd, v_MHd))
            skip_M = skip_M[key_M]
        query_rows, key_rows = (F.pad(chosen.sum(1).cumsum(0), (1, 0)).int() for chosen in (dark_BT, is_key_BT))
        return prefix_attention(q_PHd, k_MHd, v_MHd, query_rows, key_rows, limit_P, skip_M, self.length).flatten(1)

    def rotated(self, x: Tensor, tokens_P: Tensor) -> Tensor:
        """RoPE of (P, …, d) at those tokens."""
        if self.context.rope is None:
            return x
        shared = self.context.rope[0].shape[0] < self.batch  # one row of angles may serve the whole batch
        places_P = tokens_P % self.length if shared else tokens_P
        cos_Pd, sin_Pd = (table.flatten(0, 2).index_select(0, places_P) for table in self.context.rope)
        cos, sin = (table[:, None] if x.ndim == 3 else table[:, None, None] for table in (cos_Pd, sin_Pd))
        return rotate(x, (cos, sin))
