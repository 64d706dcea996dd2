"""Packed rows, operators that touch only those in use (what lies behind is NaN here), and the temporal filter."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from implementations import DTYPE, INTERPRETED, agree, implementations
from torch.nn import LayerNorm, RMSNorm

from chiar.kernels.packed_attention import rotary_attention
from chiar.kernels.packed_norm import packed_gelu, packed_norm, unpack_sum
from chiar.kernels.packing import make_packing, pack, packed_linear, row_sum, rows_product, sum_product, unpack
from chiar.kernels.temporal_filter import temporal_filter
from chiar.layers.attention import rotary_tables, rotate


def draw(*shape, used=None):
    x = torch.randn(*shape, dtype=DTYPE)
    x[used if used is not None else len(x) :] = torch.nan
    return x.requires_grad_()


def choose(batch=3, length=25, fraction=0.4, exact=False):
    packing = make_packing(torch.rand(batch, length) < fraction, exact)
    return packing, int(packing.count)


def same(ours, theirs, inputs, used=None):
    """Outputs and gradients; of packed inputs only the rows in use count."""
    seeds = [torch.randn(y.shape, dtype=DTYPE) for y in ours]
    found, expected = (torch.autograd.grad(outputs, inputs, seeds) for outputs in (ours, theirs))
    sizes = [used if bool(x.isnan().any()) else len(x) for x in inputs]
    agree([*ours, *found], [*theirs, *(x[:size] for x, size in zip(expected, sizes, strict=True))])


@given(bits=st.lists(st.booleans(), min_size=12, max_size=12))
@settings(max_examples=30, deadline=None)
def test_a_packing_says_where_everything_went(bits):
    chosen_BT = torch.tensor(bits).view(3, 4)
    packing = make_packing(chosen_BT)
    tokens = chosen_BT.flatten().nonzero()[:, 0]
    used = len(tokens)
    assert int(packing.count) == used and torch.equal(packing.token_P[:used], tokens)
    assert torch.equal(make_packing(chosen_BT, exact=True).token_P, tokens)
    assert torch.equal(packing.place_N[tokens], torch.arange(used))
    assert packing.rows.tolist() == [0, *chosen_BT.sum(1).cumsum(0).tolist()]
    before = [[sum(row[:i]) for i in range(4)] for row in chosen_BT.tolist()]
    assert packing.before_N.view(3, 4).tolist() == before


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
def test_there_and_back_and_a_linear_map_of_the_rows_in_use(with_bias, exact):
    packing, used = choose(exact=exact)
    x, other = draw(75, 3), draw(75, 3)
    expected = torch.where(packing.chosen_N[:, None], 2 * x, other)
    same([unpack(2 * pack(x, packing), other, packing)], [expected], [x, other])
    inputs = [draw(len(packing.token_P), 3, used=used), draw(5, 3), draw(5)][: 2 + with_bias]
    found = packed_linear(*inputs[:2], inputs[2] if with_bias else None, packing)[:used]
    same([found], [F.linear(inputs[0][:used], *inputs[1:])], inputs, used)


@implementations("auto")
@pytest.mark.parametrize(("rows", "width", "used"), [(70, 130, 33), (256, 64, 256), (40, 50, 0), (33, 200, 1)])
def test_gelu_and_sums_of_the_rows_in_use(rows, width, used, implementation):
    x, bias, packing = draw(rows, width, used=used), draw(width), make_packing(torch.arange(rows)[None] < used)
    found = packed_gelu(x, bias, packing, implementation)[:used]
    same([found], [F.gelu(x[:used] + bias)], [x, bias] if used else [bias], used)
    agree([row_sum(x, packing.count, implementation)], [x[:used].sum(0)])


@implementations("auto")
@pytest.mark.parametrize("with_add", [False, True])
@pytest.mark.parametrize(
    ("kind", "width", "weight", "fraction"),
    [(None, 30, True, 0.5), (RMSNorm, 6, False, 0.5), (RMSNorm, 130, True, 0.6), (LayerNorm, 48, True, 0.9)],
)
def test_a_norm_of_the_rows_in_use(kind, width, weight, fraction, with_add, implementation):
    packing, used = choose(fraction=fraction)
    norm = None if kind is None else kind(width, eps=1e-5, elementwise_affine=weight).to(DTYPE)
    parameters = [] if norm is None else list(norm.parameters())
    for parameter in parameters:
        torch.nn.init.normal_(parameter, 1.0, 0.3)
    x, extra = draw(75, width), [draw(75, width, used=used), draw(width)] if with_add else []
    u, h = packed_norm(x, norm, packing, *extra, implementation=implementation)
    expected_u = x[packing.token_P[:used]] + (extra[0][:used] + extra[1] if with_add else 0.0)
    expected_h = expected_u if norm is None else norm(expected_u)
    ours, theirs = [h[:used], u[:used]], [expected_h, expected_u]
    same(ours[: 1 + with_add], theirs[: 1 + with_add], [x, *extra, *parameters], used)


@implementations("auto")
def test_a_sum_of_packed_rows_back_at_its_tokens(implementation):
    packing, used = choose()
    inputs = u, more, bias, other = draw(75, 48, used=used), draw(75, 48, used=used), draw(48), draw(75, 48)
    places = packing.chosen_N.nonzero()[:, 0]
    expected = other.index_copy(0, places, u[:used] + more[:used] + bias)
    same([unpack_sum(*inputs, packing, implementation)], [expected], inputs, used)


@pytest.mark.skipif(not INTERPRETED, reason="plainly it is a rotation and prefix_attention")
@pytest.mark.parametrize(("B", "T", "H", "d"), [(3, 20, 2, 16), (1, 70, 1, 32)])
def test_rotary_attention_of_triton_is_attention_after_rotation(B, T, H, d):
    packing, used = choose(B, T, 0.6)
    qkv, bias = inputs = [draw(B * T, 3, H, d, used=used), draw(3, H, d)]
    cos, sin = (table.flatten(0, 2).to(DTYPE) for table in rotary_tables(torch.arange(T)[None], d))
    limit = torch.where(torch.arange(B * T) < used, packing.before_N[packing.token_P] + 1, 0)
    table = packing.token_P % T
    out = rotary_attention(qkv, bias, (cos, sin), table, packing, limit, T)[:used]
    rope = cos[table[:used]][:, None], sin[table[:used]][:, None]
    q, k, v = (qkv[:used] + bias).unbind(1)
    rows = zip(*(x.split(packing.rows.diff().tolist()) for x in (rotate(q, rope), rotate(k, rope), v)), strict=True)
    heads = [[x.transpose(0, 1)[None] for x in row] for row in rows]
    parts = [F.scaled_dot_product_attention(*row, is_causal=True)[0].transpose(0, 1) for row in heads]
    same([out], [torch.cat(parts)], inputs, used)


def filter_definition(x, taps):
    """y_t = Σ_j taps_j · x_{t−j}; there is nothing before the first token."""
    reach = [range(min(t + 1, len(taps))) for t in range(x.shape[1])]
    return torch.stack([sum(taps[j] * x[:, t - j] for j in window) for t, window in enumerate(reach)], dim=1)


# One token, fewer tokens than taps, more than a kernel's tile, more taps than it multiplies at once.
@implementations("auto")
@pytest.mark.parametrize("shape", [(2, 1, 4, 2), (3, 4, 2, 12), (2, 90, 70, 16), (1, 20, 3, 130)], ids=str)
@pytest.mark.parametrize("programs", [1, 1024])
def test_the_filter_along_time_is_its_definition(shape, programs, implementation, monkeypatch):
    if implementation == "triton":
        monkeypatch.setattr("chiar.kernels.triton_filter.PROGRAMS", programs)  # few: each takes several steps
    *shape, window = shape
    x = torch.randn(shape, dtype=DTYPE, requires_grad=True)
    taps = torch.randn(window, shape[-1], dtype=DTYPE, requires_grad=True)
    found, true = temporal_filter(x, taps, implementation), filter_definition(x, taps)
    gradients = [torch.autograd.grad(y, (x, taps), torch.ones_like(x) + x.detach()) for y in (found, true)]
    agree([found, *gradients[0]], [true, *gradients[1]])


@implementations("auto")
def test_a_filter_of_bf16_is_summed_in_fp32(implementation):
    """Twenty ones after 256: a sum in bf16, whose step is 2 there, would lose every one of them."""
    x, taps = torch.ones(1, 21, 1, dtype=torch.bfloat16), torch.ones(21, 1)
    taps[0] = 256
    with torch.autocast("cpu", torch.bfloat16):
        assert float(temporal_filter(x, taps, implementation)[0, -1, 0]) == 276


@implementations("auto")
def test_operators_are_well_formed(implementation):
    """Fakes, autograd and aliasing, as torch checks them; memory is all in use, since comparing NaN fails."""
    everything = make_packing(torch.ones(2, 3, dtype=torch.bool))
    count, token = everything.count, torch.arange(6)
    x, weight = torch.randn(6, 4, requires_grad=True), torch.randn(4, requires_grad=True)
    torch.library.opcheck(rows_product, (x.detach(), torch.randn(4, 5), count))
    torch.library.opcheck(sum_product, (torch.randn(6, 5), x.detach(), count))
    torch.library.opcheck(row_sum, (x.detach(), count, implementation))
    if implementation == "auto":
        return
    from chiar.kernels import triton_attention, triton_filter, triton_rows

    where = token, everything.place_N, everything.chosen_N, count
    norm = x, *where, weight, weight, torch.randn(6, 4), torch.randn(4), "layer", 1e-5, torch.float32, True
    torch.library.opcheck(triton_rows.norm_forward, norm)
    torch.library.opcheck(triton_rows.gelu_forward, (x, weight, count))
    torch.library.opcheck(triton_filter.filter_forward, (x[None].mT, torch.randn(3, 6, requires_grad=True)))
    qkv, bias = torch.randn(6, 3, 2, 16, requires_grad=True), torch.randn(3, 2, 16, requires_grad=True)
    inputs = qkv, bias, *torch.randn(2, 3, 16), token % 3
    layout = everything.rows, count, everything.before_N + 1, 3
    torch.library.opcheck(triton_attention.rotary_forward, (*inputs, *layout))
