"""Sparse execution of a routed layer: each token's chosen operator only. block.py has the formula.

Attention and feed-forward products run on packed rows (kernels/packing.py). Norms of light tokens, temporal filters
or in the identity basis and additions run on all tokens, which costs memory traffic but no matrix products. RBF mixing
runs on every token. On a CPU, outside compiled graphs, the host reads the routes: packings are then exact, and light
operators too run only on their own tokens."""

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from chiar.kernels.packed_attention import prefix_attention, rotary_attention
from chiar.kernels.packed_norm import packed_gelu, packed_norm, unpack_sum
from chiar.kernels.packing import Packing, fits, make_packing, pack, pack_all, packed_linear, unpack, used
from chiar.layers.attention import CausalAttention, rotate
from chiar.layers.context import Maybe, Memory, TokenContext, surely_none
from chiar.layers.operator import Tokens
from chiar.layers.routers import Route
from chiar.registry import is_light

if TYPE_CHECKING:
    from chiar.layers.block import Block

FEWEST = {"routed": 256, "all": 512}  # with fewer tokens in a batch "auto" runs densely on a CPU, by key policy
SHORT = 256  # rows up to this length are padded for a single call: on a CPU a call per row costs more
LONG = 512
"""From this length on, and if at most half of the tokens are dark, attention over all keys runs for dark queries only.
Below, torch's causal attention of every query, in one call for all rows, is faster."""


def host_sees_routes(device: torch.device) -> bool:
    """Whether the host can read the routes without waiting for a device."""
    return device.type == "cpu" and not torch.compiler.is_compiling()


def sparse_pays(x_BTD: Tensor, keys: str) -> bool:
    """Whether packing saves more time than it costs (for a CPU measured, docs/execution.md)."""
    if x_BTD.is_cuda:
        dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else x_BTD.dtype
        return dtype == torch.bfloat16 and has_fast_grouped_products(x_BTD.device.index)
    return x_BTD.shape[0] * x_BTD.shape[1] >= FEWEST[keys] or not host_sees_routes(x_BTD.device)


@torch.compiler.assume_constant_result
def has_fast_grouped_products(device: int) -> bool:
    """Whether torch's grouped bf16 products compute only the rows in use; elsewhere they wait for the row counts."""
    return torch.cuda.get_device_capability(device)[0] in (9, 10)


