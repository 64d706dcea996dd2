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

    def to_dict(self) -> dict[str, float]:
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


def position_bins(position_N: Tensor) -> Tensor:
    """0, 1–2, 3–6, 7–14, …: the beginning of a row is where positions differ most."""
    return torch.floor(torch.log2(position_N.double() + 1)).long()


def cut_at_fraction(entropy_N: Tensor, fraction: float) -> Tensor:
    """True for the `fraction` with the highest H."""
    return entropy_N > torch.quantile(entropy_N.double(), 1.0 - fraction)
