"""Which implementations of an operator the tests run: the plain ones, or Triton's in Triton's interpreter.

Triton reads TRITON_INTERPRET when it is imported: test_triton.py runs the other files once more in a process with it.
"""

import os

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DTYPE = torch.float32 if INTERPRETED else torch.float64
ALLOWED = 5e-6 if INTERPRETED else 1e-12
"""fp32 or float64 sums of some hundred terms in another order, relative to the largest entry."""


def implementations(*plain: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("implementation", ["triton"] if INTERPRETED else plain)


def agree(found, expected, allowed: float = ALLOWED, least: float = 1e-3) -> None:
    """Up to the rows that `expected` has; further rows of `found` are not compared. `least`: the size of the terms
    of a sum, where they may cancel."""
    for ours, true in zip(found, expected, strict=True):
        ours, true = ours.detach().double(), true.detach().double()
        ours = ours[: len(true)] if true.ndim else ours
        assert ours.shape == true.shape
        largest = float(true.abs().max()) if true.numel() else 0.0
        assert ((ours - true).abs() <= allowed * max(largest, least)).all()


def relative(found, expected) -> float:
    return float((found.detach().double() - expected).norm() / expected.norm().clamp(min=1e-30))


def allow_loops_of_runtime_length() -> None:
    """Triton 3.6 turns a loop's bound, an array of one number, into an int; NumPy 2.4 only does that with .item()."""
    from triton.runtime import interpreter

    original = interpreter._patch_lang_tensor

    def patch(tensor, scope):
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch


def poison_new_memory() -> None:
    empty = torch.Tensor.new_empty

    def poisoned_empty(*args, **options):
        result = empty(*args, **options)
        return result.fill_(torch.nan) if result.is_floating_point() else result

    torch.Tensor.new_empty = poisoned_empty


if INTERPRETED:
    allow_loops_of_runtime_length()
    poison_new_memory()
