"""Some of the tokens of a batch, gathered into consecutive rows: what sparse execution computes with.

How many there are is known on the device only. So packed tensors have room for every token (P = B·T rows), the first
`count` hold the chosen tokens in order, and the rest is undefined and may be NaN: nothing that sums over packed rows
may read it. Shapes, launches and compiled graphs are then the same for every split, and no step waits for the device.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from chiar.kernels.packed_attention import wants_triton


@dataclass
class Packing:
    """Where the chosen tokens went."""

    chosen_N: Tensor
    """Which of the N = B·T tokens are chosen."""
    place_N: Tensor
    """The packed row of each token, 0 for those not chosen."""
    token_P: Tensor
    """The token in each packed row; 0 beyond the last."""
    rows: Tensor
    """B + 1 int32 offsets: the packed rows of batch row b are rows[b]…rows[b + 1]."""
    count: Tensor
    """How many are chosen: one int32."""
    before_N: Tensor
    """How many chosen tokens lie before each token in its batch row, int32."""


def make_packing(chosen_BT: Tensor) -> Packing:
    chosen_N = chosen_BT.flatten()
    rows = F.pad(chosen_BT.sum(1).cumsum(0), (1, 0)).int()
    count = rows[-1:]
    before_N = (chosen_BT.cumsum(1) - chosen_BT.long()).flatten().int()
    tokens = chosen_N.shape[0]
    place_N = chosen_N.cumsum(0) - 1
    numbers_N = torch.arange(tokens, device=chosen_N.device)
    # Tokens that are not chosen all write to one place behind the end.
    token_P = numbers_N.new_zeros(tokens + 1).scatter_(0, torch.where(chosen_N, place_N, tokens), numbers_N)[:tokens]
    token_P = torch.where(numbers_N < count, token_P, 0)
    return Packing(chosen_N, torch.where(chosen_N, place_N, 0), token_P, rows, count, before_N)


def pack_all(batch: int, length: int, device: torch.device) -> Packing:
    """make_packing of tokens that are all chosen."""
    token_P = torch.arange(batch * length, device=device)
    rows = torch.arange(0, batch * length + 1, length, device=device, dtype=torch.int32)
    before_N = token_P.int() % length
    return Packing(torch.ones_like(token_P, dtype=torch.bool), token_P, token_P, rows, rows[-1:], before_N)


class Gather(torch.autograd.Function):
    """The chosen rows of x. Its gradient is a gather too: index_select's would be a slow atomic addition."""

    @staticmethod
    def forward(context: Any, x_ND: Tensor, token_P: Tensor, place_N: Tensor, chosen_N: Tensor) -> Tensor:
        context.save_for_backward(place_N, chosen_N)
        return x_ND[token_P]

    @staticmethod
    def backward(context: Any, *grads: Tensor) -> Any:
        place_N, chosen_N = context.saved_tensors
        return torch.where(chosen_N[:, None], grads[0][place_N], 0.0), None, None, None


class Scatter(torch.autograd.Function):
    """Packed rows back at their tokens, `other` at the tokens that were not chosen."""

    @staticmethod
    def forward(
        context: Any, y_PD: Tensor, other_ND: Tensor, token_P: Tensor, place_N: Tensor, chosen_N: Tensor
    ) -> Tensor:
        context.save_for_backward(token_P, chosen_N)
        return torch.where(chosen_N[:, None], y_PD[place_N], other_ND)

    @staticmethod
    def backward(context: Any, *grads: Tensor) -> Any:
        token_P, chosen_N = context.saved_tensors
        grad_ND = grads[0]
        return grad_ND[token_P], torch.where(chosen_N[:, None], 0.0, grad_ND), None, None, None


def pack(x_ND: Tensor, packing: Packing) -> Tensor:
    """The chosen rows. Beyond `count` lie copies of row 0: defined, but nobody's."""
    return Gather.apply(x_ND, packing.token_P, packing.place_N, packing.chosen_N)


def unpack(y_PD: Tensor, other_ND: Tensor, packing: Packing) -> Tensor:
    """`y` where a token was chosen, `other` elsewhere."""
    return Scatter.apply(y_PD, other_ND, packing.token_P, packing.place_N, packing.chosen_N)


def packed_linear(x_PD: Tensor, weight_KD: Tensor, bias_K: Tensor | None, packing: Packing) -> Tensor:
    """x Wᵀ + b of the first `count` rows, computing only those; the rest is undefined."""
    if torch.is_autocast_enabled(x_PD.device.type):
        dtype = torch.get_autocast_dtype(x_PD.device.type)
        x_PD, weight_KD = x_PD.to(dtype), weight_KD.to(dtype)
        bias_K = None if bias_K is None else bias_K.to(dtype)
    y_PK = PackedProduct.apply(x_PD, weight_KD, packing.count)
    return y_PK if bias_K is None else AddBias.apply(y_PK, bias_K, packing.count)


