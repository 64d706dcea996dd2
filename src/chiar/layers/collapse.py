"""The paper's regulariser against routing collapse."""

import torch
from torch import Tensor

from chiar.layers.routers import Route


def mean_over_tokens(values_BTK: Tensor, real_BT: Tensor | None) -> Tensor:
    """The mean over real tokens."""
    if real_BT is None:
        return values_BTK.mean((0, 1))
    real_BT1 = real_BT[..., None].to(values_BTK.dtype)
    return (values_BTK * real_BT1).sum((0, 1)) / real_BT1.sum().clamp_min(1)


def collapse_loss(routes: list[Route], real_BT: Tensor | None, strength: float) -> Tensor | None:
    """−λ · (entropy of mean operator use), averaged over routed layers; it has a gradient where routers do."""
    if strength == 0.0 or not routes:
        return None
    terms = []
    for route in routes:
        use_BTK = route.weights_BTK.detach() if route.probabilities_BTK is None else route.probabilities_BTK
        terms.append(torch.special.entr(mean_over_tokens(use_BTK, real_BT).clamp_min(1e-12)).sum())
    return -strength * torch.stack(terms).mean()
