"""Model FLOPs utilisation: the share of the device's peak that a run's model needs."""

import re
from typing import Any

import torch

from chiar.config import ChiarConfig
from chiar.routing.flops import Shares, count_dense_execution, count_flops
from chiar.training.settings import TrainSettings

# Dense bf16 matrix products with fp32 sums, TFLOP/s, from the makers' data sheets (without sparsity).
PEAKS = {
    "B200": 2250.0,
    "H200": 989.0,
    "H200 NVL": 835.0,
    "GH200": 989.0,
    "H100": 989.0,
    "H100 NVL": 835.0,
    "H100 PCIe": 756.0,
    "A100": 312.0,
    "A30": 165.0,
    "A10": 125.0,
    "A10G": 70.0,
    "L40S": 362.0,
    "L40": 181.0,
    "L4": 121.0,
    "RTX 6000 Ada": 364.0,
    "RTX A6000": 155.0,
    "RTX 5090": 210.0,
    "RTX 4090": 165.0,
    "RTX 3090": 71.0,
}
# A part of a GPU, or one with another power limit than the data sheet's.
UNKNOWN = ("MIG", "Laptop", "Max-Q", "RTX 4090 D")


def known_peak(name: str) -> float | None:
    """TFLOP/s of the GPU called `name`; the longest entry that is part of the name wins."""
    words = f" {re.sub(r'[-_/]', ' ', name)} "
    if any(f" {part.replace('-', ' ')} " in words for part in UNKNOWN):
        return None
    found = [known for known in PEAKS if f" {known} " in words]
    return PEAKS[max(found, key=len)] if found else None


def peak_tflops(settings: TrainSettings, device: torch.device) -> float | None:
    """What one device can do: as the user says, or as its name says under bf16; None where neither does."""
    if settings.peak_tflops:
        return settings.peak_tflops
    if device.type != "cuda" or settings.precision != "bf16":
        return None
    return known_peak(torch.cuda.get_device_name(device))


def training_flops(config: ChiarConfig, length: int, shares: Shares | None = None) -> float:
    """FLOPs of a token's forward and backward pass as MFU counts them: those of the model, as it is executed.

    Densely, every operator runs on every token with full T × T scores, so what routing could save is counted as work;
    with `shares`, what each operator got, only that is. What gradient checkpointing computes twice is counted once. The
    backward pass costs twice the forward pass, but for the spectrum of the entropy router, which has none.
    """
    count = count_dense_execution(config, length) if shares is None else count_flops(config, length, shares)
    without_backward = count.part("router") if config.router == "entropy" and not config.weights_have_gradient else 0.0
    return 3.0 * count.total - 2.0 * without_backward


class Utilisation:
    """Turns tokens a second into MFU. `of` gives None where the peak is not known, or not all tokens are counted."""

    def __init__(self, config: ChiarConfig, settings: TrainSettings, corpora: list[Any], devices: int, device: Any):
        # Documents differ in length, and added batches are not among the tokens a second.
        counted = all(corpus.kind == "language" for corpus in corpora)
        counted &= settings.mixing == "weights" or len(corpora) == 1
        peak = peak_tflops(settings, device) if counted else None
        self.peak = peak * 1e12 * devices if peak else None
        self.config, self.length = config, settings.length
        possible = config.can_run_sparse and config.dropout == 0 and not config.trains_densely
        self.sparse = config.execution != "dense" and possible

    def of(self, tokens_per_second: float, use: list[list[float]]) -> float | None:
        """`use` is the share of tokens each operator of each routed layer got."""
        if self.peak is None:
            return None
        assert self.config.operators is not None
        shares = [dict(zip(self.config.operators, row, strict=True)) for row in use] if self.sparse else None
        return round(tokens_per_second * training_flops(self.config, self.length, shares) / self.peak, 4)
