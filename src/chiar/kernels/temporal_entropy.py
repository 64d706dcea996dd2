"""Temporal spectral entropy: how spread the spectrum of the last W tokens is, along time."""

import torch
from torch import Tensor

from chiar.kernels.spectral_entropy import entropy_of


def channel_directions(width: int, channels: int, seed: int) -> Tensor:
    """Random orthonormal directions of the feature space, (D, C) in float64; signs of R fixed, as in ops/basis.py."""
    generator = torch.Generator().manual_seed(seed)
    q_DC, r_CC = torch.linalg.qr(torch.randn(width, channels, dtype=torch.float64, generator=generator))
    return q_DC * r_CC.diagonal().sign()


def channels_of(x_BTD: Tensor, directions_DC: Tensor) -> Tensor:
    """Tokens, each scaled to a root mean square of 1, along C directions, (B, T, C); a zero token stays zero."""
    # Nothing here depends on a token's scale: dividing by its largest entry first keeps squares in range.
    largest_BT1 = x_BTD.detach().abs().amax(-1, keepdim=True)
    x_BTD = x_BTD / torch.where(largest_BT1 > 0, largest_BT1, 1.0)
    square_BT1 = x_BTD.square().mean(-1, keepdim=True)
    return (x_BTD * torch.where(square_BT1 > 0, square_BT1, 1.0).rsqrt()) @ directions_DC


def temporal_entropy(line_BSC: Tensor, dct_WW: Tensor, eps: float = 0.0, dc_weight: float = 1.0) -> Tensor:
    """H of every token from the (W−1)th on, (B, S−W+1): the entropy of the W·C energies of its window, the last W
    tokens, after a DCT-II along time in each of C channels, divided by log(W·C).

    Terms of frequency 0 count: a context that stays the same has all its energy there, and a low H. `dc_weight`
    multiplies them; with 0 they are left out, and (W−1)·C terms remain: what tokens have in common is then not seen.
    Of white noise H is that of a white vector of as many features as there are terms, `white_noise_entropy`.
    """
    window_BTCW = line_BSC.unfold(1, len(dct_WW), 1)
    energy_BTCW = (window_BTCW @ dct_WW.T).square()
    if dc_weight == 0.0:
        energy_BTCW = energy_BTCW[..., 1:]
    elif dc_weight != 1.0:
        energy_BTCW = torch.cat([energy_BTCW[..., :1] * dc_weight, energy_BTCW[..., 1:]], dim=-1)
    return entropy_of(energy_BTCW.flatten(-2), eps)


def naive_temporal_entropy(x_TD: Tensor, directions_DC: Tensor, window: int) -> Tensor:
    """The definition, token by token, for one row in float64."""
    from chiar.kernels.basis import dct_matrix

    dct_WW, result = dct_matrix(window), []
    unit_TD = x_TD / x_TD.square().mean(-1, keepdim=True).sqrt()
    for t in range(len(x_TD)):
        window_WC = torch.zeros(window, directions_DC.shape[1], dtype=torch.float64)
        for age in range(min(window, t + 1)):
            window_WC[window - 1 - age] = unit_TD[t - age] @ directions_DC
        energy = (dct_WW @ window_WC).square().flatten()
        p = energy / energy.sum()
        result.append(-(p * p.clamp_min(1e-300).log()).sum() / torch.tensor(float(len(p))).double().log())
    return torch.stack(result)
