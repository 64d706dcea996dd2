"""OpenAI's own client against a real server: what it writes, refuses and survives, and how it starts and stops."""

import json
import re
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
import torch
from served import JSON, serving

from chiar.model.load import load_model
from chiar.visible import visible
from commands import run, wait_until

PROMPTS = ["light and dark", "漢字 filter", "x"]
KEY = {"authorization": "Bearer sesame"}
GRACE = 4.0


@pytest.fixture(scope="module")
def write(server):
    """Completions of the one server."""
    client = server.client()
    return lambda **fields: client.completions.create(**{"model": "model", "temperature": 0, **fields})


def test_the_text_is_that_of_chiar_generate(folder, write):
    """Which shows bytes of all kinds, spelt out for terminals."""
    drawn = {"temperature": 1.5, "top_p": 0.9, "seed": 3}
    for prompt, fields in (*((prompt, {}) for prompt in PROMPTS), ("light", drawn)):
        answer = write(prompt=prompt, max_tokens=30, **fields)
        options = [word for name, value in fields.items() for word in (f"--{name.replace('_', '-')}", value)]
        printed = run("generate", folder, "--prompt", prompt, "--max-new-tokens", 30, *options)[1]
        assert printed.endswith(visible(prompt + answer.choices[0].text) + "\n")
        assert answer.choices[0].finish_reason == "length"
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(prompt.encode()), 30)
    assert write(prompt="light", max_tokens=30, **drawn | {"seed": 4}).choices[0].text != answer.choices[0].text


def test_a_stream_adds_up_to_the_whole_and_a_stop_text_ends_it(write):
    fields = {"prompt": PROMPTS, "max_tokens": 25}
    whole, texts, finished, usage = write(**fields), [""] * 3, {}, None
    for chunk in write(**fields, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            finished[choice.index] = choice.finish_reason
    assert texts == [choice.text for choice in whole.choices]
    assert finished == dict.fromkeys(range(3), "length") and usage == whole.usage
    fields = {"prompt": "light", "max_tokens": 40, "temperature": 1.5, "seed": 1}
    text = write(**fields).choices[0].text
    stopped = write(**fields, stop=[text[10:12], "never this"]).choices[0]
    assert (stopped.text, stopped.finish_reason) == (text[: text.index(text[10:12])], "stop")


def test_rows_of_a_batch_are_what_each_is_alone(write):
    fields = {"max_tokens": 20, "temperature": 1.2, "seed": 5}
    together = write(prompt=PROMPTS[:2], n=2, **fields)
    assert [choice.index for choice in together.choices] == [0, 1, 2, 3]
    first, _, third, fourth = (choice.text for choice in together.choices)
    assert first == write(prompt=PROMPTS[0], **fields).choices[0].text
    assert third == write(prompt=list(PROMPTS[1].encode()), **fields).choices[0].text
    assert third != fourth
    assert together.usage.prompt_tokens == sum(len(prompt.encode()) for prompt in PROMPTS[:2])


def test_log_probabilities_are_the_models(folder, write):
    answer, ids = write(prompt="dark", max_tokens=0, echo=True, logprobs=2).choices[0], torch.tensor([list(b"dark")])
    with torch.no_grad():
        expected = load_model(str(folder))[0](ids).logits[0, :-1].log_softmax(-1)
    (first, *own), (none, *top) = answer.logprobs.token_logprobs, answer.logprobs.top_logprobs
    assert answer.text == "dark" and answer.logprobs.tokens == list("dark") and first is none is None
    assert answer.logprobs.text_offset == [0, 1, 2, 3]
    torch.testing.assert_close(torch.tensor(own), expected.gather(1, ids[0, 1:, None])[:, 0])
    torch.testing.assert_close(torch.tensor([max(best.values()) for best in top]), expected.max(-1).values)


def test_the_model_has_a_name_and_no_chat_and_errors_are_openais(server, write):
    client = server.client()
    assert [model.id for model in client.models.list()] == ["model"]
    assert client.models.retrieve("model").owned_by == "chiar"
    with pytest.raises(openai.BadRequestError, match="base language model"):
        client.chat.completions.create(model="model", messages=[{"role": "user", "content": "hello"}])
    for fields, status in (
        *(({"suffix": "end"}, 400), ({"extra_body": {"min_p": 0.1}}, 400), ({"max_tokens": 10**7}, 400)),
        *(({"model": "another"}, 404), ({"prompt": "x" * 20_000}, 413), ({"prompt": "x" * 600_000}, 413)),
    ):
        with pytest.raises(openai.APIStatusError) as caught:
            write(**{"prompt": "a", **fields})
        assert (caught.value.status_code, caught.value.type) == (status, "invalid_request_error")
        assert caught.value.body["message"].endswith(".")
    wrong = {404: ("GET", "/nowhere"), 405: ("GET", "/v1/completions"), 415: ("POST", "/v1/completions")}
    assert all(server.ask(*asked)[0] == status for status, asked in wrong.items())
    for body in ("", "{", "5", "[]", "[" * 9000, '{"prompt": NaN}', '{"\\ud800": 1}', "\x00", "9" * 5000):
        status, _, text = server.ask("POST", "/v1/completions", body, **JSON)
        assert status == 400 and '"message"' in text and '"type": "invalid_request_error"' in text


def test_fifty_clients_are_served_or_told_to_wait(server, write):
    fields = {"prompt": "dark", "max_tokens": 60, "temperature": 0}
    expected = write(**fields).choices[0].text
    with ThreadPoolExecutor(50) as clients:
        answers = list(clients.map(lambda n: server.post({**fields, "stream": n % 2 == 0}), range(50)))
    statuses = [status for status, _, _ in answers]
    assert set(statuses) == {200, 429}
    assert statuses.count(200) >= 8  # as many as may wait
    for number, (status, headers, text) in enumerate(answers):
        if status == 429:
            assert int(headers["retry-after"]) >= 1 and "rate_limit_exceeded" in text
        elif number % 2:
            assert json.loads(text)["choices"][0]["text"] == expected
        else:
            events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
            assert "".join(event["choices"][0]["text"] for event in events) == expected
            assert text.endswith("data: [DONE]\n\n")
    assert server.metric('requests_total{status="429"}') == statuses.count(429)
    patient = server.client(max_retries=5).completions.create(model="model", **fields)
    assert patient.choices[0].text == expected


def test_a_client_that_leaves_ends_its_text(server, write):
    """Each of these would go on for minutes."""
    gone = server.metric("clients_gone_total")
    streams = [server.open_stream() for _ in range(6)]  # four write, two wait
    wait_until(lambda: server.metric("rows_running") == 4)
    for connection, answer in streams:
        answer.close()
        connection.close()
    wait_until(lambda: server.metric("rows_running") == server.metric("requests_waiting") == 0)
    with pytest.raises(openai.APITimeoutError):
        server.client(timeout=0.5).completions.create(model="model", prompt="a", max_tokens=500_000)
    wait_until(lambda: server.metric("requests_running") == 0 and server.metric("clients_gone_total") == gone + 7)
    assert write(prompt="a", max_tokens=2).usage.completion_tokens == 2
    before = server.metric('requests_total{status="499"}')
    server.begin_request().close()
    wait_until(lambda: server.metric('requests_total{status="499"}') == before + 1)


def test_more_connections_than_file_handles_are_no_harm(folder, tmp_path):
    path = tmp_path / "log"
    with path.open("w") as log, serving(folder, "--access-log", handles=64, log=log) as server:
        stream, answer = server.open_stream()
        lines = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(100)]
        lines += [server.begin_request() for _ in range(100)]
        assert server.ask("GET", "/health")[0] == 200
        assert server.post({"prompt": "abc", "max_tokens": 2})[0] == 200
        assert answer.readline() and answer.readline() == b"\n" and answer.readline()  # who waits for us is kept
        stream.close()
        for line in lines:
            line.close()
        wait_until(lambda: " POST /v1/completions 200 " in path.read_text())
        lines = [line for line in path.read_text().splitlines() if not line.startswith("note: ")]
        answers = [re.fullmatch(r"\S+ 127\.0\.0\.1 (\S+ \S+ \d+) \d+\.\d{3} s", line) for line in lines]
        assert all(answers)  # nothing else is in the log
        completions = {f"POST /v1/completions {status}" for status in (200, 499)}
        assert "GET /health 200" in {answer[1] for answer in answers} <= {"GET /health 200", *completions}


