"""What is shown of each token."""

import pytest

from chiar.data.tokenizers import Tokenizer
from chiar.data.tokens import TextCodec
from chiar.explore.view import PART, Pieces
from chiar.generation.writer import BROKEN


def shown(codec, ids):
    pieces = Pieces(codec)
    return [pieces.next(token) for token in ids]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"ab", ["a", "b"]),
        ("é漢🎨".encode(), [PART, "é", PART, PART, "漢", PART, PART, PART, "🎨"]),
        (b"\xe6a", [PART, BROKEN + "a"]),
        (b"\xf0\x9f\x8ea", [PART, PART, PART, BROKEN + "a"]),
        (b"\xff\xff\xff\xffa", [PART, BROKEN, BROKEN, BROKEN, BROKEN + "a"]),
        (b"\x1b\n\t", ["\\x1b", "\n", "\t"]),
    ],
    ids=["plain", "whole", "broken", "cut", "never", "controls"],
)
def test_bytes(text, expected):
    assert shown(TextCodec(None, None), text) == expected


def test_a_trained_vocabulary_adds_up_to_the_text(tmp_path):
    text = "light 漢 and naïve tokens 🎨 漢漢"
    tokenizer = Tokenizer.train(["light and dark 漢 naïve tokens " * 20], 300)
    tokenizer.save(tmp_path)
    codec = TextCodec.open(None, tmp_path)
    assert "".join(shown(codec, codec.encode(text))).replace(PART, "") == text
