"""How much one server takes on."""

from dataclasses import dataclass


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
