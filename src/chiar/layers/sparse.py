"""A routed layer that runs only the chosen operator for each token. Dense execution in block.py is the definition.

Attention and feed-forward products work on packed rows (ops/packing.py); norms, filters in the identity basis and
additions pass over all tokens, which costs memory traffic but no products. RBF mixing runs on every token.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from chiar.layers.attention import CausalAttention, rotate
from chiar.layers.context import TokenContext
from chiar.layers.routers import Route
from chiar.ops.packed_attention import prefix_attention
from chiar.ops.packing import Packing, make_packing, pack, pack_all, packed_linear, unpack, used

LIGHT = "spectral"
Norm = Callable[[Tensor], Tensor]


def run_sparse(block: Any, x_BTD: Tensor, context: TokenContext, route: Route) -> Tensor:
    """The layer's output. Padding is never sent to attention: its output is arbitrary, as in dense execution."""
    run = run_pre_norm if block.pre_norm else run_post_norm
    return run(SparseLayer(block, x_BTD, context, route), x_BTD.flatten(0, 1)).view(x_BTD.shape)


class SparseLayer:
    """What both norm positions share."""

    def __init__(self, block: Any, x_BTD: Tensor, context: TokenContext, route: Route) -> None:
        self.block, self.context, self.route = block, context, route
        self.batch, self.length, _ = x_BTD.shape
        self.names = list(block.operators)
        self.chosen_N = route.choice_BT.flatten()
        self.dark = make_packing(self.of("attention"))

    def of(self, name: str) -> Tensor:
        """Real tokens sent to an operator, (B, T)."""
        chosen_BT = self.route.choice_BT == self.names.index(name)
        return chosen_BT if self.context.real_BT is None else chosen_BT & self.context.real_BT

    def weighted(self, x_ND: Tensor) -> Tensor:
        """Times the weight of the chosen operator: 1, but a learned router gets its gradient through it."""
        if not self.block.entropy_has_gradient:
            return x_ND
        weight_N = self.route.weights_BTK.flatten(0, 1).gather(1, self.chosen_N[:, None])
        return x_ND * weight_N.to(x_ND.dtype)

    def light(self, x_ND: Tensor) -> Tensor:
        """The filter's output; tokens that are not light get something arbitrary but finite."""
        filter, transform = self.block.operators[LIGHT], self.context.transform
        if transform.is_identity:
            return filter(x_ND, transform)
        packing = make_packing(self.of(LIGHT))

        def product(x_PD: Tensor, weight_KD: Tensor) -> Tensor:
            return packed_linear(x_PD, weight_KD, None, packing)

        spectrum_PD = used(transform.forward(pack(x_ND, packing), product), packing)
        y_PD = transform.inverse(used(spectrum_PD * filter.weight, packing), product)
        return unpack(y_PD, torch.zeros_like(x_ND, dtype=y_PD.dtype), packing)

    def rbf(self, x_ND: Tensor) -> Tensor:
        x_BTD = x_ND.view(self.batch, self.length, -1)
        key_BT = self.of("rbf") if self.block.routed_keys else self.context.real_BT
        return self.block.operators["rbf"](x_BTD, self.context, key_BT, None).flatten(0, 1)

    def attention(self, x_ND: Tensor, norm: Norm) -> Tensor:
        """Packed output of the tokens sent to attention, which reads norm(x)."""
        attention: CausalAttention = self.block.operators["attention"]
        q_PHd, k_MHd, v_MHd, keys = self.project(attention, x_ND, norm)
        dark = self.dark
        limit_P = used(keys.before_N[dark.token_P] + 1, dark)  # a dark token is a key itself
        skip_M = dark.before_N[keys.token_P]
        out_PHd = prefix_attention(q_PHd, k_MHd, v_MHd, dark.rows, keys.rows, limit_P, skip_M, self.length)
        return packed_linear(out_PHd.flatten(1), attention.out.weight, attention.out.bias, self.dark)

    def project(self, attention: CausalAttention, x_ND: Tensor, norm: Norm) -> tuple[Tensor, Tensor, Tensor, Packing]:
        """Rotated queries of the dark tokens; keys and values of theirs or of all; and which tokens the keys are."""
        heads, dark = attention.heads, self.dark
        weight, bias = attention.qkv.weight, attention.qkv.bias
        if self.block.routed_keys:
            # The norm's weight must not meet undefined rows.
            seen_PD = norm(pack(x_ND, dark)) if dark.is_exact else pack(norm(x_ND), dark)
            qkv = packed_linear(seen_PD, weight, bias, dark).unflatten(1, (3, heads, -1))
            q, k, v = qkv.unbind(1)
            return self.rotated(q, dark), self.rotated(k, dark), v, dark
        width, seen_ND = x_ND.shape[1], norm(x_ND)
        q = packed_linear(pack(seen_ND, dark), weight[:width], bias[:width], dark).unflatten(1, (heads, -1))
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
        tables = []
        for table in self.context.rope:
            place_P = packing.token_P % self.length if table.shape[0] == 1 else packing.token_P
            tables.append(table.flatten(0, 2)[place_P][:, None])
        return rotate(x_PHd, (tables[0], tables[1]))

    def chosen(self, parts: dict[str, Tensor]) -> Tensor:
        """Of each token the part of the operator it was sent to."""
        (_, y_ND), *others = parts.items()
        for name, part_ND in others:
            y_ND = torch.where((self.chosen_N == self.names.index(name))[:, None], part_ND, y_ND)
        return y_ND

    def other(self, name: str, x_ND: Tensor) -> Tensor:
        """op(x) of an operator that is not attention, for all tokens, right where it was chosen."""
        return self.light(x_ND) if name == LIGHT else self.rbf(x_ND)

    def heavy(self) -> Packing:
        """The tokens that run the feed-forward network where light ones skip it."""
        if LIGHT not in self.names:
            return pack_all(self.batch, self.length, self.chosen_N.device)
        if len(self.names) == 2:
            return self.dark
        heavy_BT = self.route.choice_BT != self.names.index(LIGHT)
        return make_packing(heavy_BT if self.context.real_BT is None else heavy_BT & self.context.real_BT)

    def feed_forward(self, x_PD: Tensor, packing: Packing) -> Tensor:
        ffn = self.block.ffn
        hidden = F.dropout(F.gelu(packed_linear(x_PD, ffn.up.weight, ffn.up.bias, packing)), ffn.dropout, ffn.training)
        return F.dropout(packed_linear(hidden, ffn.down.weight, ffn.down.bias, packing), ffn.dropout, ffn.training)


