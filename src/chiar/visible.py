"""Untrusted text made safe to display."""

import re
import unicodedata

# Lone surrogates are not characters and cannot be encoded.
SURROGATES = re.compile(r"[\ud800-\udfff]")
# Control, format (can reverse text), surrogate, private and unassigned code points, line and paragraph separators.
HIDDEN = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}


def visible(text: str, keep: str = "\n\t") -> str:
    """Escape every character that could move a cursor, recolour a terminal or break XML, except those in `keep`."""
    safe = (c in keep or unicodedata.category(c) not in HIDDEN for c in text)
    return "".join(c if ok else c.encode("unicode_escape").decode() for c, ok in zip(text, safe, strict=True))
