"""What a sequence said last: y_t = v_last(t), where last(t) is the latest marked token at or before t; or a running
mean of what it said. Each beside its definition."""

import torch
from torch import Tensor

from chiar.kernels.packing import accumulation_dtype, operator

AT_ONCE = 128  # tokens of a block of a running mean


def last_marked(values_BTD: Tensor, marked_BT: Tensor, before_B1D: Tensor | None = None) -> Tensor:
    """The definition. Before the first marked token: `before`, or 0."""
    B, T, D = values_BTD.shape
    first_B1D = values_BTD.new_zeros(B, 1, D) if before_B1D is None else before_B1D.to(values_BTD.dtype)
    place_T = torch.arange(1, T + 1, device=marked_BT.device)
    last_BT1 = torch.where(marked_BT, place_T, 0).cummax(1).values[..., None]
    return torch.cat([first_B1D, values_BTD], 1).gather(1, last_BT1.expand(B, T, D))


def spread_gradient(grad_ND: Tensor, token_P: Tensor, used_P: Tensor, said_N: Tensor, *_: Tensor) -> tuple[Tensor]:
    """The sum over the tokens up to the next packed one. Sums of neighbours need no atomic additions."""
    N = len(said_N)
    start_P = torch.where(used_P, token_P, N)
    # Places that hold no token end where the next token begins: they sum nothing.
    start_P = start_P.flip(0).cummin(0).values.flip(0)
    ends = start_P.new_zeros(1), start_P, start_P.new_full((1,), N)
    heard_ND = torch.where(said_N[:, None], grad_ND, 0).to(accumulation_dtype(grad_ND))
    sums_PD = torch.segment_reduce(heard_ND, "sum", lengths=torch.cat(ends).diff(), unsafe=True)[1:]
    return (torch.where(used_P[:, None], sums_PD, 0).to(grad_ND.dtype),)


@operator(
    "spread", lambda v, token, used, said, last: v.new_empty(said.shape[0], v.shape[1]), gradient=spread_gradient,
    saved=lambda inputs, outputs: inputs[1:],
)  # fmt: skip
def spread_with_gradient(
    values_PD: Tensor, token_P: Tensor, used_P: Tensor, said_N: Tensor, last_N: Tensor
) -> Tensor:  # fmt: skip
    return torch.where(said_N[:, None], values_PD[last_N], 0)


def spread(values_PD: Tensor, token_P: Tensor, used_P: Tensor, said_N: Tensor, last_N: Tensor) -> Tensor:
    """Of packed values, which belong to tokens `token_P` where `used_P`, the one at `last_N` for every token, and 0
    where nothing was `said` yet. Packed tokens stand in the order of the text."""
    if torch.is_grad_enabled():
        return spread_with_gradient(values_PD, token_P, used_P, said_N, last_N)
    return torch.where(said_N[:, None], values_PD[last_N], 0)  # which a compiler may look into


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
