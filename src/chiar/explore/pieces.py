"""What to show of each token: a character that several tokens make up stands where it is whole."""

from chiar.data.tokens import TextCodec
from chiar.visible import visible

PART = "◦"
"""A token whose character is not whole yet."""
BROKEN = "\N{REPLACEMENT CHARACTER}"


class Pieces:
    """Fed token by token, so that a text being written is shown as one that was read."""

    def __init__(self, codec: TextCodec) -> None:
        self.codec = codec
        self.waiting: list[int] = []

    def next(self, token: int) -> str:
        """Safe to show; line breaks and tabs are kept."""
        alone = self.codec.decode([token])
        if BROKEN not in alone:  # it begins a character, so what waited never was one
            self.waiting = []
            return visible(alone or self.codec.pieces([token])[0])
        self.waiting.append(token)
        text = self.codec.decode(self.waiting)
        # No character has more than four bytes: what is still broken then stays so.
        if text.endswith(BROKEN) and len(self.waiting) < 4:
            return PART
        self.waiting = []
        return visible(text)
