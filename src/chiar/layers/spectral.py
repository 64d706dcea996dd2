"""The light operator (Eq. 3)."""

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from transformers import initialization as init

from chiar.config import ChiarConfig
from chiar.kernels.packing import pack, packed_linear, unpack, used
from chiar.kernels.transform import Transform, transform_matrices
from chiar.layers.context import DerivedBuffers, TokenContext
from chiar.layers.operator import TokenOperator
from chiar.registry import Work

if TYPE_CHECKING:
    from chiar.layers.sparse import PackedTokens


class SpectralBasis(DerivedBuffers):
    """The orthonormal basis C of the feature axis, shared by all layers."""

    def __init__(self, kind: str, width: int, seed: int) -> None:
        super().__init__()
        self.kind, self.width, self.seed = kind, width, seed
        self.register_derived()

    def derive(self) -> dict[str, Tensor]:
        return transform_matrices(self.kind, self.width, self.seed)

    def transform(self) -> Transform:
        return Transform(**dict(self.named_buffers()))


class SpectralFilter(TokenOperator):
    """x ↦ Cᵀ diag(w) C x with one learned weight per frequency (the paper's w). It mixes features, never tokens."""

    def __init__(self, config: ChiarConfig) -> None:
        super().__init__()
        self.initial = float(config.filter_init)
        self.weight = nn.Parameter(torch.full((config.hidden_size,), self.initial))

    def reset_parameters(self) -> None:
        init.constant_(self.weight, self.initial)

    @staticmethod
    def flops(config: ChiarConfig, work: Work) -> dict[str, float]:
        return {"spectral": work.share * 2 * work.transform}

    def forward(self, x_BTD: Tensor, context: TokenContext, *_: object) -> Tensor:
        return context.transform.inverse(context.transform.forward(x_BTD) * self.weight)

    def run_packed(self, tokens: "PackedTokens", name: str) -> Tensor:
        if not tokens.in_place(name):
            return super().run_packed(tokens, name)
        seen_ND, transform = tokens.seen(name, tokens.x), tokens.context.transform
        if transform.is_identity:  # an element-wise product is cheaper than packing
            return seen_ND * self.weight
        packing = tokens.packing(name)
        product = partial(packed_linear, bias_K=None, packing=packing)
        spectrum_PD = used(transform.forward(pack(seen_ND, packing), product), packing)
        y_PD = transform.inverse(used(spectrum_PD * self.weight, packing), product)
        return unpack(y_PD, None, packing)
