"""Runs the Triton kernels of the filter along time on the CPU and prints their errors as JSON; a process of its own,
because Triton reads TRITON_INTERPRET when it is imported."""

import json

import torch
from interpreted_packed_attention import relative

from chiar.kernels.temporal_filter import temporal_filter


def errors(rows: int, length: int, width: int, window: int, dtype: torch.dtype = torch.float32) -> list[float]:
    """Of y, dx and dtaps."""
    torch.manual_seed(0)
    x, taps = (
        torch.randn(rows, length, width).to(dtype).requires_grad_(),
        torch.randn(window, width, requires_grad=True),
    )
    grad, found = torch.randn(rows, length, width).to(dtype), []
    for implementation in ("triton", "torch"):
        y = temporal_filter(x, taps, implementation)
        found.append((y, *torch.autograd.grad(y, (x, taps), grad)))
    return [relative(ours, true) for ours, true in zip(*found, strict=True)]


if __name__ == "__main__":
    cases = [(2, 200, 70, 16), (1, 128, 64, 4), (3, 3, 33, 8), (2, 1, 5, 2), (1, 300, 20, 12), (1, 140, 3, 130)]
    found = {str(case): errors(*case) for case in cases}
    print(json.dumps({"float32": found, "bfloat16": {str(cases[0]): errors(*cases[0], torch.bfloat16)}}))
