"""What a person sees: in a real pseudo-terminal, and in plain lines."""

import os
import pty
import re
import subprocess

from test_loop import command

from chiar.training import display
from chiar.training.display import Display


def in_a_terminal(arguments):
    """Exit code and everything the command showed in a terminal of its own."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "150", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(arguments, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    shown = b""
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:  # Linux says so when the last program has left the terminal
            break
        if not part:
            break
        shown += part
    os.close(ours)
    return process.wait(), shown.decode()


def test_a_terminal_shows_bar_time_left_and_records(corpus, tmp_path):
    code, shown = in_a_terminal([*command(corpus, tmp_path / "run"), "--steps", "45", "--set", "log_every=15"])
    assert code == 0
    assert "━" in shown
    assert re.search(r"\b\d+/45", shown)
    assert re.search(r"\d:\d\d:\d\d", shown)
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown)
    for step in (1, 15, 30, 45):
        assert re.search(rf"step {step}/45  loss \d+\.\d{{4}}", plain)
    # The bar is gone at the end, and the cursor back.
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")
    assert "━" not in shown[shown.rindex("\x1b[?25h") :]
    code, shown = in_a_terminal(command(corpus, tmp_path / "run"))
    assert code == 2 and shown.strip().startswith("error: ") and "add --resume" in shown


def test_the_time_left_knows_only_the_steps_of_this_process(monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr(display.time, "perf_counter", lambda: now[0])
    shown = Display(steps=100, first=90)
    now[0] = 1000.0  # resuming, and compiling in the first step
    shown.advance(91)
    shown.record({"step": 91, "loss": 1.0, "rate": 1e-3})
    assert "left" not in capsys.readouterr().out
    now[0] = 1004.0
    shown.advance(93)
    shown.record({"step": 93, "loss": 1.0, "rate": 1e-3})
    assert "0:00:14 left" in capsys.readouterr().out
