"""What a model or a user writes cannot take over a terminal or break a picture."""

import sys
from xml.etree import ElementTree

import pytest

from chiar.visible import visible


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain text, naïve 漢 🙂\n\tkept", "plain text, naïve 漢 🙂\n\tkept"),
        ("\x1b[2J\x07\r\x00", "\\x1b[2J\\x07\\r\\x00"),
        ("a\u202eb\u2028c", "a\\u202eb\\u2028c"),
        ("\x9b31m", "\\x9b31m"),
        ("\udc80", "\\udc80"),
    ],
    ids=["kept", "controls", "reversing", "c1", "surrogate"],
)
def test_examples(text, shown):
    assert visible(text) == shown


def test_every_code_point_can_be_printed_and_put_into_xml():
    shown = visible("".join(map(chr, range(sys.maxunicode + 1))), keep="")
    assert not any(c < " " or "\x7f" <= c < "\xa0" for c in shown)
    text = shown.replace("&", "").replace("<", "")
    assert ElementTree.fromstring(f"<t>{text}</t>").text == text
