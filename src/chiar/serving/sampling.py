"""The next token of each row, by the row's own settings."""

import torch
from torch import Tensor
from transformers.generation.logits_process import TemperatureLogitsWarper, TopPLogitsWarper

from chiar.generation.stream import GREEDY_BELOW
from chiar.serving.pieces import TokenScore
from chiar.serving.requests import CompletionRequest


class Sampler:
    """Draws as transformers' generate does, from a generator of its own: neighbours in the batch change nothing."""

    def __init__(self, request: CompletionRequest, number: int, device: torch.device) -> None:
        """`number` counts the choices of a prompt."""
        self.greedy, self.logprobs = request.temperature < GREEDY_BELOW, request.logprobs
        self.warpers = []
        if not self.greedy and request.temperature != 1:
            self.warpers.append(TemperatureLogitsWarper(request.temperature))
        if request.top_p < 1:
            self.warpers.append(TopPLogitsWarper(request.top_p))
        self.generator = torch.Generator(device)
        if request.seed is None:
            self.generator.seed()
        else:
            self.generator.manual_seed(request.seed + number)

    def choose(self, logits_V: Tensor, likeliest: int | None) -> TokenScore:
        """The next token; an ArithmeticError where there is no likeliest."""
        if likeliest is None:
            raise ArithmeticError("the model's logits are not finite")
        token = likeliest if self.greedy else self.draw(logits_V)
        return TokenScore(token) if self.logprobs is None else score(logits_V[None], [token], self.logprobs)[0]

    def draw(self, logits_V: Tensor) -> int:
        scores_1V = logits_V[None]
        for warper in self.warpers:
            scores_1V = warper(None, scores_1V)
        return int(torch.multinomial(scores_1V.softmax(-1), 1, generator=self.generator))


def find_likeliest(logits_BV: Tensor) -> list[int | None]:
    """One token a row, None where logits are not finite. All rows are looked at together: each look waits for the
    device."""
    best_B = logits_BV.argmax(-1)  # NaN counts as the largest
    finite_B = logits_BV.gather(1, best_B[:, None])[:, 0].isfinite()
    tokens, finite = torch.stack([best_B, finite_B.long()]).tolist()
    return [token if ok else None for token, ok in zip(tokens, finite, strict=True)]


def score(logits_TV: Tensor, tokens: list[int], count: int) -> list[TokenScore]:
    """Each token with its log-probability and those of the `count` likeliest."""
    logprobs_TV = logits_TV.float().log_softmax(-1)
    own = logprobs_TV.gather(1, torch.tensor(tokens, device=logprobs_TV.device)[:, None])[:, 0].tolist()
    values, ids = (x.tolist() for x in logprobs_TV.topk(min(count, logprobs_TV.shape[1])))
    return [TokenScore(t, p, dict(zip(i, v, strict=True))) for t, p, i, v in zip(tokens, own, ids, values, strict=True)]
