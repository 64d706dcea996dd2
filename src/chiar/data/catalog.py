"""The corpora by name: what each is, what it is read from, and which options it takes."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chiar.data import glue, imdb, listops, stdlib, text, tokens_file, wikitext
from chiar.data.documents import Source
from chiar.errors import InputError, unknown_name

# Options by the names their corpora know them by, and as the command line spells them.
SPELLINGS = {
    "fractions": "--split-fractions",
    "unit": "--documents",
    "field": "--field",
    "from_hub": "--from-hub",
    "brackets": "--brackets",
    "depth": "--depth",
    "arguments": "--arguments",
    "min_length": "--min-length",
    "max_length": "--max-length",
    "seed": "--seed",
    "examples": "--examples",
}
GENERATOR = ("depth", "arguments", "min_length", "max_length", "seed", "examples")


@dataclass(frozen=True)
class Entry:
    kind: str
    about: str
    needs: str
    offline: str
    options: tuple[str, ...]
    build: Callable[..., Source | tokens_file.TokensFile]


def _wikitext(name: str, paths: list[Path], **options: Any) -> Source:
    return wikitext.WikiText(name, paths, **options)


def _glue(name: str, paths: list[Path]) -> Source:
    return glue.Glue(name, paths)


def _imdb(name: str, paths: list[Path], **options: Any) -> Source:
    return imdb.Imdb(paths, name, **options)


def _text(name: str, paths: list[Path], **options: Any) -> Source:
    return text.Text(paths, name, **options)


def _tokens(name: str, paths: list[Path]) -> tokens_file.TokensFile:
    return tokens_file.TokensFile(paths, name)


def _listops(name: str, paths: list[Path], **options: Any) -> Source:
    unused = set(GENERATOR) if paths else {"fractions"}
    if wrong := sorted(SPELLINGS[option] for option in unused & options.keys()):
        where = "expressions read from files" if paths else "generated expressions"
        raise InputError(f"{', '.join(wrong)} cannot be used with {where}.")
    return listops.ListOpsFiles(name, paths, **options) if paths else listops.GeneratedListOps(name, **options)


def _stdlib(name: str, paths: list[Path], **options: Any) -> Source:
    if paths:
        raise InputError(f"stdlib is read from the running Python and takes no files, got {paths[0]}.")
    return stdlib.Stdlib(name, **options)


_WIKI = "a folder with wiki.{train,valid,test}."
_LISTOPS_OPTIONS = (*GENERATOR, "brackets", "fractions")
_GLUE_NEEDS = "a folder with train.tsv and dev.tsv"
CATALOG: dict[str, Entry] = {
    "stdlib": Entry(
        "language", "documentation of the running Python", "nothing", "yes", ("fractions",), _stdlib
    ),
    "wikitext-103": Entry(
        "language", "WikiText-103, tokens form", _WIKI + "tokens", "with files", ("from_hub",), _wikitext
    ),
    "wikitext-103-raw": Entry(
        "language", "WikiText-103, raw form", _WIKI + "raw", "with files", ("from_hub",), _wikitext
    ),
    "wikitext-2": Entry(
        "language", "WikiText-2, tokens form", _WIKI + "tokens", "with files", ("from_hub",), _wikitext
    ),
    "wikitext-2-raw": Entry(
        "language", "WikiText-2, raw form", _WIKI + "raw", "with files", ("from_hub",), _wikitext
    ),
    "text": Entry(
        "language", "your own text", ".txt, .jsonl or .parquet files, or folders", "yes",
        ("fractions", "unit", "field"), _text,
    ),
    "tokens": Entry(
        "language", "ids made elsewhere", "a folder with train.u16 …, --tokenizer", "yes", (), _tokens
    ),
    "imdb": Entry(
        "classification", "movie reviews, 2 labels", "aclImdb, or train.tsv and test.tsv (.csv)", "with files",
        ("fractions",), _imdb,
    ),
    "listops": Entry(
        "classification", "nested ListOps, 10 labels", "nothing (generated), or .tsv files", "yes",
        _LISTOPS_OPTIONS, _listops,
    ),
    "listops-lra": Entry(
        "classification", "ListOps of the long-range arena", "nothing (generated), or .tsv files", "yes",
        _LISTOPS_OPTIONS, _listops,
    ),
    "sst-2": Entry("classification", "GLUE: sentiment, 2 labels", _GLUE_NEEDS, "with files", (), _glue),
    "cola": Entry("classification", "GLUE: grammar, 2 labels", _GLUE_NEEDS, "with files", (), _glue),
    "mrpc": Entry("classification", "GLUE: paraphrases, 2 labels", _GLUE_NEEDS, "with files", (), _glue),
    "rte": Entry("classification", "GLUE: entailment, 2 labels", _GLUE_NEEDS, "with files", (), _glue),
}  # fmt: skip


def build_source(named: list[str], /, **options: Any) -> Source | tokens_file.TokensFile:
    """From what follows `chiar data prepare`: a name and what it is read from, or files of the user's.

    Options that are None were not given.
    """
    if not named:
        raise InputError(f"name a corpus ({', '.join(CATALOG)}) or a file.")
    name, paths = named[0].lower(), [Path(path) for path in named[1:]]
    if name not in CATALOG:
        if not Path(named[0]).exists():
            if "/" in named[0] or Path(named[0]).suffix:
                raise InputError(f"there is no file or folder {named[0]}.")
            raise unknown_name("corpus or file", named[0], CATALOG)
        name, paths = "text", [Path(path) for path in named]
    entry = CATALOG[name]
    given = {option: value for option, value in options.items() if value is not None}
    for option in given.keys() - set(entry.options):
        users = [other for other, candidate in CATALOG.items() if option in candidate.options]
        raise InputError(f"{SPELLINGS[option]} is an option of {', '.join(users)}, not of {name}.")
    return entry.build(name, paths, **given)
