"""How `chiar explore` begins and ends."""

import os
import signal
import socket
import subprocess
import sys

import httpx
import pytest

from commands import run


def test_a_missing_extra_is_named(folders, monkeypatch):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    code, said = run("explore", folders[0], "--port", 0)
    assert code == 2 and "pip install 'chiar[page]'" in said


def test_a_port_in_use(folders):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        code, said = run("explore", folders[0], "--port", taken.getsockname()[1])
    assert code == 2 and "cannot listen" in said and "--port 0" in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere/at-all"], "no folder"),
        (["v9-tiny"], "unknown preset"),
        (["--beside", "v3-tiny"], "--beside needs a first model"),
        (["v3-tiny", "--beside", "v3-tiny"], "named twice"),
        (["v3-16m"], "--tokenizer"),
    ],
    ids=["folder", "preset", "beside-alone", "twice", "no-tokenizer"],
)
def test_what_cannot_be_opened(arguments, message):
    code, said = run("explore", *arguments, "--port", 0)
    assert code == 2 and message in said


@pytest.mark.slow
def test_it_serves_until_interrupted(tmp_path):
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    program = [sys.executable, "-m", "chiar", "explore", "v3-tiny", "--port", "0"]
    with subprocess.Popen(program, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            url = process.stdout.readline().split()[4]
            assert url.startswith("http://127.0.0.1:")
            wish = {"text": "light and dark", "tokens": 200}
            with httpx.stream("POST", f"{url}api/continue", json=wish, timeout=30) as response:
                lines = response.iter_lines()
                next(lines)
                process.send_signal(signal.SIGINT)
                assert process.wait(15) == 0
        finally:
            process.kill()