def run_pre_norm(layer: SparseLayer, x_ND: Tensor) -> Tensor:
    block = layer.block
    attended_PD = layer.attention(x_ND, block.norms["attention"])
    others = {name: layer.other(name, block.norms[name](x_ND)) for name in layer.names if name != "attention"}
    change_ND = unpack(attended_PD, layer.chosen(others), layer.dark)
    if block.light_ffn:
        u_ND = x_ND + layer.weighted(change_ND)
        return u_ND + block.ffn(block.ffn_norm(u_ND))
    heavy = layer.heavy()
    seen_PD = used(block.ffn_norm(used(pack(x_ND + change_ND, heavy), heavy)), heavy)
    more_PD = layer.feed_forward(seen_PD, heavy)
    more_ND = unpack(more_PD, torch.zeros_like(x_ND, dtype=more_PD.dtype), heavy)
    return x_ND + layer.weighted(change_ND + more_ND)


def run_post_norm(layer: SparseLayer, x_ND: Tensor) -> Tensor:
    block = layer.block
    attended_PD = layer.attention(x_ND, lambda x: x)
    attended_ND = unpack(attended_PD, torch.zeros_like(x_ND, dtype=attended_PD.dtype), layer.dark)
    outputs = {name: attended_ND if name == "attention" else layer.other(name, x_ND) for name in layer.names}
    residuals, inputs = {}, {}
    for name, output_ND in outputs.items():
        if block.equation and name == LIGHT:
            residuals[name], inputs[name] = x_ND, output_ND
        else:
            residuals[name] = inputs[name] = block.norms[name](x_ND + output_ND)
    residual_ND = layer.chosen(residuals)
    if block.light_ffn:
        input_ND = layer.chosen(inputs) if block.equation else residual_ND
        return block.ffn_norm(layer.weighted(residual_ND) + block.ffn(layer.weighted(input_ND)))
    heavy = layer.heavy()
    u_PD = used(pack(residual_ND, heavy), heavy)
    y_PD = used(block.ffn_norm(used(u_PD + layer.feed_forward(u_PD, heavy), heavy)), heavy)
    return layer.weighted(unpack(y_PD, residual_ND, heavy))
