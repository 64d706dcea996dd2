"""Text of a model or a user cannot control a terminal or break a figure."""

import sys
from xml.etree import ElementTree

from chiar.visible import visible


def test_every_code_point_can_be_printed_and_put_into_xml():
    assert visible("plain text, naïve 漢 🙂\n\tkept") == "plain text, naïve 漢 🙂\n\tkept"
    assert visible("\x1b[2J\r\x9b a\u202eb\u2028c \udc80") == "\\x1b[2J\\r\\x9b a\\u202eb\\u2028c \\udc80"
    shown = visible("".join(map(chr, range(sys.maxunicode + 1))), keep="")
    assert not any(c < " " or "\x7f" <= c < "\xa0" for c in shown)
    text = shown.replace("&", "").replace("<", "")
    assert ElementTree.fromstring(f"<t>{text}</t>").text == text
