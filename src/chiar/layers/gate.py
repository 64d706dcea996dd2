"""The MetaRouter: a learned gate on layer 1 (Eq. 4 and Eq. 5)."""

import torch
from torch import Tensor, nn

from chiar.layers.context import Memory, TokenContext

BIAS = 2.0  # b at first under gate_init="biased": g is then 0.88


class Gate(nn.Linear):
    """w_g and b, a type of its own because it starts differently from other linear maps."""


class MetaRouter(nn.Module):
    """Eq. 4: g = σ(w_g · x̄ + b). Eq. 5: layer 1 gives g · spectral(x) + (1 − g) · x.
    `pool` says what x̄ averages over: "batch" (the paper) and "sequence" let a token see the future, "batch" also its
    neighbours in the batch; "causal" is the running mean over the row so far. Padding is never counted."""

    def __init__(self, width: int, pool: str, skip_below: float | None) -> None:
        super().__init__()
        self.pool, self.skip_below = pool, skip_below
        self.gate = Gate(width, 1)

    def forward(self, x_BTD: Tensor, context: TokenContext, memory: Memory = None) -> Tensor:
        """The gate of each token, (B, T, 1) in fp32."""
        frozen = memory.get("gate") if memory is not None else None
        if frozen is not None:
            return frozen.expand(*x_BTD.shape[:2], 1)
        mean = self._pooled(x_BTD.float(), context, memory)
        with torch.autocast(x_BTD.device.type, enabled=False):
            gate = torch.sigmoid(nn.functional.linear(mean, self.gate.weight.float(), self.gate.bias.float()))
        if self.skip_below is not None and not self.training:
            gate = torch.where(gate < self.skip_below, 0.0, gate)
        if memory is not None and self.pool != "causal":
            memory.put("gate", gate.expand(x_BTD.shape[0], 1, 1))
        return gate.expand(*x_BTD.shape[:2], 1)

    def shut(self, gate_BT1: Tensor) -> bool:
        """Whether the hard gate leaves nothing of the layer. Looks at values, so only where a bound is set."""
        if self.skip_below is None or self.training or torch.compiler.is_compiling():
            return False
        return not bool(gate_BT1.any())

    def _pooled(self, x_BTD: Tensor, context: TokenContext, memory: Memory) -> Tensor:
        count = torch.ones_like(x_BTD[..., :1])
        if context.real_BT is not None:
            count = context.real_BT[..., None].to(x_BTD.dtype)
            x_BTD = x_BTD * count
        if self.pool == "batch":
            return x_BTD.sum((0, 1), keepdim=True) / count.sum((0, 1), keepdim=True).clamp_min(1)
        if self.pool == "sequence":
            return x_BTD.sum(1, keepdim=True) / count.sum(1, keepdim=True).clamp_min(1)
        total_BTD, count_BT1 = x_BTD.cumsum(1), count.cumsum(1)
        if memory is not None:
            past_total, past_count = memory.get("gate_total"), memory.get("gate_count")
            if past_total is not None and past_count is not None:
                total_BTD, count_BT1 = total_BTD + past_total, count_BT1 + past_count
            memory.put("gate_total", total_BTD[:, -1:])
            memory.put("gate_count", count_BT1[:, -1:])
        return total_BTD / count_BT1.clamp_min(1)
