"""One new token a row: the definition and the CPU's way against torch's attention."""

import pytest
import torch
import torch.nn.functional as F
from implementations import DTYPE, agree, implementations
from torch.utils.flop_counter import FlopCounterMode

from chiar.kernels.decode_attention import decode_attention

# lengths, rows that take no part, capacity, heads, head size
SHAPES = {
    "ragged": ([100, 0, 1, 63, 64, 65], [], 128, 2, 64),
    "some-light": ([100, 0, 70, 64], [0, 1, 3], 128, 2, 64),
    "all-light": ([5, 0, 17, 1], [0, 1, 2, 3], 20, 2, 8),
    "odd-head": ([3, 30], [1], 32, 3, 5),
    "last-entry": ([127, 159], [], 160, 1, 48),
    "widest-head": ([40, 15], [1], 64, 1, 256),
    "one-row": ([40], [], 64, 2, 8),
    "one-light": ([40], [0], 64, 2, 8),
}


def example(lengths, light, capacity, heads, d, dtype=DTYPE, unused=torch.nan):
    """Inputs whose stores hold `unused` wherever nothing was stored."""
    B = len(lengths)
    new = torch.randn(B, 3, heads, d, dtype=dtype).unbind(1)  # strided, as slices of a product are
    stored = [torch.randn(B, heads, capacity, d, dtype=dtype) for _ in range(2)]
    for part in stored:
        for row, length in enumerate(lengths):
            part[row, :, length:] = unused
    takes_part_B = torch.ones(B, dtype=torch.bool)
    takes_part_B[light] = False
    return new, stored, torch.tensor(lengths), takes_part_B


@implementations("torch", "cpu", "auto")
@pytest.mark.parametrize("window", [0, 1, 7, 70])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_row_sees_its_entries_and_itself(shape, window, implementation):
    """Or the last of them."""
    unused = torch.nan if implementation in ("torch", "triton") else 1e6
    (q, k, v), stored, length_B, takes_part_B = example(*shape, unused=unused)
    before = [part.clone() for part in stored]
    out = decode_attention(q, k, v, *stored, length_B, takes_part_B, implementation, window=window)
    assert torch.equal(length_B, torch.tensor(shape[0]) + takes_part_B)
    for row, length in enumerate(shape[0]):
        if not takes_part_B[row]:
            assert (out[row] == 0).all()
            continue
        before[0][row, :, length], before[1][row, :, length] = k[row], v[row]
        first = max(0, length + 1 - window) if window else 0
        keys, values = (part[row, :, first : length + 1] for part in before)
        agree([out[row]], [F.scaled_dot_product_attention(q[row, :, None], keys, values)[:, 0]])
    assert all(torch.equal(part.nan_to_num(), old.nan_to_num()) for part, old in zip(stored, before, strict=True))


@implementations("torch")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_sums_are_wider_than_the_inputs(dtype, implementation):
    """Against float64 on the same rounded numbers: only the output is rounded, in the interpreter cut off."""
    new, stored, length_B, takes_part_B = example([40, 7], [], 64, 2, 8, dtype)
    exact = [x.double() for x in (*new, *stored)]
    expected = decode_attention(*exact, length_B.clone(), takes_part_B, "torch")
    out = decode_attention(*new, *stored, length_B, takes_part_B, implementation)
    assert out.dtype == dtype
    agree([out], [expected], 2 * torch.finfo(dtype).eps)


def test_what_it_is_registered_as():
    """The fake's shapes, which arguments it writes to, FLOPs, and what it refuses."""
    new, stored, length_B, takes_part_B = example([4, 2], [1], 8, 2, 4)
    torch.library.opcheck(decode_attention, (*new, *stored, length_B, takes_part_B, "torch"))
    with FlopCounterMode(display=False) as counter:
        decode_attention(*new, *stored, length_B, takes_part_B)
    assert counter.get_total_flops() == 2 * 2 * 2 * 2 * 8 * 4
    with pytest.raises(ValueError, match="implementation must be one of"):
        decode_attention(*new, *stored, length_B, takes_part_B, "fast")
    with pytest.raises(ValueError, match="must agree"):
        decode_attention(*new, *stored, length_B[:1], takes_part_B)
