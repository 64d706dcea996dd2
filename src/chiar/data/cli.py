"""`chiar data`: prepare corpora, list the known ones, show a prepared one. Heavy imports happen inside the commands."""

import re
from pathlib import Path
from typing import Annotated as A
from typing import Any

import typer
from typer import Option

from chiar.console import Overwrite
from chiar.errors import InputError, require

ABOUT = "Prepare corpora as token shards, and inspect them."
WHAT = "A corpus name (see `chiar data show`) and the files it is read from, or your own text files and folders."
SHOWN_LABELS = 20
data_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help=ABOUT)


@data_app.command()
def prepare(
    corpus: A[list[str], typer.Argument(metavar="NAME|PATH...", help=WHAT)],
    out: A[Path, Option(metavar="FOLDER", help="New folder for the corpus.")],
    name: A[str | None, Option(help="Corpus name in metrics; corpora mixed in training need different ones.")] = None,
    tokenizer: A[str | None, Option(help="gpt2, bpe (trained on the corpus), or bytes. [default: bpe]")] = None,
    tokenizer_path: A[Path | None, Option(help="Folder with tokenizer files.")] = None,
    vocab_size: A[int | None, Option(help="Vocabulary size of a trained bpe. [default: 8192]")] = None,
    like: A[Path | None, Option(help="Prepared corpus whose tokenizer to use.")] = None,
    from_hub: A[bool, Option("--from-hub", help="Download WikiText or gpt2's tokenizer if no path is given.")] = False,
    shard_tokens: A[int, Option(help="Tokens per shard.")] = 1 << 26,
    split_fractions: A[
        str | None, Option(help="Shares of train, valid, test where splits are missing. [default: 0.9,0.05,0.05]")
    ] = None,
    field: A[str | None, Option(help="Text field of .jsonl, text column of .parquet. [default: text]")] = None,
    text_column: A[list[str] | None, Option(help="labelled: text column; repeatable. [default: text, …]")] = None,
    label_column: A[str | None, Option(help="labelled: label column. [default: label, sentiment, …]")] = None,
    documents: A[str | None, Option(help="Unit of plain text: files, paragraphs or lines. [default: files]")] = None,
    depth: A[int | None, Option(help="ListOps: maximum depth, digits included. [default: 20; lra: 10]")] = None,
    arguments: A[int | None, Option(help="ListOps: maximum arguments per operator. [default: 5; lra: 10]")] = None,
    min_length: A[int | None, Option(help="ListOps: minimum tokens, without ( ). [default: 1; lra: 501]")] = None,
    max_length: A[int | None, Option(help="ListOps: maximum tokens, without ( ). [default: 100000; lra: 1999]")] = None,
    brackets: A[
        bool | None, Option("--brackets/--no-brackets", help="ListOps: with ( ). [default: on; lra: off; files: as is]")
    ] = None,
    examples: A[
        str | None, Option(help="ListOps: examples per split. [default: 85000,5000,10000; lra: 96000,2000,2000]")
    ] = None,
    seed: A[int | None, Option(help="ListOps: generator seed. [default: 0]")] = None,
    overwrite: Overwrite = False,
) -> None:
    """Turn a corpus into token shards with a manifest. If interrupted, run the same command again to resume."""
    from chiar.data import prepare as preparation
    from chiar.data.catalog import build_source
    from chiar.data.tokenizers import TokenizerChoice

    # With gpt2 the flag may be meant for the tokenizer alone: corpora that are not on the Hub do not get it.
    corpus_from_hub = from_hub and (tokenizer != "gpt2" or corpus[0].lower().startswith("wikitext"))
    source = build_source(
        corpus, from_hub=corpus_from_hub or None, field=field, unit=documents, depth=depth, arguments=arguments,
        text_column=text_column or None, label_column=label_column, min_length=min_length, max_length=max_length,
        brackets=brackets, seed=seed,
        fractions=three("--split-fractions", "numbers", float, split_fractions),
        examples=three("--examples", "whole numbers", int, examples),
    )  # fmt: skip
    allowed = name is None or re.fullmatch(r"[\w-]+", name)
    require(allowed, f"--name {name!r} is used in metrics and file names: only letters, digits, - and _ are allowed.")
    source.name = name or source.name
    choice = TokenizerChoice(tokenizer, tokenizer_path, vocab_size, like, from_hub)
    with preparation.Display(quiet=False) as display:
        preparation.prepare(source, out, choice, shard_tokens=shard_tokens, display=display, overwrite=overwrite)
    typer.echo("\n".join([f"wrote {out}", *source.notes]))
    show_corpus(out)


def three(option: str, what: str, number: type, text: str | None) -> tuple[Any, ...] | None:
    """An option's values for train, valid and test, or None if it was not given."""
    try:
        first, second, third = map(number, text.split(",")) if text is not None else (None, None, None)
    except ValueError:
        raise InputError(f"{option} takes three {what} (train, valid, test) as in 7,2,1; got {text!r}.") from None
    return None if text is None else (first, second, third)


@data_app.command("show")
def show_corpus(
    folder: A[Path | None, typer.Argument(metavar="DIR", help="A prepared corpus.")] = None,
    verify: A[bool, Option("--verify", help="Read every file and verify its hash.")] = False,
) -> None:
    """Show splits, tokenizer and counts of a prepared corpus. Without DIR, list the corpora known by name."""
    from rich.table import Table

    from chiar.console import show
    from chiar.data.catalog import CATALOG
    from chiar.data.shards import COUNTED, Corpus

    if folder is None:
        catalog = Table("name", "kind", "what", "read from", box=None)
        for name, (*listed, _, _) in CATALOG.items():
            catalog.add_row(name, *map(str, listed))
        return show(catalog)
    corpus = Corpus.open(folder, verify=verify)
    typer.echo(f"{corpus.name}: {corpus.kind}, {corpus.tokenizer_kind} with {corpus.vocab_size:,} entries")
    typer.echo(f"fingerprint {corpus.fingerprint}" + (", every hash is right" if verify else ""))
    table = Table("split", *COUNTED, "bytes/token", "shards", box=None)
    counts = [entry.get("label_counts", []) for entry in corpus.manifest["splits"].values()]
    balance = Table("label", *corpus.splits, box=None)
    for name, entry in corpus.manifest["splits"].items():
        ratio = f"{entry['bytes'] / entry['tokens']:.3f}"
        table.add_row(name, *(f"{entry[column]:,}" for column in COUNTED), ratio, str(len(entry["shards"])))
    show(table)
    for remark in corpus.remarks:
        typer.echo(f"note: {remark}")
    for number, label in enumerate(corpus.labels[:SHOWN_LABELS]):
        shares = (f"{split[number]:,} ({split[number] / sum(split):.1%})" for split in counts)
        balance.add_row(label, *shares)
    if corpus.labels:
        show(balance)
    if (more := len(corpus.labels) - SHOWN_LABELS) > 0:
        typer.echo(f"and {more} more labels")
