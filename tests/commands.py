"""The chiar command, run inside the test's own process; and waiting for what runs beside it."""

import time

from typer.testing import CliRunner

from chiar.cli import app
from chiar.errors import InputError


def run(*arguments):
    """Exit code and output; an InputError comes back as the code and sentence `main` gives it."""
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    if isinstance(result.exception, InputError):
        return 2, f"error: {result.exception}"
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def wait_until(true, seconds=120.0):
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "work went on"
        time.sleep(0.002)
