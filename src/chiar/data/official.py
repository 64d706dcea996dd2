"""Whether a corpus is the whole published set, so that a figure measured on part of one can say so."""

from typing import Any

# Words and newlines, as the literature counts tokens. The raw form has the same words, spelled out.
_WIKITEXT_103 = {"train": 103_227_021, "valid": 217_646, "test": 245_569}
_WIKITEXT_2 = {"train": 2_088_628, "valid": 217_646, "test": 245_569}
WORD_TOKENS = {
    "wikitext-103": _WIKITEXT_103,
    "wikitext-103-raw": _WIKITEXT_103,
    "wikitext-2": _WIKITEXT_2,
    "wikitext-2-raw": _WIKITEXT_2,
}
DOCUMENTS = {
    "imdb": {"train": 25_000, "test": 25_000},
    "sst-2": {"train": 67_349, "valid": 872},
    "cola": {"train": 8_551, "valid": 1_043},
    "mrpc": {"train": 3_668, "valid": 408},
    "rte": {"train": 2_490, "valid": 277},
}
# Of WikiText's train sets, which are published in one order.
FIRST_TITLE = "Valkyria Chronicles III"


def differences(name: str, entries: dict[str, Any], carved: bool) -> list[str]:
    """How the splits differ in size from the published ones. `carved`: valid was taken out of train."""
    published = WORD_TOKENS.get(name) or DOCUMENTS.get(name) or {}
    unit = "word tokens" if name in WORD_TOKENS else "documents"
    found = {split: _size(name, entry) for split, entry in entries.items()}
    if carved:
        found["train"] = found.get("train", 0) + found.pop("valid", 0)
    remarks = []
    for split, expected in published.items():
        if split not in found:
            remarks.append(f"{name} has no {split} split here.")
        elif found[split] != expected:
            what = "train and valid together hold" if carved and split == "train" else f"{split} holds"
            remarks.append(f"{what} {found[split]:,} {unit}, the published {name} {expected:,}: not the same set.")
    return remarks


def _size(name: str, entry: dict[str, Any]) -> int:
    return entry["words"] + entry["lines"] if name in WORD_TOKENS else entry["documents"]
