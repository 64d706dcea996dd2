"""Told to stop, the server finishes what runs, refuses what is new, and is gone in time."""

import json
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
from served import serving

from chiar.serving.cli import FAREWELL

KEY = {"authorization": "Bearer sesame"}
GRACE = 3.0


def rest(answer):
    """The events of a stream that are left."""
    return [json.loads(line[6:]) for line in answer if line.startswith(b"data: {")]


def test_sigterm_while_texts_are_written(folder):
    with serving(folder, "--grace", GRACE, "--api-key", "sesame", "--name", "named") as server:
        with pytest.raises(openai.AuthenticationError):
            server.client(key="wrong").models.list()
        client = server.client(key="sesame")
        assert client.models.list().data[0].id == "named"
        for path in ("/health", "/metrics"):  # open to those who only look after the process
            assert server.ask("GET", path, host="any.name.example")[0] == 200
        endless, answer = server.open_stream(**KEY)
        chunks = iter(
            client.completions.create(model="named", prompt="dark", max_tokens=200, temperature=0, stream=True)
        )
        first = next(chunks)
        began = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        with ThreadPoolExecutor(1) as reader:
            finished = reader.submit(list, chunks)
            status, headers, text = server.post({"prompt": "new"}, **KEY)
            assert (status, headers["retry-after"]) == (503, "5")
            assert "stopping" in text
            assert server.ask("GET", "/health")[0] == 503
            tail = finished.result()
        assert tail[-1].choices[0].finish_reason == "length"
        assert len(first.choices[0].text + "".join(chunk.choices[0].text for chunk in tail)) > 50
        assert rest(answer)[-1]["error"]["type"] == "server_error"  # this one was cut off when the time was up
        endless.close()
        assert server.process.wait(timeout=GRACE + 15) == 0
        assert time.monotonic() - began >= GRACE


def test_a_second_signal_waits_for_no_client(folder):
    with serving(folder) as server:
        connection, _ = server.open_stream()  # nobody reads it
        server.process.send_signal(signal.SIGTERM)
        while server.ask("GET", "/health")[0] != 503:
            time.sleep(0.05)
        began = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        server.process.wait(timeout=20)
        assert time.monotonic() - began < FAREWELL - 1
        connection.close()
