"""OpenAI's completions: requests, every field checked and nothing ignored that would change the text, and answers."""

import time
import uuid
from dataclasses import dataclass
from typing import Any

from chiar.data.tokens import TextCodec
from chiar.errors import InputError
from chiar.generation.writer import Piece, Sampling, TokenScore
from chiar.web import Field, Refused, check_fields, is_number, is_whole, to_json, whole

DEFAULT_TOKENS = 16
"""OpenAI's."""
MOST_STOPS, LONGEST_STOP = 4, 256
SPARE = 64
"""Connections beyond those that are served or wait."""


@dataclass(frozen=True)
class Limits:
    length: int
    """Tokens of a prompt and its continuation together."""
    rows: int = 16
    """Texts written at the same time, and texts one request may ask for (prompts × n)."""
    waiting: int = 64
    """Requests that may wait for their turn; more are told to come back."""
    body: int = 1 << 20
    """Bytes of a request."""
    grace: float = 30.0
    """Seconds that running requests get to finish when the server is told to stop."""

    @property
    def connections(self) -> int:
        """Open at the same time; each may hold a body."""
        return self.rows + self.waiting + SPARE


@dataclass(frozen=True)
class Prompt:
    ids: list[int]
    text: str


@dataclass(frozen=True)
class CompletionRequest:
    """`temperature` 0 takes the likeliest token. Of `n` choices for each prompt, number i draws with `seed` + i."""

    prompts: list[Prompt]
    max_tokens: int = DEFAULT_TOKENS
    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    stop: tuple[str, ...] = ()
    seed: int | None = None
    logprobs: int | None = None
    echo: bool = False
    stream: bool = False
    include_usage: bool = False

    @property
    def rows(self) -> int:
        return len(self.prompts) * self.n

    def sampling(self, choice: int) -> Sampling:
        seed = None if self.seed is None else self.seed + choice % self.n
        return Sampling(self.max_tokens, self.temperature, None, self.top_p, seed, self.stop, self.logprobs)


def as_stops(given: Any) -> list[Any]:
    return [given] if isinstance(given, str) else given


def is_stop(given: Any) -> bool:
    stops = as_stops(given)
    fits = isinstance(stops, list) and len(stops) <= MOST_STOPS
    return fits and all(isinstance(stop, str) and 0 < len(stop) <= LONGEST_STOP for stop in stops)


def is_prompt(given: Any) -> bool:
    ids_or_texts = given if isinstance(given, list) else [given]
    if ids_or_texts and all(is_whole(token) for token in ids_or_texts):
        return isinstance(given, list)
    return all(isinstance(p, str) or (isinstance(p, list) and all(map(is_whole, p))) for p in ids_or_texts)


def unsupported(*neutral: Any) -> Field:
    """Anything but what asks for nothing would change the text, and is not built."""
    fits = lambda value: not isinstance(value, bool) and value in neutral  # noqa: E731
    return Field(None, fits, "left out: it is not supported", "unsupported_parameter")


FLAG = Field(False, lambda value: isinstance(value, bool), "true or false")
TEXT = Field(None, lambda value: isinstance(value, str), "text")
FIELDS = {
    "model": TEXT,
    "prompt": Field(None, is_prompt, "text or token ids, or a list of one of these"),
    "n": whole(1, 1, 2**31),
    "best_of": whole(None, 1, 2**31),
    "max_tokens": whole(None, 0, 2**31),
    "temperature": Field(1.0, lambda value: is_number(value, 0, 2), "a number from 0 to 2"),
    "top_p": Field(1.0, lambda value: is_number(value, 0, 1) and value > 0, "a number above 0, at most 1"),
    "stop": Field([], is_stop, f"text or up to {MOST_STOPS} texts, none empty or over {LONGEST_STOP} characters"),
    "seed": whole(None, -(2**63), 2**63 - 1),
    "logprobs": whole(None, 0, 5),
    "echo": FLAG,
    "stream": FLAG,
    "stream_options": Field({}, lambda value: isinstance(value, dict), "an object with include_usage alone"),
    "user": TEXT,
    "suffix": unsupported(""),
    "frequency_penalty": unsupported(0),
    "presence_penalty": unsupported(0),
    "logit_bias": unsupported({}),
}


def parse_request(
    asked: dict[str, Any], model: str, codec: TextCodec, vocabulary: int, limits: Limits
) -> CompletionRequest:
    """The request in `asked`, or Refused with the field that is wrong."""
    found = check_fields(asked, FIELDS)
    if found["model"] not in (None, model):
        sentence = f"there is no model {found['model'][:100]!r} here, only {model!r}."
        raise Refused(404, sentence, "model", "model_not_found")
    given, n = found["prompt"], found["n"]
    if found["best_of"] not in (None, n):
        raise Refused(400, "best_of is not supported: leave it out, or equal to n.", "best_of", "unsupported_parameter")
    if given is None:
        raise Refused(400, "prompt is missing: give it text to continue.", "prompt")
    given = given if isinstance(given, list) and given and not is_whole(given[0]) else [given]
    if n > limits.rows or len(given) * n > limits.rows:  # before they are encoded, which takes time
        sentence = f"{len(given)} prompts × n = {n} are more than the {limits.rows} texts a request may ask for."
        raise Refused(400, sentence, "n" if n > limits.rows else "prompt")
    prompts = [read_prompt(one, codec, vocabulary) for one in given]
    try:
        options = check_fields(found["stream_options"], {"include_usage": FLAG})
    except Refused as error:
        raise Refused(400, error.message, "stream_options", "unsupported_parameter") from None
    return CompletionRequest(
        prompts,
        max_tokens=fit(found["max_tokens"], prompts, limits.length, least=0 if found["echo"] else 1),
        stop=tuple(as_stops(found["stop"])),
        include_usage=options["include_usage"],
        **{name: found[name] for name in ("n", "temperature", "top_p", "seed", "logprobs", "echo", "stream")},
    )


