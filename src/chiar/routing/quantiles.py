"""Quantiles of a stream of entropies in bounded memory."""

import torch
from torch import Tensor

from chiar.errors import InputError


class StreamingQuantiles:
    """Quantiles of numbers in [0, 1] from a fixed histogram: 512 KiB whatever the stream, exact to 1/65,536.

    At width 1024 the bulk of H spans some 600 bins. Histograms of parts of a stream add up, in any order.
    """

    BINS = 1 << 16

    def __init__(self) -> None:
        self.counts = torch.zeros(self.BINS, dtype=torch.int64)

    def add(self, values: Tensor) -> None:
        bins = (values.detach().double().cpu().flatten() * self.BINS).long().clamp(0, self.BINS - 1)
        self.counts += torch.bincount(bins, minlength=self.BINS)

    def merge(self, other: "StreamingQuantiles") -> None:
        self.counts += other.counts

    @property
    def total(self) -> int:
        return int(self.counts.sum())

    def quantile(self, q: float) -> float:
        """The value below which a fraction q lies, linear inside a bin."""
        if self.total == 0:
            raise InputError("no entropies were seen: the token stream is empty.")
        cumulative = self.counts.cumsum(0)
        target = max(q * self.total, 1e-9)
        index = min(int(torch.searchsorted(cumulative, target)), self.BINS - 1)
        inside = float(self.counts[index])
        below = float(cumulative[index]) - inside
        return (index + ((target - below) / inside if inside else 0.0)) / self.BINS

    def fraction_above(self, threshold: float) -> float:
        index = min(int(threshold * self.BINS), self.BINS - 1)
        above = float(self.counts[index + 1 :].sum())
        within = float(self.counts[index]) * (index + 1 - threshold * self.BINS)
        return (above + within) / max(self.total, 1)

    def mean(self) -> float:
        centres = (torch.arange(self.BINS, dtype=torch.float64) + 0.5) / self.BINS
        return float((self.counts * centres).sum()) / max(self.total, 1)

    def deviation(self) -> float:
        centres = (torch.arange(self.BINS, dtype=torch.float64) + 0.5) / self.BINS
        return float(((self.counts * (centres - self.mean()) ** 2).sum() / max(self.total, 1)).sqrt())

    def distance(self, other: "StreamingQuantiles") -> float:
        """Kolmogorov–Smirnov: the largest gap between the two distribution functions, 0 (same) to 1 (disjoint)."""
        ours, theirs = self.counts.cumsum(0) / self.total, other.counts.cumsum(0) / other.total
        return float((ours - theirs).abs().max())
