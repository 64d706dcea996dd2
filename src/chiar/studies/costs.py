"""Counted FLOPs a token of a variant."""

from copy import deepcopy

from chiar.config import ChiarConfig
from chiar.routing.flops import Shares, count_flops, operator_shares
from chiar.training.reporting import training_flops

PARTS = 32
"""In which the fall of f is summed up."""


def count_costs(config: ChiarConfig, length: int, shares: Shares) -> dict[str, float]:
    """Forward: the layers, the output projection (logits) and both together. Training: with the backward pass, where a
    router that learns from every operator's output runs all of them on all tokens, and where f settles from 1 all its
    values count."""
    count = count_flops(config, length, shares)
    logits = count.part("logits")
    trained, trained_shares = config, shares
    if config.routed_layers and (config.trains_densely or not config.can_run_sparse):
        trained = deepcopy(config)
        trained.routing = "soft"
        trained_shares = operator_shares(trained)
    training = training_flops(trained, length, trained_shares)
    if config.settle:
        final = [share["attention"] for share in shares]
        falling = [operator_shares(config, [1 - (1 - f) * (n + 0.5) / PARTS for f in final]) for n in range(PARTS)]
        before = sum(training_flops(trained, length, shares_then) for shares_then in falling) / PARTS
        training = config.settle * before + (1 - config.settle) * training
    return {"layers": count.total - logits, "logits": logits, "forward": count.total, "training": training}
