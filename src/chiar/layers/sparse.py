"""A routed layer that runs only the chosen operator for each token. block.py has the formula.

Attention and feed-forward products work on packed rows (kernels/packing.py); norms of light tokens, filters in the
identity basis and additions pass over all tokens, which costs memory traffic but no products, and so do filters along
time. RBF mixing runs on every token. On a CPU, outside compiled graphs, sparse_sorted.py takes their place.
"""

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from chiar.kernels.packed_attention import fits, prefix_attention, rotary_attention
from chiar.kernels.packed_norm import packed_gelu, packed_norm, unpack_sum
from chiar.kernels.packing import Packing, make_packing, pack, pack_all, packed_linear, unpack, used
from chiar.layers.attention import CausalAttention, rotate
from chiar.layers.context import LayerMemory, TokenContext, surely_none
from chiar.layers.operator import Operator
from chiar.layers.routers import Route
from chiar.layers.sparse_sorted import SortedTokens
from chiar.registry import is_light

if TYPE_CHECKING:
    from chiar.layers.block import Block

FEWEST = {"routed": 256, "all": 512}
"""Tokens in a batch, for each key policy, below which "auto" runs densely on a CPU."""
Norm = nn.Module | None


def sparse_tokens(
    block: "Block", x_BTD: Tensor, context: TokenContext, route: Route, memory: LayerMemory | None = None
) -> "PackedTokens | SortedTokens":
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
        autocast = torch.is_autocast_enabled("cuda")
        dtype = torch.get_autocast_dtype("cuda") if autocast else x_BTD.dtype
        return dtype == torch.bfloat16 and has_fast_grouped_products(x_BTD.device.index)
    return x_BTD.shape[0] * x_BTD.shape[1] >= FEWEST[keys] or not host_sees_routes(x_BTD.device)


@torch.compiler.assume_constant_result
def has_fast_grouped_products(device: int) -> bool:
    """Whether torch multiplies the rows in use alone there, for bf16; elsewhere it waits to learn how many they are."""
    return torch.cuda.get_device_capability(device)[0] in (9, 10)


class PackedTokens:
    """Light operators have all tokens in their places, (N, D), and are right where they were chosen; the others have
    the tokens sent to them, packed."""

    def __init__(
        self, block: "Block", x_BTD: Tensor, context: TokenContext, route: Route, memory: LayerMemory | None
    ) -> None:
        self.block, self.context, self.route, self.memory = block, context, route, memory
        self.shape = x_BTD.shape
        self.batch, self.length, _ = x_BTD.shape
        self.x = x_BTD.flatten(0, 1)
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
        return self.block.runs[name].run_packed(self, name)

    def norm(self, norm: nn.Module, y: Tensor, name: str) -> Tensor:
        if is_light(name):
            return norm(y)
        packing = self.packing(name)
        return used(norm(used(y, packing)), packing)

    def feed(self, y: Tensor, name: str, bias: bool = True) -> Tensor:
        """Without dropout, which sparse execution refuses; on demand without the last bias."""
        ffn, packing = self.block.ffn, self.packing(name)
        hidden = packed_gelu(packed_linear(y, ffn.up.weight, None, packing), ffn.up.bias, packing.count)
        return packed_linear(hidden, ffn.down.weight, ffn.down.bias if bias else None, packing)

    def select(self, parts: dict[str, Tensor]) -> Tensor:
        light, *others = parts
        y_ND = parts[light]
        for name in others:
            y_ND = unpack(parts[name], y_ND, self.packing(name))
        return self.weighted(y_ND)

    def weighted(self, y_ND: Tensor) -> Tensor:
        """Times the weight of the chosen operator: mostly 1, but a router gets its gradient through it."""
        if not self.block.weights_have_gradient:
            return y_ND
        weight_N1 = self.route.weights_BTK.flatten(0, 1).gather(1, self.route.choice_BT.reshape(-1, 1))
        return y_ND * weight_N1.to(y_ND.dtype)

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
        run = self.among_themselves if self.rotates_inside(attention) else self.over_keys
        out_PHd = run(attention, norm)
        return packed_linear(out_PHd.flatten(1), attention.out.weight, attention.out.bias if bias else None, self.dark)

    def rotates_inside(self, attention: CausalAttention) -> bool:
        """Whether keys are the dark tokens themselves and RoPE can be part of the attention operator."""
        alone = self.block.routed_keys and self.memory is None  # a cache needs the rotated keys by themselves
        return alone and self.context.rope is not None and fits(self.x.shape[1] // attention.heads)

    def among_themselves(self, attention: CausalAttention, norm: Norm) -> Tensor:
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
        skip_M = self.dark.before_N[keys.token_P]
        rows = self.dark.rows, keys.rows
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
