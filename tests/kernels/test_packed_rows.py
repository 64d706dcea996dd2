"""What sparse execution computes with: packed rows, and operators that touch only those in use."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from chiar.kernels.packed_gelu import packed_gelu, packed_gelu_forward
from chiar.kernels.packed_norm import packed_norm, packed_norm_forward, unpack_sum
from chiar.kernels.packing import make_packing, pack, packed_linear, row_sum, rows_product, sum_product, unpack
from chiar.kernels.rotary_attention import rotary_attention, rotary_attention_forward
from chiar.layers.attention import rotary_tables, rotate


@given(bits=st.lists(st.booleans(), min_size=12, max_size=12))
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_packing_says_where_everything_went(bits):
    chosen_BT = torch.tensor(bits).view(3, 4)
    packing = make_packing(chosen_BT)
    tokens = chosen_BT.flatten().nonzero()[:, 0]
    used = len(tokens)
    assert int(packing.count) == used and torch.equal(packing.token_P[:used], tokens)
    assert torch.equal(packing.place_N[tokens], torch.arange(used))
    assert packing.rows.tolist() == [0, *chosen_BT.sum(1).cumsum(0).tolist()]
    before = [[sum(row[:i]) for i in range(4)] for row in chosen_BT.tolist()]
    assert packing.before_N.view(3, 4).tolist() == before


def test_there_and_back_with_gradients():
    chosen_BT = torch.rand(2, 5, generator=torch.Generator().manual_seed(0)) < 0.5
    packing = make_packing(chosen_BT)
    x, other = (torch.randn(10, 3, dtype=torch.float64, requires_grad=True) for _ in range(2))

    def both(x, other):
        return unpack(2 * pack(x, packing), other, packing)

    assert torch.equal(both(x, other), torch.where(chosen_BT.flatten()[:, None], 2 * x, other))
    assert torch.autograd.gradcheck(both, (x, other))


def test_a_linear_map_of_the_rows_in_use():
    packing = make_packing(torch.tensor([[True, False, True, True]]))
    x = torch.randn(4, 3, dtype=torch.float64)
    x[3:] = torch.nan
    weight, bias = torch.randn(5, 3, dtype=torch.float64), torch.randn(5, dtype=torch.float64)
    inputs = [tensor.requires_grad_() for tensor in (x, weight, bias)]

    def sparse(x, weight, bias):
        return packed_linear(x, weight, bias, packing)[:3]

    expected = F.linear(x[:3], weight, bias)
    torch.testing.assert_close(sparse(*inputs), expected)
    seed = torch.randn(3, 5, dtype=torch.float64)
    ours, theirs = torch.autograd.grad(sparse(*inputs), inputs, seed), torch.autograd.grad(expected, inputs, seed)
    torch.testing.assert_close(ours[0][:3], theirs[0][:3])
    torch.testing.assert_close(ours[1:], theirs[1:])


def test_gelu_of_the_rows_in_use():
    x, bias = torch.randn(6, 4, dtype=torch.float64), torch.randn(4, dtype=torch.float64)
    x[4:] = torch.nan
    inputs = [tensor.requires_grad_() for tensor in (x, bias)]
    ours = packed_gelu(x, bias, torch.tensor([4], dtype=torch.int32))[:4]
    theirs = F.gelu(x[:4] + bias)
    torch.testing.assert_close(ours, theirs)
    seed = torch.randn(4, 4, dtype=torch.float64)
    found, expected = (torch.autograd.grad(y, inputs, seed) for y in (ours, theirs))
    torch.testing.assert_close(found[0][:4], expected[0][:4])
    torch.testing.assert_close(found[1], expected[1])


NORMS = {
    "none": lambda: None,
    "rms": lambda: torch.nn.RMSNorm(6, eps=1e-5),
    "rms without weight": lambda: torch.nn.RMSNorm(6, eps=1e-5, elementwise_affine=False),
    "layer": lambda: torch.nn.LayerNorm(6),
}


@pytest.mark.parametrize("with_add", [False, True])
@pytest.mark.parametrize("name", NORMS)
def test_a_norm_of_the_rows_in_use(name, with_add):
    generator = torch.Generator().manual_seed(3)
    packing = make_packing(torch.tensor([[True, False, True, True], [False, False, True, False]]))
    used = int(packing.count)
    norm = NORMS[name]()
    if norm is not None:
        norm.double()
        for parameter in norm.parameters():
            torch.nn.init.normal_(parameter, 1.0, 0.3, generator=generator)
    x, add = (torch.randn(8, 6, dtype=torch.float64, generator=generator) for _ in range(2))
    add[used:] = torch.nan
    bias = torch.randn(6, dtype=torch.float64, generator=generator)
    inputs = [tensor.requires_grad_() for tensor in ((x, add, bias) if with_add else (x,))]
    parameters = [] if norm is None else list(norm.parameters())
    u, h = packed_norm(x, norm, packing, *((add, bias) if with_add else ()))
    expected_u = x[packing.token_P[:used]] + (add[:used] + bias if with_add else 0.0)
    expected_h = expected_u if norm is None else norm(expected_u)
    seeds = [torch.randn(used, 6, dtype=torch.float64, generator=generator) for _ in range(2)]
    found, expected = [(h[:used], seeds[0])], [(expected_h, seeds[0])]
    if with_add:
        torch.testing.assert_close(u[:used], expected_u)
        found.append((u[:used], seeds[1]))
        expected.append((expected_u, seeds[1]))
    else:
        assert len(u) == 0
    torch.testing.assert_close(h[:used], expected_h)
    wanted = [*inputs, *parameters]
    ours, theirs = (
        torch.autograd.grad([output for output, _ in pairs], wanted, [seed for _, seed in pairs])
        for pairs in (found, expected)
    )
    for tensor, our, their in zip(wanted, ours, theirs, strict=True):
        rows = used if tensor is add else len(tensor)  # beyond lies a gradient that is nobody's
        torch.testing.assert_close(our[:rows], their[:rows])


def test_a_sum_of_packed_rows_back_at_its_tokens():
    generator = torch.Generator().manual_seed(4)
    chosen = torch.tensor([[True, False, True, True], [False, False, True, False]])
    packing = make_packing(chosen)
    used = int(packing.count)
    u, more, other = (torch.randn(8, 3, dtype=torch.float64, generator=generator) for _ in range(3))
    u[used:], more[used:] = torch.nan, torch.nan
    inputs = [x.requires_grad_() for x in (u, more, torch.randn(3, dtype=torch.float64), other)]
    u, more, bias, other = inputs
    found = unpack_sum(*inputs, packing)
    expected = other.index_copy(0, chosen.flatten().nonzero()[:, 0], u[:used] + more[:used] + bias)
    torch.testing.assert_close(found, expected)
    seed = torch.randn(8, 3, dtype=torch.float64, generator=generator)
    ours, theirs = (torch.autograd.grad(y, inputs, seed) for y in (found, expected))
    for our, their, rows in zip(ours, theirs, (used, used, 3, 8), strict=True):
        torch.testing.assert_close(our[:rows], their[:rows])


def case(d=16, dtype=torch.float64):
    B, T, H = 2, 9, 2
    generator = torch.Generator().manual_seed(1)
    packing = make_packing(torch.rand(B, T, generator=generator) < 0.6)
    used = int(packing.count)
    qkv = torch.randn(B * T, 3, H, d, dtype=dtype, generator=generator)
    cos, sin = (table.flatten(0, 2).to(dtype) for table in rotary_tables(torch.arange(T)[None], d, 10000.0))
    limit = torch.where(torch.arange(B * T) < used, packing.before_N[packing.token_P] + 1, 0)
    return qkv, (cos, sin), packing.token_P % T, packing, limit, T


def test_rotary_attention_is_attention_after_rotation():
    qkv, (cos, sin), table, packing, limit, T = case()
    used = int(packing.count)
    qkv[used:] = torch.nan
    qkv.requires_grad_()
    bias = torch.randn(qkv.shape[1:], dtype=torch.float64, requires_grad=True)
    out = rotary_attention(qkv, bias, (cos, sin), table, packing, limit, T)[:used]
    rope = cos[table[:used]][:, None], sin[table[:used]][:, None]
    q, k, v = (qkv[:used] + bias).unbind(1)
    q, k = rotate(q, rope), rotate(k, rope)
    parts = []
    for begin, end in zip(packing.rows[:-1].tolist(), packing.rows[1:].tolist(), strict=True):
        row = [part[begin:end].transpose(0, 1)[None] for part in (q, k, v)]
        parts.append(F.scaled_dot_product_attention(*row, is_causal=True)[0].transpose(0, 1))
    expected = torch.cat(parts)
    torch.testing.assert_close(out, expected)
    seed = torch.randn(out.shape, dtype=torch.float64)
    ours, theirs = (torch.autograd.grad(y, (qkv, bias), seed) for y in (out, expected))
    torch.testing.assert_close(ours[0][:used], theirs[0][:used])
    torch.testing.assert_close(ours[1], theirs[1])


def test_operators_are_well_formed():
    """Fakes, autograd and aliasing, as torch checks them; memory is all in use, since comparing NaN fails."""
    qkv, (cos, sin), _, _, _, T = case(dtype=torch.float32)
    everything = make_packing(torch.ones(2, 9, dtype=torch.bool))
    limit = everything.before_N + 1
    place = torch.arange(18) % 9
    bias = torch.randn(qkv.shape[1:], requires_grad=True)
    arguments = (qkv.requires_grad_(), bias, cos, sin, place, everything.rows, everything.count, limit, T, "torch")
    torch.library.opcheck(rotary_attention_forward, arguments)
    x, weight = torch.randn(6, 4), torch.randn(4, 5)
    count = torch.tensor([6], dtype=torch.int32)
    torch.library.opcheck(rows_product, (x, weight, count))
    torch.library.opcheck(sum_product, (torch.randn(6, 5), x, count))
    torch.library.opcheck(row_sum, (x, count, "torch"))
    token = torch.arange(6).flip(0)
    norm = (x, token, count, torch.randn(4), torch.randn(4), torch.randn(6, 4), torch.randn(4), "layer", 1e-5)
    torch.library.opcheck(packed_norm_forward, (*norm, torch.bfloat16, True, "torch"))
    torch.library.opcheck(packed_gelu_forward, (x.requires_grad_(), torch.randn(4, requires_grad=True), count, "torch"))


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed here")
def test_kernels_in_the_interpreter():
    script = Path(__file__).with_name("interpreted_packed_rows.py")
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, env={**os.environ, "TRITON_INTERPRET": "1"}
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for name, found in json.loads(done.stdout).items():
        for errors in found:
            assert max(errors) < 5e-6, (name, errors)
