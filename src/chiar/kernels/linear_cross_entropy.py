"""Cross-entropy of a linear map, computed from the last states without keeping an N×V tensor of logits.

L = Σ_n logsumexp(W x_n) − (W x_n)[t_n], ∂L/∂X = G W and ∂L/∂W = Gᵀ X with G = softmax(X Wᵀ) − onehot(t). The forward
pass goes over chunks of rows, turns each chunk's logits into its G in place, takes both products at once and
reuses the memory; the backward pass only scales what is stored.
"""

import math
from typing import Any

import torch
from torch import Tensor

from chiar.kernels.packing import accumulation_dtype, check_choice, operator, product_dtype, wants_triton

CHUNK = 3072 * 50257  # logits at a time, unless chunk_rows is given
# 50257 is odd, and rows of logits at odd offsets slow down every product and every load.
COLUMN_MULTIPLE = 16


def linear_cross_entropy(
    states_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, *, ignore_index: int = -100, reduction: str = "mean",
    chunk_rows: int | None = None, implementation: str = "auto",
) -> Tensor:  # fmt: skip
    """F.cross_entropy(states @ weight.T, targets), in fp32 (float64 for float64 states), in little memory. Products run
    in the dtype of the states, or autocast's; softmax, loss and the weight's gradient are fp32. Where every target is
    ignored the mean is 0. "none" gives each row's loss and has no gradient."""
    check_choice("reduction", reduction, ("mean", "sum", "none"))
    check_choice("implementation", implementation, ("auto", "torch", "triton"))
    chunk_rows = max(1, CHUNK // len(weight_VD)) if chunk_rows is None else chunk_rows
    if chunk_rows < 1:
        raise ValueError(f"chunk_rows must be at least 1, got {chunk_rows}.")
    states_ND = states_ND.to(product_dtype(states_ND))
    for_states, for_weight = (torch.is_grad_enabled() and x.requires_grad for x in (states_ND, weight_VD))
    if reduction == "none" and (for_states or for_weight):
        raise ValueError('reduction "none" has no gradient: call it under torch.no_grad().')
    options = ignore_index, chunk_rows, for_states, for_weight, implementation
    total, losses_N, _, _ = fused_forward(states_ND, weight_VD, targets_N, *options)
    if reduction != "mean":
        return losses_N if reduction == "none" else total
    return total / (targets_N != ignore_index).sum().clamp(min=1)


def run_in_chunks(
    states_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, ignore_index: int, chunk_rows: int, for_states: bool,
    for_weight: bool, implementation: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The summed loss, the loss of each row, and the gradients asked for (empty where not)."""
    rows, vocabulary, precise = len(states_ND), len(weight_VD), accumulation_dtype(states_ND)
    # Added words have zero weights: their logits stay 0 and nobody reads them.
    padded_PD = aligned(weight_VD, states_ND.dtype)
    losses_N = states_ND.new_empty(rows, dtype=precise)
    grad_states_ND = states_ND.new_empty(states_ND.shape) if for_states else states_ND.new_empty(0)
    grad_weight_PD = states_ND.new_zeros(padded_PD.shape if for_weight else (0,), dtype=precise)
    buffer_cP = states_ND.new_empty(min(chunk_rows, rows), len(padded_PD))
    gradient, to_gradient = for_states or for_weight, torch_softmax_gradient
    if wants_triton(states_ND, implementation):
        from chiar.kernels.triton_rows import triton_softmax_gradient as to_gradient
    # Autocast is still on in here, and would cast fp32 products again.
    with torch.autocast(states_ND.device.type, enabled=False):
        for first in range(0, rows, chunk_rows):
            chunk = slice(first, min(first + chunk_rows, rows))
            states_nD = states_ND[chunk]
            logits_nP = buffer_cP[: len(states_nD)]
            torch.mm(states_nD, padded_PD.T, out=logits_nP)
            to_gradient(logits_nP, vocabulary, targets_N[chunk], ignore_index, losses_N[chunk], gradient)
            if for_states:
                torch.mm(logits_nP, padded_PD, out=grad_states_ND[chunk])
            if for_weight:
                add_product(grad_weight_PD, logits_nP.T, states_nD)
    return losses_N.sum(), losses_N, grad_states_ND, grad_weight_PD[:vocabulary]


def aligned(weight_VD: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight in `dtype`, with rows of zeros up to the next multiple; itself where nothing has to change."""
    vocabulary, width = weight_VD.shape
    missing = -vocabulary % COLUMN_MULTIPLE
    if not missing:
        return weight_VD.to(dtype)
    padded_PD = weight_VD.new_empty(vocabulary + missing, width, dtype=dtype)
    padded_PD[:vocabulary].copy_(weight_VD)
    padded_PD[vocabulary:].zero_()
    return padded_PD


def add_product(sum_VD: Tensor, left_Vn: Tensor, right_nD: Tensor) -> None:
    """sum += left @ right, without rounding the product to the operands' dtype first where the device can."""
    if left_Vn.dtype == sum_VD.dtype:
        sum_VD.addmm_(left_Vn, right_nD)
    elif sum_VD.is_cuda:
        torch.addmm(sum_VD, left_Vn, right_nD, out_dtype=sum_VD.dtype, out=sum_VD)
    else:
        sum_VD.add_(left_Vn @ right_nD)


def torch_softmax_gradient(
    logits_nP: Tensor, vocabulary: int, targets_n: Tensor, ignore_index: int, losses_n: Tensor, gradient: bool
) -> None:
    """Writes the rows' losses and, in place of their logits, softmax − onehot (0 where the target is ignored). Columns
    beyond the vocabulary are padding: they count for nothing and are 0 before and after."""
    logits_nV = logits_nP[:, :vocabulary]
    kept_n = targets_n != ignore_index
    targets_n1 = targets_n.masked_fill(~kept_n, 0).unsqueeze(1)
    x_nV = logits_nV.to(losses_n.dtype)
    log_sum_n1 = x_nV.logsumexp(1, keepdim=True)
    losses_n.copy_((log_sum_n1 - x_nV.gather(1, targets_n1)).squeeze(1).masked_fill_(~kept_n, 0.0))
    if not gradient:
        return
    x_nV.sub_(log_sum_n1).exp_()
    x_nV.scatter_add_(1, targets_n1, x_nV.new_full((1, 1), -1.0).expand_as(targets_n1))
    x_nV.masked_fill_(~kept_n.unsqueeze(1), 0.0)
    if x_nV.data_ptr() != logits_nV.data_ptr():
        logits_nV.copy_(x_nV)


def shapes(states_ND: Tensor, weight_VD: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    losses_N = states_ND.new_empty(states_ND.shape[0], dtype=accumulation_dtype(states_ND))
    grad_states_ND = states_ND.new_empty(states_ND.shape if rest[3] else (0,))
    grad_weight_VD = losses_N.new_empty(weight_VD.shape if rest[4] else (0,))
    return losses_N.new_empty(()), losses_N, grad_states_ND, grad_weight_VD


def scale_gradients(
    total: Tensor, grad_states_ND: Tensor, grad_weight_VD: Tensor, for_states: bool, for_weight: bool, dtype: Any
) -> tuple[Tensor | None, Tensor | None]:
    # With an axis of its own the factor is not rounded to bf16 before the product, as a bare number would be.
    factor_1 = total.reshape(1)
    by_states = (grad_states_ND * factor_1).to(grad_states_ND.dtype) if for_states else None
    return by_states, (grad_weight_VD * factor_1).to(dtype) if for_weight else None


fused_forward = operator(
    "linear_cross_entropy", shapes, gradient=scale_gradients,
    saved=lambda ins, outs: (*outs[2:], *ins[5:7], ins[1].dtype),
    # One product for the logits and one for each gradient, all in the forward pass; a multiply-add is 2 FLOPs.
    flops=lambda states, weight, *a, **_: 2 * math.prod(states) * weight[0] * (1 + a[3] + a[4]),
)(run_in_chunks)  # fmt: skip