def test_health_and_metrics_and_no_strangers_name(server):
    status, _, text = server.ask("GET", "/v1/models", host="evil.example")
    assert status == 421 and '"code": "wrong_host"' in text  # the page's tests have more names
    assert server.ask("GET", "/v1/models", origin="http://evil.example")[0] == 403
    assert server.ask("GET", "/health")[::2] == (200, '{"status": "ok"}')
    tokens = server.metric("completion_tokens_total")
    server.post({"prompt": "abc", "max_tokens": 7})
    assert server.metric("completion_tokens_total") == tokens + 7
    assert 0 < server.metric("attention_fraction") < 1
    assert server.metric("generation_seconds_total") > 0
    told = server.ask("GET", "/metrics")[2].splitlines()
    helped, typed = ([line.split()[2] for line in told if line.startswith(f"# {word} ")] for word in ("HELP", "TYPE"))
    assert helped == typed == sorted({re.match(r"\w+", line)[0] for line in told if line.startswith("chiar_")})


def test_sigterm_while_texts_are_written(folder):
    """What runs is finished, what is new refused, and the server gone in time."""
    with serving(folder, "--grace", GRACE, "--api-key", "sesame", "--name", "named") as server:
        with pytest.raises(openai.AuthenticationError):
            server.client(key="wrong").models.list()
        client = server.client(key="sesame")
        assert client.models.list().data[0].id == "named"
        for path in ("/health", "/metrics"):  # open to those who only look after the process
            assert server.ask("GET", path, host="any.name.example")[0] == 200
        endless, answer = server.open_stream(**KEY)
        chunks = client.completions.create(model="named", prompt="dark", max_tokens=12, temperature=0, stream=True)
        next(chunks)
        began = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        with ThreadPoolExecutor(1) as reader:
            finished = reader.submit(list, chunks)
            status, headers, text = server.post({"prompt": "new"}, **KEY)
            assert (status, headers["retry-after"]) == (503, "5") and "stopping" in text
            assert server.ask("GET", "/health")[0] == 503
            assert finished.result()[-1].choices[0].finish_reason == "length"
        rest = [json.loads(line[6:]) for line in answer if line.startswith(b"data: {")]
        assert rest[-1]["error"]["type"] == "server_error"  # this one was cut off when the time was up
        endless.close()
        assert server.process.wait(timeout=GRACE + 15) == 0
        assert time.monotonic() - began >= GRACE


def test_a_second_signal_waits_for_no_client(folder):
    with serving(folder, "--grace", 600) as server:
        connection, _ = server.open_stream()  # nobody reads it
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: server.ask("GET", "/health")[0] == 503)
        server.process.send_signal(signal.SIGTERM)
        server.process.wait(timeout=60)
        connection.close()
