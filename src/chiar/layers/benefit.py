"""What attention does to a token, as a target for the router that decides whether it gets any."""

import torch
import torch.nn.functional as F
from torch import Tensor

from chiar.layers.derived import stored_in


@torch.no_grad()
def attention_benefit(x_BTD: Tensor, output_BTD: Tensor) -> Tensor:
    """1 − cos(x, x + attention(x)): how far attention turns a token's state. Scale does not count, as norms follow."""
    dtype = stored_in(x_BTD.dtype)
    return 1 - F.cosine_similarity(x_BTD.to(dtype), (x_BTD + output_BTD).to(dtype), dim=-1)


def benefit_loss(lead_BT: Tensor, benefit_BT: Tensor, real_BT: Tensor | None) -> Tensor:
    """Mean squared distance of the router's logit difference from the benefit, standardised over the batch."""
    real_BT = torch.ones_like(lead_BT, dtype=torch.bool) if real_BT is None else real_BT
    count = real_BT.sum().clamp_min(1)

    def mean(values_BT: Tensor) -> Tensor:
        return torch.where(real_BT, values_BT, 0).sum() / count

    centred_BT = benefit_BT - mean(benefit_BT)
    target_BT = centred_BT / mean(centred_BT.square()).sqrt().clamp_min(1e-6)
    return mean((lead_BT - target_BT).square())
