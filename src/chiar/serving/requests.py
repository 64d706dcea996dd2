"""A completion request: every field checked, nothing ignored that would change the text."""

import json
from dataclasses import dataclass
from typing import Any

from chiar.data.tokens import TextCodec
from chiar.errors import InputError
from chiar.serving.limits import Limits
from chiar.serving.problems import ApiError, wrong

DEFAULT_TOKENS = 16
"""OpenAI's."""
MOST_STOPS, LONGEST_STOP = 4, 256
MOST_LOGPROBS = 5
# What asks for nothing, by field. Anything else there would change the text, and is not built.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "suffix": (None, ""),
    "frequency_penalty": (None, 0),
    "presence_penalty": (None, 0),
    "logit_bias": (None, {}),
}
KNOWN = {
    *("model", "prompt", "n", "best_of", "max_tokens", "temperature", "top_p", "stop", "seed", "logprobs", "echo"),
    *("stream", "stream_options", "user"),
}


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


def read_json(body: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(body, parse_constant=refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {str(error)[:200]}") from None
    if not isinstance(fields, dict):
        raise ApiError(400, "the body must be a JSON object.")
    return fields


def refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")


def parse_request(
    fields: dict[str, Any], model: str, codec: TextCodec, vocabulary: int, limits: Limits
) -> CompletionRequest:
    """The request in `fields`, or an ApiError that names the field."""
    for name, value in fields.items():
        if name in NEUTRAL and (isinstance(value, bool) or value not in NEUTRAL[name]):
            raise wrong(name, f"{name} is not supported: leave it out.", "unsupported_parameter")
        if name not in KNOWN and name not in NEUTRAL:
            raise wrong(name, f"there is no parameter {name[:100]!r} here: leave it out.", "unsupported_parameter")
    asked = fields.get("model", model)
    if asked != model:
        raise ApiError(
            404, f"there is no model {str(asked)[:100]!r} here, only {model!r}.", param="model", code="model_not_found"
        )
    text(fields, "user")
    n = whole(fields, "n", 1, 1, limits.rows)
    if fields.get("best_of") not in (None, n):
        raise wrong("best_of", "best_of is not supported: leave it out, or equal to n.", "unsupported_parameter")
    given = list_prompts(fields.get("prompt"))
    if len(given) * n > limits.rows:  # before they are encoded, which takes time
        raise wrong(
            "prompt", f"{len(given)} prompts × n = {n} are more than the {limits.rows} texts a request may ask for."
        )
    prompts = [read_prompt(one, codec, vocabulary) for one in given]
    if not all(prompt.ids for prompt in prompts):
        raise wrong("prompt", "the prompt is empty: give it at least a word to continue.")
    echo = flag(fields, "echo")
    options = fields.get("stream_options")
    if options is not None and (not isinstance(options, dict) or set(options) - {"include_usage"}):
        raise wrong("stream_options", "stream_options takes include_usage alone.", "unsupported_parameter")
    return CompletionRequest(
        prompts,
        max_tokens=fit(fields, prompts, limits.length, least=0 if echo else 1),
        n=n,
        temperature=number(fields, "temperature", 1.0, 0.0, 2.0),
        top_p=positive(fields, "top_p"),
        stop=read_stop(fields.get("stop")),
        seed=whole(fields, "seed", None, -(2**63), 2**63 - 1),
        logprobs=whole(fields, "logprobs", None, 0, MOST_LOGPROBS),
        echo=echo,
        stream=flag(fields, "stream"),
        include_usage=flag(options or {}, "include_usage"),
    )


def list_prompts(given: Any) -> list[Any]:
    """`given` is text, token ids, or a list of either."""
    if given is None:
        raise wrong("prompt", "prompt is missing: give it text to continue.")
    return given if isinstance(given, list) and given and not is_whole(given[0]) else [given]


def read_prompt(given: Any, codec: TextCodec, vocabulary: int) -> Prompt:
    try:
        if isinstance(given, str):
            given.encode()
            return Prompt(codec.encode(given), given)
        if isinstance(given, list) and all(is_whole(token) for token in given):
            if any(not 0 <= token < vocabulary for token in given):
                raise wrong("prompt", f"token ids must lie between 0 and {vocabulary - 1}.")
            return Prompt(given, codec.decode(given))
    except UnicodeEncodeError:
        raise wrong("prompt", "the prompt has half a surrogate pair in it, which is no text.") from None
    except InputError as error:
        raise wrong("prompt", f"the prompt cannot be read: {error}") from None
    raise wrong("prompt", "the prompt must be text or token ids, or a list of one of these.")


def fit(fields: dict[str, Any], prompts: list[Prompt], length: int, least: int) -> int:
    """How many tokens may be added; the limit holds for prompt and continuation together."""
    longest = max(len(prompt.ids) for prompt in prompts)
    if longest + 1 > length:
        raise ApiError(
            413,
            f"the prompt has {longest} tokens and the server takes {length}, continuation included: shorten it.",
            param="prompt",
            code="context_length_exceeded",
        )
    if fields.get("max_tokens") is None:
        return min(DEFAULT_TOKENS, length - longest)
    wanted = whole(fields, "max_tokens", None, least, 2**31)
    if longest + wanted > length:
        raise wrong(
            "max_tokens",
            f"{longest} tokens of prompt and {wanted} of continuation are more than the {length} the server takes: "
            f"ask for at most {length - longest}.",
            "context_length_exceeded",
        )
    return wanted


def read_stop(given: Any) -> tuple[str, ...]:
    stops = [] if given is None else [given] if isinstance(given, str) else given
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
        raise wrong("stop", "stop must be text or a list of texts, none of them empty.")
    if len(stops) > MOST_STOPS or any(len(stop) > LONGEST_STOP for stop in stops):
        raise wrong("stop", f"stop takes up to {MOST_STOPS} texts of up to {LONGEST_STOP} characters.")
    return tuple(stops)


def is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def whole(fields: dict[str, Any], name: str, default: Any, least: int, most: int) -> Any:
    value = fields.get(name)
    if value is None:
        return default
    if not is_whole(value) or not least <= value <= most:
        raise wrong(name, f"{name} must be a whole number from {least} to {most}.")
    return value


def number(fields: dict[str, Any], name: str, default: float, least: float, most: float) -> float:
    value = fields.get(name)
    if value is None:
        return default
    real = isinstance(value, int | float) and not isinstance(value, bool)
    if not real or not least <= value <= most:  # nor is NaN between anything
        raise wrong(name, f"{name} must be a number from {least:g} to {most:g}.")
    return float(value)


def positive(fields: dict[str, Any], name: str) -> float:
    value = number(fields, name, 1.0, 0.0, 1.0)
    if value == 0:
        raise wrong(name, f"{name} must be above 0: no token would be left to draw.")
    return value


def flag(fields: dict[str, Any], name: str) -> bool:
    value = fields.get(name)
    if value is not None and not isinstance(value, bool):
        raise wrong(name, f"{name} must be true or false.")
    return bool(value)


def text(fields: dict[str, Any], name: str) -> None:
    if not isinstance(fields.get(name, ""), str | None):
        raise wrong(name, f"{name} must be text.")
