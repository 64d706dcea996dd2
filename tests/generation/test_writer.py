"""What is shown, piece by piece, is the text up to the first stop text."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from chiar.data.tokens import TextCodec
from chiar.generation.writer import Piece, Row, Sampling, TokenScore, write_text
from chiar.model.modeling import ChiarForCausalLM
from helpers import randomise, small_config

BYTES = TextCodec(None, None)
SHORT = st.text("ab漢", min_size=1, max_size=4)


def write(data, stops=()):
    """The pieces of a text that a model writes byte by byte, until it is stopped."""
    pieces = []
    row = Row(BYTES, Sampling(len(data), stops=tuple(stops)), send=pieces.append)
    for byte in data:
        if not row.is_over:
            row.take(TokenScore(byte), set())
    return pieces


@given(st.text("ab漢", min_size=1, max_size=30), st.lists(SHORT, max_size=3))
def test_pieces_add_up(text, stops):
    pieces = write(text.encode(), stops)
    found = [(text.index(stop) + len(stop), text.index(stop)) for stop in stops if stop in text]
    # The one that is complete first counts; of several that end together the longest.
    expected = text[: min(found)[1]] if found else text
    assert "".join(piece.text for piece in pieces) == expected
    assert pieces[-1].finish == ("stop" if found else "length")
    assert all(piece.finish is None for piece in pieces[:-1])


HALF = "漢".encode()


def test_bytes_that_are_no_character_are_shown_at_once():
    """All but what may still become one."""
    broken = [HALF[:1] * 3 + HALF, b"\x80" * 9 + b"a", b"\xf0\x9f\x98" + HALF, b"\xff\xf0\x9f" * 4, HALF[:2] * 9]
    for data in broken:
        row = Row(BYTES, Sampling(100))
        for seen, byte in enumerate(data, 1):
            row.take(TokenScore(byte), set())
            assert seen - row.sent <= 3, (data, seen)


@given(st.lists(st.sampled_from([0x61, 0x80, 0xBC, *HALF, *"😀é".encode(), 0xFF]), min_size=1, max_size=24))
def test_pieces_of_any_bytes_add_up(data):
    assert "".join(piece.text for piece in write(data)) == bytes(data).decode("utf-8", "replace")


def test_a_character_with_tokens_between_that_show_nothing():
    first, second, third = HALF
    assert "".join(piece.text for piece in write([first, 256, second, 256, 256, third, 97])) == "漢a"
    assert len(write([first, *[256] * 40])) > 1  # it is not waited for for ever


def test_every_token_comes_with_a_piece():
    pieces = [Piece("a", [TokenScore(97)]), Piece("bc", [TokenScore(98), TokenScore(99)], "length")]
    assert write(b"abc", ["bx"]) == pieces
    assert [piece.text for piece in write(b"xabyabc", ["abc"])] == ["x", "aby", ""]  # held back: it may be a stop text
    found = [(piece.text, len(piece.tokens)) for piece in write("é".encode() + b"\xe6")]
    assert found == [("é", 2), ("\N{REPLACEMENT CHARACTER}", 1)]  # characters are whole, remains are shown


def test_a_model_in_training_writes_as_its_own_evaluation_and_goes_on_training():
    model = randomise(ChiarForCausalLM(small_config(vocab_size=257, dropout=0.5, gate_pool="batch")), seed=4).train()
    text = write_text(model, BYTES, "light", Sampling(9))
    assert model.training and model.config.gate_generation == "refuse"
    model.eval()
    model.config.gate_generation = "prefill"
    ids = torch.tensor([list(b"light")])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=9, do_sample=False)
    assert text == BYTES.decode(out[0, 5:].tolist())
    assert text.startswith(write_text(model, BYTES, "light", Sampling(9, stops=(text[3:5],)))) and len(text) > 5
