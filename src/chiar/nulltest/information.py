"""How much a route says about a token, and how much of that is the bias of counting."""

from dataclasses import dataclass

import torch
from torch import Tensor

from chiar.nulltest.statistics import bits


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
    def excess(self) -> float:
        return self.bits - self.chance

    @property
    def share(self) -> float:
        """Of the route's entropy: (bits − chance) / entropy."""
        return self.excess / self.route_bits if self.route_bits > 0 else 0.0

    @property
    def adjusted(self) -> float:
        """(bits − chance) / (entropy − chance): 0 for shuffled labels, 1 for labels that decide the route."""
        room = self.route_bits - self.chance
        return self.excess / room if room > 1e-9 else 0.0

    def to_dict(self) -> dict[str, float | None]:
        return {**vars(self), "excess": self.excess, "share": self.share, "adjusted": self.adjusted}


def mutual_information(route_N: Tensor, labels_N: Tensor, shuffles: int, seed: int) -> Information:
    """In bits, from frequencies, with `shuffles` permutations of the labels as its null."""
    _, route_N = route_N.unique(return_inverse=True)
    names, labels_N = labels_N.unique(return_inverse=True)
    routes = int(route_N.max()) + 1
    fixed = bits(torch.bincount(route_N)) + bits(torch.bincount(labels_N))

    def counted(label_N: Tensor) -> float:
        return fixed - bits(torch.bincount(route_N * len(names) + label_N, minlength=routes * len(names)))

    generator = torch.Generator().manual_seed(seed)
    null = torch.tensor(
        [counted(labels_N[torch.randperm(len(labels_N), generator=generator)]) for _ in range(shuffles)],
        dtype=torch.float64,
    )
    return Information(
        bits=max(counted(labels_N), 0.0),
        chance=float(null.mean()),
        chance_deviation=float(null.std()) if shuffles > 1 else 0.0,
        route_bits=bits(torch.bincount(route_N)),
        labels=len(names),
    )


def hash_information(
    token_N: Tensor, labels: list[Tensor], fraction: float, draws: int, seed: int
) -> tuple[float, list[Information]]:
    """What a route says that knows nothing but the token: each distinct token is dark with probability `fraction`.

    A few frequent tokens make up whole word classes, so such a route tells classes apart too: shuffled labels alone are
    too weak a null. Means over draws, with the share that was dark; one entry for each kind of label.
    """
    generator = torch.Generator().manual_seed(seed)
    distinct, inverse_N = token_N.unique(return_inverse=True)
    dark, found = [], []
    for draw in range(draws):
        route_N = (torch.rand(len(distinct), generator=generator) < fraction)[inverse_N].long()
        dark.append(float(route_N.double().mean()))
        found.append([mutual_information(route_N, labels_N, 2, seed + draw) for labels_N in labels])
    return sum(dark) / draws, [average(list(of_label)) for of_label in zip(*found, strict=True)]


def average(found: list[Information]) -> Information:
    def mean(name: str) -> float:
        return sum(getattr(information, name) for information in found) / len(found)

    deviation = float(torch.tensor([information.bits for information in found], dtype=torch.float64).std())
    names = ("bits", "chance", "chance_deviation", "route_bits")
    return Information(**{name: mean(name) for name in names}, labels=found[0].labels, deviation=deviation)


def position_bins(position_N: Tensor) -> Tensor:
    """0, 1–2, 3–6, 7–14, …: the beginning of a row is where positions differ most."""
    return torch.floor(torch.log2(position_N.double() + 1)).long()


def cut_at_fraction(entropy_N: Tensor, fraction: float) -> Tensor:
    """True for the `fraction` with the highest H."""
    return entropy_N > torch.quantile(entropy_N.double(), 1.0 - fraction)
