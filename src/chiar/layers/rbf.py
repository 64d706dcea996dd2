"""RBF mixing, the third operator of v1."""

import math
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor, nn
from transformers import initialization as init

from chiar.config import ChiarConfig
from chiar.kernels.packing import pack
from chiar.kernels.rows import Ragged, take
from chiar.layers.context import Maybe, Memory, TokenContext, surely_none, visible_keys
from chiar.layers.operator import Operator
from chiar.registry import Work

if TYPE_CHECKING:
    from chiar.layers.sparse import PackedTokens, SortedTokens


class RBFMixing(Operator):
    """Random Fourier features φ = [cos, sin](xω/√m), A = causal softmax(φφᵀ), output Linear(Aφ).
    ω ~ N(0, 2γ) is drawn once and saved with the weights. The paper gives no equation; this is the released code
    made causal. On normalised inputs the diagonal of φφᵀ is m and the rest near 0, so A is almost the identity."""

    omega_Dm: Tensor

    def __init__(self, width: int, features: int) -> None:
        super().__init__()
        self.features, self.std = features, math.sqrt(2.0)  # γ = 1
        self.register_buffer("omega_Dm", self.std * torch.randn(width, features))
        self.out = nn.Linear(2 * features, width)

    def reset_parameters(self) -> None:
        init.normal_(self.omega_Dm, std=self.std)

    @classmethod
    def build(cls, config: ChiarConfig) -> Self:
        return cls(config.hidden_size, config.rbf_features)

    @staticmethod
    def flops(config: ChiarConfig, work: Work) -> dict[str, float]:
        D, features = config.hidden_size, config.rbf_features
        mapped = max(work.share, work.key_share)
        return {"rbf": mapped * 2 * D * features + work.share * 4 * features * D + work.pairs * 8 * features}

    def forward(
        self, x_BTD: Tensor, context: TokenContext, key_BT: Maybe = None, memory: Memory = None, spare: bool = False, /
    ) -> Tensor:
        if memory is not None and spare and surely_none(key_BT):
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
        scores_BTS = (query_BTF @ key_BSF.transpose(1, 2)).float()
        weights_BTS = scores_BTS.masked_fill(~visible_BTS, float("-inf")).softmax(-1).to(key_BSF.dtype)
        return weights_BTS @ key_BSF

    def run_packed(self, tokens: "PackedTokens", name: str) -> Tensor:
        return pack(tokens.run_all(self, name), tokens.packing(name))

    def run_sorted(self, tokens: "SortedTokens", name: str, x_PD: Tensor) -> Tensor:
        """Over each other or over all."""
        ragged = Ragged(tokens.counts_by_row(name))
        if tokens.block.routed_keys:
            query_PF = self.features_of(tokens.seen(name, x_PD))
            key_BSF = ragged.batched(query_PF)
            visible_BQS = torch.ones(ragged.longest, ragged.longest, dtype=torch.bool).tril()
            if len(x_PD):
                tokens.remember(name, {"features": query_PF[:, None]})
        else:
            key_BSF, is_key_BT = self.features_of(tokens.all_seen(name)), tokens.is_key()
            query_PF = take(key_BSF.flatten(0, 1), tokens.places[name])
            if tokens.memory is not None:
                tokens.memory.ragged(name).append({"features": key_BSF[:, None]}, is_key_BT)
            place_BQ1 = ragged.batched((tokens.places[name] % tokens.length)[:, None])
            place_S = torch.arange(tokens.length)
            # What fills a short row up must see something, or its softmax would be NaN.
            visible_BQS = (place_S <= place_BQ1) & is_key_BT[:, None] | (place_S == place_BQ1)
        return self.out(ragged.flat(self.mix(ragged.batched(query_PF), key_BSF, visible_BQS)))
