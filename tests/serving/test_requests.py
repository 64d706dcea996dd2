"""Every field is checked, and an error names the field."""

import pytest

from chiar.data.tokens import TextCodec
from chiar.serving.protocol import Limits, parse_request
from chiar.web import Refused, parse_json

BYTES = TextCodec(None, None)


def parse(length=32, rows=4, **fields):
    return parse_request({"prompt": "abc", **fields}, "model", BYTES, 257, Limits(length=length, rows=rows))


def test_defaults_are_openais():
    request = parse()
    assert (request.max_tokens, request.n, request.temperature, request.top_p) == (16, 1, 1.0, 1.0)
    assert not (request.stream or request.echo or request.stop or request.include_usage)
    assert request.seed is request.logprobs is None
    assert parse(length=10).max_tokens == 7  # as many as there is room for


@pytest.mark.parametrize(
    ("prompt", "ids"),
    [
        ("ab", [[97, 98]]),
        (["a", "é"], [[97], [195, 169]]),
        ([97, 98], [[97, 98]]),
        ([[97], [98, 256]], [[97], [98, 256]]),
    ],
)
def test_prompts(prompt, ids):
    assert [one.ids for one in parse(prompt=prompt).prompts] == ids


def test_fields_that_ask_for_nothing():
    neutral = {"suffix": None, "frequency_penalty": 0, "presence_penalty": 0.0, "logit_bias": {}, "best_of": 1}
    assert parse(**neutral, user="somebody", seed=None, stop=None, stream_options=None) == parse()


@pytest.mark.parametrize(
    ("field", "values"),
    {
        "prompt": [None, "", [], [[]], ["a", ""], 5, {"a": 1}, [257], [-1], [True], ["a", 97], [97, "a"], "\ud800"],
        "max_tokens": [0, -1, 1.5, "5", True, 10**30],
        "n": [0, 5, "1", 1.0],
        "best_of": [2],
        "temperature": [-0.1, 2.1, "1", True, float("inf"), float("nan"), 10**400, [1]],
        "top_p": [0, 1.1, "x"],
        "stop": ["", ["a"] * 5, [1], "x" * 257, {}],
        "seed": [1.5, 2**63, "1"],
        "logprobs": [-1, 6, True],
        "echo": [1, "yes"],
        "stream": [0, "true"],
        "stream_options": [[], {"other": 1}],
        "include_usage": [True],
        "suffix": ["b", 5, False],
        "frequency_penalty": [1, False, "0"],
        "presence_penalty": [-0.5],
        "logit_bias": [{"5": 1}],
        "user": [5],
        "min_p": [0.1],
    }.items(),
)
def test_what_is_wrong_is_named(field, values):
    for value in values:
        with pytest.raises(Refused) as caught:
            parse(**{field: value})
        assert caught.value.status == 400, value
        assert caught.value.param == field, value


def test_a_prompt_that_is_too_long():
    parse(prompt="x" * 31, max_tokens=1)
    with pytest.raises(Refused) as caught:
        parse(prompt="x" * 32)
    assert (caught.value.status, caught.value.code) == (413, "context_length_exceeded")
    with pytest.raises(Refused, match="at most 10") as caught:
        parse(prompt="x" * 22, max_tokens=11)
    assert (caught.value.status, caught.value.code) == (400, "context_length_exceeded")


def test_more_texts_than_a_request_may_ask_for():
    assert parse(prompt=["a", "b"], n=2).rows == 4
    with pytest.raises(Refused, match="more than the 4"):
        parse(prompt=["a", "b"], n=3)


def test_texts_are_counted_before_they_are_read():
    with pytest.raises(Refused, match="more than the 4"):
        parse(prompt=["\ud800"] * 5)


def test_another_model():
    assert parse(model="model") == parse()
    with pytest.raises(Refused) as caught:
        parse(model="gpt")
    assert (caught.value.status, caught.value.code) == (404, "model_not_found")


@pytest.mark.parametrize("body", [b"", b"{", b"5", b"[]", b"\xff", b'{"a": Infinity}', b"[" * 100_000, b"9" * 10_000])
def test_bodies_that_are_no_objects(body):
    with pytest.raises(Refused) as caught:
        parse_json(body)
    assert caught.value.status == 400
