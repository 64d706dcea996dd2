"""What the null test measures of one layer's states and routes, each beside what chance gives."""

import math
from dataclasses import dataclass

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from chiar.kernels.spectral_entropy import spectral_entropy
from chiar.kernels.transform import Transform, make_transform
from chiar.kernels.white_noise import white_noise_entropy

Array = np.ndarray
PERCENTILES = (5, 25, 50, 75, 95)
KINDS = ("dct", "identity", "random")
CHUNK, DRAWS = 4096, 20
DIVISORS = (16, 8, 4)
NOISE, KLT = "white noise", "klt"


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


def clustered_error(influence_N: Array, clusters_N: Array) -> float:
    """Standard error of a statistic from what each sample moves it by, where those of one cluster are not independent.

    Equal tokens have almost equal states and flips in one row share its text, so neither are independent samples.
    """
    _, inverse_N = np.unique(clusters_N, return_inverse=True)
    sums_C = np.bincount(inverse_N, weights=influence_N)
    count = len(sums_C)
    return math.nan if count < 2 else float(np.sqrt(np.square(sums_C).sum() * count / (count - 1)))


def mean_and_error(values_N: Array, clusters_N: Array) -> tuple[float, float]:
    mean = np.mean(values_N, dtype=np.float64)
    return float(mean), clustered_error((values_N - mean) / len(values_N), clusters_N)


def finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def bins_of(values: Array, layer_N: Array, bins: int) -> Array:
    """The bin of each value, where bins hold equally many of the layer's."""
    return np.searchsorted(np.quantile(layer_N, np.arange(1, bins) / bins), values)


@dataclass(frozen=True)
class Basis:
    name: str
    transform: Transform
    eps: float = 0.0
    dc_weight: float = 1.0

    def entropy(self, states_ND: Tensor) -> Array:
        parts = [spectral_entropy(part, self.transform, self.eps, self.dc_weight) for part in states_ND.split(CHUNK)]
        return torch.cat(parts).double().cpu().numpy()

    def to(self, device: torch.device) -> "Basis":
        moved = {name: None if part is None else part.to(device) for name, part in vars(self.transform).items()}
        return Basis(self.name, Transform(**moved), self.eps, self.dc_weight)


def model_bases(kind: str, width: int, seed: int = 0, eps: float = 0.0, dc_weight: float = 1.0) -> list[Basis]:
    """The model's basis first, then the others, for the same states. A weight of the DC bin is the model's own."""
    own = Basis(kind, make_transform(kind, width, seed), eps, dc_weight)
    return [own, *(Basis(name, make_transform(name, width), eps) for name in KINDS if name != kind)]


def percentiles(values_N: Array) -> dict[str, float]:
    found = np.percentile(values_N, PERCENTILES)
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
    """Its mean, were the states white and independent (the law of large samples)."""
    distance_critical: float
    """Its 95th percentile then."""
    distance_repeated: float
    """Its mean, were equal tokens equal states: one white vector for each distinct token, as often as the token."""


def ks_distance(a_N: Array, b_M: Array) -> float:
    return float(stats.ks_2samp(a_N, b_M, method="asymp").statistic)


def repeated_distance(token_N: Array, null: Null, seed: int) -> float:
    """What repetition alone does to the distance: the mean over draws of one null entropy a distinct token."""
    generator, sample_N = np.random.default_rng(seed), null.sample_N.numpy()
    distinct, inverse_N = np.unique(token_N, return_inverse=True)
    drawn = [generator.choice(sample_N, len(distinct))[inverse_N] for _ in range(DRAWS)]
    return float(np.mean([ks_distance(one, sample_N) for one in drawn]))


def whiteness(basis: str, entropy_N: Array, null: Null, token_N: Array, repeated: float) -> Whiteness:
    """`repeated` is `repeated_distance`, the same for every layer."""
    n, m = len(entropy_N), len(null.sample_N)
    scale = math.sqrt((n + m) / (n * m))
    mean, error = mean_and_error(entropy_N, token_N)
    deviation = float(entropy_N.std(ddof=1))
    return Whiteness(
        basis=basis, mean=mean, deviation=deviation, percentiles=percentiles(entropy_N),
        effect=(mean - null.mean) / null.deviation, effect_error=error / null.deviation,
        spread=deviation / null.deviation, distance=ks_distance(entropy_N, null.sample_N.numpy()),
        distance_expected=float(stats.kstwobign.mean()) * scale,
        distance_critical=float(stats.kstwobign.ppf(0.95)) * scale, distance_repeated=repeated,
    )  # fmt: skip


@dataclass(frozen=True)
class Information:
    """Mutual information of a route with one kind of label. Counted from frequencies it is never below 0 and grows with
    the number of labels, so what shuffled labels give is shown beside it."""

    bits: float
    chance: float
    """Mean over shuffles of the labels: the bias."""
    chance_deviation: float
    route_bits: float
    """Entropy of the route, the most there can be."""
    labels: int
    """Distinct labels seen."""
    deviation: float | None = None
    """Of `bits` over draws, where it is a mean over random routes."""

    @property
    def adjusted(self) -> float:
        """(bits − chance) / (entropy − chance): 0 for shuffled labels, 1 for labels that decide the route."""
        room = self.route_bits - self.chance
        return (self.bits - self.chance) / room if room > 1e-9 else 0.0


