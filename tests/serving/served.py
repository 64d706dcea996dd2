"""`chiar serve` as a process of its own, on a free port."""

import http.client
import json
import re
import socket
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import dataclass

import openai

LONG = 1_000_000
"""More tokens than any test has time for."""


@dataclass
class Served:
    process: subprocess.Popen
    port: int

    def client(self, key="none", **settings) -> openai.OpenAI:
        url = f"http://127.0.0.1:{self.port}/v1"
        return openai.OpenAI(base_url=url, api_key=key, **{"max_retries": 0, "timeout": 60, **settings})

    def ask(self, method, path, body=None, **headers):
        """Status, headers and text."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            return answer.status, answer.headers, answer.read().decode()
        finally:
            connection.close()

    def post(self, fields, **headers):
        headers = {"content-type": "application/json", **headers}
        return self.ask("POST", "/v1/completions", json.dumps(fields), **headers)

    def open_stream(self, **headers):
        """A stream without an end."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        fields = {"prompt": "light", "stream": True, "max_tokens": LONG, "temperature": 0}
        connection.request(
            "POST", "/v1/completions", json.dumps(fields), {"content-type": "application/json", **headers}
        )
        answer = connection.getresponse()
        assert answer.status == 200
        return connection, answer

    def begin_request(self) -> socket.socket:
        """A connection with a request whose body does not end."""
        line = socket.create_connection(("127.0.0.1", self.port))
        head = ["POST /v1/completions HTTP/1.1", "host: localhost", "content-type: application/json"]
        line.sendall("\r\n".join([*head, "content-length: 99", "", '{"prompt"']).encode())
        return line

    def metric(self, name) -> float:
        found = re.search(rf"^chiar_{re.escape(name)} (\S+)$", self.ask("GET", "/metrics")[2], re.MULTILINE)
        return float(found[1]) if found else 0.0


@contextmanager
def serving(folder, *options):
    """Yields when it answers; ends the process whatever happened."""
    command = [sys.executable, "-m", "chiar", "serve", str(folder), "--port", "0", "--max-length", str(LONG + 100)]
    process = subprocess.Popen(
        [*command, *map(str, options)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        line = process.stdout.readline()
        yield Served(process, int(re.search(r"http://127\.0\.0\.1:(\d+)/v1", line)[1]))
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
