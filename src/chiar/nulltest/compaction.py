"""Theorem 1's first half: how much of a token's energy few coefficients hold, in the DCT and in the best basis.

The best fixed basis, the KLT, is the principal axes of the states themselves, taken from the even rows of the sample;
everything is measured on the odd ones. Tokens are scaled to length 1: H does not see scale, and no large token rules.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from chiar.kernels.transform import Transform
from chiar.nulltest.white import Basis

DIVISORS = (16, 8, 4)
NOISE = "white noise"
KLT = "klt"


@dataclass(frozen=True)
class Compaction:
    """Mean share of energy in k of D coefficients: over all tokens, then by bins of rising H."""

    basis: str
    centred: bool
    """Whether the mean of all tokens was taken away first, as in a covariance; the filter and H see it."""
    k: int
    first: list[float | None]
    """The first k coefficients: those of lowest frequency, or of largest variance (KLT). The theorem's truncation."""
    largest: list[float | None]
    """Each token's own k largest."""


def unit(states_ND: Tensor) -> Tensor:
    return states_ND / states_ND.norm(dim=-1, keepdim=True).clamp_min(torch.finfo(states_ND.dtype).tiny)


def klt(states_ND: Tensor) -> Transform:
    """The orthonormal basis whose first k coefficients hold the most energy of these states, for every k at once."""
    double_ND = states_ND.double()
    _, vectors_DD = torch.linalg.eigh(double_ND.T @ double_ND)
    return Transform(whole_DD=vectors_DD.T.flip(0).to(states_ND.dtype))


def energy_shares(states_ND: Tensor, transform: Transform, widths: list[int]) -> dict[int, tuple[Tensor, Tensor]]:
    """For each k the shares of energy in the first k coefficients and in the k largest, of every token."""
    energy_ND = transform.forward(states_ND).square()
    total_N1 = energy_ND.sum(-1, keepdim=True).clamp_min(torch.finfo(energy_ND.dtype).tiny)
    first_ND = (energy_ND / total_N1).cumsum(-1)
    largest_ND = (energy_ND.sort(-1, descending=True).values / total_N1).cumsum(-1)
    return {k: (first_ND[:, k - 1].cpu(), largest_ND[:, k - 1].cpu()) for k in widths}


def measure_compaction(
    states_ND: Tensor, row_N: Tensor, bin_N: Tensor, bins: int, bases: list[Basis], noise_MD: Tensor
) -> list[Compaction]:
    """For every basis, the KLT and white noise. `bin_N` is each token's entropy bin, `row_N` its row."""
    width = states_ND.shape[-1]
    widths = sorted({max(width // divisor, 1) for divisor in DIVISORS})
    fitted_N, bin_M = row_N % 2 == 0, bin_N[row_N % 2 == 1].cpu()
    found = []
    for centred in (False, True):
        scaled_ND = unit(states_ND)
        if centred:
            scaled_ND = unit(scaled_ND - scaled_ND[fitted_N].mean(0))
        transforms = {basis.name: basis.transform for basis in bases} | {KLT: klt(scaled_ND[fitted_N])}
        for name, transform in transforms.items():
            for k, (first_M, largest_M) in energy_shares(scaled_ND[~fitted_N], transform, widths).items():
                shares = by_bin(first_M, bin_M, bins), by_bin(largest_M, bin_M, bins)
                found.append(Compaction(name, centred, k, *shares))
    for k, (first_M, largest_M) in energy_shares(noise_MD, Transform(), widths).items():
        found.append(Compaction(NOISE, False, k, [float(first_M.mean())], [float(largest_M.mean())]))
    return found


def by_bin(values_N: Tensor, bin_N: Tensor, bins: int) -> list[float | None]:
    """The mean of all, then of each bin; None for an empty one."""
    parts = [values_N, *(values_N[bin_N == number] for number in range(bins))]
    return [float(part.double().mean()) if len(part) else None for part in parts]
