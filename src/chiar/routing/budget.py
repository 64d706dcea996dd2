"""The loss by which a learned router holds its share of attention."""

import torch
from torch import Tensor

from chiar.layers.routers import Route
from chiar.routing.collapse import mean_over_tokens


def budget_loss(
    routes: list[Route], real_BT: Tensor | None, fractions: list[float] | None, strength: float
) -> Tensor | None:
    """λ · (mean probability of attention − f)², averaged over routed layers."""
    if strength == 0.0 or not routes or fractions is None:
        return None
    terms = []
    for route, fraction in zip(routes, fractions, strict=True):
        assert route.probabilities_BTK is not None
        terms.append((mean_over_tokens(route.probabilities_BTK, real_BT)[-1] - fraction).square())
    return strength * torch.stack(terms).mean()
