"""GPT-2's alphabet: one printable character for each byte, so that vocabularies of bytes fit into JSON text.

Printable Latin-1 characters stand for themselves; the other bytes take the characters from U+0100 on, in order.
"""

_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(256) if byte not in set(_PRINTABLE)]

CHARACTER_OF_BYTE = {byte: chr(byte) for byte in _PRINTABLE} | {b: chr(256 + n) for n, b in enumerate(_OTHERS)}
BYTE_OF_CHARACTER = {character: byte for byte, character in CHARACTER_OF_BYTE.items()}


def bytes_of(token: str) -> bytes:
    """The bytes a vocabulary entry stands for."""
    return bytes(BYTE_OF_CHARACTER[character] for character in token)
