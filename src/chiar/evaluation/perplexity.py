"""Next-token losses of a language model over a prepared split, in blocks or with a sliding window."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from chiar.data.shards import Corpus, Split
from chiar.errors import InputError
from chiar.evaluation.report import LanguageScores, RoutingUse
from chiar.evaluation.routing_use import RoutingTally
from chiar.evaluation.unigram import unigram_entropy

# Logits of a whole batch over GPT-2's vocabulary would take gigabytes.
LOGIT_ROWS = 1024


@dataclass(frozen=True)
class Window:
    """Reads `inputs` ids from `start`, predicts the id after each; the first `known` were predicted before."""

    start: int
    inputs: int
    known: int


def windows(targets: int, length: int, stride: int) -> Iterator[Window]:
    """Every one of `targets` ids after the first is new in exactly one window, with length − stride ids before it.

    The first window has no more before it than there is. A stride of `length` gives blocks side by side, the last one
    as long as what is left.
    """
    start = covered = 0
    while covered < targets:
        stop = min(start + length, targets)
        yield Window(start, stop - start, covered - start)
        start, covered = start + stride, stop


def batches(stream: Iterator[Window], size: int) -> Iterator[list[Window]]:
    """Up to `size` windows of one length; a shorter one at the end is a batch of its own and needs no padding."""
    batch: list[Window] = []
    for window in stream:
        if batch and (len(batch) == size or window.inputs != batch[0].inputs):
            yield batch
            batch = []
        batch.append(window)
    if batch:
        yield batch


def count_windows(targets: int, length: int, stride: int, rows: int | None) -> int:
    total = 1 + max(0, -(-(targets - length) // stride))
    return total if rows is None else min(rows, total)


@torch.inference_mode()
def measure_perplexity(
    model: Any,
    corpus: Corpus,
    split: Split,
    *,
    length: int,
    stride: int | None = None,
    rows: int | None = None,
    batch_size: int = 16,
    precision: str = "fp32",
    advance: Callable[[int], None] = lambda windows: None,
) -> tuple[LanguageScores, RoutingUse]:
    """Losses of a ChiarForCausalLM, added in float64; routing is counted over the tokens that were predicted from.

    `rows` limits the windows; the text behind word and byte figures is then that of the tokens predicted. `advance`
    is told how many windows were done.
    """
    if stride is not None and not 1 <= stride <= length:
        raise InputError(f"the stride must lie between 1 and the length {length}, got {stride}.")
    if split.tokens < 2:
        raise InputError(f"split {split.name!r} has {split.tokens} token: there is nothing to predict.")
    device, training = model.device, model.training
    total = torch.zeros((), dtype=torch.float64, device=device)
    tally = RoutingTally(model.config, device)
    tokens = 0
    model.eval()
    try:
        for batch in batches(islice(windows(split.tokens - 1, length, stride or length), rows), batch_size):
            starts, known = np.array([window.start for window in batch]), [window.known for window in batch]
            read = torch.from_numpy(split.rows(starts, batch[0].inputs + 1)).to(device)
            new_BT = torch.arange(batch[0].inputs, device=device) >= torch.tensor(known, device=device)[:, None]
            with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
                decoded = model.model(read[:, :-1], output_routing=True)
                losses = token_losses(model.lm_head, decoded.last_hidden_state[new_BT], read[:, 1:][new_BT])
            total += losses
            tally.add(decoded.routing, new_BT)
            tokens += sum(window.inputs - window.known for window in batch)
            advance(len(batch))
    finally:
        model.train(training)
    if not math.isfinite(float(total)):
        raise InputError("the loss is not finite: the model's weights are damaged or its training diverged.")
    words, lines, size = count_text(corpus, split, tokens)
    without_context = unigram_entropy(split, corpus.vocab_size, tokens)
    return LanguageScores(tokens, float(total) / tokens, words, lines, size, without_context), tally.use()


def token_losses(lm_head: torch.nn.Module, states_ND: Tensor, targets_N: Tensor) -> Tensor:
    """Sum of the losses in float64, a few rows of logits at a time."""
    total = torch.zeros((), dtype=torch.float64, device=states_ND.device)
    for states_nD, targets_n in zip(states_ND.split(LOGIT_ROWS), targets_N.split(LOGIT_ROWS), strict=True):
        total += F.cross_entropy(lm_head(states_nD).float(), targets_n, reduction="none").double().sum()
    return total


def count_text(corpus: Corpus, split: Split, tokens: int) -> tuple[int, int, int]:
    """Words, lines and bytes of the whole split, or of the text its first `tokens` targets stand for."""
    if tokens == split.tokens - 1:
        return split.words, split.lines, split.bytes
    tokenizer = corpus.tokenizer()
    ids = split.read(1, tokens)
    documents = [tokenizer.decode_bytes(part) for part in np.split(ids, np.flatnonzero(ids == corpus.end_of_text))]
    texts = [document.decode("utf-8", "replace") for document in documents]
    words, lines = sum(len(text.split()) for text in texts), sum(text.count("\n") for text in texts)
    return words, lines, sum(map(len, documents))