def used(x: Tensor, packing: Packing) -> Tensor:
    """Zeros in the undefined rows, and in those of the gradient: around whatever sums over rows, such as a norm's
    weight."""
    in_use_P = torch.arange(len(x), device=x.device) < packing.count
    return torch.where(in_use_P if x.ndim == 1 else in_use_P[:, None], x, 0)


class PackedProduct(torch.autograd.Function):
    """x Wᵀ over the first `count` rows."""

    @staticmethod
    def forward(context: Any, x_PD: Tensor, weight_KD: Tensor, count: Tensor) -> Tensor:
        context.save_for_backward(x_PD, weight_KD, count)
        return rows_product(x_PD, weight_KD.t(), count)

    @staticmethod
    def backward(context: Any, *grads: Tensor) -> Any:
        x_PD, weight_KD, count = context.saved_tensors
        grad_x_PD = rows_product(grads[0], weight_KD, count) if context.needs_input_grad[0] else None
        grad_weight_KD = sum_product(grads[0], x_PD, count) if context.needs_input_grad[1] else None
        return grad_x_PD, grad_weight_KD, None


class AddBias(torch.autograd.Function):
    """y + b, with the gradient of b summed over the first `count` rows only."""

    @staticmethod
    def forward(context: Any, y_PK: Tensor, bias_K: Tensor, count: Tensor) -> Tensor:
        context.save_for_backward(count)
        return y_PK + bias_K

    @staticmethod
    def backward(context: Any, *grads: Tensor) -> Any:
        (count,) = context.saved_tensors
        return grads[0], row_sum(grads[0], count, "auto"), None


@torch.library.custom_op("chiar::rows_product", mutates_args=())
def rows_product(x_PD: Tensor, weight_DK: Tensor, count: Tensor) -> Tensor:
    """x W of the first `count` rows; the rest is undefined."""
    if x_PD.is_cuda:
        return F.grouped_mm(x_PD.contiguous(), aligned(weight_DK)[None], offs=count)
    y_PK = x_PD.new_empty(x_PD.shape[0], weight_DK.shape[1])
    used = int(count)
    torch.mm(x_PD[:used], weight_DK, out=y_PK[:used])
    return y_PK


@rows_product.register_fake
def _(x_PD: Tensor, weight_DK: Tensor, count: Tensor) -> Tensor:
    return x_PD.new_empty(x_PD.shape[0], weight_DK.shape[1])


@torch.library.custom_op("chiar::sum_product", mutates_args=())
def sum_product(y_PK: Tensor, x_PD: Tensor, count: Tensor) -> Tensor:
    """yᵀ x over the first `count` rows: (K, D)."""
    if x_PD.is_cuda:
        return F.grouped_mm(y_PK.contiguous().t(), x_PD.contiguous(), offs=count)[0]
    used = int(count)
    return y_PK[:used].t() @ x_PD[:used]


@sum_product.register_fake
def _(y_PK: Tensor, x_PD: Tensor, count: Tensor) -> Tensor:
    return x_PD.new_empty(y_PK.shape[1], x_PD.shape[1])


@torch.library.custom_op("chiar::row_sum", mutates_args=())
def row_sum(x_PK: Tensor, count: Tensor, implementation: str) -> Tensor:
    """The sum of the first `count` rows."""
    if wants_triton(x_PK, implementation):
        from chiar.kernels.triton.row_sum import triton_row_sum

        return triton_row_sum(x_PK.contiguous(), count)
    return x_PK[: int(count)].sum(0)


@row_sum.register_fake
def _(x_PK: Tensor, count: Tensor, implementation: str) -> Tensor:
    return x_PK.new_empty(x_PK.shape[1])


def aligned(weight_DK: Tensor) -> Tensor:
    """Grouped products want one stride of 1 and the other a multiple of 16 bytes, which views of weights have."""
    return weight_DK if 1 in weight_DK.stride() else weight_DK.contiguous()


@register_flop_formula(torch.ops.chiar.rows_product)
def _rows_flops(x_shape: Any, weight_shape: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
    """An upper bound: how many rows are used is known on the device only."""
    return 2 * x_shape[0] * weight_shape[0] * weight_shape[1]


@register_flop_formula(torch.ops.chiar.sum_product)
def _sum_flops(y_shape: Any, x_shape: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
    """An upper bound, as above."""
    return 2 * y_shape[0] * y_shape[1] * x_shape[1]
