"""The temporal filter: a causal filter of each channel over the last tokens of a row, whole texts or token by token."""

import torch
from torch import Tensor, nn
from transformers import initialization as init

from chiar.config import ChiarConfig
from chiar.kernels.temporal_filter import temporal_basis, temporal_filter
from chiar.layers.context import DerivedBuffers, LayerMemory, Maybe, Memory, TokenContext, put_back, with_past
from chiar.layers.operator import Operator
from chiar.registry import Work


class TemporalFilter(DerivedBuffers, Operator):
    """A causal filter of each channel over the last W tokens: taps = basis · coefficients, plus `now` for the current
    token. A few low frequencies cannot single out one token, so its weight is a parameter of its own. With coefficients
    of 0 the filter starts as `initial` times the identity: 1 as the spectral filter does, 0 adds nothing to a residual
    stream. Both parameters have gradients from the first step."""

    basis_WK: Tensor
    looks_back = True

    def __init__(self, config: ChiarConfig, initial: float | None = None, name: str = "temporal") -> None:
        """`name`: where a layer's memory keeps the inputs of the last W − 1 tokens."""
        super().__init__()
        self.window, self.number, self.name = config.temporal_window, config.temporal_coefficients, name
        self.initial = float(config.filter_init if initial is None else initial)
        self.now_D = nn.Parameter(torch.full((config.hidden_size,), self.initial))
        self.coefficients_KD = nn.Parameter(torch.zeros(self.number, config.hidden_size))
        self.register_derived()

    def reset_parameters(self) -> None:
        init.constant_(self.now_D, self.initial)
        init.zeros_(self.coefficients_KD)

    @staticmethod
    def flops(config: ChiarConfig, work: Work) -> dict[str, float]:
        """Only the tokens sent to it need an output, though they look back on all."""
        return {"temporal": work.share * 2 * config.temporal_window * config.hidden_size}

    def derive(self) -> dict[str, Tensor]:
        return {"basis_WK": temporal_basis(self.window, self.number)}

    def taps(self) -> Tensor:
        """(W, D) in at least fp32; row j applies to the token j places earlier."""
        dtype = self.basis_WK.dtype
        taps_WD = (self.basis_WK[..., None] * self.coefficients_KD.to(dtype)).sum(1)
        return torch.cat([taps_WD[:1] + self.now_D.to(dtype), taps_WD[1:]])

    def begin(self, memory: LayerMemory, rows: int) -> None:
        """Zeros before the first token."""
        if memory.get(self.name) is None:
            memory.put(self.name, self.now_D.new_zeros(rows, self.window - 1, len(self.now_D)))

    def forward(self, x_BTD: Tensor, context: TokenContext, key_BT: Maybe = None, memory: Memory = None, /) -> Tensor:
        device = x_BTD.device.type
        if torch.is_autocast_enabled(device):  # as a linear map does: half the memory traffic
            x_BTD = x_BTD.to(torch.get_autocast_dtype(device))
        if context.used_BT is not None:  # gaps between texts count as zeros
            x_BTD = torch.where(context.used_BT[..., None], x_BTD, 0)
        if memory is None and (context.real_BT is None or context.padding_behind):
            return temporal_filter(x_BTD, self.taps())
        line_BSD = with_past(x_BTD, self.window - 1, context.real_BT, memory, self.name)
        if x_BTD.shape[1] == 1:
            return (line_BSD * self.taps().flip(0)).sum(1, keepdim=True).to(x_BTD.dtype)
        return put_back(temporal_filter(line_BSD, self.taps())[:, self.window - 1 :], context.real_BT)


class TemporalSublayer(nn.Module):
    """x + filter(LN(x)), or LN(x + filter(x)) under post-norm, for every token. It starts by adding nothing."""

    def __init__(self, norm: nn.Module, config: ChiarConfig) -> None:
        super().__init__()
        self.norm, self.pre_norm = norm, config.norm_position == "pre"
        self.filter = TemporalFilter(config, initial=0.0, name="everywhere")

    def forward(self, x_BTD: Tensor, context: TokenContext, memory: Memory) -> Tensor:
        if self.pre_norm:
            return x_BTD + self.filter(self.norm(x_BTD), context, None, memory)
        return self.norm(x_BTD + self.filter(x_BTD, context, None, memory))
