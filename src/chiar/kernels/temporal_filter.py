"""A causal filter along time for each channel: y_t = Σ_j taps_j · x_{t−j} over the last W tokens. The taps are given by
a few DCT-II coefficients along the window, so that a channel has K parameters instead of W and its taps are smooth."""

import torch
import torch.nn.functional as F
from torch import Tensor

from chiar.kernels.packing import wants_triton
from chiar.kernels.transform import dct_matrix

FEW_TAPS = 8


def temporal_basis(window: int, coefficients: int) -> Tensor:
    """The first K DCT-II functions along the window, (W, K) in float64; row j applies to the token j places earlier."""
    return dct_matrix(window)[:coefficients].T.contiguous()


def temporal_filter(x_BTD: Tensor, taps_WD: Tensor, implementation: str = "auto") -> Tensor:
    """The result has the dtype of x; sums have that of the taps. Tokens before the first count as zeros."""
    if wants_triton(x_BTD, implementation):
        from chiar.kernels.triton_filter import filter_forward

        return filter_forward(x_BTD, taps_WD)
    with torch.autocast(x_BTD.device.type, enabled=False):
        window, T = len(taps_WD), x_BTD.shape[1]
        line_BSD = F.pad(x_BTD.to(taps_WD.dtype), (0, 0, window - 1, 0))
        if window > FEW_TAPS and not torch.compiler.is_compiling():
            y_BDT = F.conv1d(line_BSD.transpose(1, 2), taps_WD.T.flip(1)[:, None], groups=taps_WD.shape[1])
            return y_BDT.transpose(1, 2).to(x_BTD.dtype)
        y_BTD = line_BSD[:, window - 1 :] * taps_WD[0]
        for j in range(1, window):  # on a CPU faster than a grouped convolution if compiled, or with few taps
            y_BTD = torch.addcmul(y_BTD, line_BSD.narrow(1, window - 1 - j, T), taps_WD[j])
    return y_BTD.to(x_BTD.dtype)
