"""`chiar serve` as a process of its own, on a free port."""

import http.client
import json
import re
import resource
import socket
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import dataclass

import openai

LONG = 1_000_000
"""More tokens than any test has time for."""
JSON = {"content-type": "application/json"}


@dataclass
class Served:
    process: subprocess.Popen
    port: int

    def client(self, key="none", **settings) -> openai.OpenAI:
        url = f"http://127.0.0.1:{self.port}/v1"
        return openai.OpenAI(base_url=url, api_key=key, **{"max_retries": 0, "timeout": 60, **settings})

    def begin(self, method, path, body=None, **headers):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request(method, path, body, headers)
        return connection, connection.getresponse()

    def ask(self, method, path, body=None, **headers):
        """Status, headers and text."""
        connection, answer = self.begin(method, path, body, **headers)
        text = answer.read().decode()
        connection.close()
        return answer.status, answer.headers, text

    def post(self, fields, **headers):
        return self.ask("POST", "/v1/completions", json.dumps(fields), **JSON, **headers)

    def open_stream(self, **headers):
        """A stream without an end."""
        fields = {"prompt": "light", "stream": True, "max_tokens": LONG, "temperature": 0}
        connection, answer = self.begin("POST", "/v1/completions", json.dumps(fields), **JSON, **headers)
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
def serving(folder, *options, handles=None, log=subprocess.DEVNULL):
    """Yields when it answers; ends the process whatever happened. `handles`: files it may have open at a time."""
    few = None if handles is None else lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (handles, handles))
    command = ["-m", "chiar", "serve", str(folder), "--port", "0", "--max-length", str(LONG + 100), *map(str, options)]
    pipes = {"stdout": subprocess.PIPE, "stderr": log, "text": True, "preexec_fn": few}
    with subprocess.Popen([sys.executable, *command], **pipes) as process:
        try:
            yield Served(process, int(re.search(r"http://127\.0\.0\.1:(\d+)/v1", process.stdout.readline())[1]))
        finally:
            process.kill()
