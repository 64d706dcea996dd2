"""Text of unknown origin made safe to show."""

import re
import unicodedata

# Halves of surrogate pairs, which are no characters and have no bytes.
HALVES = re.compile(r"[\ud800-\udfff]")
# Controls, formatting (which can reverse text), surrogates, private and unassigned code points, line separators.
HIDDEN = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}


def visible(text: str, keep: str = "\n\t") -> str:
    """Every character that could move a cursor, recolour a terminal or break XML spelt as an escape, except `keep`."""
    shown = (c in keep or unicodedata.category(c) not in HIDDEN for c in text)
    return "".join(c if ok else c.encode("unicode_escape").decode() for c, ok in zip(text, shown, strict=True))
