"""The texts that are being written: rows of one cache that join behind their prompt and leave when they end."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from chiar.data.tokens import TextCodec
from chiar.model.cache import ChiarCache
from chiar.serving.job import Job
from chiar.serving.pieces import Piece, TokenScore, Writer
from chiar.serving.requests import Prompt
from chiar.serving.sampling import Sampler, find_likeliest, score

SCORED = 256
"""Tokens of a prompt whose logits are there at the same time."""


class Row:
    """One choice of a request."""

    def __init__(self, job: Job, prompt: int, number: int, codec: TextCodec, device: torch.device) -> None:
        self.job, request = job, job.request
        self.writer = Writer(prompt * request.n + number, codec, request.stop)
        self.sampler = Sampler(request, number, device)
        self.room = request.max_tokens
        self.stored = len(request.prompts[prompt].ids)
        """Tokens the cache has of it, which is also the position of the next."""
        self.last = 0
        """The token that comes next into the cache."""
        self.done = False

    @property
    def is_over(self) -> bool:
        return self.done or self.job.is_over

    def take(self, token: TokenScore, ends: set[int]) -> None:
        self.last = token.id
        self.room -= 1
        self.job.completion_tokens += 1
        piece = self.writer.add(token)
        if token.id in ends or self.writer.stopped:
            self.finish("stop", piece)
        elif not self.room:
            self.finish("length", piece)
        elif piece is not None:
            self.job.send(piece)

    def finish(self, reason: str, piece: Piece | None = None) -> None:
        self.done = True
        last = self.writer.end(reason)
        if piece is not None:
            last = Piece(last.choice, piece.text + last.text, piece.tokens + last.tokens, last.finish)
        self.job.send(last)


class Batch:
    """Prompts are read one by one, so that a text is the same whoever else is served: the paper's gate is a mean over
    all rows read together. Decoding then needs no padding: keys are stored by each row's own length."""

    def __init__(
        self,
        model: Any,
        codec: TextCodec,
        note_routes: Callable[[Any], None],
        give_up: Callable[[list[Job], Exception], None],
    ) -> None:
        """`give_up` is told which requests failed, where others go on."""
        self.model, self.codec, self.note_routes, self.give_up = model, codec, note_routes, give_up
        ends = model.config.eos_token_id
        self.ends: set[int] = set(ends if isinstance(ends, list) else [] if ends is None else [ends])
        self.rows: list[Row] = []
        self.cache: ChiarCache | None = None

    @property
    def live(self) -> int:
        return sum(not row.is_over for row in self.rows)

    @torch.no_grad()
    def begin(self, job: Job, number: int) -> None:
        """Read prompt `number` of a request and write the first token of its choices."""
        model, request = self.model, job.request
        prompt, device = request.prompts[number], model.device
        cache = ChiarCache(len(model.model.layers))
        decoded = model.model(torch.tensor([prompt.ids], device=device), past_key_values=cache, output_routes=True)
        self.note_routes(decoded.routes)
        states_TD = decoded.last_hidden_state[0]
        rows = [Row(job, number, choice, self.codec, device) for choice in range(request.n)]
        if request.echo:
            scores = self.score_prompt(prompt, states_TD, request.logprobs)
            for row in rows:
                job.send(Piece(row.writer.choice, prompt.text, scores))
        if not request.max_tokens:
            for row in rows:
                row.finish("length")
            return
        self.extend(rows, model.lm_head(states_TD[-1]).expand(len(rows), -1))
        if len(rows) > 1:
            cache.batch_repeat_interleave(len(rows))
        self.join(cache, rows)

    def join(self, cache: ChiarCache, rows: list[Row]) -> None:
        self.drop()
        if self.cache is None:
            self.cache = cache
        else:
            self.cache.join(cache, len(self.rows), len(rows))
        self.rows += rows

    @torch.no_grad()
    def step(self) -> None:
        """One more token for every row. A row that is over is carried along until half of them are."""
        if 2 * self.live <= len(self.rows):
            self.drop()
        if self.cache is None:
            return
        device, rows = self.model.device, self.rows
        ids_B1 = torch.tensor([[row.last] for row in rows], device=device)
        positions_B1 = torch.tensor([[row.stored] for row in rows], device=device)
        self.cache.seen = max(row.stored for row in rows)
        output = self.model(ids_B1, past_key_values=self.cache, position_ids=positions_B1)
        for row in rows:
            row.stored += not row.is_over  # positions may end where the row did
        self.extend(rows, output.logits[:, -1])

    def extend(self, rows: list[Row], logits_BV: Tensor) -> None:
        """The next token of each row; where there is none, that row's request fails alone."""
        logits_BV = logits_BV.float()
        for row, logits_V, likeliest in zip(rows, logits_BV, find_likeliest(logits_BV), strict=True):
            if row.is_over:
                continue
            try:
                row.take(row.sampler.choose(logits_V, likeliest), self.ends)
            except Exception as error:
                self.give_up([row.job], error)

    def drop(self) -> None:
        """Let go of the rows that are over. Where that fails half-way the cache is of no use to any of its rows."""
        kept = [number for number, row in enumerate(self.rows) if not row.is_over]
        if len(kept) == len(self.rows):
            return
        self.rows = [self.rows[number] for number in kept]
        if not kept:
            self.cache = None
        elif self.cache is not None:
            try:
                self.cache.batch_select_indices(torch.tensor(kept, device=self.model.device))
            except Exception as error:
                self.give_up([row.job for row in self.clear()], error)

    def clear(self) -> list[Row]:
        """Forget everything; the rows that were being written."""
        rows, self.rows, self.cache = self.rows, [], None
        return rows

    def score_prompt(self, prompt: Prompt, states_TD: Tensor, logprobs: int | None) -> list[TokenScore]:
        """Nobody asks for a prompt's tokens without their log-probabilities."""
        if logprobs is None:
            return []
        scores = [TokenScore(prompt.ids[0])]
        for start in range(0, len(prompt.ids) - 1, SCORED):
            targets = prompt.ids[start + 1 : start + 1 + SCORED]
            logits_TV = self.model.lm_head(states_TD[start : start + len(targets)])
            scores += score(logits_TV, targets, logprobs)
        return scores
