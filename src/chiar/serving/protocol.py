"""OpenAI's completions: requests, every field checked and nothing ignored that would change the text, and answers."""

import time
import uuid
from dataclasses import dataclass, replace
from typing import Any

from chiar.data.tokens import TextCodec
from chiar.errors import InputError
from chiar.generation.writer import Piece, Sampling, TokenScore
from chiar.web import Field, Refused, check_fields, is_number, is_whole, to_json, whole

# Tokens written unless a request says otherwise, which is OpenAI's, and connections beyond those that run or wait.
DEFAULT_TOKENS, SPARE = 16, 64


@dataclass(frozen=True)
class Limits:
    """`length`: tokens of a prompt and its continuation. `rows`: texts written at the same time, and texts of one
    request. `waiting`: requests that may wait. `body`: bytes of a request. `grace`: seconds that running requests get
    to finish when the server is told to stop."""

    length: int
    rows: int = 16
    waiting: int = 64
    body: int = 1 << 20
    grace: float = 30.0

    @property
    def connections(self) -> int:
        return self.rows + self.waiting + SPARE


@dataclass(frozen=True)
class Prompt:
    ids: list[int]
    text: str


@dataclass(frozen=True)
class CompletionRequest:
    """Of `n` choices for each prompt, number i draws with the seed + i."""

    prompts: list[Prompt]
    sampling: Sampling
    n: int = 1
    echo: bool = False
    stream: bool = False
    include_usage: bool = False

    @property
    def rows(self) -> int:
        return len(self.prompts) * self.n

    def sampling_of(self, choice: int) -> Sampling:
        seed = self.sampling.seed
        return self.sampling if seed is None else replace(self.sampling, seed=seed + choice % self.n)


def is_stop(given: Any) -> bool:
    stops = [given] if isinstance(given, str) else given
    return isinstance(stops, list) and len(stops) <= 4 and all(isinstance(s, str) and 0 < len(s) <= 256 for s in stops)


def is_prompt(given: Any) -> bool:
    """Text or token ids, or a list of either."""
    several = given if isinstance(given, list) else [given]
    ids = [isinstance(one, list) and all(map(is_whole, one)) for one in [given, *several]]
    return ids[0] or all(isinstance(one, str) or is_ids for one, is_ids in zip(several, ids[1:], strict=True))


def unsupported(neutral: Any) -> Field:
    """Anything but what asks for nothing would change the text, and is not built."""
    fits, code = lambda value: not isinstance(value, bool) and value == neutral, "unsupported_parameter"
    return Field(None, fits, "left out: it is not supported", code)


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
    "stop": Field([], is_stop, "text or up to 4 texts, none of them empty or longer than 256 characters"),
    "seed": whole(None, -(2**63), 2**63 - 1),
    "logprobs": whole(None, 0, 5),
    "echo": FLAG,
    "stream": FLAG,
    "stream_options": Field({}, lambda v: isinstance(v, dict) and set(v) <= {"include_usage"}, "include_usage alone"),
    "user": TEXT,
    "suffix": unsupported(""),
    "frequency_penalty": unsupported(0),
    "presence_penalty": unsupported(0),
    "logit_bias": unsupported({}),
}


def parse_request(
    asked: dict[str, Any], model: str, codec: TextCodec, tokens: int, limits: Limits
) -> CompletionRequest:
    """The request in `asked`, or Refused with the field that is wrong; `tokens` is the size of the vocabulary."""
    found = check_fields(asked, FIELDS)
    if found["model"] not in (None, model):
        sentence = f"there is no model {found['model'][:100]!r} here, only {model!r}."
        raise Refused(404, sentence, "model", "model_not_found")
    given, n, stop = found["prompt"], found["n"], found["stop"]
    if found["best_of"] not in (None, n):
        raise Refused(400, "best_of is not supported: leave it out, or equal to n.", "best_of", "unsupported_parameter")
    if given is None:
        raise Refused(400, "prompt is missing: give it text to continue.", "prompt")
    given = given if isinstance(given, list) and given and not is_whole(given[0]) else [given]
    if len(given) * n > limits.rows:  # before they are encoded, which takes time
        sentence = f"{len(given)} prompts × n = {n} are more than the {limits.rows} texts a request may ask for."
        raise Refused(400, sentence, "n" if n > limits.rows else "prompt")
    prompts = [read_prompt(one, codec, tokens) for one in given]
    options = check_fields(found["stream_options"], {"include_usage": FLAG})
    stops = [stop] if isinstance(stop, str) else stop
    room = fit(found["max_tokens"], max(len(prompt.ids) for prompt in prompts), limits.length, found["echo"])
    how = {name: found[name] for name in ("temperature", "top_p", "seed", "logprobs")}
    sampling = Sampling(room, stops=tuple(stops), **how)
    return CompletionRequest(prompts, sampling, n, found["echo"], found["stream"], options["include_usage"])


def read_prompt(given: str | list[int], codec: TextCodec, tokens: int) -> Prompt:
    try:
        if isinstance(given, str):
            given.encode()
        elif any(not 0 <= token < tokens for token in given):
            raise InputError(f"token ids must lie between 0 and {tokens - 1}.")
        prompt = Prompt(codec.encode(given), given) if isinstance(given, str) else Prompt(given, codec.decode(given))
    except UnicodeEncodeError:
        raise Refused(400, "the prompt has half a surrogate pair in it, which is no text.", "prompt") from None
    except InputError as error:
        raise Refused(400, f"the prompt cannot be read: {error}", "prompt") from None
    if not prompt.ids:
        raise Refused(400, "the prompt is empty: give it at least a word to continue.", "prompt")
    return prompt


def fit(wanted: int | None, longest: int, length: int, echo: bool) -> int:
    """How many tokens may be added; the limit holds for prompt and continuation together."""
    if longest + 1 > length:
        sentence = f"the prompt has {longest} tokens and the server takes {length}, continuation included: shorten it."
        raise Refused(413, sentence, "prompt", "context_length_exceeded")
    if wanted is None:
        return min(DEFAULT_TOKENS, length - longest)
    if wanted == 0 and not echo:
        raise Refused(400, "max_tokens must be above 0, unless the prompt is echoed.", "max_tokens")
    if longest + wanted > length:
        sentence = (
            f"prompt ({longest} tokens) and continuation ({wanted}) are more than the {length} the server takes: "
        )
        sentence += f"ask for at most {length - longest}."
        raise Refused(400, sentence, "max_tokens", "context_length_exceeded")
    return wanted


class Answer:
    """To one request: as a whole, or chunk by chunk."""

    def __init__(self, request: CompletionRequest, model: str, codec: TextCodec) -> None:
        self.request, self.codec = request, codec
        name, now = f"cmpl-{uuid.uuid4().hex}", int(time.time())
        self.head = {"id": name, "object": "text_completion", "created": now, "model": model}
        self.offsets = [0] * request.rows  # characters of each choice that went out

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
        wanted = self.request.sampling.logprobs is not None
        logprobs = self.logprobs(number, piece.tokens) if wanted else None
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
        falling = zip(self.codec.pieces(list(token.top)), token.top.values(), strict=True)
        return None if token.logprob is None else dict(reversed(list(falling)))

    def usage(self, written: int) -> dict[str, int]:
        read = sum(len(prompt.ids) for prompt in self.request.prompts)
        return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}


def event(body: dict[str, Any]) -> bytes:
    return b"data: " + to_json(body) + b"\n\n"
