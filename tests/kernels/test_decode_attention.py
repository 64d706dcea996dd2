"""One new token a row: the operator against the definition, and the definition against torch's attention."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from chiar.kernels.decode_attention import decode_attention

# lengths, rows that take no part, capacity, heads, head size
SHAPES = {
    "ragged": ([5, 0, 17, 1], [], 20, 2, 8),
    "some-light": ([5, 0, 17, 1], [0, 3], 20, 2, 8),
    "all-light": ([5, 0, 17, 1], [0, 1, 2, 3], 20, 2, 8),
    "odd-head": ([3, 30], [1], 32, 3, 5),
    "last-entry": ([31, 31], [], 32, 1, 4),
    "one-row": ([9], [], 10, 2, 6),
}
shapes = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
plain = pytest.mark.parametrize("implementation", ["torch", "cpu", "auto"])


def example(lengths, light, capacity, heads, d, dtype=torch.float64, unused=torch.nan):
    """Inputs whose stores hold `unused` wherever nothing was stored."""
    generator, B = torch.Generator().manual_seed(0), len(lengths)
    new = [torch.randn(B, heads, d, generator=generator, dtype=dtype) for _ in range(3)]
    stored = [torch.randn(B, heads, capacity, d, generator=generator, dtype=dtype) for _ in range(2)]
    for part in stored:
        for row, length in enumerate(lengths):
            part[row, :, length:] = unused
    takes_part_B = torch.ones(B, dtype=torch.bool)
    takes_part_B[light] = False
    return new, stored, torch.tensor(lengths), takes_part_B


@shapes
@plain
def test_a_row_sees_its_entries_and_itself(shape, implementation):
    unused = torch.nan if implementation == "torch" else 1e6
    (q, k, v), stored, length_B, takes_part_B = example(*shape, unused=unused)
    before = [part.clone() for part in stored]
    out = decode_attention(q, k, v, *stored, length_B, takes_part_B, implementation)
    for row, length in enumerate(shape[0]):
        if not takes_part_B[row]:
            assert (out[row] == 0).all()
            assert length_B[row] == length
            for part, old in zip(stored, before, strict=True):
                assert torch.equal(part[row].nan_to_num(), old[row].nan_to_num())
            continue
        keys = torch.cat([before[0][row, :, :length], k[row, :, None]], 1)
        values = torch.cat([before[1][row, :, :length], v[row, :, None]], 1)
        expected = F.scaled_dot_product_attention(q[row, :, None], keys, values)[:, 0]
        assert torch.allclose(out[row], expected, atol=1e-12)
        assert length_B[row] == length + 1
        assert torch.equal(stored[0][row, :, : length + 1], keys)
        assert torch.equal(stored[1][row, :, : length + 1], values)
        assert torch.equal(stored[0][row, :, length + 1 :].nan_to_num(), before[0][row, :, length + 1 :].nan_to_num())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_sums_are_wider_than_the_inputs(dtype):
    """Against float64 on the same rounded numbers: only the output is rounded."""
    new, stored, length_B, takes_part_B = example([40, 7], [], 64, 2, 8, dtype)
    exact = [x.double() for x in (*new, *stored)]
    expected = decode_attention(*exact, length_B.clone(), takes_part_B, "torch")
    out = decode_attention(*new, *stored, length_B, takes_part_B, "torch")
    assert out.dtype == dtype
    assert (out.double() - expected).abs().max() <= torch.finfo(dtype).eps * expected.abs().max()


def test_what_it_is_registered_as():
    """The fake's shapes, and which arguments it writes to."""
    new, stored, length_B, takes_part_B = example([4, 2], [1], 8, 2, 4)
    torch.library.opcheck(decode_attention, (*new, *stored, length_B, takes_part_B, "torch"))


def test_flops():
    new, stored, length_B, takes_part_B = example([4, 2], [1], 8, 2, 4)
    with FlopCounterMode(display=False) as counter:
        decode_attention(*new, *stored, length_B, takes_part_B)
    assert counter.get_total_flops() == 2 * 2 * 2 * 2 * 8 * 4


def test_an_unknown_implementation():
    new, stored, length_B, takes_part_B = example([4, 2], [1], 8, 2, 4)
    with pytest.raises(ValueError, match="implementation must be one of"):
        decode_attention(*new, *stored, length_B, takes_part_B, "fast")


# lengths, light rows, capacity, heads, head size, dtype, steps
KERNEL_CASES = {
    "ragged": ([100, 0, 1, 63, 64, 65], [], 128, 2, 64, "float32", 1),
    "light": ([100, 0, 70, 64], [0, 1, 3], 128, 2, 64, "float32", 2),
    "all-light": ([100, 5], [0, 1], 128, 2, 64, "float32", 2),
    "last-entry": ([126, 95], [1], 128, 1, 32, "float32", 2),
    "odd-head": ([50, 3], [], 96, 3, 48, "float32", 1),
    "tiny-head": ([50, 3], [], 64, 1, 6, "float32", 1),
    "wide-head": ([70, 33], [], 96, 1, 128, "float32", 1),
    "widest-head": ([40, 15], [1], 64, 1, 256, "float32", 1),
    "crossing-a-split": ([62, 127], [], 160, 1, 64, "float32", 3),
    "bf16": ([100, 0, 40], [1], 128, 2, 64, "bfloat16", 2),
}


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
def test_the_kernels_in_the_interpreter():
    script = Path(__file__).with_name("interpreted_decode_attention.py")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, str(script), json.dumps(list(KERNEL_CASES.values()))]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    for (name, case), found in zip(KERNEL_CASES.items(), json.loads(done.stdout), strict=True):
        lengths, light, *_, dtype, steps = case
        limit = 2e-6 if dtype == "float32" else 2 * torch.finfo(torch.bfloat16).eps
        assert found["out"] <= limit, (name, found)
        assert found["stored alike"] and found["zeros"], (name, found)
        assert found["lengths"] == [n + steps - (row in light) for row, n in enumerate(lengths)], name
