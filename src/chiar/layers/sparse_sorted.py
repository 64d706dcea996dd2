"""Sparse execution where the host may look at the routes: on a CPU, outside compiled graphs.

Tokens are sorted by operator. Each operator then has a slice to itself, norms and the feed-forward network, which know
no order, run over slices or all, and the end puts tokens back: one move of rows in, one out, and nothing computed that
was not chosen. Dense execution in block.py is the definition.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from chiar.kernels.packed_attention import prefix_attention
from chiar.kernels.rows import Ragged, Reorder, causal_attention, inverse_of, put, take
from chiar.layers.attention import CausalAttention, rotate
from chiar.layers.context import LayerMemory, TokenContext, is_light
from chiar.layers.rbf import RBFMixing
from chiar.layers.routers import Route
from chiar.registry import OPERATORS

LONG = 512
"""From here on, and where at most half of the tokens are dark, all keys get attention for dark queries only: torch's
causal attention of every query, in one call for all rows, is faster below."""


class SortedLayer:
    """One pass of one layer. Padding forms a last slice that nothing runs on."""

    def __init__(
        self, block: Any, x_BTD: Tensor, context: TokenContext, route: Route, memory: LayerMemory | None
    ) -> None:
        self.block, self.context, self.memory, self.route = block, context, memory, route
        self.batch, self.length, _ = x_BTD.shape
        self.x_ND = x_BTD.flatten(0, 1)
        self.names = list(block.operators)
        choice_BT = route.choice_BT
        if context.real_BT is not None:
            choice_BT = torch.where(context.real_BT, choice_BT, len(self.names))
        self.choice_BT = choice_BT
        choice_N = choice_BT.flatten()
        self.counts: list[int] = choice_N.bincount(minlength=len(self.names) + 1).tolist()
        self.order_N = choice_N.argsort(stable=True)
        self.inverse_N = inverse_of(self.order_N)

    def run(self) -> Tensor:
        x_ND = Reorder.apply(self.x_ND, self.order_N, self.inverse_N)
        *slices, padding_PD = x_ND.split(self.counts)
        end = self.pre_norm if self.block.pre_norm else self.post_norm
        y_ND = end(dict(zip(self.names, slices, strict=True)), x_ND[: len(x_ND) - len(padding_PD)])
        if len(padding_PD):
            y_ND = torch.cat([y_ND, padding_PD.to(y_ND.dtype)])
        return Reorder.apply(y_ND, self.inverse_N, self.order_N).view(self.batch, self.length, -1)

    def pre_norm(self, slices: dict[str, Tensor], x_ND: Tensor) -> Tensor:
        block = self.block
        changes = {name: self.operate(name, x_PD) for name, x_PD in slices.items()}
        if block.light_ffn:
            u_ND = x_ND + self.weighted(joined(changes))
            return u_ND + self.feed(block.ffn_norm(u_ND))
        for name, x_PD in slices.items():
            if not is_light(name):
                changes[name] = changes[name] + block.ffn(block.ffn_norm(x_PD + changes[name]))
        return x_ND + self.weighted(joined(changes))

    def post_norm(self, slices: dict[str, Tensor], x_ND: Tensor) -> Tensor:
        block = self.block
        residuals, inputs = {}, {}
        for name, x_PD in slices.items():
            output_PD = self.operate(name, x_PD)
            if block.equation and is_light(name):
                residuals[name], inputs[name] = x_PD, output_PD
            else:
                residuals[name] = inputs[name] = block.norms[name](x_PD + output_PD)
        if block.light_ffn:
            residual_ND = joined(residuals)
            input_ND = joined(inputs) if block.equation else residual_ND
            return block.ffn_norm(self.weighted(residual_ND) + self.feed(self.weighted(input_ND)))
        ends = {name: u if is_light(name) else block.ffn_norm(u + block.ffn(u)) for name, u in residuals.items()}
        return self.weighted(joined(ends))

    def feed(self, x_ND: Tensor) -> Tensor:
        """Every token through its network: the shared one, or the light tokens' own and the others'."""
        block = self.block
        if block.own_ffn is None:
            return block.ffn(x_ND)
        slices = zip(self.names, x_ND.split(self.counts[:-1]), strict=True)
        return torch.cat([(block.own_ffn if is_light(name) else block.ffn)(x_PD) for name, x_PD in slices])

    def weighted(self, y_ND: Tensor) -> Tensor:
        """Times the weight of the chosen operator: mostly 1, but a router gets its gradient through it."""
        if not self.block.weights_have_gradient:
            return y_ND
        weight_N1 = self.route.weights_BTK.flatten(0, 1).gather(1, self.route.choice_BT.view(-1, 1))
        weight_N1 = Reorder.apply(weight_N1, self.order_N, self.inverse_N)
        return y_ND * weight_N1[: len(y_ND)].to(y_ND.dtype)

    def operate(self, name: str, x_PD: Tensor) -> Tensor:
        """op(x), or op(LN_op(x)) under pre-norm, of the tokens sent to it."""
        operator = self.block.operators[name]
        if name in ("skip", "bypass"):
            return self.block.run_plain(name, x_PD)
        if name == "attention" and not self.block.routed_keys:
            return operator.out(self.over_all(operator, x_PD))
        if name == "temporal":  # its light tokens look back on all
            y_BTD = operator(self.all_seen(name), self.context, self.memory)
            return take(y_BTD.flatten(0, 1), self.tokens(name))
        seen_PD = self.seen(name, x_PD)
        if name in OPERATORS:
            return operator(seen_PD)
        if name == "attention":
            return operator.out(self.among_themselves(operator, seen_PD))
        return operator(seen_PD, self.context.transform) if name == "spectral" else self.rbf(operator, seen_PD)

    def seen(self, name: str, x_PD: Tensor) -> Tensor:
        return self.block.norms[name](x_PD) if self.block.pre_norm else x_PD

    def tokens(self, name: str) -> Tensor:
        """The numbers, among B·T, of the tokens sent to an operator."""
        k = self.names.index(name)
        begin = sum(self.counts[:k])
        return self.order_N[begin : begin + self.counts[k]]

    def counts_by_row(self, name: str) -> list[int]:
        k = self.names.index(name)
        return [self.counts[k]] if self.batch == 1 else (self.choice_BT == k).sum(1).tolist()

    def all_seen(self, name: str) -> Tensor:
        """What the operator reads of every token, in order, (B, T, D)."""
        return self.seen(name, self.x_ND).view(self.batch, self.length, -1)

    def among_themselves(self, attention: CausalAttention, seen_PD: Tensor) -> Tensor:
        """Attention of the dark tokens over each other, (P, D)."""
        qkv_P3Hd = attention.qkv(seen_PD).unflatten(1, (3, attention.heads, -1))
        q_PHd, k_PHd = self.rotated(qkv_P3Hd[:, :2], self.tokens("attention")).unbind(1)
        v_PHd = qkv_P3Hd[:, 2]
        if self.memory is not None and len(seen_PD):
            heads = {"key": k_PHd, "value": v_PHd}
            new = {name: self.spread(part, "attention") for name, part in heads.items()}
            self.memory.ragged("attention").append(new, self.choice_BT == self.names.index("attention"))
        return causal_attention(q_PHd, k_PHd, v_PHd, self.counts_by_row("attention"))

    def spread(self, part_PHd: Tensor, name: str) -> Tensor:
        """(B, H, T, d) with zeros at the tokens of other operators."""
        part_ND = put(part_PHd.flatten(1), self.tokens(name), self.batch * self.length)
        return part_ND.view(self.batch, self.length, *part_PHd.shape[1:]).transpose(1, 2)

    def over_all(self, attention: CausalAttention, x_PD: Tensor) -> Tensor:
        """Attention of the dark tokens over all keys, (P, D)."""
        if self.length >= LONG and 2 * len(x_PD) <= self.batch * self.length:
            return self.by_rows(attention, self.seen("attention", x_PD))
        x_BTD = self.all_seen("attention")
        mixed_BTD, _ = attention.mix(x_BTD, self.context, self.context.real_BT, self.memory)
        return take(mixed_BTD.flatten(0, 1), self.tokens("attention"))

    def by_rows(self, attention: CausalAttention, seen_PD: Tensor) -> Tensor:
        """The same without the queries of other tokens."""
        heads, width = attention.heads, seen_PD.shape[1]
        weight, bias = attention.qkv.weight, attention.qkv.bias
        q_PHd = F.linear(seen_PD, weight[:width], bias[:width]).unflatten(1, (heads, -1))
        q_PHd = self.rotated(q_PHd, self.tokens("attention"))
        kv_BTD = F.linear(self.all_seen("attention"), weight[width:], bias[width:])
        k_BHTd, v_BHTd = kv_BTD.unflatten(2, (2, heads, -1)).permute(2, 0, 3, 1, 4)
        if self.context.rope is not None:
            k_BHTd = rotate(k_BHTd, self.context.rope)
        if self.memory is not None:
            self.memory.ragged("attention").append({"key": k_BHTd, "value": v_BHTd}, self.is_key())
        dark_BT, is_key_BT = self.choice_BT == self.names.index("attention"), self.is_key()
        limit_P = is_key_BT.cumsum(1).flatten().int()[self.tokens("attention")]
        skip_M = (dark_BT.cumsum(1) - dark_BT.long()).flatten().int()
        k_MHd, v_MHd = (x.transpose(1, 2).flatten(0, 1) for x in (k_BHTd, v_BHTd))
        if self.context.real_BT is not None:
            key_M = is_key_BT.flatten().nonzero()[:, 0]
            k_MHd, v_MHd = (take(x.flatten(1), key_M).view(-1, *x.shape[1:]) for x in (k_MHd, v_MHd))
            skip_M = skip_M[key_M]
        query_rows, key_rows = (F.pad(chosen.sum(1).cumsum(0), (1, 0)).int() for chosen in (dark_BT, is_key_BT))
        return prefix_attention(q_PHd, k_MHd, v_MHd, query_rows, key_rows, limit_P, skip_M, self.length).flatten(1)

    def is_key(self) -> Tensor:
        real_BT = self.context.real_BT
        return torch.ones_like(self.choice_BT, dtype=torch.bool) if real_BT is None else real_BT

    def rotated(self, x: Tensor, tokens_P: Tensor) -> Tensor:
        """RoPE of (P, …, d) at those tokens."""
        if self.context.rope is None:
            return x
        shared = self.context.rope[0].shape[0] < self.batch  # one row of angles may serve the whole batch
        places_P = tokens_P % self.length if shared else tokens_P
        cos_Pd, sin_Pd = (table.flatten(0, 2).index_select(0, places_P) for table in self.context.rope)
        cos, sin = (table[:, None] if x.ndim == 3 else table[:, None, None] for table in (cos_Pd, sin_Pd))
        return rotate(x, (cos, sin))

    def rbf(self, rbf: RBFMixing, seen_PD: Tensor) -> Tensor:
        """RBF mixing of the tokens sent to it, over each other or over all."""
        ragged = Ragged(self.counts_by_row("rbf"))
        if self.block.routed_keys:
            query_PF = rbf.features_of(seen_PD)
            key_BSF = ragged.batched(query_PF)
            visible_BQS = torch.ones(ragged.longest, ragged.longest, dtype=torch.bool).tril()
            if self.memory is not None and len(seen_PD):
                new = {"features": self.spread(query_PF[:, None], "rbf")}
                self.memory.ragged("rbf").append(new, self.choice_BT == self.names.index("rbf"))
        else:
            key_BSF, is_key_BT = rbf.features_of(self.all_seen("rbf")), self.is_key()
            query_PF = take(key_BSF.flatten(0, 1), self.tokens("rbf"))
            if self.memory is not None:
                self.memory.ragged("rbf").append({"features": key_BSF[:, None]}, is_key_BT)
            place_BQ1 = ragged.batched((self.tokens("rbf") % self.length)[:, None])
            place_S = torch.arange(self.length)
            # What fills a short row up must see something, or its softmax would be NaN.
            visible_BQS = (place_S <= place_BQ1) & is_key_BT[:, None] | (place_S == place_BQ1)
        return rbf.out(ragged.flat(rbf.mix(ragged.batched(query_PF), key_BSF, visible_BQS)))


def joined(parts: dict[str, Tensor]) -> Tensor:
    return torch.cat(list(parts.values()))
