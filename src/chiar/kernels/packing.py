"""Packing: the chosen tokens of a batch gathered into consecutive rows, for sparse execution.

Packed tensors have room for every token (P = B·T rows). The first `count` rows, a number on the device, hold the chosen
tokens in order; the rest is undefined and may be NaN. So shapes, launches and graphs do not depend on the routes.
Where the host may read the routes, a packing is exact instead: P = count, and nothing is undefined.
"""

import importlib.util
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.flop_counter import register_flop_formula

LARGEST_HEAD = 256  # features that the Triton kernels take
HAS_TRITON = importlib.util.find_spec("triton") is not None


def wants_triton(x: Tensor, implementation: str = "auto") -> bool:
    """Whether to use Triton. "auto": on a GPU, but not for float64."""
    takes = HAS_TRITON and x.is_cuda and x.dtype != torch.float64
    return implementation == "triton" or (implementation == "auto" and takes)


def chosen_attention(q: Tensor, implementation: str, on_cpu: str) -> str:
    """Resolves "auto" for these queries: `on_cpu` on a CPU, else Triton if it can, else the definition ("torch")."""
    check_choice("implementation", implementation, ("auto", "torch", on_cpu, "triton"))
    if implementation != "auto":
        return implementation
    takes = wants_triton(q) and q.shape[-1] <= LARGEST_HEAD
    return on_cpu if q.device.type == "cpu" else "triton" if takes else "torch"


def fits(x_ND: Tensor, heads: int) -> bool:
    """Whether rotary_attention supports heads of this size; its kernels read the vectors in place."""
    return wants_triton(x_ND) and x_ND.shape[1] // heads in (16, 32, 64, 128, 256)


def launch(kernel: Any, grid: tuple[int, ...], x: Tensor, *inputs: Any, **options: Any) -> None:
    """Launch a Triton kernel on the device of x; Triton itself would take the current device."""
    with torch.cuda.device(x.device) if x.is_cuda else nullcontext():
        kernel[grid](x, *inputs, **options)


def accumulation_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def product_dtype(x: Tensor) -> torch.dtype:
    """The dtype of matrix products of x: autocast's if it is on, but float64 stays."""
    device = x.device.type
    cast = torch.is_autocast_enabled(device) and x.dtype != torch.float64
    return torch.get_autocast_dtype(device) if cast else x.dtype


def check_choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {value!r}.")


