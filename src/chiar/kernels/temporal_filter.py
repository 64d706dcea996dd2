"""A causal filter along time, one for each channel: y_t = Σ_j taps_j · x_{t−j} over the last W tokens. Its taps are a
few DCT-II coefficients along the window: a channel has K numbers, not W, and what it says about the past is smooth."""

import torch
import torch.nn.functional as F
from torch import Tensor

from chiar.kernels.packing import wants_triton
from chiar.kernels.transform import dct_matrix


def temporal_basis(window: int, coefficients: int) -> Tensor:
    """The first K DCT-II functions along the window, (W, K) in float64; row j belongs to the token j before."""
    return dct_matrix(window)[:coefficients].T.contiguous()


def temporal_filter(x_BTD: Tensor, taps_WD: Tensor, implementation: str = "auto") -> Tensor:
    """In the dtype of x, summed in the precision of the taps. There is nothing before the first token."""
    if wants_triton(x_BTD, implementation):
        from chiar.kernels.triton_filter import filter_forward

        return filter_forward(x_BTD, taps_WD)
    with torch.autocast(x_BTD.device.type, enabled=False):
        line_BDS = F.pad(x_BTD.mT.to(taps_WD.dtype), (len(taps_WD) - 1, 0))
        y_BDT = F.conv1d(line_BDS, taps_WD.flip(0).T[:, None], groups=x_BTD.shape[2])
    return y_BDT.mT.to(x_BTD.dtype)
