"""OpenAI's own client against a real server."""

import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
import torch
from served import serving
from typer.testing import CliRunner

from chiar.cli import app
from chiar.model.load import load_model
from chiar.serving.protocol import Limits
from chiar.visible import visible

PROMPTS = ["light and dark", "漢字 filter", "x"]


@pytest.fixture(scope="module")
def client(server):
    return server.client()


def generated(folder, prompt, *options):
    """What `chiar generate` shows: bytes of all kinds, spelt out for terminals."""
    result = CliRunner().invoke(app, ["generate", str(folder), "--prompt", prompt, *map(str, options)])
    assert result.exit_code == 0
    return result.stdout


def shown(prompt, text):
    return visible(prompt + text) + "\n"


def read_now(line):
    """What the server has said so far, left to be read again."""
    line.setblocking(False)
    try:
        return line.recv(1000, socket.MSG_PEEK)
    except BlockingIOError:
        return b""


def wait_for(condition, seconds=20):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("prompt", PROMPTS)
def test_the_text_is_that_of_chiar_generate(folder, client, prompt):
    greedy = client.completions.create(model="model", prompt=prompt, max_tokens=30, temperature=0)
    assert shown(prompt, greedy.choices[0].text) == generated(folder, prompt, "--max-new-tokens", 30)
    assert greedy.choices[0].finish_reason == "length"
    assert (greedy.usage.prompt_tokens, greedy.usage.completion_tokens) == (len(prompt.encode()), 30)


def test_draws_are_those_of_chiar_generate(folder, client):
    def draw(seed):
        return client.completions.create(
            model="model", prompt="light", max_tokens=30, temperature=1.5, top_p=0.9, seed=seed
        )

    options = ["--max-new-tokens", 30, "--temperature", 1.5, "--top-p", 0.9, "--seed", 3]
    assert shown("light", draw(3).choices[0].text) == generated(folder, "light", *options)
    assert draw(3).choices[0].text != draw(4).choices[0].text


