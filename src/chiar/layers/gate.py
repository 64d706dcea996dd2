"""The MetaRouter: a learned gate on layer 1 (Eq. 4 and Eq. 5)."""

import torch
from torch import Tensor, nn

from chiar.layers.context import Memory, TokenContext

BIAS = 2.0  # initial b under gate_init="biased", where g is 0.88


class Gate(nn.Linear):
    """w_g and b; a type of its own because it is initialised differently from other linear maps."""


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
        """Whether the hard gate removes the whole layer. Reads values, so only if a bound is set."""
        if self.skip_below is None or self.training or torch.compiler.is_compiling():
            return False
        return not bool(gate_BT1.any())

    def _pooled(self, x_BTD: Tensor, context: TokenContext, memory: Memory) -> Tensor:
        count_BT1 = torch.ones_like(x_BTD[..., :1]) if context.real_BT is None else context.real_BT[..., None].float()
        sums = torch.cat([x_BTD * count_BT1, count_BT1], dim=-1)  # of states, and how many they are
        if self.pool == "causal":
            sums, past = sums.cumsum(1), None if memory is None else memory.get("gate_sums")
            sums = sums if past is None else sums + past
            if memory is not None:
                memory.put("gate_sums", sums[:, -1:])
        else:
            sums = sums.sum((0, 1) if self.pool == "batch" else 1, keepdim=True)
        return sums[..., :-1] / sums[..., -1:].clamp_min(1)
