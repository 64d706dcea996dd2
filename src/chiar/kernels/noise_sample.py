"""White noise drawn rather than derived: H of a sample, for histograms and for entropies without exact moments."""

from dataclasses import dataclass

import torch
from torch import Tensor

from chiar.kernels.spectral_entropy import spectral_entropy
from chiar.kernels.transform import Transform
from chiar.kernels.white_noise import white_noise_entropy

CHUNK = 4096


@dataclass(frozen=True)
class Null:
    """H of white Gaussian vectors: exact moments where they are known (no ε, no weight on the DC bin), and a sample."""

    mean: float
    deviation: float
    exact: bool
    sample_N: Tensor


def make_null(width: int, samples: int, seed: int, eps: float = 0.0, dc_weight: float = 1.0) -> Null:
    """Any orthonormal basis leaves white noise white, so the null needs no transform."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [min(CHUNK, samples - done) for done in range(0, samples, CHUNK)]
    drawn = [torch.randn(size, width, generator=generator) for size in sizes]
    sample_N = torch.cat([spectral_entropy(part, Transform(), eps, dc_weight) for part in drawn])
    exact = eps == 0.0 and dc_weight == 1.0
    mean, deviation = white_noise_entropy(width) if exact else (float(sample_N.mean()), float(sample_N.std()))
    return Null(mean, deviation, exact, sample_N)
