"""Logits into softmax − onehot, in place, and the loss of each row: the middle of linear_cross_entropy."""

from contextlib import nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_BLOCK = 4096
WARPS = 16


@triton.jit
def _softmax_gradient(
    logits_ptr,
    targets_ptr,
    losses_ptr,
    row_stride,
    target_stride,
    ignore_index,
    VOCABULARY: tl.constexpr,
    PADDED: tl.constexpr,
    GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program a row, read twice: for log Σ exp, then (from the L2 cache) to become its gradient.

    Memory is masked at PADDED, a multiple of 16, so that loads and stores are 16 bytes wide; numbers at VOCABULARY.
    """
    row = tl.program_id(0).to(tl.int64)  # row × row_stride may pass 2³¹
    row_ptr = logits_ptr + row * row_stride
    columns = tl.arange(0, BLOCK)

    # Every lane keeps the maximum m of what it saw and s = Σ exp(x − m). Of exp(m − m') and exp(x − m') with
    # m' = max(m, x) one is 1 and the other exp(−|m − x|), so an element costs one exponential.
    # m starts finite so that lanes beyond the row never meet ∞ − ∞.
    m = tl.full([BLOCK], -3.0e38, tl.float32)
    s = tl.zeros([BLOCK], tl.float32)
    for start in range(0, PADDED, BLOCK):
        x = tl.load(row_ptr + start + columns, mask=start + columns < PADDED, other=0.0).to(tl.float32)
        x = tl.where(start + columns < VOCABULARY, x, -float("inf"))
        e = tl.exp(-tl.abs(m - x))
        s = tl.where(x > m, s * e + 1.0, s + e)
        m = tl.maximum(m, x)
    largest = tl.max(m, 0)
    log_sum = largest + tl.log(tl.sum(s * tl.exp(m - largest), 0))

    target = tl.load(targets_ptr + row * target_stride)
    kept = target != ignore_index
    # A target outside the vocabulary reads nothing and makes the loss nan.
    known = (target >= 0) & (target < VOCABULARY)
    chosen = tl.load(row_ptr + target, mask=known, other=float("nan")).to(tl.float32)
    tl.store(losses_ptr + row, tl.where(kept, log_sum - chosen, 0.0))

    if GRADIENT:
        tl.debug_barrier()  # every warp has read the target's logit before one overwrites it
        for start in range(0, PADDED, BLOCK):
            inside = start + columns < PADDED
            x = tl.load(row_ptr + start + columns, mask=inside, other=0.0).to(tl.float32)
            g = tl.exp(x - log_sum) - tl.where(start + columns == target, 1.0, 0.0)
            g = tl.where(kept & (start + columns < VOCABULARY), g, 0.0)
            tl.store(row_ptr + start + columns, g.to(logits_ptr.dtype.element_ty), mask=inside)


def triton_softmax_gradient(
    logits_nP: Tensor, vocabulary: int, targets_n: Tensor, ignore_index: int, losses_n: Tensor, gradient: bool
) -> None:
    """As torch_softmax_gradient, for fp32, fp16 and bf16."""
    rows, padded = logits_nP.shape
    assert logits_nP.is_contiguous() and losses_n.is_contiguous() and losses_n.dtype == torch.float32
    if rows == 0:
        return
    # Triton launches on the current device.
    with torch.cuda.device(logits_nP.device) if logits_nP.is_cuda else nullcontext():
        _softmax_gradient[(rows,)](
            logits_nP,
            targets_n,
            losses_n,
            logits_nP.stride(0),
            targets_n.stride(0),
            ignore_index,
            VOCABULARY=vocabulary,
            PADDED=padded,
            GRADIENT=gradient,
            BLOCK=min(MAX_BLOCK, triton.next_power_of_2(padded)),
            num_warps=WARPS,
        )
