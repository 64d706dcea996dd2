"""The dark operator: multi-head causal softmax attention."""

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from chiar.config import ChiarConfig
from chiar.kernels.flash import text_attention, window_attention
from chiar.layers.context import LayerMemory, Maybe, Memory, TokenContext, surely_none, visible_keys
from chiar.layers.operator import Operator
from chiar.registry import Work

if TYPE_CHECKING:
    from chiar.layers.sparse import PackedTokens


BASE = 10000.0  # of RoPE


def compute_rotary_tables(positions_BT: Tensor, head_size: int) -> tuple[Tensor, Tensor]:
    """cos and sin of RoPE's angles, (B, 1, T, head size), in fp32: bf16 would lose precision at large positions."""
    exponents = torch.arange(0, head_size, 2, device=positions_BT.device, dtype=torch.float32) / head_size
    angles = positions_BT[:, None, :, None].float() * BASE**-exponents
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


# A custom operator, so that compilers keep the tables instead of recomputing sines for every head of every layer.
rotary_tables = torch.library.custom_op("chiar::rotary_tables", compute_rotary_tables, mutates_args=())


@rotary_tables.register_fake
def _(positions_BT: Tensor, head_size: int) -> tuple[Tensor, Tensor]:
    cos = torch.empty(len(positions_BT), 1, positions_BT.shape[1], head_size, device=positions_BT.device)
    return cos, torch.empty_like(cos)


def rotate(x_BHTd: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate feature pairs (i, i + d/2) by the angle of their position (rotate-half)."""
    cos, sin = rope
    first, second = x_BHTd.chunk(2, dim=-1)
    return (x_BHTd * cos + torch.cat([-second, first], dim=-1) * sin).to(x_BHTd.dtype)


class CausalAttention(Operator):
    """softmax(QKᵀ/√d) V over earlier keys, with biases in the QKV and output projections."""

    def __init__(self, config: ChiarConfig) -> None:
        super().__init__()
        self.heads, self.dropout = config.num_attention_heads, config.dropout
        self.window: int | None = None  # number of tokens a query sees; None: all
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.out = nn.Linear(config.hidden_size, config.hidden_size)

    @staticmethod
    def flops(config: ChiarConfig, work: Work) -> dict[str, float]:
        """Queries and outputs of the tokens it runs on, keys and values of the tokens that are keys."""
        D = config.hidden_size
        return {"projections": (work.share + work.key_share) * 4 * D * D, "scores": work.pairs * 4 * D}

    def forward(
        self, x_BTD: Tensor, context: TokenContext, key_BT: Maybe = None, memory: Memory = None, /
    ) -> tuple[Tensor, Maybe]:
        """The output and, if eager, the weights, which cover the store's entries if there is one."""
        eager = context.attention_implementation == "eager"
        if memory is not None and not eager and surely_none(key_BT):
            return torch.zeros_like(x_BTD), None
        mixed_BTD, weights = self.mix(x_BTD, context, key_BT, memory)
        return self.out(mixed_BTD), weights

    def begin(self, memory: LayerMemory, rows: int) -> None:
        """Create an empty store if there is none, as after a prompt without dark tokens."""
        weight = self.qkv.weight
        none_BH0d = weight.new_zeros(rows, self.heads, 0, weight.shape[1] // self.heads)
        memory.ragged("attention", self.window).begin({"key": none_BH0d, "value": none_BH0d})

    def run_packed(self, tokens: "PackedTokens", name: str) -> Tensor:
        return tokens.attend(self)

    def mix(self, x_BTD: Tensor, context: TokenContext, key_BT: Maybe, memory: Memory) -> tuple[Tensor, Maybe]:
        """`forward` without the output projection."""
        B, T, D = x_BTD.shape
        qkv = self.qkv(x_BTD).view(B, T, 3, self.heads, D // self.heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv
        if context.rope is not None and context.room_is_made:
            q, k = rotate(qkv[:2], context.rope)  # together: one small kernel instead of two when compiled
        elif context.rope is not None:
            q, k = rotate(q, context.rope), rotate(k, context.rope)
        eager, window = context.attention_implementation == "eager", self.window
        masked = key_BT is not None and not context.padding_behind
        visible: Maybe = visible_keys(key_BT, T, window) if masked and key_BT is not None else None
        if memory is not None:
            store = memory.ragged("attention", window)
            # A packed layout is as wide as its longest row, which in a store with older entries may be another one.
            full = key_BT is None or (context.padding_behind and store.is_empty)
            if key_BT is None:
                key_BT = torch.ones(B, T, dtype=torch.bool, device=x_BTD.device)
            if T == 1 and not (eager or torch.is_grad_enabled() or self.training):
                if not context.room_is_made:
                    store.make_room(k, v)
                return store.attend(q[:, :, 0], k[:, :, 0], v[:, :, 0], key_BT[:, 0]).reshape(B, 1, D), None
            is_first = store.is_empty
            count_BT = store.append({"key": k, "value": v}, key_BT, full)
            if not is_first:
                k, v, visible = store.used("key"), store.used("value"), store.visible(count_BT)

        dropout, weights = self.dropout if self.training else 0.0, None
        if eager:
            if visible is None and window is not None:
                visible = visible_keys(torch.ones(B, T, dtype=torch.bool, device=q.device), T, window)
            mixed, weights = eager_attention(q, k, v, visible, dropout)
        elif context.rows is not None:
            mixed = text_attention(q[0], k[0], v[0], context.rows, context.longest, dropout)[None]
        elif visible is None and window is not None:
            mixed = window_attention(q, k, v, window, dropout)
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, visible, dropout_p=dropout, is_causal=visible is None)
        return mixed.transpose(1, 2).reshape(B, T, D), weights


def eager_attention(q: Tensor, k: Tensor, v: Tensor, visible: Maybe, dropout: float) -> tuple[Tensor, Tensor]:
    """The definition, which also returns the weights."""
    if visible is None:
        visible = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
    scores = (q @ k.transpose(2, 3)).float() * q.shape[-1] ** -0.5
    weights = scores.masked_fill(~visible, float("-inf")).softmax(-1).to(q.dtype)
    return F.dropout(weights, dropout) @ v, weights
