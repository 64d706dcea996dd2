"""Every field is checked, and an error names the field."""

import pytest

from chiar.data.tokens import TextCodec
from chiar.serving.app import Limits, parse_request
from chiar.web import Refused

BYTES = TextCodec(None, None)


def parse(length=32, rows=4, **fields):
    return parse_request({"prompt": "abc", **fields}, "model", BYTES, 257, Limits(length=length, rows=rows))


def test_defaults_are_openais():
    request, neutral = parse(), {"suffix": None, "frequency_penalty": 0, "presence_penalty": 0.0, "logit_bias": {}}
    sampling = request.sampling
    assert (sampling.max_new_tokens, request.n, sampling.temperature, sampling.top_p) == (16, 1, 1.0, 1.0)
    assert not (request.stream or request.echo or sampling.stops or request.include_usage)
    assert sampling.seed is sampling.logprobs is None
    assert parse(length=10).sampling.max_new_tokens == 7  # as many as there is room for
    assert parse(**neutral, best_of=1, user="somebody", model="model", seed=None, stop=None) == request


def test_prompts():
    for prompt, ids in (("ab", [[97, 98]]), (["a", "é"], [[97], [195, 169]]), ([97, 98], [[97, 98]])):
        assert [one for one, _ in parse(prompt=prompt).prompts] == [one for one, _ in parse(prompt=ids).prompts] == ids


@pytest.mark.parametrize(
    ("field", "values"),
    {
        "prompt": [None, "", [], [[]], ["a", ""], 5, {"a": 1}, [257], [-1], [True], ["a", 97], [97, "a"], "\ud800"],
        "max_tokens": [0, -1, 1.5, "5", True, 10**30],
        **{"n": [0, 5, "1", 1.0], "best_of": [2], "top_p": [0, 1.1, "x"], "seed": [1.5, 2**63, "1"]},
        "temperature": [-0.1, 2.1, "1", True, float("inf"), float("nan"), 10**400, [1]],
        "stop": ["", ["a"] * 5, [1], "x" * 257, {}],
        **{"logprobs": [-1, 6, True], "echo": [1, "yes"], "stream": [0, "true"], "include_usage": [True]},
        **{"stream_options": [[], {"other": 1}], "suffix": ["b", 5, False], "frequency_penalty": [1, False, "0"]},
        **{"presence_penalty": [-0.5], "logit_bias": [{"5": 1}], "user": [5], "min_p": [0.1]},
    }.items(),
)
def test_what_is_wrong_is_named(field, values):
    for value in values:
        with pytest.raises(Refused) as caught:
            parse(**{field: value})
        assert (caught.value.status, caught.value.param) == (400, field), value


def test_limits():
    parse(prompt="x" * 31, max_tokens=1)
    assert parse(prompt=["a", "b"], n=2).left == 4
    for fields, status, code, said in (
        ({"prompt": ["a", "b"], "n": 3}, 400, None, "more than the 4"),
        ({"prompt": "x" * 32}, 413, "context_length_exceeded", "at most 32"),
        ({"prompt": "x" * 22, "max_tokens": 11}, 400, "context_length_exceeded", "at most 10"),
        ({"model": "gpt"}, 404, "model_not_found", "'model'"),
    ):
        with pytest.raises(Refused) as caught:
            parse(**fields)
        assert (caught.value.status, caught.value.code) == (status, code) and said in caught.value.message
