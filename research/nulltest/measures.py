"""The measures of the null test on one layer's states and routes, each with its value under chance."""

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
    """H of white Gaussian vectors: a sample, and moments, exact if known (without ε or a weight on the DC bin)."""

    mean: float
    deviation: float
    exact: bool
    sample_N: Tensor


def make_null(width: int, samples: int, seed: int, eps: float = 0.0, dc_weight: float = 1.0) -> Null:
    """White noise is white in every orthonormal basis, so the null needs no transform."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [min(CHUNK, samples - done) for done in range(0, samples, CHUNK)]
    chunks = [torch.randn(size, width, generator=generator) for size in sizes]
    sample_N = torch.cat([spectral_entropy(chunk, Transform(), eps, dc_weight) for chunk in chunks])
    exact = eps == 0.0 and dc_weight == 1.0
    mean, deviation = white_noise_entropy(width) if exact else (float(sample_N.mean()), float(sample_N.std()))
    return Null(mean, deviation, exact, sample_N)


def clustered_error(influence_N: Array, clusters_N: Array) -> float:
    """Cluster-robust standard error of a statistic from the influence of each sample on it.

    Equal tokens have almost equal states, and flips in one row share its text: neither are independent samples.
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
    """The bin of each value; bins hold equal numbers of the layer's tokens."""
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
    """The model's basis, then the others. Only the model's basis weights the DC bin."""
    own = Basis(kind, make_transform(kind, width, seed), eps, dc_weight)
    return [own, *(Basis(name, make_transform(name, width), eps) for name in KINDS if name != kind)]


def percentiles(values_N: Array) -> dict[str, float]:
    values = np.percentile(values_N, PERCENTILES)
    return {str(p): float(value) for p, value in zip(PERCENTILES, values, strict=True)}


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
    """Kolmogorov–Smirnov distance to a null sample of the same size."""
    distance_expected: float
    """Its mean if the states were white and independent (asymptotically)."""
    distance_critical: float
    """Its 95th percentile in that case."""
    distance_repeated: float
    """Its mean if equal tokens had equal states: one white vector per distinct token, repeated like the token."""


def ks_distance(a_N: Array, b_M: Array) -> float:
    return float(stats.ks_2samp(a_N, b_M, method="asymp").statistic)


def repeated_distance(token_N: Array, null: Null, seed: int) -> float:
    """The distance under repetition alone: one null entropy per distinct token, averaged over draws."""
    generator, sample_N = np.random.default_rng(seed), null.sample_N.numpy()
    distinct, inverse_N = np.unique(token_N, return_inverse=True)
    draws = [generator.choice(sample_N, len(distinct))[inverse_N] for _ in range(DRAWS)]
    return float(np.mean([ks_distance(draw_N, sample_N) for draw_N in draws]))


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
    """Mutual information of a route with labels. Estimated from frequencies it is never below 0 and grows with the
    number of labels, so its value for shuffled labels is reported too."""

    bits: float
    chance: float
    """Mean over shuffles of the labels: the bias."""
    chance_deviation: float
    route_bits: float
    """Entropy of the route, the upper limit."""
    labels: int
    """Number of distinct labels."""
    deviation: float | None = None
    """Of `bits` over draws, if it is a mean over random routes."""

    @property
    def adjusted(self) -> float:
        """(bits − chance) / (entropy − chance): 0 for shuffled labels, 1 for labels that determine the route."""
        most = self.route_bits - self.chance
        return (self.bits - self.chance) / most if most > 1e-9 else 0.0


def mutual_information(route_N: Array, labels_N: Array, shuffles: int, seed: int) -> Information:
    """In bits, from frequencies, with `shuffles` permutations of the labels as the null."""
    _, route_N = np.unique(route_N, return_inverse=True)
    names, labels_N = np.unique(labels_N, return_inverse=True)
    route_bits, label_bits = (float(stats.entropy(np.bincount(one), base=2)) for one in (route_N, labels_N))

    def information(label_N: Array) -> float:
        return route_bits + label_bits - float(stats.entropy(np.bincount(route_N * len(names) + label_N), base=2))

    generator = np.random.default_rng(seed)
    null = [information(generator.permutation(labels_N)) for _ in range(shuffles)]
    chance, deviation = float(np.mean(null)), float(np.std(null, ddof=1)) if shuffles > 1 else 0.0
    return Information(max(information(labels_N), 0.0), chance, deviation, route_bits, len(names))


