"""How likely a continuation is behind its context, and what a model writes there: rows of any length, in batches."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation.stopping_criteria import StoppingCriteria, StoppingCriteriaList

from chiar.data.tokens import TextCodec
from chiar.errors import InputError
from chiar.evaluation.perplexity import LOGIT_ROWS

Advance = Callable[[int], None]
"""Told how many rows were done."""


@dataclass(frozen=True)
class Pair:
    context: list[int]
    continuation: list[int]


@dataclass(frozen=True)
class Likelihood:
    nats: float
    """log p(continuation | context)."""
    greedy: bool
    """Whether greedy decoding would write it."""


def in_batches(lengths: list[int], size: int) -> Iterator[list[int]]:
    """Numbers of rows, the longest first, so that rows of a batch need little padding."""
    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    yield from (order[start : start + size] for start in range(0, len(order), size))


def rows_at_once(config: Any, batch_size: int) -> int:
    """The paper's gate is a mean over all rows read together: such a model reads them one by one."""
    return 1 if config.meta_router and config.gate_pool == "batch" else batch_size


def fit(pair: Pair, length: int) -> Pair:
    """The pair without the beginning of a context that is too long; the last token is read by nobody."""
    if len(pair.continuation) > length:
        raise InputError(
            f"a continuation has {len(pair.continuation)} tokens and the model reads {length} at once: raise --length."
        )
    room = length + 1 - len(pair.continuation)
    return Pair(pair.context[-room:], pair.continuation)


@torch.no_grad()
def score_continuations(
    model: Any,
    pairs: list[Pair],
    *,
    batch_size: int = 16,
    precision: str = "fp32",
    advance: Advance = lambda done: None,
) -> list[Likelihood]:
    """Sums are in float64. No context may be empty."""
    assert all(pair.context for pair in pairs), "something must come before the first token"
    found: dict[int, Likelihood] = {}
    device, lengths = model.device, [len(pair.context) + len(pair.continuation) for pair in pairs]
    for numbers in in_batches(lengths, rows_at_once(model.config, batch_size)):
        rows = [(pairs[n].context + pairs[n].continuation)[:-1] for n in numbers]
        ids_BT, mask_BT = padded(rows, device, left=False)
        new_BT = torch.zeros_like(ids_BT, dtype=torch.bool)
        for row, number in enumerate(numbers):
            new_BT[row, len(pairs[number].context) - 1 : len(rows[row])] = True
        targets_N = torch.tensor([token for n in numbers for token in pairs[n].continuation], device=device).long()
        with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
            states_ND = model.model(ids_BT, attention_mask=mask_BT).last_hidden_state[new_BT]
            nats_N, best_N = token_likelihoods(model.lm_head, states_ND, targets_N)
        sizes = [len(pairs[n].continuation) for n in numbers]
        for number, nats, best in zip(numbers, nats_N.split(sizes), best_N.split(sizes), strict=True):
            found[number] = Likelihood(float(nats.sum()), bool(best.all()))
        advance(len(numbers))
    return [found[number] for number in range(len(pairs))]


def token_likelihoods(lm_head: Any, states_ND: Tensor, targets_N: Tensor) -> tuple[Tensor, Tensor]:
    """log p of each target, and whether it is the likeliest; a few rows of logits at a time."""
    nats, best = [targets_N.new_zeros(0, dtype=torch.float64)], [targets_N.new_zeros(0, dtype=torch.bool)]
    for states_nD, targets_n in zip(states_ND.split(LOGIT_ROWS), targets_N.split(LOGIT_ROWS), strict=True):
        logits_nV = lm_head(states_nD).float()
        nats.append(logits_nV.log_softmax(-1).gather(1, targets_n[:, None])[:, 0].double())
        best.append(logits_nV.argmax(-1) == targets_n)
    return torch.cat(nats), torch.cat(best)


def padded(rows: list[list[int]], device: torch.device, left: bool) -> tuple[Tensor, Tensor | None]:
    """Ids, and which of them are real; None where all rows are equally long."""
    longest = max(map(len, rows))
    ids_BT = torch.zeros(len(rows), longest, dtype=torch.long)
    mask_BT = torch.zeros_like(ids_BT)
    for number, row in enumerate(rows):
        place = slice(longest - len(row), longest) if left else slice(0, len(row))
        ids_BT[number, place] = torch.tensor(row)
        mask_BT[number, place] = 1
    return ids_BT.to(device), None if bool(mask_BT.all()) else mask_BT.to(device)


class StopAtText(StoppingCriteria):
    """Rows end where one of these texts comes up behind the prompt."""

    def __init__(self, codec: TextCodec, stops: list[str], prompt: int) -> None:
        self.codec, self.stops, self.prompt = codec, stops, prompt
        self.reach = max(len(stop.encode()) for stop in stops) + 1
        """Tokens that a stop text may lie in, not counting those that show nothing: the others are a byte at least."""
        self.known: dict[int, bool] = {}

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        texts = (self.codec.decode(self.tail(row)) for row in input_ids[:, self.prompt :].tolist())
        done = [any(stop in text for stop in self.stops) for text in texts]
        return torch.tensor(done, device=input_ids.device)

    def tail(self, ids: list[int]) -> list[int]:
        """The end of these, with `reach` tokens that show something."""
        shown, start = 0, len(ids)
        while start and shown < self.reach:
            start -= 1
            shown += self.shows(ids[start])
        return ids[start:]

    def shows(self, token: int) -> bool:
        if token not in self.known:
            self.known[token] = bool(self.codec.decode([token]))
        return self.known[token]


@torch.no_grad()
def continue_texts(
    model: Any,
    codec: TextCodec,
    prompts: list[list[int]],
    stops: list[str],
    settings: GenerationConfig,
    batch_size: int,
) -> list[str]:
    """What the model writes behind each prompt, up to the first of the stop texts."""
    written: dict[int, str] = {}
    for numbers in in_batches([len(prompt) for prompt in prompts], rows_at_once(model.config, batch_size)):
        ids_BT, mask_BT = padded([prompts[n] for n in numbers], model.device, left=True)
        criteria = StoppingCriteriaList([StopAtText(codec, stops, ids_BT.shape[1])] if stops else [])
        mask_BT = torch.ones_like(ids_BT) if mask_BT is None else mask_BT
        out_BT = model.generate(ids_BT, attention_mask=mask_BT, generation_config=settings, stopping_criteria=criteria)
        for number, row in zip(numbers, out_BT[:, ids_BT.shape[1] :].tolist(), strict=True):
            text = codec.decode(until_end(row, settings.eos_token_id))
            written[number] = text[: min((text.find(stop) for stop in stops if stop in text), default=len(text))]
    return [written[number] for number in range(len(prompts))]


def until_end(ids: list[int], ends: Any) -> list[int]:
    """Rows that end earlier than others are filled up behind the end of text."""
    known = set(ends if isinstance(ends, list) else [ends])
    return ids[: next((at for at, token in enumerate(ids) if token in known), len(ids))]