class PackedTokens(Tokens):
    """Each operator gets the real tokens sent to it, packed. An operator that works in place gets all, (N, D), and its
    output is valid where it was chosen. Padding is never sent to attention; its output is arbitrary, as in dense
    execution. `memory` must be empty: tokens see each other, not stored keys."""

    route: Route

    def __init__(self, block: "Block", x_BTD: Tensor, context: TokenContext, route: Route, memory: Memory) -> None:
        super().__init__(block, x_BTD, context, route, memory)
        self.batch, self.length, _ = x_BTD.shape
        self.x = x_BTD.flatten(0, 1)
        self.on_host = host_sees_routes(x_BTD.device)
        self.packings: dict[str, Packing] = {}

    def packing(self, name: str) -> Packing:
        """The packing of the real tokens sent to an operator."""
        if name not in self.packings:
            self.packings[name] = make_packing(self.sent_to(name), self.on_host)
        return self.packings[name]

    @property
    def dark(self) -> Packing:
        return self.packing("attention")

    def over_all(self, attention: CausalAttention, seen_PD: Tensor) -> Tensor:
        """Attention of the dark tokens over all keys, without the queries of other tokens, (P, H, d)."""
        width, heads, weight, bias = seen_PD.shape[1], attention.heads, attention.qkv.weight, attention.qkv.bias
        q_PHd = packed_linear(seen_PD, weight[:width], bias[:width], self.dark).unflatten(1, (heads, -1))
        seen_ND = self.seen("attention", self.x_BTD.flatten(0, 1))
        kv_MD = F.linear(seen_ND, weight[width:], bias[width:])
        if self.context.real_BT is None:
            keys = pack_all(self.batch, self.length, self.x.device)
        else:
            keys = make_packing(self.context.real_BT, self.on_host)
            kv_MD = pack(kv_MD, keys)
        k_MHd, v_MHd = kv_MD.unflatten(1, (2, heads, -1)).unbind(1)
        return self.over_keys(self.rotated(q_PHd, self.dark), self.rotated(k_MHd, keys), v_MHd, keys)

    def over_keys(self, q_PHd: Tensor, k_MHd: Tensor, v_MHd: Tensor, keys: Packing) -> Tensor:
        """Attention of the dark tokens over keys up to themselves, (P, H, d)."""
        self.remember("attention", {"key": k_MHd, "value": v_MHd}, keys)
        skip_M, rows = self.dark.before_N[keys.token_P], (self.dark.rows, keys.rows)
        return prefix_attention(q_PHd, k_MHd, v_MHd, *rows, self.limits(keys), skip_M, self.length)

    def limits(self, keys: Packing) -> Tensor:
        """How many keys each dark token sees; it is a key itself."""
        return used(keys.before_N[self.dark.token_P] + 1, self.dark)

    def remember(self, name: str, parts_MHd: dict[str, Tensor], keys: Packing) -> None:
        """Store an operator's keys as dense execution does."""
        key_BT = keys.chosen_N.view(self.batch, self.length)
        if self.memory is None or surely_none(key_BT):
            return
        new = {}
        for part, part_MHd in parts_MHd.items():
            part_ND = unpack(part_MHd.flatten(1), None, keys)
            new[part] = part_ND.view(self.batch, self.length, *part_MHd.shape[1:]).transpose(1, 2)
        self.memory.ragged(name).append(new, key_BT)

    def rotated(self, x_PHd: Tensor, packing: Packing) -> Tensor:
        """RoPE at the positions of the packed tokens."""
        if self.context.rope is None:
            return x_PHd
        cos, sin = (table.flatten(0, 2)[self.table_rows(packing)][:, None] for table in self.context.rope)
        return rotate(x_PHd, (cos, sin))

    def table_rows(self, packing: Packing) -> Tensor:
        """The row of each packed token in RoPE's tables, which all batch rows may share."""
        assert self.context.rope is not None
        shared = self.context.rope[0].shape[0] == 1
        return packing.token_P % self.length if shared else packing.token_P

    def in_place(self, name: str) -> bool:
        return is_light(name) and not self.on_host

    def view(self, name: str) -> Tensor:
        return self.x if self.in_place(name) else pack(self.x, self.packing(name))

    def operate(self, name: str) -> Tensor:
        return self.block.run(name).run_packed(self, name)

    def norm(self, norm: nn.Module, y: Tensor, name: str) -> Tensor:
        if self.in_place(name):
            return norm(y)
        packing = self.packing(name)
        return used(norm(used(y, packing)), packing)

    def feed(self, y: Tensor, name: str, bias: bool = True) -> Tensor:
        """No dropout, which sparse execution refuses; `bias=False` leaves out the last bias."""
        ffn, packing = self.block.ffn, self.packing(name)
        if self.on_host:
            return ffn(y)
        hidden = packed_gelu(packed_linear(y, ffn.up.weight, None, packing), ffn.up.bias, packing)
        return packed_linear(hidden, ffn.down.weight, ffn.down.bias if bias else None, packing)

    def select(self, parts: dict[str, Tensor]) -> Tensor:
        y_ND: Maybe = None
        for name, part in parts.items():
            y_ND = part if self.in_place(name) else unpack(part, y_ND, self.packing(name))
        assert y_ND is not None
        return self.weighted(y_ND)

    def weighted(self, y_ND: Tensor) -> Tensor:
        """Multiplied by the chosen operator's weight: mostly 1, but a router gets its gradient through it."""
        if not self.block.weights_have_gradient:
            return y_ND
        weight_N1 = self.route.weights_BTK.flatten(0, 1).gather(1, self.route.choice_BT.reshape(-1, 1))
        return y_ND * weight_N1.to(y_ND.dtype)

    def together(self, y_ND: Tensor) -> Tensor:
        """(B, T, D); on the host padding keeps its input."""
        y_BTD, real_BT = y_ND.view(self.x_BTD.shape), self.context.real_BT
        return torch.where(real_BT[..., None], y_BTD, self.x_BTD) if self.on_host and real_BT is not None else y_BTD

    def fused_ends(self) -> Tensor | None:
        """With two operators dark tokens stay packed through the layer; kernels add biases and residuals."""
        block, names = self.block, self.block.names
        if len(names) != 2 or self.on_host:
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
        # With a weight of 1 this adds 0, but it carries the router's gradient.
        change_ND = y_ND - self.x
        return y_ND + (self.weighted(change_ND) - change_ND)

    def attend(self, attention: CausalAttention, bias: bool = True) -> Tensor:
        """Packed attention output of the dark tokens, over dark or all keys; `bias=False` leaves out the last bias."""
        few = self.on_host and self.length >= LONG and 2 * len(self.dark.token_P) <= len(self.x)
        if self.on_host and not (few or self.block.routed_keys):
            seen_BTD = self.seen("attention", self.x_BTD)
            mixed_BTD, _ = attention.mix(seen_BTD, self.context, self.context.real_BT, self.memory)
            return attention.out(pack(mixed_BTD.flatten(0, 1), self.dark))
        norm = self.block.norms["attention"] if self.block.pre_norm else None
        seen_PD = packed_norm(self.x, norm, self.dark)[1]
        attend = self.among_themselves if self.block.routed_keys else self.over_all
        out_PD = attend(attention, seen_PD).flatten(1)
        return packed_linear(out_PD, attention.out.weight, attention.out.bias if bias else None, self.dark)

    def among_themselves(self, attention: CausalAttention, seen_PD: Tensor) -> Tensor:
        dark, heads, bias = self.dark, attention.heads, attention.qkv.bias
        alone = self.memory is None  # a cache needs the rotated keys by themselves
        if alone and self.context.rope is not None and fits(self.x, heads):
            # RoPE is part of the attention operator, and so is the bias: a grouped product has none.
            qkv_P3Hd = packed_linear(seen_PD, attention.qkv.weight, None, dark).unflatten(1, (3, heads, -1))
            cos, sin = (table.flatten(0, 2) for table in self.context.rope)
            where = self.table_rows(dark), dark, self.limits(dark), self.length
            return rotary_attention(qkv_P3Hd, bias.view(3, heads, -1), (cos, sin), *where)
        qkv_P3Hd = packed_linear(seen_PD, attention.qkv.weight, bias, dark).unflatten(1, (3, heads, -1))
        q_PHd, k_PHd = (self.rotated(x_PHd, dark) for x_PHd in qkv_P3Hd[:, :2].unbind(1))
        v_PHd = qkv_P3Hd[:, 2]
        if not (self.on_host and self.length <= SHORT and len(v_PHd)):
            return self.over_keys(q_PHd, k_PHd, v_PHd, dark)
        self.remember("attention", {"key": k_PHd, "value": v_PHd}, dark)
        count_B = dark.rows.diff()
        rows = [pad_sequence(x_PHd.split(count_B.tolist()), batch_first=True) for x_PHd in (q_PHd, k_PHd, v_PHd)]
        q_BHLd, k_BHLd, v_BHLd = (x_BLHd.transpose(1, 2) for x_BLHd in rows)
        mixed_BLHd = F.scaled_dot_product_attention(q_BHLd, k_BHLd, v_BHLd, is_causal=True).transpose(1, 2)
        return mixed_BLHd[torch.arange(mixed_BLHd.shape[1]) < count_B[:, None]]
