"""A causal filter along time, one for each channel: y_t = Σ_j taps_j · x_{t−j} over the last W tokens. Its taps are a
few DCT-II coefficients along the window: a channel has K numbers, not W, and what it says about the past is smooth."""

import torch
from torch import Tensor

from chiar.kernels.basis import dct_matrix
from chiar.kernels.packing import register_gradient, row_kernels

Two = tuple[Tensor, Tensor]


def temporal_basis(window: int, coefficients: int) -> Tensor:
    """The first K DCT-II functions along the window, (W, K) in float64; row j belongs to the token j before."""
    return dct_matrix(window)[:coefficients].T.contiguous()


def naive_temporal_filter(x_BTD: Tensor, taps_WD: Tensor) -> Tensor:
    """The definition. There is nothing before the first token."""
    reach = [range(min(t + 1, len(taps_WD))) for t in range(x_BTD.shape[1])]
    y = [torch.stack([taps_WD[j] * x_BTD[:, t - j] for j in window]).sum(0) for t, window in enumerate(reach)]
    return torch.stack(y, dim=1).to(x_BTD.dtype)


@torch.library.custom_op("chiar::temporal_filter", mutates_args=())
def temporal_filter(x_BTD: Tensor, taps_WD: Tensor, implementation: str = "auto") -> Tensor:
    """The same as W shifted products, summed in the precision of the taps: one operator, because a compiler takes
    minutes over the shifts of a few layers."""
    x_BTD, taps_WD = x_BTD.contiguous(), taps_WD.contiguous()
    if kernels := row_kernels(x_BTD, implementation):
        return kernels.filter_forward(x_BTD, taps_WD)
    return shifted_sum(x_BTD, taps_WD)


def shifted_sum(x_BTD: Tensor, taps_WD: Tensor) -> Tensor:
    length = x_BTD.shape[1]
    y_BTD = taps_WD[0] * x_BTD
    for j in range(1, min(len(taps_WD), length)):
        y_BTD[:, j:] += taps_WD[j] * x_BTD[:, : length - j]
    return y_BTD.to(x_BTD.dtype)


@torch.library.custom_op("chiar::temporal_filter_backward", mutates_args=())
def temporal_filter_backward(grad_BTD: Tensor, x_BTD: Tensor, taps_WD: Tensor, implementation: str) -> Two:
    """The gradients of x, the same filter backwards in time, and of the taps."""
    grad_BTD, x_BTD, taps_WD = grad_BTD.contiguous(), x_BTD.contiguous(), taps_WD.contiguous()
    if kernels := row_kernels(x_BTD, implementation):
        return kernels.filter_backward(grad_BTD, x_BTD, taps_WD)
    length, dtaps_WD = x_BTD.shape[1], torch.zeros_like(taps_WD)
    for j in range(min(len(taps_WD), length)):
        dtaps_WD[j] = (grad_BTD[:, j:].to(taps_WD.dtype) * x_BTD[:, : length - j]).sum((0, 1))
    return shifted_sum(grad_BTD.flip(1), taps_WD).flip(1).to(x_BTD.dtype), dtaps_WD


temporal_filter.register_fake(lambda x, *_: x.new_empty(x.shape))
temporal_filter_backward.register_fake(lambda grad, x, taps, _: (x.new_empty(x.shape), taps.new_empty(taps.shape)))
register_gradient(temporal_filter, temporal_filter_backward, lambda inputs, outputs: inputs)
