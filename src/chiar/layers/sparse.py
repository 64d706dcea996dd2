"""A routed layer that runs only the chosen operator for each token. Dense execution in block.py is the definition.

Attention and feed-forward products work on packed rows (ops/packing.py); norms, filters in the identity basis and
additions pass over all tokens, which costs memory traffic but no products, and so do filters along time. RBF mixing
runs on every token. On a CPU, outside compiled graphs, sparse_sorted.py takes their place.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from chiar.kernels.packed_attention import fits, prefix_attention, rotary_attention
from chiar.kernels.packed_norm import packed_gelu, packed_norm, unpack_sum
from chiar.kernels.packing import Packing, make_packing, pack, pack_all, packed_linear, unpack, used
from chiar.layers.attention import CausalAttention, rotate
from chiar.layers.context import LayerMemory, TokenContext, is_light, surely_none
from chiar.layers.routers import Route
from chiar.layers.sparse_sorted import SortedLayer
from chiar.registry import OPERATORS

FEWEST = {"routed": 256, "all": 512}
"""Tokens in a batch, for each key policy, below which "auto" runs densely on a CPU."""
Norm = nn.Module | None


def run_sparse(
    block: Any, x_BTD: Tensor, context: TokenContext, route: Route, memory: LayerMemory | None = None
) -> Tensor:
    """The layer's output. Padding is never sent to attention: its output is arbitrary, as in dense execution.

    `memory` is empty: tokens see each other, not what was stored before.
    """
    if host_sees_routes(x_BTD.device):
        return SortedLayer(block, x_BTD, context, route, memory).run()
    run = run_pre_norm if block.pre_norm else run_post_norm
    return run(SparseLayer(block, x_BTD, context, route, memory), x_BTD.flatten(0, 1)).view(x_BTD.shape)


def host_sees_routes(device: torch.device) -> bool:
    """Whether to look at how many tokens were chosen costs no waiting."""
    return device.type == "cpu" and not torch.compiler.is_compiling()


def sparse_pays(x_BTD: Tensor, keys: str) -> bool:
    """Whether packing tokens costs less than it saves (on a CPU as measured: docs/speed.md)."""
    if x_BTD.is_cuda:
        autocast = torch.is_autocast_enabled("cuda")
        dtype = torch.get_autocast_dtype("cuda") if autocast else x_BTD.dtype
        return dtype == torch.bfloat16 and has_fast_grouped_products(x_BTD.device.index)
    return x_BTD.shape[0] * x_BTD.shape[1] >= FEWEST[keys] or not host_sees_routes(x_BTD.device)


@torch.compiler.assume_constant_result
def has_fast_grouped_products(device: int) -> bool:
    """Whether torch multiplies the rows in use alone there, for bf16; elsewhere it waits to learn how many they are."""
    return torch.cuda.get_device_capability(device)[0] in (9, 10)


class SparseLayer:
    """What both norm positions share."""

    def __init__(
        self, block: Any, x_BTD: Tensor, context: TokenContext, route: Route, memory: LayerMemory | None
    ) -> None:
        self.block, self.context, self.route, self.memory = block, context, route, memory
        self.batch, self.length, _ = x_BTD.shape
        self.names = list(block.operators)
        self.light_name = next(name for name in self.names if is_light(name))
        self.chosen_N = route.choice_BT.flatten()
        self.dark = make_packing(self.of("attention"))

    def of(self, name: str) -> Tensor:
        """Real tokens sent to an operator, (B, T)."""
        chosen_BT = self.route.choice_BT == self.names.index(name)
        return chosen_BT if self.context.real_BT is None else chosen_BT & self.context.real_BT

    def weighted(self, x_ND: Tensor) -> Tensor:
        """Times the weight of the chosen operator: mostly 1, but a router gets its gradient through it."""
        if not self.block.weights_have_gradient:
            return x_ND
        weight_N = self.route.weights_BTK.flatten(0, 1).gather(1, self.chosen_N[:, None])
        return x_ND * weight_N.to(x_ND.dtype)

    def light(self, x_ND: Tensor) -> Tensor:
        """The filter's output; tokens that are not light get something arbitrary but finite."""
        filter, transform = self.block.operators[self.light_name], self.context.transform
        if self.light_name == "temporal":
            return filter(x_ND.view(self.batch, self.length, -1), self.context, self.memory).flatten(0, 1)
        if transform.is_identity and self.light_name == "spectral":
            return filter(x_ND, transform)
        packing = make_packing(self.of(self.light_name))
        if self.light_name in OPERATORS:
            y_PD = used(filter(used(pack(x_ND, packing), packing)), packing)
            return unpack(y_PD, torch.zeros_like(x_ND, dtype=y_PD.dtype), packing)

        def product(x_PD: Tensor, weight_KD: Tensor) -> Tensor:
            return packed_linear(x_PD, weight_KD, None, packing)

        spectrum_PD = used(transform.forward(pack(x_ND, packing), product), packing)
        y_PD = transform.inverse(used(spectrum_PD * filter.weight, packing), product)
        return unpack(y_PD, torch.zeros_like(x_ND, dtype=y_PD.dtype), packing)

    def rbf(self, x_ND: Tensor) -> Tensor:
        x_BTD = x_ND.view(self.batch, self.length, -1)
        key_BT = self.of("rbf") if self.block.routed_keys else self.context.real_BT
        rbf, only_keys = self.block.operators["rbf"], self.block.routed_keys
        return rbf(x_BTD, self.context, key_BT, self.memory, only_keys).flatten(0, 1)

    def attention(self, x_ND: Tensor, norm: Norm, bias: bool = True) -> Tensor:
        """Packed output of the tokens sent to attention, which reads norm(x); on demand without its last bias."""
        attention: CausalAttention = self.block.operators["attention"]
        run = self.among_themselves if self.turns_at_once(x_ND) else self.over_keys
        out_PHd = run(attention, x_ND, norm)
        return packed_linear(out_PHd.flatten(1), attention.out.weight, attention.out.bias if bias else None, self.dark)

    def turns_at_once(self, x_ND: Tensor) -> bool:
        """Whether keys are the dark tokens themselves and RoPE can be part of the attention operator."""
        head = x_ND.shape[1] // self.block.operators["attention"].heads
        alone = self.block.routed_keys and self.memory is None  # a cache needs the rotated keys by themselves
        return alone and self.context.rope is not None and fits(head)

    def among_themselves(self, attention: CausalAttention, x_ND: Tensor, norm: Norm) -> Tensor:
        dark, heads = self.dark, attention.heads
        qkv_P3Hd = packed_linear(self.seen(x_ND, norm), attention.qkv.weight, None, dark).unflatten(1, (3, heads, -1))
        assert self.context.rope is not None
        cos, sin = (table.flatten(0, 2) for table in self.context.rope)
        table_P, limit_P = self.table_rows(dark), self.limits(dark)
        # A grouped product has no bias: the kernel that turns adds it.
        bias_3Hd = attention.qkv.bias.view(3, heads, -1)
        return rotary_attention(qkv_P3Hd, bias_3Hd, (cos, sin), table_P, dark, limit_P, self.length)

    def limits(self, keys: Packing) -> Tensor:
        """How many keys each packed dark token sees; a dark token is a key itself."""
        return used(keys.before_N[self.dark.token_P] + 1, self.dark)

    def seen(self, x_ND: Tensor, norm: Norm) -> Tensor:
        """norm(x) of the dark tokens, packed."""
        return packed_norm(x_ND, norm, self.dark)[1]

    def after_attention(self, x_ND: Tensor) -> tuple[Tensor, Tensor]:
        """u = x + attention(LN(x)) of the dark tokens, packed, and what the feed-forward network reads of it."""
        block = self.block
        attended_PD = self.attention(x_ND, block.norms["attention"], bias=False)
        return packed_norm(x_ND, block.ffn_norm, self.dark, attended_PD, block.operators["attention"].out.bias)

    def over_keys(self, attention: CausalAttention, x_ND: Tensor, norm: Norm) -> Tensor:
        q_PHd, k_MHd, v_MHd, keys = self.project(attention, x_ND, norm)
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

    def project(self, attention: CausalAttention, x_ND: Tensor, norm: Norm) -> tuple[Tensor, Tensor, Tensor, Packing]:
        """Rotated queries of the dark tokens; keys and values of theirs or of all; and which tokens the keys are."""
        heads, dark = attention.heads, self.dark
        weight, bias = attention.qkv.weight, attention.qkv.bias
        if self.block.routed_keys:
            qkv = packed_linear(self.seen(x_ND, norm), weight, bias, dark).unflatten(1, (3, heads, -1))
            q, k, v = qkv.unbind(1)
            return self.rotated(q, dark), self.rotated(k, dark), v, dark
        width, seen_ND = x_ND.shape[1], x_ND if norm is None else norm(x_ND)
        q = packed_linear(self.seen(x_ND, norm), weight[:width], bias[:width], dark).unflatten(1, (heads, -1))
        k, v = F.linear(seen_ND, weight[width:], bias[width:]).unflatten(1, (2, heads, -1)).unbind(1)
        if self.context.real_BT is None:
            keys = pack_all(self.batch, self.length, x_ND.device)
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

    def chosen(self, parts: dict[str, Tensor]) -> Tensor:
        """Of each token the part of the operator it was sent to."""
        (_, y_ND), *others = parts.items()
        for name, part_ND in others:
            y_ND = torch.where((self.chosen_N == self.names.index(name))[:, None], part_ND, y_ND)
        return y_ND

    def bypass(self, x_ND: Tensor) -> Tensor:
        """Attention's value and output projections of the light tokens, packed; others get 0."""
        attention: CausalAttention = self.block.operators["attention"]
        packing, width = make_packing(self.of("bypass")), x_ND.shape[1]
        weight, bias = attention.qkv.weight[2 * width :], attention.qkv.bias[2 * width :]
        value_PD = packed_linear(packed_norm(x_ND, self.block.norms["attention"], packing)[1], weight, bias, packing)
        y_PD = packed_linear(value_PD, attention.out.weight, attention.out.bias, packing)
        return unpack(y_PD, torch.zeros_like(x_ND, dtype=y_PD.dtype), packing)

    def other(self, name: str, x_ND: Tensor) -> Tensor:
        """op(x), or op(LN_op(x)) under pre-norm, of an operator that is not attention, for all tokens, right where it
        was chosen."""
        if name in ("skip", "bypass"):
            return torch.zeros_like(x_ND) if name == "skip" else self.bypass(x_ND)
        seen_ND = self.block.norms[name](x_ND) if self.block.pre_norm else x_ND
        return self.light(seen_ND) if is_light(name) else self.rbf(seen_ND)

    def heavy(self) -> Packing:
        """The tokens that run the feed-forward network where light ones skip it or have their own."""
        if len(self.names) == 2:
            return self.dark
        heavy_BT = self.route.choice_BT != self.names.index(self.light_name)
        return make_packing(heavy_BT if self.context.real_BT is None else heavy_BT & self.context.real_BT)

    def feed(self, x_ND: Tensor) -> Tensor:
        """Every token through its network: the shared one, or the light tokens' own and the others'."""
        if self.block.own_ffn is None:
            return self.block.ffn(x_ND)
        light, heavy = make_packing(self.of(self.light_name)), self.heavy()
        light_PD = self.feed_forward(pack(x_ND, light), light, own=True)
        y_ND = unpack(light_PD, torch.zeros_like(x_ND, dtype=light_PD.dtype), light)
        return unpack(self.feed_forward(pack(x_ND, heavy), heavy), y_ND, heavy)

    def feed_forward(self, x_PD: Tensor, packing: Packing, bias: bool = True, own: bool = False) -> Tensor:
        """Without dropout, which sparse execution refuses; on demand without the last bias."""
        ffn = self.block.own_ffn if own else self.block.ffn
        hidden = packed_gelu(packed_linear(x_PD, ffn.up.weight, None, packing), ffn.up.bias, packing.count)
        return packed_linear(hidden, ffn.down.weight, ffn.down.bias if bias else None, packing)


