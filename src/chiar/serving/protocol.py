"""OpenAI's completions: requests, every field checked and nothing ignored that would change the text, and answers."""

import asyncio
import time
import uuid
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from chiar.data.tokens import TextCodec
from chiar.generation.writer import Piece, Row, Sampling, TokenScore
from chiar.web import TEXT, UNKNOWN, Field, Refused, between, check_fields, to_json

# Tokens written unless a request says otherwise, which is OpenAI's.
DEFAULT_TOKENS = 16


@dataclass(frozen=True)
class Limits:
    """`length`: tokens of a prompt and its continuation. `rows`: texts written at the same time, and texts of one
    request. `waiting`: requests. `body`: bytes of a request. `grace`: seconds to finish when told to stop."""

    length: int
    rows: int = 16
    waiting: int = 64
    body: int = 1 << 20
    grace: float = 30.0


@dataclass
class Job:
    """One request on its way, with `n` choices for each prompt (ids and text), and its answer."""

    model: str
    codec: TextCodec
    prompts: list[tuple[list[int], str]]
    sampling: Sampling
    n: int = 1
    echo: bool = False
    stream: bool = False
    include_usage: bool = False

    def __post_init__(self) -> None:
        name, now = f"cmpl-{uuid.uuid4().hex}", int(time.time())
        self.head = {"id": name, "object": "text_completion", "created": now, "model": self.model}
        self.rows: list[Row] = []
        self.begun = 0  # prompts that were read
        # Choices that are not finished. Cancelled: nobody reads any more; the writer drops it before its next step.
        self.left, self.failed, self.cancelled = len(self.prompts) * self.n, False, False
        self.offsets = [0] * self.left  # characters of each choice that went out
        # The model's thread appends; whoever has it do so tells the loop.
        self.unsent: deque[tuple[int, Piece] | Refused] = deque()
        self.news = asyncio.Event()

    @property
    def is_over(self) -> bool:
        return self.failed or self.cancelled or not self.left

    def put(self, choice: int, piece: Piece) -> None:
        self.left -= piece.finish is not None
        self.unsent.append((choice, piece))

    def fail(self, error: Refused) -> None:
        if not self.is_over:
            self.failed = True
            self.unsent.append(error)

    async def pieces(self) -> AsyncIterator[tuple[int, Piece]]:
        """With the number of their choice, until every choice has ended."""
        open_choices = len(self.offsets)
        while open_choices:
            while not self.unsent:
                self.news.clear()
                await self.news.wait()
            item = self.unsent.popleft()
            if isinstance(item, Refused):
                raise item
            open_choices -= item[1].finish is not None
            yield item

    async def whole(self) -> dict[str, Any]:
        pieces: list[list[Piece]] = [[] for _ in self.offsets]
        async for number, piece in self.pieces():
            pieces[number].append(piece)
        choices = []
        for number, own in enumerate(pieces):
            tokens = [token for piece in own for token in piece.tokens]
            choices.append(self.choice(number, Piece("".join(piece.text for piece in own), tokens, own[-1].finish)))
        return {**self.head, "choices": choices, "usage": self.usage()}

    async def events(self) -> AsyncIterator[bytes]:
        """Server-sent events, as OpenAI's: a chunk for every piece of text, then [DONE]; a failure is an event too."""
        try:
            async for number, piece in self.pieces():
                yield event({**self.head, "choices": [self.choice(number, piece)]})
            if self.include_usage:
                yield event({**self.head, "choices": [], "usage": self.usage()})
            yield b"data: [DONE]\n\n"
        except Refused as error:
            yield event(error.body())

    def choice(self, number: int, piece: Piece) -> dict[str, Any]:
        logprobs = None
        if self.sampling.logprobs is not None:
            texts, offsets = self.codec.pieces([token.id for token in piece.tokens]), []
            for text in texts:
                offsets.append(self.offsets[number])
                self.offsets[number] += len(text)
            own, top = [token.logprob for token in piece.tokens], [self.likeliest(token) for token in piece.tokens]
            logprobs = {"tokens": texts, "token_logprobs": own, "top_logprobs": top, "text_offset": offsets}
        return {"index": number, "text": piece.text, "logprobs": logprobs, "finish_reason": piece.finish}

    def likeliest(self, token: TokenScore) -> dict[str, float] | None:
        """By text, as OpenAI's; of several tokens that look alike the likeliest, which is the first."""
        falling = zip(self.codec.pieces(list(token.top)), token.top.values(), strict=True)
        return None if token.logprob is None else dict(reversed(list(falling)))

    def usage(self) -> dict[str, int]:
        read, written = sum(len(ids) for ids, _ in self.prompts), sum(len(row.tokens) for row in self.rows)
        return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}