def mutual_information(route_N: Array, labels_N: Array, shuffles: int, seed: int) -> Information:
    """In bits, from frequencies, with `shuffles` permutations of the labels as its null."""
    _, route_N = np.unique(route_N, return_inverse=True)
    names, labels_N = np.unique(labels_N, return_inverse=True)
    route_bits, label_bits = (float(stats.entropy(np.bincount(one), base=2)) for one in (route_N, labels_N))

    def counted(label_N: Array) -> float:
        return route_bits + label_bits - float(stats.entropy(np.bincount(route_N * len(names) + label_N), base=2))

    generator = np.random.default_rng(seed)
    null = [counted(generator.permutation(labels_N)) for _ in range(shuffles)]
    chance, deviation = float(np.mean(null)), float(np.std(null, ddof=1)) if shuffles > 1 else 0.0
    return Information(max(counted(labels_N), 0.0), chance, deviation, route_bits, len(names))


def hash_information(
    token_N: Array, labels: list[Array], fraction: float, draws: int, seed: int
) -> tuple[float, list[Information]]:
    """What a route says that knows nothing but the token: each distinct token is dark with probability `fraction`.

    A few frequent tokens make up whole word classes, so such a route tells classes apart too: shuffled labels alone are
    too weak a null. Means over draws, with the share that was dark; one entry for each kind of label.
    """
    generator = np.random.default_rng(seed)
    distinct, inverse_N = np.unique(token_N, return_inverse=True)
    routes = [(generator.random(len(distinct)) < fraction)[inverse_N] for _ in range(draws)]
    averages = []
    for labels_N in labels:
        found = [mutual_information(route_N, labels_N, 2, seed + draw) for draw, route_N in enumerate(routes)]
        names = ("bits", "chance", "chance_deviation", "route_bits")
        means = [float(np.mean([getattr(one, name) for one in found])) for name in names]
        scatter = float(np.std([one.bits for one in found], ddof=1))
        averages.append(Information(*means, labels=found[0].labels, deviation=scatter))
    return float(np.mean(routes)), averages


def position_bins(position_N: Array) -> Array:
    """0, 1–2, 3–6, 7–14, …: the beginning of a row is where positions differ most."""
    return np.floor(np.log2(position_N + 1.0)).astype(int)


@dataclass(frozen=True)
class Compaction:
    """Theorem 1's first half: the mean share of a token's energy in k of D coefficients, over all tokens and then by
    bins of rising H. The best fixed basis, the KLT, is fitted on the even rows of the sample; everything is measured on
    the odd ones. Tokens are scaled to length 1: H does not see scale, and no large token rules."""

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


def energy_shares(states_ND: Tensor, transform: Transform, widths: list[int]) -> dict[int, tuple[Array, Array]]:
    """For each k the shares of energy in the first k coefficients and in the k largest, of every token."""
    energy_ND = transform.forward(states_ND).square()
    energy_ND = energy_ND / energy_ND.sum(-1, keepdim=True).clamp_min(torch.finfo(energy_ND.dtype).tiny)
    first_ND, largest_ND = energy_ND.cumsum(-1), energy_ND.sort(-1, descending=True).values.cumsum(-1)
    return {k: (first_ND[:, k - 1].cpu().numpy(), largest_ND[:, k - 1].cpu().numpy()) for k in widths}


def measure_compaction(
    states_ND: Tensor, row_N: Array, bin_N: Array, bins: int, bases: list[Basis], noise_MD: Tensor
) -> list[Compaction]:
    """For every basis, the KLT and white noise. `bin_N` is each token's entropy bin, `row_N` its row."""
    width = states_ND.shape[-1]
    widths = sorted({max(width // divisor, 1) for divisor in DIVISORS})
    fitted_N = torch.from_numpy(row_N % 2 == 0).to(states_ND.device)
    bin_M = bin_N[row_N % 2 == 1]

    def by_bin(values_M: Array) -> list[float | None]:
        """The mean of all, then of each bin; None for an empty one."""
        parts = [values_M, *(values_M[bin_M == number] for number in range(bins))]
        return [float(part.mean(dtype=np.float64)) if len(part) else None for part in parts]

    found = []
    for centred in (False, True):
        scaled_ND = unit(states_ND)
        if centred:
            scaled_ND = unit(scaled_ND - scaled_ND[fitted_N].mean(0))
        transforms = {basis.name: basis.transform for basis in bases} | {KLT: klt(scaled_ND[fitted_N])}
        for name, transform in transforms.items():
            for k, (first_M, largest_M) in energy_shares(scaled_ND[~fitted_N], transform, widths).items():
                found.append(Compaction(name, centred, k, by_bin(first_M), by_bin(largest_M)))
    for k, (first_M, largest_M) in energy_shares(noise_MD, Transform(), widths).items():
        found.append(Compaction(NOISE, False, k, [float(first_M.mean())], [float(largest_M.mean())]))
    return found
