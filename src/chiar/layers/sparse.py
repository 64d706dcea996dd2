"""A routed layer that runs only the chosen operator for each token. block.py has the formula.

Attention and feed-forward products work on packed rows (kernels/packing.py); norms of light tokens, filters in the
identity basis and additions pass over all tokens, which costs memory traffic but no products, and so do filters along
time. RBF mixing runs on every token. On a CPU, outside compiled graphs, the host may look at the routes: there tokens
are sorted by operator instead."""

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from chiar.kernels.packed_attention import prefix_attention, rotary_attention
from chiar.kernels.packed_norm import packed_gelu, packed_norm, unpack_sum
from chiar.kernels.packing import Packing, fits, make_packing, pack, pack_all, packed_linear, unpack, used
from chiar.kernels.rows import causal_attention, put, take
from chiar.layers.attention import CausalAttention, rotate
from chiar.layers.context import LayerMemory, Memory, TokenContext, surely_none
from chiar.layers.operator import Operator, Tokens
from chiar.layers.routers import Route
from chiar.registry import is_light

if TYPE_CHECKING:
    from chiar.layers.block import Block

FEWEST = {"routed": 256, "all": 512}  # tokens in a batch, for each key policy, below which "auto" runs densely on a CPU
LONG = 512
"""From here on, and where at most half of the tokens are dark, all keys get attention for dark queries only: torch's
causal attention of every query, in one call for all rows, is faster below."""
Norm = nn.Module | None


def sparse_tokens(
    block: "Block", x_BTD: Tensor, context: TokenContext, route: Route, memory: Memory = None
) -> "SparseTokens":
    """Padding is never sent to attention: its output is arbitrary, as in dense execution. `memory` is empty: tokens see
    each other, not what was stored before."""
    layout = SortedTokens if host_sees_routes(x_BTD.device) else PackedTokens
    return layout(block, x_BTD, context, route, memory)


def host_sees_routes(device: torch.device) -> bool:
    """Whether to look at how many tokens were chosen costs no waiting."""
    return device.type == "cpu" and not torch.compiler.is_compiling()


def sparse_pays(x_BTD: Tensor, keys: str) -> bool:
    """Whether packing tokens costs less than it saves (on a CPU as measured: docs/execution.md)."""
    if x_BTD.is_cuda:
        dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else x_BTD.dtype
        return dtype == torch.bfloat16 and has_fast_grouped_products(x_BTD.device.index)
    return x_BTD.shape[0] * x_BTD.shape[1] >= FEWEST[keys] or not host_sees_routes(x_BTD.device)


@torch.compiler.assume_constant_result
def has_fast_grouped_products(device: int) -> bool:
    """Whether torch multiplies the rows in use alone there, for bf16; elsewhere it waits to learn how many they are."""
    return torch.cuda.get_device_capability(device)[0] in (9, 10)


class SparseTokens(Tokens):
    route: Route

    def __init__(self, block: "Block", x_BTD: Tensor, context: TokenContext, route: Route, memory: Memory) -> None:
        super().__init__(block, x_BTD.flatten(0, 1), context, route, memory)
        self.shape = self.batch, self.length, _ = x_BTD.shape

    def together(self, y_ND: Tensor) -> Tensor:
        """All tokens in their places, (B, T, D)."""
        raise NotImplementedError

    def weight_N1(self) -> Tensor:
        """Of the chosen operator: mostly 1, but a router gets its gradient through it."""
        return self.route.weights_BTK.flatten(0, 1).gather(1, self.route.choice_BT.reshape(-1, 1))


