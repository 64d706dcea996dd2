"""The filter along time is its definition, forward and backward, as plain torch and as a kernel."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from chiar.kernels.temporal_filter import filter_forward, naive_temporal_filter, temporal_basis, temporal_filter


@pytest.mark.parametrize("shape", [(2, 9, 3), (1, 1, 4), (3, 4, 2)], ids=str)
@pytest.mark.parametrize("window", [2, 4, 12])
def test_outputs_and_gradients_are_the_definitions(shape, window):
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    taps = torch.randn(window, shape[-1], dtype=torch.float64, requires_grad=True)
    grad = torch.randn(shape, dtype=torch.float64)
    found, true = (f(x, taps) for f in (temporal_filter, naive_temporal_filter))
    torch.testing.assert_close(found, true, atol=1e-12, rtol=1e-12)
    ours, theirs = (torch.autograd.grad(y, (x, taps), grad) for y in (found, true))
    torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=1e-12)


def test_the_operator_is_described_to_the_compiler():
    x, taps = torch.randn(2, 5, 3, requires_grad=True), torch.randn(4, 3, requires_grad=True)
    torch.library.opcheck(filter_forward, (x, taps, "torch"))
    torch.library.opcheck(filter_forward, (x.detach().transpose(0, 1), taps, "torch"))


def test_taps_of_all_coefficients_can_be_anything_and_few_are_smooth():
    basis = temporal_basis(6, 6)
    wanted = torch.randn(6, 3, dtype=torch.float64)
    torch.testing.assert_close(basis @ (basis.T @ wanted), wanted)
    few = temporal_basis(6, 2)
    torch.testing.assert_close(few.T @ few, torch.eye(2, dtype=torch.float64))
    assert (few[:, 0] == few[0, 0]).all() and (few[:, 1].diff() < 0).all()


def test_bf16_is_summed_in_fp32():
    """A thousand small numbers after a large one: a sum in bf16 would lose every one of them."""
    x, taps = torch.full((1, 1001, 1), 0.5, dtype=torch.bfloat16), torch.ones(1001, 1)
    assert temporal_filter(x, taps)[0, -1, 0] == torch.tensor(500.5).bfloat16()


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed here")
def test_kernels_in_the_interpreter():
    script = Path(__file__).with_name("interpreted_temporal_filter.py")
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, env={**os.environ, "TRITON_INTERPRET": "1"}
    )
    assert done.returncode == 0, done.stderr[-3000:]
    # fp32 sums of up to 400 terms in another order; y and dx are rounded to bf16 once.
    for dtype, allowed in (("float32", 5e-6), ("bfloat16", 8e-3)):
        for case, errors in json.loads(done.stdout)[dtype].items():
            assert max(errors) < allowed, (dtype, case)