def event(body: dict[str, Any]) -> bytes:
    return b"data: " + to_json(body) + b"\n\n"


def is_stop(given: Any) -> bool:
    stops = [given] if isinstance(given, str) else given
    return isinstance(stops, list) and len(stops) <= 4 and all(isinstance(s, str) and 0 < len(s) <= 256 for s in stops)


def is_prompt(given: Any) -> bool:
    def is_one(value: Any) -> bool:
        return TEXT[1](value) or (isinstance(value, list) and all(type(token) is int for token in value))

    return is_one(given) or (isinstance(given, list) and all(map(is_one, given)))


def unsupported(neutral: Any) -> Field:
    """Anything but what asks for nothing would change the text, and is not built."""
    return None, lambda value: not isinstance(value, bool) and value == neutral, UNKNOWN[2]


FLAG: Field = (False, lambda value: isinstance(value, bool), "true or false")
FIELDS: dict[str, Field] = {
    "model": TEXT,
    "prompt": ("", is_prompt, "text or token ids, or a list of one of these"),
    "n": between(1, 2**31, 1),
    "max_tokens": between(0, 2**31, None),
    "temperature": between(0, 2, 1.0, int | float),
    "top_p": between(1e-9, 1, 1.0, int | float),
    "stop": ([], is_stop, "text or up to 4 texts, none of them empty or longer than 256 characters"),
    "seed": between(-(2**63), 2**63 - 1, None),
    "logprobs": between(0, 5, None),
    **dict.fromkeys(("echo", "stream"), FLAG),
    "stream_options": ({}, lambda v: isinstance(v, dict) and set(v) <= {"include_usage"}, "include_usage alone"),
    "user": TEXT,
    **{"best_of": unsupported(1), "suffix": unsupported(""), "logit_bias": unsupported({})},
    **dict.fromkeys(("frequency_penalty", "presence_penalty"), unsupported(0)),
}


def parse_request(asked: dict[str, Any], model: str, codec: TextCodec, vocabulary: int, limits: Limits) -> Job:
    """The request in `asked`, or Refused with the field that is wrong."""
    found = check_fields(asked, FIELDS)
    given, n, stop, wanted, echo = (found[name] for name in ("prompt", "n", "stop", "max_tokens", "echo"))
    if found["model"] not in ("", model):
        raise Refused(404, f"there is no model of this name here, only {model!r}.", "model", "model_not_found")
    given = given if isinstance(given, list) and given and not isinstance(given[0], int) else [given]
    if len(given) * n > limits.rows:  # before they are encoded, which takes time
        sentence = f"{len(given)} prompts × n = {n} are more than the {limits.rows} texts a request may ask for."
        raise Refused(400, sentence, "n" if n > limits.rows else "prompt")
    if any(not 0 <= token < vocabulary for one in given if isinstance(one, list) for token in one):
        raise Refused(400, f"token ids must lie between 0 and {vocabulary - 1}.", "prompt")
    prompts = [(codec.encode(one), one) if isinstance(one, str) else (one, codec.decode(one)) for one in given]
    if not all(ids for ids, _ in prompts):
        raise Refused(400, "the prompt is empty: give it at least a word to continue.", "prompt")
    longest = max(len(ids) for ids, _ in prompts)
    room = limits.length - longest
    if room < 1:
        sentence = f"the prompt has {longest} tokens; with its continuation {limits.length} are the most: shorten it."
        raise Refused(413, sentence, "prompt", "context_length_exceeded")
    if wanted == 0 and not echo:
        raise Refused(400, "max_tokens must be above 0, unless the prompt is echoed.", "max_tokens")
    if wanted is not None and wanted > room:
        sentence = f"behind {longest} tokens of prompt there is room for {room}: ask for at most {room}."
        raise Refused(400, sentence, "max_tokens", "context_length_exceeded")
    tokens, stops = min(DEFAULT_TOKENS, room) if wanted is None else wanted, [stop] if isinstance(stop, str) else stop
    how = {name: found[name] for name in ("temperature", "top_p", "seed", "logprobs")}
    options = check_fields(found["stream_options"], {"include_usage": FLAG})
    return Job(model, codec, prompts, Sampling(tokens, stops=tuple(stops), **how), n, echo, found["stream"], **options)
