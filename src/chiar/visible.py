"""Text of unknown origin made safe to show."""

import unicodedata

# Controls, formatting (which can reverse text), surrogates, private and unassigned code points, line separators.
HIDDEN = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}


def visible(text: str, keep: str = "\n\t") -> str:
    """Every character that could move a cursor, recolour a terminal or break XML spelt as an escape, except `keep`."""
    return "".join(c if c in keep or unicodedata.category(c) not in HIDDEN else spelt(c) for c in text)


def spelt(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
