"""RBF mixing, the third operator of v1."""

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import initialization as init

from chiar.config import ChiarConfig
from chiar.layers.context import Maybe, Memory, TokenContext, surely_none, visible_keys
from chiar.layers.operator import Operator
from chiar.registry import Work

if TYPE_CHECKING:
    from chiar.layers.sparse import PackedTokens

FEATURES = 64


class RBFMixing(Operator):
    """Random Fourier features φ = [cos, sin](xω/√m), A = causal softmax(φφᵀ), output Linear(Aφ).
    ω ~ N(0, 2γ) is drawn once and saved with the weights. The paper gives no equation; this is the released code
    made causal. On normalised inputs the diagonal of φφᵀ is m and the rest near 0, so A is almost the identity."""

    omega_Dm: Tensor

    def __init__(self, config: ChiarConfig) -> None:
        super().__init__()
        self.features, self.std = FEATURES, math.sqrt(2.0)  # γ = 1
        self.register_buffer("omega_Dm", self.std * torch.randn(config.hidden_size, self.features))
        self.out = nn.Linear(2 * self.features, config.hidden_size)

    def reset_parameters(self) -> None:
        init.normal_(self.omega_Dm, std=self.std)

    @staticmethod
    def flops(config: ChiarConfig, work: Work) -> dict[str, float]:
        D, features = config.hidden_size, FEATURES
        mapped = max(work.share, work.key_share)
        return {"rbf": mapped * 2 * D * features + work.share * 4 * features * D + work.pairs * 8 * features}

    def forward(self, x_BTD: Tensor, context: TokenContext, key_BT: Maybe = None, memory: Memory = None, /) -> Tensor:
        if memory is not None and surely_none(key_BT):
            return torch.zeros_like(x_BTD)
        if key_BT is None:
            key_BT = torch.ones(x_BTD.shape[:2], dtype=torch.bool, device=x_BTD.device)
        query_BTF = key_BSF = self.features_of(x_BTD)
        visible_BTS = visible_keys(key_BT, x_BTD.shape[1])[:, 0]
        if memory is not None:
            store = memory.ragged("rbf")
            is_first = store.is_empty
            count_BT = store.append({"features": query_BTF[:, None]}, key_BT)
            if not is_first:
                key_BSF, visible_BTS = store.used("features")[:, 0], store.visible(count_BT)[:, 0]
        return self.out(self.mix(query_BTF, key_BSF, visible_BTS))

    def features_of(self, x: Tensor) -> Tensor:
        """φ, (…, F) with F = 2m."""
        angles = x @ self.omega_Dm.to(x.dtype) / math.sqrt(self.features)
        return torch.cat([angles.cos(), angles.sin()], dim=-1)

    def mix(self, query_BTF: Tensor, key_BSF: Tensor, visible_BTS: Tensor) -> Tensor:
        scores_BTS = (query_BTF @ key_BSF.transpose(1, 2)).float()
        weights_BTS = scores_BTS.masked_fill(~visible_BTS, float("-inf")).softmax(-1).to(key_BSF.dtype)
        return weights_BTS @ key_BSF

    def run_packed(self, tokens: "PackedTokens", name: str) -> Tensor:
        """On the host, and if its own tokens are the only keys, features are computed for these alone."""
        if not (tokens.on_host and tokens.block.routed_keys):
            return super().run_packed(tokens, name)
        packing, features_PF = tokens.packing(name), self.features_of(tokens.seen(name, tokens.view(name)))
        tokens.remember(name, {"features": features_PF[:, None]}, packing)
        count_B = packing.rows.diff()
        key_BLF = pad_sequence(features_PF.split(count_B.tolist()), batch_first=True)
        number_L = torch.arange(key_BLF.shape[1])
        mixed_BLF = self.mix(key_BLF, key_BLF, number_L <= number_L[:, None])
        return self.out(mixed_BLF[number_L < count_B[:, None]])