def test_a_stream_adds_up_to_the_whole(client):
    fields = {"model": "model", "prompt": PROMPTS, "max_tokens": 25, "temperature": 0}
    whole = client.completions.create(**fields)
    texts, finished, usage = [""] * 3, {}, None
    for chunk in client.completions.create(**fields, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            finished[choice.index] = choice.finish_reason
    assert texts == [choice.text for choice in whole.choices]
    assert finished == {0: "length", 1: "length", 2: "length"}
    assert usage == whole.usage


def test_rows_of_a_batch_are_what_each_is_alone(client):
    fields = {"model": "model", "max_tokens": 20, "temperature": 1.2, "seed": 5}
    together = client.completions.create(prompt=PROMPTS[:2], n=2, **fields)
    assert [choice.index for choice in together.choices] == [0, 1, 2, 3]
    first, _, third, fourth = (choice.text for choice in together.choices)
    assert first == client.completions.create(prompt=PROMPTS[0], **fields).choices[0].text
    assert third == client.completions.create(prompt=list(PROMPTS[1].encode()), **fields).choices[0].text
    assert third != fourth
    assert together.usage.prompt_tokens == sum(len(prompt.encode()) for prompt in PROMPTS[:2])


def test_a_stop_text_ends_it(client):
    fields = {"model": "model", "prompt": "light", "max_tokens": 40, "temperature": 1.5, "seed": 1}
    text = client.completions.create(**fields).choices[0].text
    stop = text[10:12]
    stopped = client.completions.create(**fields, stop=[stop, "never this"]).choices[0]
    assert (stopped.text, stopped.finish_reason) == (text[: text.index(stop)], "stop")


def test_log_probabilities_are_the_models(folder, client):
    answer = client.completions.create(model="model", prompt="dark", max_tokens=0, echo=True, logprobs=2).choices[0]
    model = load_model(str(folder))[0]
    ids = torch.tensor([list(b"dark")])
    with torch.no_grad():
        expected = model(ids).logits[0, :-1].log_softmax(-1)
    assert answer.text == "dark"
    assert answer.logprobs.tokens == list("dark")
    assert answer.logprobs.token_logprobs[0] is None
    own = torch.tensor(answer.logprobs.token_logprobs[1:])
    torch.testing.assert_close(own, expected.gather(1, ids[0, 1:, None])[:, 0])
    best = torch.tensor([max(top.values()) for top in answer.logprobs.top_logprobs[1:]])
    torch.testing.assert_close(best, expected.max(-1).values)


def test_the_model_has_a_name(client):
    assert [model.id for model in client.models.list()] == ["model"]
    assert client.models.retrieve("model").owned_by == "chiar"


@pytest.mark.parametrize(
    ("fields", "kind", "status"),
    [
        ({"suffix": "end"}, openai.BadRequestError, 400),
        ({"frequency_penalty": 0.5}, openai.BadRequestError, 400),
        ({"extra_body": {"min_p": 0.1}}, openai.BadRequestError, 400),
        ({"prompt": ""}, openai.BadRequestError, 400),
        ({"prompt": ["a"] * 5}, openai.BadRequestError, 400),
        ({"max_tokens": 10**7}, openai.BadRequestError, 400),
        ({"model": "another"}, openai.NotFoundError, 404),
        ({"prompt": "x" * 20_000}, openai.APIStatusError, 413),
        ({"prompt": "x" * 600_000}, openai.APIStatusError, 413),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_errors_are_openais(client, fields, kind, status):
    with pytest.raises(kind) as caught:
        client.completions.create(**{"model": "model", "prompt": "a", **fields})
    assert caught.value.status_code == status
    assert caught.value.type == "invalid_request_error"
    assert caught.value.body["message"].endswith(".")


def test_chat_is_refused_with_a_reason(client):
    with pytest.raises(openai.BadRequestError, match="base language model"):
        client.chat.completions.create(model="model", messages=[{"role": "user", "content": "hello"}])


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (("GET", "/nowhere"), 404),
        (("GET", "/v1/completions"), 405),
        (("POST", "/v1/completions", "{"), 415),
    ],
)
def test_other_ways_to_be_wrong(server, arguments, status):
    answered, _, text = server.ask(*arguments)
    assert answered == status
    assert '"type": "invalid_request_error"' in text


@pytest.mark.parametrize("body", ["{", "[]", "[" * 9000, '{"prompt": NaN}', '{"\\ud800": 1}', "\x00"])
def test_hostile_bodies(server, body):
    status, _, text = server.ask("POST", "/v1/completions", body, **{"content-type": "application/json"})
    assert status == 400
    assert '"message"' in text


def test_fifty_clients_are_served_or_told_to_wait(server, client):
    expected = client.completions.create(model="model", prompt="dark", max_tokens=60, temperature=0).choices[0].text

    def ask(number):
        fields = {"prompt": "dark", "max_tokens": 60, "temperature": 0, "stream": number % 2 == 0}
        return server.post(fields)

    with ThreadPoolExecutor(50) as clients:
        answers = list(clients.map(ask, range(50)))
    statuses = [status for status, _, _ in answers]
    assert set(statuses) == {200, 429}
    assert statuses.count(200) >= 8  # as many as may wait
    for number, (status, headers, text) in enumerate(answers):
        if status == 429:
            assert int(headers["retry-after"]) >= 1
            assert "rate_limit_exceeded" in text
        elif number % 2:
            assert json.loads(text)["choices"][0]["text"] == expected
        else:
            events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
            assert "".join(event["choices"][0]["text"] for event in events) == expected
            assert text.endswith("data: [DONE]\n\n")
    assert server.metric('requests_total{status="429"}') == statuses.count(429)
    patient = server.client(max_retries=5).completions.create(
        model="model", prompt="dark", max_tokens=60, temperature=0
    )
    assert patient.choices[0].text == expected


def test_a_client_that_leaves_ends_its_text(server, client):
    """Each of these would go on for minutes."""
    gone = server.metric("clients_gone_total")
    streams = [server.open_stream() for _ in range(6)]  # four write, two wait
    wait_for(lambda: server.metric("rows_running") == 4)
    for connection, answer in streams:
        answer.close()
        connection.close()
    wait_for(lambda: server.metric("rows_running") == server.metric("requests_waiting") == 0)
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.5).completions.create(model="model", prompt="a", max_tokens=500_000)
    wait_for(lambda: server.metric("requests_running") == 0 and server.metric("clients_gone_total") == gone + 7)
    assert client.completions.create(model="model", prompt="a", max_tokens=2).usage.completion_tokens == 2


def test_a_client_that_leaves_amid_its_request(server):
    gone = server.metric('requests_total{status="499"}')
    server.begin_request().close()
    wait_for(lambda: server.metric('requests_total{status="499"}') == gone + 1)


def test_connections_are_bounded(folder):
    """Each of these holds a part of a body."""
    limits = Limits(length=0, rows=1, waiting=1)
    with serving(folder, "--rows", limits.rows, "--waiting", limits.waiting) as server:
        lines = [server.begin_request()]
        assert server.ask("GET", "/health")[0] == 200
        lines += [server.begin_request() for _ in range(limits.connections)]
        wait_for(lambda: b" 503 " in read_now(lines[-1]))
        assert read_now(lines[0]) == b""  # who came in time is still listened to
        for line in lines:
            line.close()
        wait_for(lambda: server.ask("GET", "/health")[0] == 200)
        assert server.post({"prompt": "abc", "max_tokens": 2})[0] == 200


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "", "[::1", "localhost.evil.example"])
@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/health"])
def test_a_strangers_name_is_refused(server, host, path):
    """A page of his could read the answers otherwise: to the browser they come from his name."""
    status, _, text = server.ask("GET", path, host=host)
    assert status == 421
    assert '"code": "wrong_host"' in text


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:8000", "127.0.0.1", "[::1]:8000", "192.168.0.7"])
def test_names_that_lead_here(server, host):
    assert server.ask("GET", "/v1/models", host=host)[0] == 200


def test_health_and_metrics(server):
    assert server.ask("GET", "/health")[::2] == (200, '{"status": "ok"}')
    tokens = server.metric("completion_tokens_total")
    server.post({"prompt": "abc", "max_tokens": 7})
    assert server.metric("completion_tokens_total") == tokens + 7
    assert 0 < server.metric("attention_fraction") < 1
    assert server.metric("generation_seconds_total") > 0
