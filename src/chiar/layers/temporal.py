"""Spectra along time, the axis that has an order: a filter over the last tokens, and their entropy as a signal."""

import torch
from torch import Tensor, nn

from chiar.kernels.basis import dct_matrix
from chiar.kernels.temporal_entropy import channel_directions, channels_of, temporal_entropy
from chiar.kernels.temporal_filter import temporal_basis, temporal_filter
from chiar.layers.context import LayerMemory, TokenContext
from chiar.layers.derived import DerivedBuffers
from chiar.layers.lookback import put_back, with_past


class TemporalFilter(DerivedBuffers):
    """A causal filter of each channel over the last W tokens: taps = basis · coefficients, plus one for the token now.

    Few low frequencies cannot single out one token, so the weight `now` of the token itself is a parameter of its own.
    With coefficients 0 the filter starts as `initial` times the identity: 1 is what the spectral filter starts as, 0
    adds nothing to a residual stream. Both have gradients from the first step.
    """

    basis_WK: Tensor

    def __init__(
        self, width: int, window: int, coefficients: int, initial: float = 1.0, name: str = "temporal"
    ) -> None:
        """`name`: where a layer's memory keeps the inputs of the last W − 1 tokens."""
        super().__init__()
        self.window, self.number, self.initial, self.name = window, coefficients, initial, name
        self.now_D = nn.Parameter(torch.full((width,), initial))
        self.coefficients_KD = nn.Parameter(torch.zeros(coefficients, width))
        self.register_derived()

    def derive(self) -> dict[str, Tensor]:
        return {"basis_WK": temporal_basis(self.window, self.number)}

    def taps(self) -> Tensor:
        """(W, D) in fp32 at least; row j is for the token j before."""
        dtype = self.basis_WK.dtype
        taps_WD = (self.basis_WK[..., None] * self.coefficients_KD.to(dtype)).sum(1)
        return torch.cat([taps_WD[:1] + self.now_D.to(dtype), taps_WD[1:]])

    def forward(self, x_BTD: Tensor, context: TokenContext, memory: LayerMemory | None = None) -> Tensor:
        device = x_BTD.device.type
        if torch.is_autocast_enabled(device):  # as a linear map would: half the traffic
            x_BTD = x_BTD.to(torch.get_autocast_dtype(device))
        if memory is None and context.real_BT is None:
            return temporal_filter(x_BTD, self.taps())
        line_BSD = with_past(x_BTD, self.window - 1, context.real_BT, memory, self.name)
        if x_BTD.shape[1] == 1:
            return (line_BSD * self.taps().flip(0)).sum(1, keepdim=True).to(x_BTD.dtype)
        return put_back(temporal_filter(line_BSD, self.taps())[:, self.window - 1 :], context.real_BT)


class TemporalSublayer(nn.Module):
    """x + filter(LN(x)), or LN(x + filter(x)) under post-norm, for every token. It starts by adding nothing."""

    def __init__(self, norm: nn.Module, pre_norm: bool, filter: TemporalFilter) -> None:
        super().__init__()
        self.norm, self.pre_norm, self.filter = norm, pre_norm, filter

    def forward(self, x_BTD: Tensor, context: TokenContext, memory: LayerMemory | None) -> Tensor:
        if self.pre_norm:
            return x_BTD + self.filter(self.norm(x_BTD), context, memory)
        return self.norm(x_BTD + self.filter(x_BTD, context, memory))


class TemporalSignal(DerivedBuffers):
    """Temporal spectral entropy of the states a layer reads, in fp32; the same directions in every layer.

    Before the first token there are zeros: the start of a text is an abrupt event, and its H is high.
    """

    directions_DC: Tensor
    dct_WW: Tensor

    def __init__(self, width: int, window: int, channels: int, seed: int) -> None:
        super().__init__()
        self.width, self.window, self.channels, self.seed = width, window, channels, seed
        self.register_derived()

    def derive(self) -> dict[str, Tensor]:
        directions_DC = channel_directions(self.width, self.channels, self.seed)
        return {"directions_DC": directions_DC, "dct_WW": dct_matrix(self.window)}

    def forward(
        self,
        x_BTD: Tensor,
        real_BT: Tensor | None = None,
        memory: LayerMemory | None = None,
        eps: float = 0.0,
        dc_weight: float = 1.0,
    ) -> Tensor:
        """H of each token, (B, T)."""
        x_BTD = x_BTD.to(self.directions_DC.dtype)
        with torch.autocast(x_BTD.device.type, enabled=False):
            channels_BTC = channels_of(x_BTD, self.directions_DC)
            line_BSC = with_past(channels_BTC, self.window - 1, real_BT, memory, "signal")
            return put_back(temporal_entropy(line_BSC, self.dct_WW, eps, dc_weight), real_BT)
