"""Runs the Triton kernel on the CPU and prints its errors as JSON. Triton reads TRITON_INTERPRET when it is imported,
so this is a process of its own."""

import json
import sys

import torch

from chiar.kernels.linear_cross_entropy import torch_softmax_gradient
from chiar.kernels.triton.softmax_gradient import triton_softmax_gradient


def run(rows: int, vocabulary: int, dtype: str, gradient: bool, spread: float) -> dict[str, float]:
    torch.manual_seed(0)
    padded = vocabulary + -vocabulary % 16
    logits = torch.zeros(rows, padded, dtype=getattr(torch, dtype))
    logits[:, :vocabulary] = spread * torch.randn(rows, vocabulary)
    targets = torch.randint(0, vocabulary, (2 * rows,))[::2]  # not contiguous
    targets[0], targets[rows // 2], targets[-1] = 0, -7, vocabulary - 1
    exact = logits.double()
    expected = torch.full((rows,), torch.nan, dtype=torch.float64)
    torch_softmax_gradient(exact, vocabulary, targets, -7, expected, True)
    losses, before = torch.full((rows,), torch.nan), logits.clone()
    triton_softmax_gradient(logits, vocabulary, targets, -7, losses, gradient)
    errors = {"loss": float((losses - expected).abs().max()), "ignored": float(losses[rows // 2])}
    after = exact if gradient else before.double()
    return {**errors, "logits": float((logits.double() - after).abs().max())}


def unknown_target() -> float:
    losses = torch.zeros(2)
    triton_softmax_gradient(torch.zeros(2, 16), 11, torch.tensor([11, 3]), -100, losses, True)
    return float(losses.isnan().tolist() == [True, False])


if __name__ == "__main__":
    cases = json.loads(sys.argv[1])
    print(json.dumps({"cases": [run(*case) for case in cases], "unknown_target": unknown_target()}))
