"""The paper's regulariser against routing collapse."""

import torch
from torch import Tensor

from chiar.layers.routers import Route


def collapse_loss(routes: list[Route | None], real_BT: Tensor | None, strength: float) -> Tensor | None:
    """−λ · (entropy of mean operator use), averaged over routed layers; it has a gradient where routers do."""
    used = [route for route in routes if route is not None]
    if strength == 0.0 or not used:
        return None
    terms = []
    for route in used:
        use_BTK = route.weights_BTK.detach() if route.probabilities_BTK is None else route.probabilities_BTK
        use_NK = use_BTK.flatten(0, 1) if real_BT is None else use_BTK[real_BT]
        mean_K = use_NK.mean(0)
        terms.append(torch.special.entr(mean_K.clamp_min(1e-12)).sum())
    return -strength * torch.stack(terms).mean()
