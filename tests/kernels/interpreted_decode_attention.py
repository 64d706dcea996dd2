"""Runs the Triton kernels of decoding on the CPU and prints their errors as JSON; a process of its own, because Triton
reads TRITON_INTERPRET when it is imported."""

import json
import sys

import torch
from interpreted_packed_attention import allow_loops_of_runtime_length, poison_new_memory, relative

from chiar.kernels.decode_attention import decode_attention


def run(lengths: list[int], light: list[int], capacity: int, heads: int, d: int, dtype: str, steps: int) -> dict:
    """`steps` tokens one after another; rows in `light` take no part in the first. What was never stored is NaN."""
    B = len(lengths)
    found = {}
    for implementation in ("triton", "torch"):
        generator = torch.Generator().manual_seed(0)

        def draw(*shape: int, generator: torch.Generator = generator) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(getattr(torch, dtype))

        stored = [torch.full((B, heads, capacity, d), torch.nan, dtype=getattr(torch, dtype)) for _ in range(2)]
        for part in stored:
            for row, length in enumerate(lengths):
                part[row, :, :length] = draw(heads, length, d)
        length_B = torch.tensor(lengths)
        outputs = []
        for step in range(steps):
            q, k, v = draw(B, 3, heads, d).unbind(1)  # strided, as slices of one product are
            takes_part_B = torch.ones(B, dtype=torch.bool)
            if step == 0:
                takes_part_B[light] = False
            outputs.append(decode_attention(q, k, v, *stored, length_B, takes_part_B, implementation))
        found[implementation] = torch.stack(outputs).float(), *[part.float() for part in stored], length_B
    ours, true = found["triton"], found["torch"]
    stored = zip(ours[1:3], true[1:3], strict=True)
    return {
        "out": relative(ours[0], true[0]),
        "stored alike": all(torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in stored),
        "lengths": ours[3].tolist(),
        "zeros": bool((ours[0][0][light] == 0).all()),
    }


if __name__ == "__main__":
    allow_loops_of_runtime_length()
    poison_new_memory()
    print(json.dumps([run(*case) for case in json.loads(sys.argv[1])]))
