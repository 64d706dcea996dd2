"""Attention of one new token per row: it is appended to its row's entries and attends to all of them, itself included,
or to the last `window`. Lengths stay on the device, and tensors keep their address and shape, so that the same call
serves every step."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from chiar.kernels.packing import accumulation_dtype, chosen_attention, like, operator


@operator(
    "decode_attention", like(0), writes=("key_BHLd", "value_BHLd", "length_B"),
    # At most: two products over all entries there is room for.
    flops=lambda q, k, v, key, *_, **__: 2 * 2 * math.prod(key),
)  # fmt: skip
def decode_attention(
    q_BHd: Tensor, k_BHd: Tensor, v_BHd: Tensor, key_BHLd: Tensor, value_BHLd: Tensor, length_B: Tensor,
    takes_part_B: Tensor, implementation: str = "auto", window: int = 0,
) -> Tensor:  # fmt: skip
    """softmax(q Kᵀ/√d) V, (B, H, d), over the first `length_B` entries of each row and the new one, or the last
    `window` of these. Rows that take part store k and v at entry `length_B`, which rises by one and must stay below L;
    the others give 0. Entries beyond a row's length are arbitrary, on a CPU finite. Scores and sums are fp32 (float64
    for float64)."""
    tensors = q_BHd, k_BHd, v_BHd, key_BHLd, value_BHLd, length_B, takes_part_B
    B, H, L, d = key_BHLd.shape
    wanted = [(B, H, d)] * 3 + [(B, H, L, d)] * 2 + [(B,)] * 2
    # A kernel would read and write beside the tensors.
    if [x.shape for x in tensors] != wanted or len({x.dtype for x in tensors[:5]}) > 1:
        found = ", ".join(f"{tuple(x.shape)} {x.dtype}" for x in tensors)
        raise ValueError(f"new and stored entries must agree in rows, heads, features and dtype, got {found}.")
    implementation = chosen_attention(q_BHd, implementation, "cpu")
    if implementation == "triton":
        from chiar.kernels.triton_attention import triton_decode

        return triton_decode(*tensors, window=window)
    forward = cpu_forward if implementation == "cpu" else torch_forward
    return forward(*tensors, window=window)


def torch_forward(*tensors: Tensor, window: int = 0) -> Tensor:
    """The definition."""
    q_BHd, k_BHd, v_BHd, key_BHLd, value_BHLd, length_B, takes_part_B = tensors
    row_B = torch.arange(len(length_B), device=length_B.device)
    for stored_BHLd, new_BHd in ((key_BHLd, k_BHd), (value_BHLd, v_BHd)):
        before_BHd = stored_BHLd[row_B, :, length_B]
        stored_BHLd[row_B, :, length_B] = torch.where(takes_part_B[:, None, None], new_BHd, before_BHd)
    length_B += takes_part_B
    seen_B1, dtype = torch.where(takes_part_B, length_B, 0)[:, None], accumulation_dtype(q_BHd)
    entry_L = torch.arange(key_BHLd.shape[2], device=q_BHd.device)
    visible_BL = entry_L < seen_B1
    if window:
        visible_BL = visible_BL & (entry_L >= seen_B1 - window)
    visible_B11L = visible_BL[:, None, None]
    # Entries beyond a row's length may be anything, NaN too.
    key, value = (torch.where(visible_B11L.mT, part, 0.0).to(dtype) for part in (key_BHLd, value_BHLd))
    out_BH1d = F.scaled_dot_product_attention(q_BHd[:, :, None].to(dtype), key, value, attn_mask=visible_B11L)
    return torch.where(takes_part_B[:, None, None], out_BH1d[:, :, 0], 0.0).to(q_BHd.dtype)


def cpu_forward(*tensors: Tensor, window: int = 0) -> Tensor:
    """torch's own attention over the longest row that takes part. On a CPU reading its length costs nothing."""
    q_BHd, k_BHd, v_BHd, key_BHLd, value_BHLd, length_B, takes_part_B = tensors
    if len(length_B) == 1 and bool(takes_part_B):  # as below, by a third of the calls
        last, end = int(length_B), int(length_B.add_(1))
        first = max(0, end - window) if window else 0
        key_BHLd[:, :, last], value_BHLd[:, :, last] = k_BHd, v_BHd
        key, value = key_BHLd[:, :, first:end], value_BHLd[:, :, first:end]
        return F.scaled_dot_product_attention(q_BHd[:, :, None], key, value)[:, :, 0]
    rows, out_BHd = takes_part_B.nonzero()[:, 0], torch.zeros_like(q_BHd)
    if not len(rows):
        return out_BHd
    key_BHLd[rows, :, length_B[rows]] = k_BHd[rows]
    value_BHLd[rows, :, length_B[rows]] = v_BHd[rows]
    length_B += takes_part_B
    longest, first = int(length_B[rows].max()), max(0, int(length_B[rows].min()) - window) if window else 0
    those = slice(None) if len(rows) == len(length_B) else rows
    key, value = key_BHLd[those, :, first:longest], value_BHLd[those, :, first:longest]
    entry_L, length_B1 = torch.arange(first, longest), length_B[those][:, None]
    visible = entry_L < length_B1
    visible = (visible & (entry_L >= length_B1 - window) if window else visible)[:, None, None]
    mask = None if bool(visible.all()) else visible
    out_BHd[rows] = F.scaled_dot_product_attention(q_BHd[those][:, :, None], key, value, attn_mask=mask)[:, :, 0]
    return out_BHd
