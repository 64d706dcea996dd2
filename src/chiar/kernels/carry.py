"""Values carried forward along a sequence: y_t = v_last(t), where last(t) is the latest marked token at or before t; or
a weighted running mean."""

import torch
from torch import Tensor

from chiar.kernels.packing import accumulation_dtype, operator

AT_ONCE = 128  # tokens in a block of the running mean


def last_marked(values_BTD: Tensor, marked_BT: Tensor, before_B1D: Tensor | None = None) -> Tensor:
    """The definition. Before the first marked token: `before`, or 0."""
    B, T, D = values_BTD.shape
    first_B1D = values_BTD.new_zeros(B, 1, D) if before_B1D is None else before_B1D.to(values_BTD.dtype)
    place_T = torch.arange(1, T + 1, device=marked_BT.device)
    last_BT1 = torch.where(marked_BT, place_T, 0).cummax(1).values[..., None]
    return torch.cat([first_B1D, values_BTD], 1).gather(1, last_BT1.expand(B, T, D))


def carry_packed_gradient(
    grad_ND: Tensor, token_P: Tensor, used_P: Tensor, has_value_N: Tensor, *_: Tensor
) -> tuple[Tensor]:
    """The sum over the tokens up to the next packed one. Sums of neighbours need no atomic additions."""
    N = len(has_value_N)
    start_P = torch.where(used_P, token_P, N)
    # Places that hold no token end where the next token begins: they sum nothing.
    start_P = start_P.flip(0).cummin(0).values.flip(0)
    ends = start_P.new_zeros(1), start_P, start_P.new_full((1,), N)
    masked_ND = torch.where(has_value_N[:, None], grad_ND, 0).to(accumulation_dtype(grad_ND))
    sums_PD = torch.segment_reduce(masked_ND, "sum", lengths=torch.cat(ends).diff(), unsafe=True)[1:]
    return (torch.where(used_P[:, None], sums_PD, 0).to(grad_ND.dtype),)


@operator(
    "carry_packed", lambda v, token, used, has_value, last: v.new_empty(has_value.shape[0], v.shape[1]),
    gradient=carry_packed_gradient, saved=lambda inputs, outputs: inputs[1:],
)  # fmt: skip
def carry_packed_with_gradient(
    values_PD: Tensor, token_P: Tensor, used_P: Tensor, has_value_N: Tensor, last_N: Tensor
) -> Tensor:  # fmt: skip
    return torch.where(has_value_N[:, None], values_PD[last_N], 0)


def carry_packed(values_PD: Tensor, token_P: Tensor, used_P: Tensor, has_value_N: Tensor, last_N: Tensor) -> Tensor:
    """For every token the packed value at `last_N`, or 0 where `has_value_N` is false. Packed places hold the values of
    tokens `token_P`, where `used_P`, in the order of the text."""
    if torch.is_grad_enabled():
        return carry_packed_with_gradient(values_PD, token_P, used_P, has_value_N, last_N)
    return torch.where(has_value_N[:, None], values_PD[last_N], 0)  # a plain expression, which compilers can fuse


def smoothed(values_BTD: Tensor, weight_BT: Tensor, before_B1D: Tensor | None = None, block: int = AT_ONCE) -> Tensor:
    """The running mean m_t = w_t v_t + (1 − w_t) m_{t−1}, in blocks of tokens: inside one it is a triangular product of
    decays, which never exceed 1. A token of weight 0 repeats the mean."""
    B, T, D = values_BTD.shape
    dtype = torch.float64 if values_BTD.dtype == torch.float64 else torch.float32
    weight_BT, mean_B1D = weight_BT.to(dtype), torch.zeros(B, 1, D, dtype=dtype, device=values_BTD.device)
    if before_B1D is not None:
        mean_B1D = before_B1D.to(dtype)
    parts = []
    for start in range(0, T, block):
        v_BtD, w_Bt = values_BTD[:, start : start + block].to(dtype), weight_BT[:, start : start + block]
        fall_Bt = torch.log1p(-w_Bt.clamp(max=1 - 1e-6)).cumsum(1)  # −∞ would make ∞ − ∞
        size = v_BtD.shape[1]
        past_tt = torch.ones(size, size, dtype=torch.bool, device=v_BtD.device).tril()
        decay_Btt = (fall_Bt[:, :, None] - fall_Bt[:, None]).masked_fill(~past_tt, -torch.inf).exp()
        made_BtD = decay_Btt @ (w_Bt[..., None] * v_BtD) + fall_Bt.exp()[..., None] * mean_B1D
        mean_B1D = made_BtD[:, -1:]
        parts.append(made_BtD)
    return torch.cat(parts, 1).to(values_BTD.dtype)
