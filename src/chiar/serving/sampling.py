"""The next token of each row, by the row's own settings."""

import torch
from torch import Tensor
from transformers.generation.logits_process import TemperatureLogitsWarper, TopPLogitsWarper

from chiar.serving.pieces import TokenScore
from chiar.serving.requests import CompletionRequest

SCORED = 256
"""Rows of logits at a time."""


class Sampler:
    """Draws as transformers' generate does, from a generator of its own: neighbours in the batch change nothing."""

    def __init__(self, request: CompletionRequest, number: int, device: torch.device) -> None:
        """`number` counts the choices of a prompt."""
        self.greedy, self.logprobs = request.temperature == 0, request.logprobs
        self.warpers = []
        if request.temperature not in (0, 1):
            self.warpers.append(TemperatureLogitsWarper(request.temperature))
        if request.top_p < 1:
            self.warpers.append(TopPLogitsWarper(request.top_p))
        self.generator = torch.Generator(device)
        if request.seed is None:
            self.generator.seed()
        else:
            self.generator.manual_seed(request.seed + number)

    def draw(self, logits_V: Tensor) -> int:
        scores_1V = logits_V[None]
        for warper in self.warpers:
            scores_1V = warper(None, scores_1V)
        return int(torch.multinomial(scores_1V.softmax(-1), 1, generator=self.generator))


def choose(logits_BV: Tensor, samplers: list[Sampler]) -> list[TokenScore]:
    """One token a row. Greedy rows are looked at together: each look waits for the device."""
    logits_BV = logits_BV.float()
    likeliest = logits_BV.argmax(-1).tolist()
    chosen = []
    for logits_V, best, sampler in zip(logits_BV, likeliest, samplers, strict=True):
        token = best if sampler.greedy else sampler.draw(logits_V)
        chosen.append(
            TokenScore(token) if sampler.logprobs is None else score(logits_V[None], [token], sampler.logprobs)[0]
        )
    return chosen


def score(logits_TV: Tensor, tokens: list[int], count: int) -> list[TokenScore]:
    """Each token with its log-probability and those of the `count` likeliest."""
    scores = []
    for part_TV, part in zip(
        logits_TV.split(SCORED), (tokens[i : i + SCORED] for i in range(0, len(tokens), SCORED)), strict=True
    ):
        logprobs_TV = part_TV.float().log_softmax(-1)
        own = logprobs_TV.gather(1, torch.tensor(part, device=logprobs_TV.device)[:, None])[:, 0].tolist()
        values, ids = (x.tolist() for x in logprobs_TV.topk(min(count, logprobs_TV.shape[1])))
        scores += [
            TokenScore(t, p, dict(zip(i, v, strict=True))) for t, p, i, v in zip(part, own, ids, values, strict=True)
        ]
    return scores
