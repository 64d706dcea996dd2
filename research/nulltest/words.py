"""The word class of every token: closed classes from a small lexicon of our own, the rest by spelling.

Words are assembled from the tokenizer's pieces, and every piece has the class of its word. This is not a tagger: it
separates function words from content words, as the claim under test needs.
"""

import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from chiar.data.shards import Split
from chiar.data.tokenizers import Tokenizer

LEXICON = Path(__file__).parent / "closed_class_words.txt"
FUNCTION = ("determiner", "preposition", "conjunction", "pronoun", "auxiliary", "particle", "clitic")
CONTENT = ("open class", "capitalised word")
CLASSES = (*FUNCTION, *CONTENT, "number", "punctuation", "unknown word", "space", "end of text")
NUMBER_OF = {name: number for number, name in enumerate(CLASSES)}
# Letters of any script in UTF-8; the leading bytes c2 and e2 mostly encode punctuation and symbols, f0 emoji.
LETTER = rb"(?:[A-Za-z]|[\xc3-\xe1\xe3-\xef][\x80-\xbf]{1,2})"
APOSTROPHE = rb"(?:'|\xe2\x80\x99)"
PIECES = re.compile(
    rb"(?P<unknown><unk>)"
    rb"|(?P<word>" + LETTER + rb"+(?:" + APOSTROPHE + LETTER + rb"+)*"
    rb"|" + APOSTROPHE + rb"(?:s|t|re|ve|ll|d|m)(?![A-Za-z]))"
    rb"|(?P<number>[0-9](?:[0-9.,:]*[0-9])?(?:s|st|nd|rd|th)?)"
    rb"|(?P<space>\s+)"
    rb"|(?P<mark>.)",
    re.DOTALL | re.IGNORECASE,
)
CONTEXT = 16
"""Tokens read on both sides of a row, to know the words that its ends cut."""


class WordClasses(NamedTuple):
    """For N tokens: an index into CLASSES, and whether the word of the token starts with a capital letter."""

    class_N: np.ndarray
    capital_N: np.ndarray


@cache
def lexicon() -> dict[str, str]:
    text = LEXICON.read_text(encoding="utf-8")
    entries = (line.split(":") for line in text.splitlines() if not line.startswith("#"))
    return {word: name for name, words in entries for word in words.split()}


def word_class(word: str) -> str:
    """The class of a word as spelled in the text."""
    plain = word.replace("\N{RIGHT SINGLE QUOTATION MARK}", "'").lower()
    known = lexicon()
    if plain in known:
        return known[plain]
    stem, apostrophe, _ = plain.partition("'")
    if apostrophe and plain.endswith("n't"):
        return "auxiliary"
    if apostrophe and stem in known:
        return known[stem]
    return "capitalised word" if word[:1].isupper() else "open class"


def classify(ids: np.ndarray, tokenizer: Tokenizer) -> WordClasses:
    """Classes of the tokens of running text. A token belongs to the word that its first non-space byte lies in."""
    parts = [tokenizer.token_bytes[number] for number in ids.tolist()]
    # End of text has no bytes: a newline in its place separates the words on both sides.
    ends = ids == tokenizer.end_of_text
    parts = [b"\n" if end else part for part, end in zip(parts, ends.tolist(), strict=True)]
    text = b"".join(parts)
    class_of_byte, capital_of_byte = np.empty(len(text), np.int64), np.zeros(len(text), bool)
    for match in PIECES.finditer(text):
        kind, span = str(match.lastgroup), slice(*match.span())
        if kind == "word":
            word = match.group().decode("utf-8", "replace")
            class_of_byte[span] = NUMBER_OF[word_class(word)]
            capital_of_byte[span] = word[:1].isupper()
        else:
            name = {"unknown": "unknown word", "mark": "punctuation"}.get(kind, kind)
            class_of_byte[span] = NUMBER_OF[name]
    lengths = np.array([len(part) for part in parts])
    leading = np.array([min(len(part) - len(part.lstrip()), max(len(part) - 1, 0)) for part in parts])
    first = np.cumsum(lengths) - lengths + leading
    return WordClasses(np.where(ends, NUMBER_OF["end of text"], class_of_byte[first]), capital_of_byte[first])


def classify_rows(split: Split, starts: np.ndarray, length: int, tokenizer: Tokenizer) -> WordClasses:
    """Classes of the tokens of the rows that begin at `starts`, row by row."""
    parts = []
    for start in starts.tolist():
        before = min(start, CONTEXT)
        read = split.read(start - before, min(before + length + CONTEXT, split.tokens - start + before))
        classes = classify(read, tokenizer)
        parts.append((classes.class_N[before : before + length], classes.capital_N[before : before + length]))
    return WordClasses(np.concatenate([a for a, _ in parts]), np.concatenate([b for _, b in parts]))