def run_pre_norm(layer: SparseLayer, x_ND: Tensor) -> Tensor:
    block = layer.block
    if not block.light_ffn and len(layer.names) == 2:
        return run_apart(layer, x_ND)
    attended_PD = layer.attention(x_ND, block.norms["attention"])
    others = {name: layer.other(name, x_ND) for name in layer.names if name != "attention"}
    change_ND = unpack(attended_PD, layer.chosen(others), layer.dark)
    if block.light_ffn:
        u_ND = x_ND + layer.weighted(change_ND)
        return u_ND + layer.feed(block.ffn_norm(u_ND))
    heavy = layer.heavy()
    seen_PD = used(block.ffn_norm(used(pack(x_ND + change_ND, heavy), heavy)), heavy)
    more_PD = layer.feed_forward(seen_PD, heavy)
    more_ND = unpack(more_PD, torch.zeros_like(x_ND, dtype=more_PD.dtype), heavy)
    return x_ND + layer.weighted(change_ND + more_ND)


def run_apart(layer: SparseLayer, x_ND: Tensor) -> Tensor:
    """Pre-norm, where light tokens skip the feed-forward network too: dark ones are packed once and stay packed."""
    u_PD, seen_PD = layer.after_attention(x_ND)
    more_PD = layer.feed_forward(seen_PD, layer.dark, bias=False)
    light = layer.light_name
    light_ND = x_ND if light == "skip" else x_ND + layer.other(light, x_ND)
    y_ND = unpack_sum(u_PD, more_PD, layer.block.ffn.down.bias, light_ND, layer.dark)
    if not layer.block.weights_have_gradient:
        return y_ND
    # Where the weight is 1 what is added is 0, but its gradient is the router's.
    change_ND = y_ND - x_ND
    return y_ND + (layer.weighted(change_ND) - change_ND)


def run_post_norm(layer: SparseLayer, x_ND: Tensor) -> Tensor:
    block = layer.block
    attended_PD = layer.attention(x_ND, None)
    attended_ND = unpack(attended_PD, torch.zeros_like(x_ND, dtype=attended_PD.dtype), layer.dark)
    outputs = {name: attended_ND if name == "attention" else layer.other(name, x_ND) for name in layer.names}
    residuals, inputs = {}, {}
    for name, output_ND in outputs.items():
        if block.equation and is_light(name):
            residuals[name], inputs[name] = x_ND, output_ND
        else:
            residuals[name] = inputs[name] = block.norms[name](x_ND + output_ND)
    residual_ND = layer.chosen(residuals)
    if block.light_ffn:
        input_ND = layer.chosen(inputs) if block.equation else residual_ND
        return block.ffn_norm(layer.weighted(residual_ND) + layer.feed(layer.weighted(input_ND)))
    heavy = layer.heavy()
    u_PD = used(pack(residual_ND, heavy), heavy)
    y_PD = used(block.ffn_norm(used(u_PD + layer.feed_forward(u_PD, heavy), heavy)), heavy)
    return layer.weighted(unpack(y_PD, residual_ND, heavy))