class PackedTokens(SparseTokens):
    """Light operators have all tokens in their places, (N, D), and are right where they were chosen; the others have
    the tokens sent to them, packed."""

    def __init__(self, block: "Block", x_BTD: Tensor, context: TokenContext, route: Route, memory: Memory) -> None:
        super().__init__(block, x_BTD, context, route, memory)
        self.packings: dict[str, Packing] = {}
        self.dark = self.packing("attention")

    def of(self, name: str) -> Tensor:
        """Real tokens sent to an operator, (B, T)."""
        chosen_BT = self.route.choice_BT == self.block.names.index(name)
        return chosen_BT if self.context.real_BT is None else chosen_BT & self.context.real_BT

    def packing(self, name: str) -> Packing:
        if name not in self.packings:
            self.packings[name] = make_packing(self.of(name))
        return self.packings[name]

    def view(self, name: str) -> Tensor:
        return self.x if is_light(name) else pack(self.x, self.packing(name))

    def seen(self, name: str) -> Tensor:
        """What an operator reads of every token, (N, D)."""
        return self.block.norms[name](self.x) if self.block.pre_norm else self.x

    def run_all(self, operator: Operator, name: str) -> Tensor:
        """The definition, for every token, (N, D)."""
        key_BT = self.of(name) if self.block.routed_keys and not is_light(name) else self.context.real_BT
        seen_BTD = self.seen(name).view(self.shape)
        return operator(seen_BTD, self.context, key_BT, self.memory, self.block.routed_keys).flatten(0, 1)

    def operate(self, name: str) -> Tensor:
        return self.block.run(name).run_packed(self, name)

    def norm(self, norm: nn.Module, y: Tensor, name: str) -> Tensor:
        if is_light(name):
            return norm(y)
        packing = self.packing(name)
        return used(norm(used(y, packing)), packing)

    def feed(self, y: Tensor, name: str, bias: bool = True) -> Tensor:
        """Without dropout, which sparse execution refuses; on demand without the last bias."""
        ffn, packing = self.block.ffn, self.packing(name)
        hidden = packed_gelu(packed_linear(y, ffn.up.weight, None, packing), ffn.up.bias, packing)
        return packed_linear(hidden, ffn.down.weight, ffn.down.bias if bias else None, packing)

    def select(self, parts: dict[str, Tensor]) -> Tensor:
        light, *others = parts
        y_ND = parts[light]
        for name in others:
            y_ND = unpack(parts[name], y_ND, self.packing(name))
        return self.weighted(y_ND)

    def weighted(self, y_ND: Tensor) -> Tensor:
        return y_ND * self.weight_N1().to(y_ND.dtype) if self.block.weights_have_gradient else y_ND

    def together(self, y_ND: Tensor) -> Tensor:
        return y_ND.view(self.shape)

    def fused_ends(self) -> Tensor | None:
        """With two operators dark tokens are packed once and stay packed; kernels add biases and residuals."""
        block, names = self.block, self.block.names
        if len(names) != 2:
            return None
        attention = block.operators["attention"]
        assert isinstance(attention, CausalAttention)
        attended_PD = self.attend(attention, bias=False)
        u_PD, seen_PD = packed_norm(self.x, block.ffn_norm, self.dark, attended_PD, attention.out.bias)
        more_PD = self.feed(seen_PD, "attention", bias=False)
        light_ND = self.x + self.operate(names[0])
        y_ND = unpack_sum(u_PD, more_PD, block.ffn.down.bias, light_ND, self.dark)
        if not block.weights_have_gradient:
            return y_ND
        # Where the weight is 1 what is added is 0, but its gradient is the router's.
        change_ND = y_ND - self.x
        return y_ND + (self.weighted(change_ND) - change_ND)

    def attend(self, attention: CausalAttention, bias: bool = True) -> Tensor:
        """Packed output of the dark tokens, over each other or over all; on demand without the last bias."""
        norm = self.block.norms["attention"] if self.block.pre_norm else None
        alone = self.block.routed_keys and self.memory is None  # a cache needs the rotated keys by themselves
        inside = alone and self.context.rope is not None and fits(self.x, attention.heads)
        out_PHd = self.among_themselves(attention, norm) if inside else self.over_keys(attention, norm)
        return packed_linear(out_PHd.flatten(1), attention.out.weight, attention.out.bias if bias else None, self.dark)

    def among_themselves(self, attention: CausalAttention, norm: Norm) -> Tensor:
        """Where keys are the dark tokens themselves and RoPE can be part of the attention operator."""
        dark, heads = self.dark, attention.heads
        qkv_P3Hd = packed_linear(self.dark_seen(norm), attention.qkv.weight, None, dark).unflatten(1, (3, heads, -1))
        assert self.context.rope is not None
        cos, sin = (table.flatten(0, 2) for table in self.context.rope)
        table_P, limit_P = self.table_rows(dark), self.limits(dark)
        # A grouped product has no bias: the kernel that turns adds it.
        bias_3Hd = attention.qkv.bias.view(3, heads, -1)
        return rotary_attention(qkv_P3Hd, bias_3Hd, (cos, sin), table_P, dark, limit_P, self.length)

    def dark_seen(self, norm: Norm) -> Tensor:
        """norm(x) of the dark tokens, packed."""
        return packed_norm(self.x, norm, self.dark)[1]

    def limits(self, keys: Packing) -> Tensor:
        """How many keys each packed dark token sees; a dark token is a key itself."""
        return used(keys.before_N[self.dark.token_P] + 1, self.dark)

    def over_keys(self, attention: CausalAttention, norm: Norm) -> Tensor:
        q_PHd, k_MHd, v_MHd, keys = self.project(attention, norm)
        if self.memory is not None:
            self.remember(self.memory, k_MHd, v_MHd, keys)
        skip_M, rows = self.dark.before_N[keys.token_P], (self.dark.rows, keys.rows)
        return prefix_attention(q_PHd, k_MHd, v_MHd, *rows, self.limits(keys), skip_M, self.length)

    def remember(self, memory: LayerMemory, k_MHd: Tensor, v_MHd: Tensor, keys: Packing) -> None:
        """Store keys and values as attention in dense execution does."""
        key_BT = keys.chosen_N.view(self.batch, self.length)
        if self.block.routed_keys and surely_none(key_BT):
            return
        new = {}
        for name, part_MHd in (("key", k_MHd), ("value", v_MHd)):
            part_MD = part_MHd.flatten(1)
            part_ND = unpack(part_MD, part_MD.new_zeros(self.batch * self.length, part_MD.shape[1]), keys)
            new[name] = part_ND.view(self.batch, self.length, *part_MHd.shape[1:]).transpose(1, 2)
        memory.ragged("attention").append(new, key_BT)

    def project(self, attention: CausalAttention, norm: Norm) -> tuple[Tensor, Tensor, Tensor, Packing]:
        """Rotated queries of the dark tokens; keys and values of theirs or of all; and which tokens the keys are."""
        heads, dark = attention.heads, self.dark
        weight, bias = attention.qkv.weight, attention.qkv.bias
        if self.block.routed_keys:
            qkv = packed_linear(self.dark_seen(norm), weight, bias, dark).unflatten(1, (3, heads, -1))
            q, k, v = qkv.unbind(1)
            return self.rotated(q, dark), self.rotated(k, dark), v, dark
        width, seen_ND = self.x.shape[1], self.x if norm is None else norm(self.x)
        q = packed_linear(self.dark_seen(norm), weight[:width], bias[:width], dark).unflatten(1, (heads, -1))
        k, v = F.linear(seen_ND, weight[width:], bias[width:]).unflatten(1, (2, heads, -1)).unbind(1)
        if self.context.real_BT is None:
            keys = pack_all(self.batch, self.length, self.x.device)
        else:
            keys = make_packing(self.context.real_BT)
            k, v = (pack(part.flatten(1), keys).unflatten(1, (heads, -1)) for part in (k, v))
        return self.rotated(q, dark), self.rotated(k, keys), v, keys

    def rotated(self, x_PHd: Tensor, packing: Packing) -> Tensor:
        if self.context.rope is None:
            return x_PHd
        cos, sin = (table.flatten(0, 2)[self.table_rows(packing)][:, None] for table in self.context.rope)
        return rotate(x_PHd, (cos, sin))

    def table_rows(self, packing: Packing) -> Tensor:
        """The row of each packed token in RoPE's tables, of which all batch rows may share one."""
        assert self.context.rope is not None
        shared = self.context.rope[0].shape[0] == 1
        return packing.token_P % self.length if shared else packing.token_P