def hash_information(
    token_N: Array, labels: list[Array], fraction: float, draws: int, seed: int
) -> tuple[float, list[Information]]:
    """Information in a route that depends on the token alone: distinct tokens are dark with probability `fraction`.

    A few frequent tokens make up whole word classes, so such a route tells classes apart too: shuffled labels alone are
    too weak a null. Returns means over draws: the share of dark tokens, and one entry for each kind of label.
    """
    generator = np.random.default_rng(seed)
    distinct, inverse_N = np.unique(token_N, return_inverse=True)
    routes = [(generator.random(len(distinct)) < fraction)[inverse_N] for _ in range(draws)]
    averages = []
    for labels_N in labels:
        results = [mutual_information(route_N, labels_N, 2, seed + draw) for draw, route_N in enumerate(routes)]
        names = ("bits", "chance", "chance_deviation", "route_bits")
        means = [float(np.mean([getattr(result, name) for result in results])) for name in names]
        deviation = float(np.std([result.bits for result in results], ddof=1))
        averages.append(Information(*means, labels=results[0].labels, deviation=deviation))
    return float(np.mean(routes)), averages


def position_bins(position_N: Array) -> Array:
    """0, 1–2, 3–6, 7–14, …: positions differ most at the start of a row."""
    return np.floor(np.log2(position_N + 1.0)).astype(int)


@dataclass(frozen=True)
class Compaction:
    """The first half of Theorem 1: the mean share of a token's energy in k of D coefficients, over all tokens and then
    by bins of rising H. The best fixed basis, the KLT, is fitted on the even rows of the sample; everything is measured
    on the odd ones. Tokens are scaled to norm 1, as H is scale-invariant, so that large tokens do not dominate."""

    basis: str
    centred: bool
    """Whether the mean over tokens was subtracted first, as in a covariance; the filter and H do not."""
    k: int
    first: list[float | None]
    """The first k coefficients, as the theorem truncates: lowest frequency, or largest variance (KLT)."""
    largest: list[float | None]
    """The k largest coefficients of each token."""


def unit(states_ND: Tensor) -> Tensor:
    return states_ND / states_ND.norm(dim=-1, keepdim=True).clamp_min(torch.finfo(states_ND.dtype).tiny)


def klt(states_ND: Tensor) -> Transform:
    """The orthonormal basis whose first k coefficients hold the most energy of these states, for every k."""
    double_ND = states_ND.double()
    _, vectors_DD = torch.linalg.eigh(double_ND.T @ double_ND)
    return Transform(whole_DD=vectors_DD.T.flip(0).to(states_ND.dtype))


def energy_shares(states_ND: Tensor, transform: Transform, counts: list[int]) -> dict[int, tuple[Array, Array]]:
    """For each k, the shares of every token's energy in its first k and in its k largest coefficients."""
    energy_ND = transform.forward(states_ND).square()
    energy_ND = energy_ND / energy_ND.sum(-1, keepdim=True).clamp_min(torch.finfo(energy_ND.dtype).tiny)
    first_ND, largest_ND = energy_ND.cumsum(-1), energy_ND.sort(-1, descending=True).values.cumsum(-1)
    return {k: (first_ND[:, k - 1].cpu().numpy(), largest_ND[:, k - 1].cpu().numpy()) for k in counts}


def measure_compaction(
    states_ND: Tensor, row_N: Array, bin_N: Array, bins: int, bases: list[Basis], noise_MD: Tensor
) -> list[Compaction]:
    """For every basis, the KLT and white noise. `bin_N` is the entropy bin of each token, `row_N` its row."""
    width = states_ND.shape[-1]
    counts = sorted({max(width // divisor, 1) for divisor in DIVISORS})
    fitted_N = torch.from_numpy(row_N % 2 == 0).to(states_ND.device)
    bin_M = bin_N[row_N % 2 == 1]

    def by_bin(values_M: Array) -> list[float | None]:
        """The mean of all, then of each bin; None for an empty bin."""
        parts = [values_M, *(values_M[bin_M == number] for number in range(bins))]
        return [float(part.mean(dtype=np.float64)) if len(part) else None for part in parts]

    rows = []
    for centred in (False, True):
        scaled_ND = unit(states_ND)
        if centred:
            scaled_ND = unit(scaled_ND - scaled_ND[fitted_N].mean(0))
        transforms = {basis.name: basis.transform for basis in bases} | {KLT: klt(scaled_ND[fitted_N])}
        for name, transform in transforms.items():
            for k, (first_M, largest_M) in energy_shares(scaled_ND[~fitted_N], transform, counts).items():
                rows.append(Compaction(name, centred, k, by_bin(first_M), by_bin(largest_M)))
    for k, (first_M, largest_M) in energy_shares(noise_MD, Transform(), counts).items():
        rows.append(Compaction(NOISE, False, k, [float(first_M.mean())], [float(largest_M.mean())]))
    return rows
