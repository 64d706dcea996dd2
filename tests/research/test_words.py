"""Word classes: the lexicon, spelling, and words assembled from pieces."""

import numpy as np

from chiar.data.own_files import Text
from chiar.data.prepare import prepare
from chiar.data.tokenizers import Tokenizer, TokenizerChoice
from research.nulltest.words import CLASSES, FUNCTION, LEXICON, classify, classify_rows

TEXT = "The cat didn't see Anna's 1,234 dogs of Köln — it 's <unk> , isn 't it ? Unbelievable things in the 1990s\n"
EXPECTED = [
    ("The", "determiner"), ("cat", "open class"), ("didn't", "auxiliary"), ("see", "open class"),
    ("Anna's", "capitalised word"), ("1,234", "number"), ("dogs", "open class"), ("of", "preposition"),
    ("Köln", "capitalised word"), ("—", "punctuation"), ("it", "pronoun"), ("'s", "clitic"),
    ("<unk>", "unknown word"), (",", "punctuation"), ("isn", "auxiliary"), ("'t", "clitic"), ("it", "pronoun"),
    ("?", "punctuation"), ("Unbelievable", "capitalised word"), ("things", "open class"), ("in", "preposition"),
    ("the", "determiner"), ("1990s", "number"),
]  # fmt: skip


def test_the_lexicon_names_every_word_once():
    lines = [line.partition(":") for line in LEXICON.read_text("utf-8").splitlines() if not line.startswith("#")]
    words = [word for _, _, words in lines for word in words.split()]
    assert {name for name, _, _ in lines} == set(FUNCTION) and len(words) == len(set(words)) > 250


def test_pieces_have_the_class_of_their_word():
    """A tokenizer with few merges splits words; a leading space belongs to the word that follows."""
    tokenizer = Tokenizer.train([TEXT] * 3 + ["the things in the believable"] * 5, 300)
    ids = np.append(tokenizer.encode_batch([TEXT])[0], tokenizer.end_of_text)
    found = [CLASSES[number] for number in classify(ids, tokenizer).class_N]
    of_byte = [name for word, kind in EXPECTED for name in [kind] * len(word.encode()) + ["space"]]
    place = 0
    for token, name in zip(ids[:-1], found[:-1], strict=True):
        piece = tokenizer.token_bytes[token]
        assert TEXT.encode()[place : place + len(piece)] == piece
        assert not piece.strip() or name == of_byte[place + len(piece) - len(piece.lstrip())]
        place += len(piece)
    assert place == len(of_byte) > len(ids) and found[-1] == "end of text"


def test_words_cut_by_the_ends_of_a_row_keep_their_class(tmp_path):
    (tmp_path / "train.txt").write_text("\n\n".join([TEXT] * 5), encoding="utf-8")
    (tmp_path / "valid.txt").write_text(TEXT, encoding="utf-8")
    corpus = prepare(Text([tmp_path]), tmp_path / "corpus", TokenizerChoice("bytes"))
    split = corpus.split("train")
    whole = classify(split.read(0, split.tokens), corpus.tokenizer())
    cuts = [TEXT.encode().index(cut) for cut in (b"nbelievable", b"s in the")]
    starts = np.array([0, 9, *cuts, split.tokens - 7])
    found = classify_rows(split, starts, 7, corpus.tokenizer())
    wanted = np.concatenate([np.arange(start, start + 7) for start in starts])
    assert found.class_N.tolist() == whole.class_N[wanted].tolist()
    assert found.capital_N.tolist() == whole.capital_N[wanted].tolist()
    assert CLASSES.index("end of text") in whole.class_N
