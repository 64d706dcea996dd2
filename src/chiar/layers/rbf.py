"""RBF mixing, the third operator of v1."""

import math

import torch
from torch import Tensor, nn

from chiar.layers.context import LayerMemory, TokenContext, surely_none, visible_keys


class RBFMixing(nn.Module):
    """Random Fourier features φ = [cos, sin](xω/√m), A = causal softmax(φφᵀ), output Linear(Aφ).

    ω ~ N(0, 2γ) is drawn once and saved with the weights. The paper gives no equation; this is the released code
    made causal. On normalised inputs the diagonal of φφᵀ is m and the rest near 0, so A is almost the identity.
    """

    omega_Dm: Tensor

    def __init__(self, width: int, features: int, gamma: float) -> None:
        super().__init__()
        self.features, self.std = features, math.sqrt(2.0 * gamma)
        self.register_buffer("omega_Dm", self.std * torch.randn(width, features))
        self.out = nn.Linear(2 * features, width)

    def forward(
        self,
        x_BTD: Tensor,
        context: TokenContext,
        key_BT: Tensor | None = None,
        memory: LayerMemory | None = None,
        only_keys: bool = False,
    ) -> Tensor:
        """As attention's: with `only_keys` the memory stores the marked tokens alone."""
        if memory is not None and only_keys and surely_none(key_BT):
            return torch.zeros_like(x_BTD)
        query_BTF = self.features_of(x_BTD)
        is_key_BS = torch.ones(x_BTD.shape[:2], dtype=torch.bool, device=x_BTD.device) if key_BT is None else key_BT
        key_BSF, visible_BTS = query_BTF, visible_keys(is_key_BS, x_BTD.shape[1])[:, 0]
        if memory is not None:
            store = memory.ragged("rbf")
            is_first = store.is_empty
            count_BT = store.append({"features": query_BTF[:, None]}, is_key_BS)
            if not is_first:
                key_BSF, visible_BTS = store.used("features")[:, 0], store.visible(count_BT)[:, 0]
        return self.out(self.mix(query_BTF, key_BSF, visible_BTS))

    def features_of(self, x: Tensor) -> Tensor:
        """φ, (…, F) with F = 2m."""
        angles = x @ self.omega_Dm.to(x.dtype) / math.sqrt(self.features)
        return torch.cat([angles.cos(), angles.sin()], dim=-1)

    def mix(self, query_BTF: Tensor, key_BSF: Tensor, visible_BTS: Tensor) -> Tensor:
        """Aφ."""
        scores_BTS = (query_BTF @ key_BSF.transpose(1, 2)).float()
        weights_BTS = scores_BTS.masked_fill(~visible_BTS, float("-inf")).softmax(-1).to(key_BSF.dtype)
        return weights_BTS @ key_BSF