def read_prompt(given: str | list[int], codec: TextCodec, vocabulary: int) -> Prompt:
    try:
        if isinstance(given, str):
            given.encode()
        elif any(not 0 <= token < vocabulary for token in given):
            raise InputError(f"token ids must lie between 0 and {vocabulary - 1}.")
        prompt = Prompt(codec.encode(given), given) if isinstance(given, str) else Prompt(given, codec.decode(given))
    except UnicodeEncodeError:
        raise Refused(400, "the prompt has half a surrogate pair in it, which is no text.", "prompt") from None
    except InputError as error:
        raise Refused(400, f"the prompt cannot be read: {error}", "prompt") from None
    if not prompt.ids:
        raise Refused(400, "the prompt is empty: give it at least a word to continue.", "prompt")
    return prompt


def fit(wanted: int | None, prompts: list[Prompt], length: int, least: int) -> int:
    """How many tokens may be added; the limit holds for prompt and continuation together."""
    longest = max(len(prompt.ids) for prompt in prompts)
    if longest + 1 > length:
        sentence = f"the prompt has {longest} tokens and the server takes {length}, continuation included: shorten it."
        raise Refused(413, sentence, "prompt", "context_length_exceeded")
    if wanted is None:
        return min(DEFAULT_TOKENS, length - longest)
    if wanted < least:
        raise Refused(400, f"max_tokens must be {least} at least; 0 needs echo.", "max_tokens")
    if longest + wanted > length:
        sentence = (
            f"{longest} tokens of prompt and {wanted} of continuation are more than the {length} the server takes"
        )
        raise Refused(400, f"{sentence}: ask for at most {length - longest}.", "max_tokens", "context_length_exceeded")
    return wanted


class Answer:
    """To one request: as a whole, or chunk by chunk."""

    def __init__(self, request: CompletionRequest, model: str, codec: TextCodec) -> None:
        self.request, self.codec = request, codec
        self.head = {"id": f"cmpl-{uuid.uuid4().hex}", "object": "text_completion", "created": int(time.time())}
        self.head["model"] = model
        self.offsets = [0] * request.rows
        """Characters of each choice that went out."""

    def whole(self, pieces: list[tuple[int, Piece]], written: int) -> dict[str, Any]:
        choices = []
        for number in range(self.request.rows):
            own = [piece for choice, piece in pieces if choice == number]
            tokens = [token for piece in own for token in piece.tokens]
            choices.append(self.choice(number, Piece("".join(piece.text for piece in own), tokens, own[-1].finish)))
        return {**self.head, "choices": choices, "usage": self.usage(written)}

    def chunk(self, choice: int, piece: Piece) -> bytes:
        return event({**self.head, "choices": [self.choice(choice, piece)]})

    def end(self, written: int) -> bytes:
        last = {**self.head, "choices": [], "usage": self.usage(written)}
        return (event(last) if self.request.include_usage else b"") + b"data: [DONE]\n\n"

    def choice(self, number: int, piece: Piece) -> dict[str, Any]:
        logprobs = None if self.request.logprobs is None else self.logprobs(number, piece.tokens)
        return {"index": number, "text": piece.text, "logprobs": logprobs, "finish_reason": piece.finish}

    def logprobs(self, choice: int, tokens: list[TokenScore]) -> dict[str, Any]:
        texts, offsets = self.codec.pieces([token.id for token in tokens]), []
        for text in texts:
            offsets.append(self.offsets[choice])
            self.offsets[choice] += len(text)
        own, top = [token.logprob for token in tokens], [self.likeliest(token) for token in tokens]
        return {"tokens": texts, "token_logprobs": own, "top_logprobs": top, "text_offset": offsets}

    def likeliest(self, token: TokenScore) -> dict[str, float] | None:
        """By text, as OpenAI's; of several tokens that look alike the likeliest, which is the first."""
        ordered = reversed(list(zip(self.codec.pieces(list(token.top)), token.top.values(), strict=True)))
        return None if token.logprob is None else dict(ordered)

    def usage(self, written: int) -> dict[str, int]:
        read = sum(len(prompt.ids) for prompt in self.request.prompts)
        return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}


def event(body: dict[str, Any]) -> bytes:
    return b"data: " + to_json(body) + b"\n\n"
