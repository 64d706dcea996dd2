"""AdamW with decay on matrices only, and the cosine schedule."""

import math

import torch
from torch import nn

from chiar.training.settings import TrainSettings


def make_optimizer(model: nn.Module, settings: TrainSettings, device: torch.device) -> torch.optim.AdamW:
    """Matrices (and embeddings) decay; biases, norms and the filters, spectral and temporal, do not."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    groups = [
        {"params": [p for name, p in named if decays(name, p)], "weight_decay": settings.weight_decay},
        {"params": [p for name, p in named if not decays(name, p)], "weight_decay": 0.0},
    ]
    fused = device.type == "cuda"
    betas = (settings.beta1, settings.beta2)
    optimizer = torch.optim.AdamW(groups, lr=settings.learning_rate, betas=betas, fused=fused or None)
    # AdamW makes its state on the first step; made now, so that a checkpoint can be read into it.
    for _, parameter in named:
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device if fused else "cpu"),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
    return optimizer


def decays(name: str, parameter: nn.Parameter) -> bool:
    return parameter.ndim >= 2 and not name.endswith("coefficients_KD")


def learning_rate(settings: TrainSettings, step: int) -> float:
    """Linear warm-up, then a cosine down to the final rate at the last step."""
    if step < settings.warmup:
        return settings.learning_rate * (step + 1) / settings.warmup
    span = max(settings.steps - settings.warmup, 1)
    progress = min((step - settings.warmup) / span, 1.0)
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    return settings.final_learning_rate + (settings.learning_rate - settings.final_learning_rate) * cosine


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate
