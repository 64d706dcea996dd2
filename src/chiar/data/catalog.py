"""The corpora by name: what each is, what it is read from, and which options it takes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from chiar.data.corpora import Labelled, Stdlib, Text, TokensFile, WikiText
from chiar.data.documents import Source, spelling
from chiar.data.listops import GENERATOR, listops
from chiar.errors import InputError, unknown_name


class Entry(NamedTuple):
    kind: str
    about: str
    needs: str
    options: tuple[str, ...]
    build: Callable[..., Source]


_TOKENS, _RAW = "a folder with wiki.{train,valid,test}.tokens", "a folder with wiki.{train,valid,test}.raw"
_GLUE, _TSV = "a folder with train.tsv and dev.tsv", "aclImdb, or train.tsv and test.tsv (.csv)"
_TEXT, _IDS = ".txt, .jsonl or .parquet files, or folders", "a folder with train.u16 …, --tokenizer"
_NOTHING, _LISTOPS = "nothing (generated), or .tsv files", (*GENERATOR, "fractions")
_CARVE, _HUB = ("fractions",), ("from_hub",)
CATALOG = {
    "stdlib": Entry("language", "documentation of the running Python", "nothing", _CARVE, Stdlib),
    "wikitext-103": Entry("language", "WikiText-103, tokens form", _TOKENS, _HUB, WikiText),
    "wikitext-103-raw": Entry("language", "WikiText-103, raw form", _RAW, _HUB, WikiText),
    "wikitext-2": Entry("language", "WikiText-2, tokens form", _TOKENS, _HUB, WikiText),
    "wikitext-2-raw": Entry("language", "WikiText-2, raw form", _RAW, _HUB, WikiText),
    "text": Entry("language", "your own text", _TEXT, ("fractions", "unit", "field"), Text),
    "tokens": Entry("language", "ids made elsewhere", _IDS, (), TokensFile),
    "imdb": Entry("classification", "movie reviews, 2 labels", _TSV, _CARVE, Labelled),
    "listops": Entry("classification", "nested ListOps, 10 labels", _NOTHING, _LISTOPS, listops),
    "listops-lra": Entry("classification", "ListOps of the long-range arena", _NOTHING, _LISTOPS, listops),
    "sst-2": Entry("classification", "GLUE: sentiment, 2 labels", _GLUE, (), Labelled),
    "cola": Entry("classification", "GLUE: grammar, 2 labels", _GLUE, (), Labelled),
    "mrpc": Entry("classification", "GLUE: paraphrases, 2 labels", _GLUE, (), Labelled),
    "rte": Entry("classification", "GLUE: entailment, 2 labels", _GLUE, (), Labelled),
}


def build_source(named: list[str], /, **options: Any) -> Source:
    """From what follows `chiar data prepare`: a name and what it is read from, or files; None is not given."""
    if not named:
        raise InputError(f"name a corpus ({', '.join(CATALOG)}) or a file.")
    name, paths = named[0].lower(), [Path(path) for path in named[1:]]
    if name not in CATALOG:
        if not Path(named[0]).exists():
            if "/" in named[0] or Path(named[0]).suffix:
                raise InputError(f"there is no file or folder {named[0]}.")
            raise unknown_name("corpus or file", named[0], CATALOG)
        name, paths = "text", [Path(path) for path in named]
    given = {option: value for option, value in options.items() if value is not None}
    for option in given.keys() - set(CATALOG[name].options):
        users = [other for other, entry in CATALOG.items() if option in entry.options]
        raise InputError(f"{spelling(option)} is an option of {', '.join(users)}, not of {name}.")
    return CATALOG[name].build(paths, name, **given)
