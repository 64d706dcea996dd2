"""From tokens to text that may be shown: whole characters, and nothing from a stop text on."""

from dataclasses import dataclass, field

import torch

from chiar.data.tokens import TextCodec
from chiar.generation.stream import TokenStreamer


@dataclass(frozen=True)
class TokenScore:
    """A token with its log-probability under the model, before temperature and top_p; None for a text's first."""

    id: int
    logprob: float | None = None
    top: dict[int, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Piece:
    """What one choice has to add; `finish` says that it is the last, and why."""

    choice: int
    text: str
    tokens: list[TokenScore]
    finish: str | None = None


class Writer:
    """Holds back what may be half a character or the beginning of a stop text."""

    def __init__(self, choice: int, codec: TextCodec, stops: tuple[str, ...]) -> None:
        self.choice, self.stops = choice, stops
        self.held = ""
        self.tokens: list[TokenScore] = []
        self.stopped = False
        self.streamer = TokenStreamer(codec, None, lambda text, dark: self.hold(text))

    def hold(self, text: str) -> None:
        self.held += text

    def add(self, token: TokenScore) -> Piece | None:
        """What may be shown now. `stopped` tells whether a stop text came up."""
        self.tokens.append(token)
        self.streamer.put(torch.tensor([token.id]))
        safe = self.cut()
        return self.release(safe) if safe else None

    def end(self, finish: str) -> Piece:
        self.streamer.end()
        self.cut()
        return self.release(len(self.held), "stop" if self.stopped else finish)

    def cut(self) -> int:
        """How many of the characters held are safe; a stop text and all behind it are dropped."""
        found = [at for at in (self.held.find(stop) for stop in self.stops) if at >= 0]
        if found:
            self.held, self.stopped = self.held[: min(found)], True
        if self.stopped:
            return len(self.held)
        return len(self.held) - max((overlap(self.held, stop) for stop in self.stops), default=0)

    def release(self, characters: int, finish: str | None = None) -> Piece:
        piece = Piece(self.choice, self.held[:characters], self.tokens, finish)
        self.held, self.tokens = self.held[characters:], []
        return piece


def overlap(text: str, stop: str) -> int:
    """The longest end of `text` that `stop` begins with."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)
