"""Runs the Triton kernels for packed rows on the CPU and prints their errors as JSON; a process of its own, because
Triton reads TRITON_INTERPRET when it is imported."""

import json

import torch
from interpreted_packed_attention import allow_loops_of_runtime_length, relative

from chiar.layers.attention import rotary_tables
from chiar.ops.packed_gelu import packed_gelu
from chiar.ops.packing import make_packing, row_sum
from chiar.ops.rotary_attention import rotary_attention_forward


def gelu(rows: int, width: int, used: int, implementation: str) -> list[torch.Tensor]:
    torch.manual_seed(0)
    x = torch.randn(rows, width)
    x[used:] = torch.nan
    x.requires_grad_()
    bias = torch.randn(width, requires_grad=True)
    y = packed_gelu(x, bias, torch.tensor([used], dtype=torch.int32), implementation)
    y.backward(torch.randn(rows, width))
    return [y[:used].detach(), x.grad[:used], bias.grad]


def row_sums(rows: int, width: int, used: int, implementation: str) -> list[torch.Tensor]:
    torch.manual_seed(0)
    x = torch.randn(rows, width)
    x[used:] = torch.nan
    return [row_sum(x, torch.tensor([used], dtype=torch.int32), implementation)]


def attention(lengths: tuple[int, int], heads: int, d: int, implementation: str) -> list[torch.Tensor]:
    """Chosen tokens of a batch of rows attend to each other."""
    B, T = lengths
    torch.manual_seed(0)
    chosen = make_packing(torch.rand(B, T) < 0.6)
    used = int(chosen.count)
    qkv = torch.randn(B * T, 3, heads, d)
    qkv[used:] = torch.nan
    qkv.requires_grad_()
    tables = rotary_tables(torch.arange(T)[None], d, 10000.0)
    cos, sin = (table.flatten(0, 2) for table in tables)
    limit = torch.where(torch.arange(B * T) < used, chosen.before_N[chosen.token_P] + 1, 0)
    table = chosen.token_P % T
    out, _, _ = rotary_attention_forward(qkv, cos, sin, table, chosen.rows, chosen.count, limit, T, implementation)
    out.backward(torch.randn(out.shape))
    return [out[:used].detach(), qkv.grad[:used]]


def errors(function, *case) -> list[float]:
    ours, true = (function(*case, implementation) for implementation in ("triton", "torch"))
    return [relative(a, b) for a, b in zip(ours, true, strict=True)]


if __name__ == "__main__":
    allow_loops_of_runtime_length()
    print(
        json.dumps(
            {
                "gelu": [errors(gelu, *case) for case in ((70, 130, 33), (64, 128, 64), (40, 50, 0), (33, 200, 1))],
                "row sums": [errors(row_sums, *case) for case in ((300, 70, 130), (256, 64, 256), (40, 50, 0))],
                "attention": [errors(attention, *case) for case in (((3, 20), 2, 16), ((1, 70), 3, 32))],
            }
        )
    )
