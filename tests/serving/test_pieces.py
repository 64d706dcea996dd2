"""What is shown, piece by piece, is the text up to the first stop text."""

from hypothesis import given
from hypothesis import strategies as st

from chiar.serving.pieces import Piece, TokenScore, Writer
from chiar.tokens import TextCodec

BYTES = TextCodec(None, None)
SHORT = st.text("ab漢", min_size=1, max_size=4)


def write(data, stops=()):
    """The pieces of a text that a model writes byte by byte, until it is stopped."""
    writer, pieces = Writer(0, BYTES, tuple(stops)), []
    for byte in data:
        pieces.append(writer.add(TokenScore(byte)))
        if writer.stopped:
            break
    return [*(piece for piece in pieces if piece), writer.end("length")]


@given(st.text("ab漢", max_size=30), st.lists(SHORT, max_size=3))
def test_pieces_add_up(text, stops):
    pieces = write(text.encode(), stops)
    found = [(text.index(stop) + len(stop), text.index(stop)) for stop in stops if stop in text]
    # The one that is complete first counts; of several that end together the longest.
    expected = text[: min(found)[1]] if found else text
    assert "".join(piece.text for piece in pieces) == expected
    assert pieces[-1].finish == ("stop" if found else "length")
    assert all(piece.finish is None for piece in pieces[:-1])


def test_the_beginning_of_a_stop_text_is_held_back():
    assert [piece.text for piece in write(b"xabyabc", ["abc"])] == ["x", "aby", ""]


def test_characters_are_whole_and_remains_are_shown():
    pieces = write("é".encode() + b"\xe6")
    assert [piece.text for piece in pieces] == ["é", "\N{REPLACEMENT CHARACTER}"]
    assert [len(piece.tokens) for piece in pieces] == [2, 1]


def test_every_token_comes_with_a_piece():
    assert write(b"abc", ["bx"]) == [
        Piece(0, "a", [TokenScore(97)]),
        Piece(0, "bc", [TokenScore(98), TokenScore(99)]),
        Piece(0, "", [], "length"),
    ]
