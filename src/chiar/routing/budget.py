"""The loss by which a learned router holds its share of attention."""

import torch
from torch import Tensor

from chiar.layers.routers import Route, one_hot
from chiar.routing.collapse import mean_over_tokens


def budget_loss(
    routes: list[Route], real_BT: Tensor | None, fractions: list[float] | None, strength: float
) -> Tensor | None:
    """λ · (share of attention − f)², averaged over routed layers: the share that was chosen, with the gradient of the
    mean probability. The mean probability itself can be f while no token's is above ½."""
    if strength == 0.0 or not routes or fractions is None:
        return None
    terms = []
    for route, fraction in zip(routes, fractions, strict=True):
        assert route.probabilities_BTK is not None
        p_BTK = route.probabilities_BTK
        chosen_BTK = one_hot(route.choice_BT, p_BTK.shape[-1]).to(p_BTK.dtype)
        share = mean_over_tokens(chosen_BTK + (p_BTK - p_BTK.detach()), real_BT)[-1]
        terms.append((share - fraction).square())
    return strength * torch.stack(terms).mean()