def operator(
    name: str, fake: Callable[..., Any], *, flops: Callable[..., int] | None = None, writes: tuple[str, ...] = (),
    gradient: Any = None, saved: Callable[[Any, Any], tuple[Any, ...]] = lambda inputs, outputs: inputs,
    differentiable: int = 1,
) -> Callable[[Callable[..., Any]], Any]:  # fmt: skip
    """Registers a function as the custom operator chiar::`name`, which compilers do not look into. `fake` returns
    outputs of the right shapes. `gradient(*grads, *saved(inputs, outputs))` returns the gradients of the first inputs,
    where `grads` belong to the first `differentiable` outputs; there are no second derivatives. `flops` is an upper
    bound from shapes."""

    def save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        outputs = output if isinstance(output, tuple) else (output,)
        kept = saved(inputs, outputs)
        ctx.save_for_backward(*(x if isinstance(x, Tensor) else None for x in kept))
        ctx.others, ctx.number = [None if isinstance(x, Tensor) else x for x in kept], len(inputs)
        ctx.mark_non_differentiable(*outputs[differentiable:])
        ctx.set_materialize_grads(False)

    @once_differentiable
    def gradients(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        kept = [other if x is None else x for x, other in zip(ctx.saved_tensors, ctx.others, strict=True)]
        grads = grads[:differentiable]
        found = () if all(grad is None for grad in grads) else gradient(*grads, *kept)
        return *found, *(None,) * (ctx.number - len(found))

    def make(function: Callable[..., Any]) -> Any:
        made = torch.library.custom_op(f"chiar::{name}", function, mutates_args=writes)
        made.register_fake(fake)
        if gradient is not None:
            made.register_autograd(gradients, setup_context=save)
        if flops is not None:
            register_flop_formula(getattr(torch.ops.chiar, name))(flops)
        return made

    return make


def like(*places: int) -> Callable[..., Any]:
    """A fake whose outputs have the shapes of the inputs at these places."""

    def fake(*inputs: Any, **_: Any) -> Any:
        outputs = tuple(inputs[place].new_empty(inputs[place].shape) for place in places)
        return outputs if len(outputs) > 1 else outputs[0]

    return fake


@dataclass
class Packing:
    """Where the chosen tokens are."""

    chosen_N: Tensor  # which of the N = B·T tokens are chosen
    place_N: Tensor  # the packed row of each token, 0 for those not chosen
    token_P: Tensor  # the token in each packed row; 0 beyond the last
    rows: Tensor  # B + 1 int32 offsets: the packed rows of batch row b are rows[b]…rows[b + 1]
    count: Tensor  # how many are chosen: one int32
    before_N: Tensor  # how many chosen tokens lie before each token in its batch row, int32
    exact: bool = False  # P = count


def make_packing(chosen_BT: Tensor, exact: bool = False) -> Packing:
    chosen_N, tokens = chosen_BT.flatten(), chosen_BT.numel()
    rows = F.pad(chosen_BT.sum(1).cumsum(0), (1, 0)).int()
    before_N = (chosen_BT.cumsum(1) - chosen_BT.long()).flatten().int()
    place_N = chosen_N.cumsum(0) - 1
    if exact:
        token_P = chosen_N.nonzero()[:, 0]
    else:
        numbers_N = torch.arange(tokens, device=chosen_N.device)
        # Tokens that are not chosen all write to one extra place at the end.
        place_or_end_N = torch.where(chosen_N, place_N, tokens)
        token_P = numbers_N.new_zeros(tokens + 1).scatter_(0, place_or_end_N, numbers_N)[:tokens]
        token_P = torch.where(numbers_N < rows[-1:], token_P, 0)
    return Packing(chosen_N, torch.where(chosen_N, place_N, 0), token_P, rows, rows[-1:], before_N, exact)


def pack_all(batch: int, length: int, device: torch.device) -> Packing:
    """`make_packing` with every token chosen."""
    token_P = torch.arange(batch * length, device=device)
    rows = torch.arange(0, batch * length + 1, length, device=device, dtype=torch.int32)
    before_N = token_P.int() % length
    return Packing(torch.ones_like(token_P, dtype=torch.bool), token_P, token_P, rows, rows[-1:], before_N)


class Gather(torch.autograd.Function):
    """x[token]. The gradient is a gather too, or a copy of P rows; that of index_select would be a slow scatter-add."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, token_P: Tensor, place_N: Tensor, chosen_N: Tensor, exact: bool) -> Tensor:
        ctx.save_for_backward(token_P if exact else place_N, chosen_N)
        ctx.exact = exact
        return x_ND.index_select(0, token_P) if exact else x_ND[token_P]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (place, chosen_N), (grad_PD, *_) = ctx.saved_tensors, grads
        if ctx.exact:
            grad_ND = grad_PD.new_zeros(len(chosen_N), grad_PD.shape[1]).index_copy_(0, place, grad_PD)
        else:
            grad_ND = torch.where(chosen_N[:, None], grad_PD[place], 0.0)
        return grad_ND, None, None, None, None


class Scatter(torch.autograd.Function):
    """Packed rows at their tokens, `other` at tokens that were not chosen."""

    @staticmethod
    def forward(ctx: Any, y_PD: Tensor, other_ND: Tensor, token_P: Tensor, place_N: Tensor, chosen_N: Tensor) -> Tensor:
        ctx.save_for_backward(token_P, chosen_N)
        return torch.where(chosen_N[:, None], y_PD[place_N], other_ND)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        token_P, chosen_N = ctx.saved_tensors
        return grads[0][token_P], torch.where(chosen_N[:, None], 0.0, grads[0]), None, None, None


def pack(x_ND: Tensor, packing: Packing) -> Tensor:
    """The chosen rows. Rows beyond `count` are copies of row 0."""
    return Gather.apply(x_ND, packing.token_P, packing.place_N, packing.chosen_N, packing.exact)


def unpack(y_PD: Tensor, other_ND: Tensor | None, packing: Packing) -> Tensor:
    """`y` where a token was chosen, `other` or 0 elsewhere."""
    if other_ND is None:
        other_ND = y_PD.new_zeros(len(packing.chosen_N), y_PD.shape[1])
    if packing.exact:
        dtype = torch.promote_types(y_PD.dtype, other_ND.dtype)
        return other_ND.to(dtype).index_copy(0, packing.token_P, y_PD.to(dtype))
    return Scatter.apply(y_PD, other_ND, packing.token_P, packing.place_N, packing.chosen_N)


def packed_linear(x_PD: Tensor, weight_KD: Tensor, bias_K: Tensor | None, packing: Packing) -> Tensor:
    """x Wᵀ + b for the first `count` rows only; the rest is undefined."""
    if packing.exact:
        return F.linear(x_PD, weight_KD, bias_K)
    parts = (x if x is None else x.to(product_dtype(x)) for x in (x_PD, weight_KD, bias_K))
    return PackedLinear.apply(*parts, packing.count)


def used(x: Tensor, packing: Packing) -> Tensor:
    """Zeros in the undefined rows, and in their gradients. Needed around sums over rows, such as a norm's weight
    gradient."""
    if packing.exact:
        return x
    in_use_P = torch.arange(len(x), device=x.device) < packing.count
    return torch.where(in_use_P if x.ndim == 1 else in_use_P[:, None], x, 0)


class PackedLinear(torch.autograd.Function):
    """x Wᵀ + b. The gradients of W and b sum over the first `count` rows only."""

    @staticmethod
    def forward(ctx: Any, x_PD: Tensor, weight_KD: Tensor, bias_K: Tensor | None, count: Tensor) -> Tensor:
        ctx.save_for_backward(x_PD, weight_KD, count)
        y_PK = rows_product(x_PD, weight_KD.t(), count)
        return y_PK if bias_K is None else y_PK + bias_K

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (x_PD, weight_KD, count), needs = ctx.saved_tensors, ctx.needs_input_grad
        dx_PD = rows_product(grads[0], weight_KD, count) if needs[0] else None
        dweight_KD = sum_product(grads[0], x_PD, count) if needs[1] else None
        return dx_PD, dweight_KD, row_sum(grads[0], count, "auto") if needs[2] else None, None


@operator(
    "rows_product", lambda x, weight, count: x.new_empty(x.shape[0], weight.shape[1]),
    flops=lambda x, weight, *_, **__: 2 * x[0] * weight[0] * weight[1],
)  # fmt: skip
def rows_product(x_PD: Tensor, weight_DK: Tensor, count: Tensor) -> Tensor:
    """x W for the first `count` rows; the rest is undefined."""
    if x_PD.is_cuda:
        # One stride must be 1 and the other a multiple of 16 bytes, which views of weights have.
        weight_DK = weight_DK if 1 in weight_DK.stride() else weight_DK.contiguous()
        return F.grouped_mm(x_PD.contiguous(), weight_DK[None], offs=count)
    y_PK, used = x_PD.new_empty(x_PD.shape[0], weight_DK.shape[1]), int(count)
    torch.mm(x_PD[:used], weight_DK, out=y_PK[:used])
    return y_PK


@operator(
    "sum_product", lambda y, x, count: x.new_empty(y.shape[1], x.shape[1]),
    flops=lambda y, x, *_, **__: 2 * y[0] * y[1] * x[1],
)  # fmt: skip
def sum_product(y_PK: Tensor, x_PD: Tensor, count: Tensor) -> Tensor:
    """yᵀ x over the first `count` rows: (K, D)."""
    if x_PD.is_cuda:
        return F.grouped_mm(y_PK.contiguous().t(), x_PD.contiguous(), offs=count)[0]
    return y_PK[: int(count)].t() @ x_PD[: int(count)]


@operator("row_sum", lambda x, count, implementation: x.new_empty(x.shape[1]))
def row_sum(x_PK: Tensor, count: Tensor, implementation: str) -> Tensor:
    """The sum of the first `count` rows."""
    if wants_triton(x_PK, implementation):
        from chiar.kernels.triton_rows import triton_row_sum

        return triton_row_sum(x_PK.contiguous(), count)
    return x_PK[: int(count)].sum(0)
