"""Causal attention of concatenated texts, and of a sliding window: torch's flash attention where it runs, beside the
definitions."""

import torch
import torch.nn.functional as F
from torch import Tensor

from chiar.kernels.packing import product_dtype


def has_flash(x: Tensor) -> bool:
    """Whether torch's flash attention supports x in the dtype of its matrix products: bf16 or fp16 on a GPU."""
    return x.is_cuda and product_dtype(x) in (torch.bfloat16, torch.float16)


def flash(
    q_BTHd: Tensor,
    k_BTHd: Tensor,
    v_BTHd: Tensor,
    rows: Tensor | None,
    longest: int,
    window: int | None,
    dropout: float,
) -> Tensor:
    """torch's flash attention of (B, T, H, d), or of (P, H, d) with `rows`, the offsets of texts."""
    back = None if window is None else window - 1
    found = torch.ops.aten._flash_attention_forward(
        q_BTHd, k_BTHd, v_BTHd, rows, rows, longest, longest, dropout, True, False,
        window_size_left=back, window_size_right=None if back is None else 0,
    )  # fmt: skip
    return found[0]


def text_attention(
    q_HPd: Tensor, k_HPd: Tensor, v_HPd: Tensor, rows: Tensor, longest: int, dropout: float = 0.0
) -> Tensor:
    """Causal attention within each text, (H, P, d): text i is tokens rows[i] to rows[i + 1]."""
    if has_flash(q_HPd):
        q_PHd, k_PHd, v_PHd = (x.transpose(0, 1).to(product_dtype(x)) for x in (q_HPd, k_HPd, v_HPd))
        return flash(q_PHd, k_PHd, v_PHd, rows, longest, None, dropout).transpose(0, 1)
    place_P = torch.arange(q_HPd.shape[1], device=q_HPd.device)
    text_P = torch.searchsorted(rows, place_P, right=True)
    visible_PP = (text_P[:, None] == text_P) & (place_P <= place_P[:, None])
    return F.scaled_dot_product_attention(q_HPd, k_HPd, v_HPd, visible_PP, dropout)


def window_attention(q_BHTd: Tensor, k_BHTd: Tensor, v_BHTd: Tensor, window: int, dropout: float = 0.0) -> Tensor:
    """Every token sees the last `window` tokens, including itself."""
    T = q_BHTd.shape[2]
    if window >= T:
        return F.scaled_dot_product_attention(q_BHTd, k_BHTd, v_BHTd, dropout_p=dropout, is_causal=True)
    if has_flash(q_BHTd):
        q, k, v = (x.transpose(1, 2).to(product_dtype(x)) for x in (q_BHTd, k_BHTd, v_BHTd))
        return flash(q, k, v, None, T, window, dropout).transpose(1, 2)
    # Blocks of queries, each with the keys it may see: one mask for everything would cost T² again.
    parts, size = [], max(window, 256)
    for start in range(0, T, size):
        queries, keys = slice(start, start + size), slice(max(0, start - window + 1), start + size)
        place_q, place_k = (torch.arange(T, device=q_BHTd.device)[part] for part in (queries, keys))
        back_qk = place_q[:, None] - place_k
        visible_qk = (back_qk >= 0) & (back_qk < window)
        seen = q_BHTd[:, :, queries], k_BHTd[:, :, keys], v_BHTd[:, :, keys]
        parts.append(F.scaled_dot_product_attention(*seen, visible_qk, dropout))
    return torch.cat(parts, 2)
