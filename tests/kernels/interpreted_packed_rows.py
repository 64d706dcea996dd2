"""Runs the Triton kernels for packed rows on the CPU and prints their errors as JSON; a process of its own, because
Triton reads TRITON_INTERPRET when it is imported."""

import json

import torch
from interpreted_packed_attention import allow_loops_of_runtime_length, relative

from chiar.kernels.packed_gelu import packed_gelu
from chiar.kernels.packed_norm import packed_norm, unpack_sum
from chiar.kernels.packing import make_packing, row_sum
from chiar.kernels.rotary_attention import rotary_attention_forward
from chiar.layers.attention import rotary_tables


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


def norm(kind: str, width: int, add: bool, fraction: float, implementation: str) -> list[torch.Tensor]:
    torch.manual_seed(0)
    chosen = make_packing(torch.rand(3, 25) < fraction)
    used = int(chosen.count)
    module = {"none": None, "rms": torch.nn.RMSNorm(width), "layer": torch.nn.LayerNorm(width)}[kind]
    parameters = [] if module is None else list(module.parameters())
    for parameter in parameters:
        torch.nn.init.normal_(parameter, 1.0, 0.3)
    x = torch.randn(75, width, requires_grad=True)
    extra = []
    if add:
        added = torch.randn(75, width)
        added[used:] = torch.nan
        extra = [added.requires_grad_(), torch.randn(width, requires_grad=True)]
    u, h = packed_norm(x, module, chosen, *extra, implementation=implementation)
    outputs = [h[:used], *([u[:used]] if add else [])]
    gradients = torch.autograd.grad(outputs, [x, *extra, *parameters], [torch.randn(y.shape) for y in outputs])
    if add:
        gradients = (gradients[0], gradients[1][:used], *gradients[2:])
    return [*(y.detach() for y in outputs), *gradients]


def sums(width: int, implementation: str) -> list[torch.Tensor]:
    torch.manual_seed(0)
    chosen = make_packing(torch.rand(3, 25) < 0.4)
    used = int(chosen.count)
    inputs = [torch.randn(75, width), torch.randn(75, width), torch.randn(width), torch.randn(75, width)]
    inputs[0][used:], inputs[1][used:] = torch.nan, torch.nan
    inputs = [x.requires_grad_() for x in inputs]
    y = unpack_sum(*inputs, chosen, implementation)
    du, dmore, dbias, dother = torch.autograd.grad(y, inputs, torch.randn(75, width))
    return [y.detach(), du[:used], dmore[:used], dbias, dother]


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
    bias = torch.randn(3, heads, d, requires_grad=True)
    rope = cos, sin, table
    out, _, _ = rotary_attention_forward(qkv, bias, *rope, chosen.rows, chosen.count, limit, T, implementation)
    out.backward(torch.randn(out.shape))
    return [out[:used].detach(), qkv.grad[:used], bias.grad]


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
                "norm": [
                    errors(norm, *case)
                    for case in (
                        ("rms", 130, True, 0.6),
                        ("rms", 64, False, 1.0),
                        ("layer", 48, True, 0.3),
                        ("layer", 130, False, 0.5),
                        ("none", 30, False, 0.5),
                        ("layer", 20, True, 0.9),
                        ("rms", 30, True, 0.0),
                    )
                ],
                "sums": [errors(sums, width) for width in (48, 130)],
                "attention": [errors(attention, *case) for case in (((3, 20), 2, 16), ((1, 70), 3, 32))],
            }
        )
    )
