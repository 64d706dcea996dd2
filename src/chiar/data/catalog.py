"""The corpora by name: what each is, what it is read from, and which options it takes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from chiar.data.corpora import Labelled, Source, Stdlib, WikiText
from chiar.data.listops import GENERATOR, GeneratedListOps, ListOpsFiles
from chiar.data.own_files import LabelledFiles, Text
from chiar.data.prepare import Enwik8, TokensFile
from chiar.errors import InputError, require, unknown_name

_WIKI, _GLUE = "a folder with wiki.{train,valid,test}.", "a folder with train.tsv and dev.tsv"
_COLUMNS = ("fractions", "text_column", "label_column")
_LISTOPS = "nothing (generated), or .tsv files"
# By name: kind, description, what it is read from, options, and the class.
CATALOG: dict[str, tuple[str, str, str, tuple[str, ...], Callable[..., Source]]] = {
    "stdlib": ("language", "documentation of the running Python", "nothing", ("fractions",), Stdlib),
    "wikitext-103": ("language", "WikiText-103, tokens form", f"{_WIKI}tokens", ("from_hub",), WikiText),
    "wikitext-103-raw": ("language", "WikiText-103, raw form", f"{_WIKI}raw", ("from_hub",), WikiText),
    "wikitext-2": ("language", "WikiText-2, tokens form", f"{_WIKI}tokens", ("from_hub",), WikiText),
    "wikitext-2-raw": ("language", "WikiText-2, raw form", f"{_WIKI}raw", ("from_hub",), WikiText),
    "text": (
        "language",
        "your own text",
        "files of text, .jsonl, .parquet; folders",
        ("fractions", "unit", "field"),
        Text,
    ),
    "enwik8": (
        "language",
        "Wikipedia's first 10⁸ bytes",
        "the file enwik8 or enwik8.gz, --tokenizer bytes",
        (),
        Enwik8,
    ),
    "tokens": ("language", "existing token ids", "a folder with train.u16 …, --tokenizer", (), TokensFile),
    "labelled": ("classification", "your own labelled texts", ".tsv, .csv, .jsonl, .parquet", _COLUMNS, LabelledFiles),
    "imdb": ("classification", "movie reviews, 2 labels", "aclImdb, or .tsv (.csv)", ("fractions",), Labelled),
    "listops": ("classification", "nested ListOps, 10 labels", _LISTOPS, GENERATOR, GeneratedListOps),
    "listops-lra": ("classification", "ListOps of the long-range arena", _LISTOPS, GENERATOR, GeneratedListOps),
    "sst-2": ("classification", "GLUE: sentiment, 2 labels", _GLUE, (), Labelled),
    "cola": ("classification", "GLUE: grammar, 2 labels", _GLUE, (), Labelled),
    "mrpc": ("classification", "GLUE: paraphrases, 2 labels", _GLUE, (), Labelled),
    "rte": ("classification", "GLUE: entailment, 2 labels", _GLUE, (), Labelled),
}


def spelling(option: str) -> str:
    """The name of an option on the command line."""
    return {"fractions": "--split-fractions", "unit": "--documents"}.get(option, f"--{option.replace('_', '-')}")


def build_source(named: list[str], /, **options: Any) -> Source:
    """The source of `chiar data prepare NAME PATH...`, or of `PATH...` alone. Options of None were not given."""
    require(named, f"name a corpus ({', '.join(CATALOG)}) or a file.")
    name, paths = named[0].lower(), [Path(path) for path in named[1:]]
    if name not in CATALOG:
        if not Path(named[0]).exists() and not Path(named[0]).suffix and "/" not in named[0]:
            raise unknown_name("corpus or file", named[0], CATALOG)
        name, paths = "text", [Path(path) for path in named]
    *_, allowed, build = CATALOG[name]
    if build is GeneratedListOps and paths:
        allowed, build = ("brackets", "fractions"), ListOpsFiles
    given = {option: value for option, value in options.items() if value is not None}
    for option in given.keys() - set(allowed):
        users = [other for other, entry in CATALOG.items() if option in entry[3] and other != name]
        also = f" is an option of {', '.join(users)}," if users else " is"
        raise InputError(f"{spelling(option)}{also} not for {name}{' from files' if paths else ''}.")
    return build(paths, name, **given)
