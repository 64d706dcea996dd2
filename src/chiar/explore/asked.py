"""What a client asked for, checked field by field; each mistake is one sentence."""

import sys
from typing import Any

from chiar.explore.continuing import Wish
from chiar.explore.limits import MOST_BYTES, Refused
from chiar.explore.loaded import LoadedModel
from chiar.explore.steering import KINDS, Steering

MOST_NEW_TOKENS = 256


def asked_model(asked: dict[str, Any], models: list[LoadedModel]) -> LoadedModel:
    number = asked.get("model", 0)
    if not is_whole(number) or not 0 <= number < len(models):
        raise Refused(400, f"there is no model {str(number)[:40]!r} here: there are {len(models)}, counted from 0.")
    return models[number]


def asked_text(asked: dict[str, Any]) -> str:
    text = asked.get("text")
    if not isinstance(text, str):
        raise Refused(400, "the field text must be a string.")
    if len(text.encode("utf-8", "surrogatepass")) > MOST_BYTES:
        raise Refused(413, f"the text is longer than {MOST_BYTES:,} bytes, the most here: shorten it.")
    return text


def asked_steering(asked: dict[str, Any]) -> Steering | None:
    steer = asked.get("steer")
    if steer is None:
        return None
    if not isinstance(steer, dict) or steer.get("kind") not in KINDS or not is_number(steer.get("value")):
        raise Refused(400, f"the field steer takes a kind ({' or '.join(KINDS)}) and a number as its value.")
    return Steering(steer["kind"], float(steer["value"]))


def asked_wish(asked: dict[str, Any]) -> Wish:
    wish = Wish(asked.get("tokens", Wish.tokens), asked.get("temperature", Wish.temperature), asked.get("seed", 0))
    if not is_whole(wish.tokens) or not 1 <= wish.tokens <= MOST_NEW_TOKENS:
        raise Refused(400, f"the field tokens must be a whole number from 1 to {MOST_NEW_TOKENS}.")
    if not is_number(wish.temperature) or not 0 <= wish.temperature <= 5:
        raise Refused(400, "the field temperature must be a number from 0 to 5.")
    if not is_whole(wish.seed) or not 0 <= wish.seed < 2**63:
        raise Refused(400, "the field seed must be a whole number from 0 to 2⁶³ − 1.")
    return wish


def is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
