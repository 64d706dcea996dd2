"""How much one server takes on."""

from dataclasses import dataclass

SPARE = 64
"""Connections beyond those that are served or wait."""


@dataclass(frozen=True)
class Limits:
    length: int
    """Tokens of a prompt and its continuation together."""
    rows: int = 16
    """Texts written at the same time, and texts one request may ask for (prompts × n)."""
    waiting: int = 64
    """Requests that may wait for their turn; more are told to come back."""
    body: int = 1 << 20
    """Bytes of a request."""
    body_seconds: float = 30.0
    """Time a client has to send them."""
    grace: float = 30.0
    """Seconds that running requests get to finish when the server is told to stop."""

    @property
    def connections(self) -> int:
        """Open at the same time: those who are served and who wait, and some who send their request, are told to come
        back or look at /metrics. Each may hold a body."""
        return self.rows + self.waiting + SPARE
