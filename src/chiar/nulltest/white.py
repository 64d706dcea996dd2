"""How far H is from what white noise of the same width gives, in several bases."""

from dataclasses import dataclass

import torch
from torch import Tensor

from chiar.kernels.spectral_entropy import spectral_entropy
from chiar.kernels.transform import Transform, make_transform
from chiar.kernels.white_noise import white_noise_entropy
from chiar.nulltest.statistics import ks_distance, ks_under_null, mean_and_error

PERCENTILES = (5, 25, 50, 75, 95)
KINDS = ("dct", "identity", "random")
CHUNK = 4096
DRAWS = 20


@dataclass(frozen=True)
class Basis:
    name: str
    transform: Transform
    eps: float = 0.0
    dc_weight: float = 1.0

    def entropy(self, states_ND: Tensor) -> Tensor:
        parts = [spectral_entropy(part, self.transform, self.eps, self.dc_weight) for part in states_ND.split(CHUNK)]
        return torch.cat(parts).cpu()

    def to(self, device: torch.device) -> "Basis":
        moved = {name: None if part is None else part.to(device) for name, part in vars(self.transform).items()}
        return Basis(self.name, Transform(**moved), self.eps, self.dc_weight)


def model_bases(kind: str, width: int, seed: int = 0, eps: float = 0.0, dc_weight: float = 1.0) -> list[Basis]:
    """The model's basis first, then the others, for the same states. A weight of the DC bin is the model's own."""
    own = Basis(kind, make_transform(kind, width, seed), eps, dc_weight)
    return [own, *(Basis(name, make_transform(name, width), eps) for name in KINDS if name != kind)]


@dataclass(frozen=True)
class Null:
    """H of white Gaussian vectors: exact moments where they are known (no ε, no weight on the DC bin), and a sample."""

    mean: float
    deviation: float
    exact: bool
    sample_N: Tensor

    def percentiles(self) -> dict[str, float]:
        return percentiles(self.sample_N)


def make_null(width: int, samples: int, seed: int, eps: float = 0.0, dc_weight: float = 1.0) -> Null:
    """Any orthonormal basis leaves white noise white, so the null needs no transform."""
    generator = torch.Generator().manual_seed(seed)
    noise = Basis("identity", Transform(), eps, dc_weight)
    sizes = [min(CHUNK, samples - done) for done in range(0, samples, CHUNK)]
    sample_N = torch.cat([noise.entropy(torch.randn(size, width, generator=generator)) for size in sizes])
    exact = eps == 0.0 and dc_weight == 1.0
    mean, deviation = white_noise_entropy(width) if exact else (float(sample_N.mean()), float(sample_N.std()))
    return Null(mean, deviation, exact, sample_N)


def percentiles(values_N: Tensor) -> dict[str, float]:
    found = torch.quantile(values_N.double(), torch.tensor([p / 100 for p in PERCENTILES], dtype=torch.float64))
    return {str(p): float(value) for p, value in zip(PERCENTILES, found, strict=True)}


@dataclass(frozen=True)
class Whiteness:
    """H of one layer's input in one basis, against the null."""

    basis: str
    mean: float
    deviation: float
    percentiles: dict[str, float]
    effect: float
    """(mean − the null's mean) / the null's standard deviation."""
    effect_error: float
    """Its standard error; equal tokens count as one sample."""
    spread: float
    """Standard deviation / the null's."""
    distance: float
    """Kolmogorov–Smirnov distance to a sample of the null of the same size."""
    distance_expected: float
    """Its mean, were the states white and independent."""
    distance_critical: float
    """Its 95th percentile then."""
    distance_repeated: float
    """Its mean, were equal tokens equal states: one white vector for each distinct token, as often as the token."""


def repeated_distance(token_N: Tensor, null: Null, seed: int) -> float:
    """What repetition alone does to the distance: the mean over draws of one null entropy a distinct token."""
    generator = torch.Generator().manual_seed(seed)
    distinct, inverse_N = token_N.unique(return_inverse=True)
    found = []
    for _ in range(DRAWS):
        drawn = torch.randint(len(null.sample_N), (len(distinct),), generator=generator)
        found.append(ks_distance(null.sample_N[drawn][inverse_N], null.sample_N))
    return sum(found) / DRAWS


def whiteness(basis: str, entropy_N: Tensor, null: Null, token_N: Tensor, repeated: float) -> Whiteness:
    """`repeated` is `repeated_distance`, the same for every layer."""
    expected, critical = ks_under_null(len(entropy_N), len(null.sample_N))
    mean, error = mean_and_error(entropy_N, token_N)
    deviation = float(entropy_N.double().std())
    return Whiteness(
        basis=basis,
        mean=mean,
        deviation=deviation,
        percentiles=percentiles(entropy_N),
        effect=(mean - null.mean) / null.deviation,
        effect_error=error / null.deviation,
        spread=deviation / null.deviation,
        distance=ks_distance(entropy_N, null.sample_N),
        distance_expected=expected,
        distance_critical=critical,
        distance_repeated=repeated,
    )