class SortedTokens(SparseTokens):
    """Tokens sorted by operator. Each operator has a slice to itself, norms and the feed-forward network, which know no
    order, run over slices or all, and the end puts tokens back: one move of rows in, one out, and nothing computed that
    was not chosen. Padding forms a last slice that nothing runs on."""

    def __init__(self, block: "Block", x_BTD: Tensor, context: TokenContext, route: Route, memory: Memory) -> None:
        super().__init__(block, x_BTD, context, route, memory)
        self.unsorted_ND = self.x
        self.choice_BT = route.choice_BT
        if context.real_BT is not None:
            self.choice_BT = torch.where(context.real_BT, route.choice_BT, len(block.names))
        choice_N = self.choice_BT.flatten()
        counts: list[int] = choice_N.bincount(minlength=len(block.names) + 1).tolist()
        self.order_N = choice_N.argsort(stable=True)
        x_ND = take(self.unsorted_ND, self.order_N)
        *slices, self.padding_PD = x_ND.split(counts)
        self.x = x_ND[: len(x_ND) - len(self.padding_PD)]
        self.slices = dict(zip(block.names, slices, strict=True))
        self.places = dict(zip(block.names, self.order_N.split(counts), strict=False))  # among B·T

    def view(self, name: str) -> Tensor:
        return self.slices[name]

    def operate(self, name: str) -> Tensor:
        return self.block.run(name).run_sorted(self, name, self.slices[name])

    def select(self, parts: dict[str, Tensor]) -> Tensor:
        y_ND = torch.cat(list(parts.values()))
        if not self.block.weights_have_gradient:
            return y_ND
        weight_N1 = take(self.weight_N1(), self.order_N)
        return y_ND * weight_N1[: len(y_ND)].to(y_ND.dtype)

    def together(self, y_ND: Tensor) -> Tensor:
        if len(self.padding_PD):
            y_ND = torch.cat([y_ND, self.padding_PD.to(y_ND.dtype)])
        return put(y_ND, self.order_N, len(y_ND)).view(self.batch, self.length, -1)

    def seen(self, name: str, x_PD: Tensor) -> Tensor:
        return self.block.norms[name](x_PD) if self.block.pre_norm else x_PD

    def all_seen(self, name: str) -> Tensor:
        """What the operator reads of every token, in order, (B, T, D)."""
        return self.seen(name, self.unsorted_ND).view(self.batch, self.length, -1)

    def run_all(self, operator: Operator, name: str) -> Tensor:
        """The definition, for every token, of which those sent to the operator are taken, (P, D)."""
        y_BTD = operator(self.all_seen(name), self.context, self.context.real_BT, self.memory)
        return take(y_BTD.flatten(0, 1), self.places[name])

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
            x_ND = put(x_PHd.flatten(1), self.places[name], self.batch * self.length)
            new[part] = x_ND.view(self.batch, self.length, *x_PHd.shape[1:]).transpose(1, 2)
        self.memory.ragged(name).append(new, self.sent_to(name))

    def attend(self, attention: CausalAttention, x_PD: Tensor) -> Tensor:
        """Attention of the dark tokens, over each other or over all, (P, D)."""
        if self.block.routed_keys:
            return attention.out(self.among_themselves(attention, self.seen("attention", x_PD)))
        if self.length >= LONG and 2 * len(x_PD) <= self.batch * self.length:
            return attention.out(self.over_all(attention, self.seen("attention", x_PD)))
        x_BTD = self.all_seen("attention")
        mixed_BTD, _ = attention.mix(x_BTD, self.context, self.context.real_BT, self.memory)
        return attention.out(take(mixed_BTD.flatten(0, 1), self.places["attention"]))

    def among_themselves(self, attention: CausalAttention, seen_PD: Tensor) -> Tensor:
        """Attention of the dark tokens over each other, (P, D)."""
        qkv_P3Hd = attention.qkv(seen_PD).unflatten(1, (3, attention.heads, -1))
        q_PHd, k_PHd = self.rotated(qkv_P3Hd[:, :2], self.places["attention"]).unbind(1)
        v_PHd = qkv_P3Hd[:, 2]
        if len(seen_PD):
            self.remember("attention", {"key": k_PHd, "value": v_PHd})
        return causal_attention(q_PHd, k_PHd, v_PHd, self.counts_by_row("attention"))

    def over_all(self, attention: CausalAttention, seen_PD: Tensor) -> Tensor:
        """Attention of the dark tokens over all keys, without the queries of other tokens, (P, D)."""
        heads, width = attention.heads, seen_PD.shape[1]
        weight, bias = attention.qkv.weight, attention.qkv.bias
        q_PHd = F.linear(seen_PD, weight[:width], bias[:width]).unflatten(1, (heads, -1))
        q_PHd = self.rotated(q_PHd, self.places["attention"])
        kv_BTD = F.linear(self.all_seen("attention"), weight[width:], bias[width:])
        k_BHTd, v_BHTd = kv_BTD.unflatten(2, (2, heads, -1)).permute(2, 0, 3, 1, 4)
        if self.context.rope is not None:
            k_BHTd = rotate(k_BHTd, self.context.rope)
        if self.memory is not None:
            self.memory.ragged("attention").append({"key": k_BHTd, "value": v_BHTd}, self.is_key())
        dark_BT, is_key_BT = self.sent_to("attention"), self.is_key()
        limit_P = is_key_BT.cumsum(1).flatten().int()[self.places["attention"]]
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
