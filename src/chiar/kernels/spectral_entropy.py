"""Spectral entropy, the paper's H (Eq. 1 and 2)."""

import math

import torch
from torch import Tensor

from chiar.kernels.transform import Transform


def spectral_entropy(x: Tensor, transform: Transform, eps: float = 0.0, dc_weight: float = 1.0) -> Tensor:
    """Over the last axis, with x̂ = C x: Eq. 1, p_i = x̂_i² / Σ x̂_j², and Eq. 2, H(x) = −Σ p_i log p_i / log D. With
    eps = 0 rows are first divided by their largest |x|, so that nothing over- or underflows and only the zero vector is
    special (H = 0); H log D = log S − Σ y² log y² / S with S = Σ y². With eps > 0, the paper's form, it is added to S
    and inside the logarithm. `dc_weight` multiplies the energy of the first basis vector."""
    x = x if x.dtype == torch.float64 else x.float()
    with torch.autocast(x.device.type, enabled=False):
        if eps == 0.0:
            # H is homogeneous of degree 0, so the gradient through the scale is zero and detaching it is exact.
            largest = x.detach().abs().amax(-1, keepdim=True)
            x = x / torch.where(largest > 0, largest, 1.0)
        energy = transform.forward(x).square()
        if dc_weight != 1.0:
            energy = torch.cat([energy[..., :1] * dc_weight, energy[..., 1:]], dim=-1)
        total = energy.sum(-1)
        if eps > 0.0:
            p = energy / (total + eps).unsqueeze(-1)
            entropy = -(p * torch.log(p + eps)).sum(-1)
        else:
            # y² log y² := 0 at 0, with zero gradient because that of y² is zero: the bound keeps log away from 0.
            energy_log = energy * torch.log(energy.clamp_min(torch.finfo(energy.dtype).tiny))
            safe_total = torch.where(total > 0, total, 1.0)
            entropy = torch.log(safe_total) - energy_log.sum(-1) / safe_total
        return (entropy / math.log(energy.shape[-1])).clamp(0.0, 1.0)
