"""`chiar data`: prepare corpora, list what can be prepared, look at what was. Heavy imports happen inside the verbs."""

from pathlib import Path
from typing import Annotated

import typer

from chiar.errors import InputError

data_app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Turn corpora into memory-mapped token shards, and look at them.",
)

LISTOPS = "ListOps: "


@data_app.command()
def prepare(
    corpus: Annotated[
        list[str],
        typer.Argument(
            metavar="NAME|PATH...",
            help="A corpus of `chiar data list` and the folder or files it is read from, or text files of your own.",
        ),
    ],
    out: Annotated[Path, typer.Option(help="New folder for the corpus.")],
    name: Annotated[str | None, typer.Option(help="What metrics call it; to mix several texts of your own.")] = None,
    tokenizer: Annotated[str | None, typer.Option(help="gpt2, bpe (trained on the corpus; default) or bytes.")] = None,
    tokenizer_path: Annotated[Path | None, typer.Option(help="Folder with the tokenizer's files.")] = None,
    vocab_size: Annotated[int | None, typer.Option(help="Entries of a trained bpe (8192).")] = None,
    like: Annotated[Path | None, typer.Option(help="Take the tokenizer of this prepared corpus.")] = None,
    from_hub: Annotated[
        bool, typer.Option("--from-hub", help="Fetch WikiText or the gpt2 tokenizer where no path is given.")
    ] = False,
    workers: Annotated[int | None, typer.Option(help="Processes that tokenise; one a core by default.")] = None,
    shard_tokens: Annotated[int, typer.Option(help="Tokens a shard.")] = 1 << 26,
    split_fractions: Annotated[
        str | None, typer.Option(help="Shares of train, valid, test where a corpus has no splits (0.9,0.05,0.05).")
    ] = None,
    field: Annotated[str | None, typer.Option(help="Field of .jsonl, column of .parquet with the text (text).")] = None,
    documents: Annotated[
        str | None, typer.Option(help="A document in plain text: paragraphs (default), lines or files.")
    ] = None,
    depth: Annotated[int | None, typer.Option(help=LISTOPS + "levels, the digits' one included (20).")] = None,
    arguments: Annotated[int | None, typer.Option(help=LISTOPS + "most arguments of an operator (5).")] = None,
    min_length: Annotated[int | None, typer.Option(help=LISTOPS + "fewest tokens, round brackets aside.")] = None,
    max_length: Annotated[int | None, typer.Option(help=LISTOPS + "most tokens, round brackets aside.")] = None,
    brackets: Annotated[
        bool | None, typer.Option("--brackets/--no-brackets", help=LISTOPS + "round brackets as published.")
    ] = None,
    examples: Annotated[
        str | None, typer.Option(help=LISTOPS + "how many in train, valid and test (85000,5000,10000).")
    ] = None,
    seed: Annotated[int | None, typer.Option(help=LISTOPS + "seed of the generator (0).")] = None,
) -> None:
    """Turn a corpus into token shards with a manifest. Interrupted, the same command goes on where it stopped."""
    from chiar.data.catalog import build_source
    from chiar.data.documents import parse_fractions
    from chiar.data.prepare import prepare as prepare_corpus
    from chiar.data.progress import terminal_display
    from chiar.data.tokenizer_choice import TokenizerChoice

    # The flag may be meant for the tokenizer alone; then a corpus that knows no Hub is not troubled with it.
    corpus_from_hub = from_hub and (tokenizer != "gpt2" or corpus[0].startswith("wikitext"))
    source = build_source(
        corpus,
        from_hub=corpus_from_hub or None,
        fractions=parse_fractions(split_fractions) if split_fractions is not None else None,
        field=field,
        unit=documents,
        depth=depth,
        arguments=arguments,
        min_length=min_length,
        max_length=max_length,
        brackets=brackets,
        examples=three_counts(examples) if examples is not None else None,
        seed=seed,
    )
    source.name = name or source.name
    choice = TokenizerChoice(tokenizer, tokenizer_path, vocab_size, like, from_hub)
    with terminal_display() as display:
        prepare_corpus(source, out, choice, workers=workers, shard_tokens=shard_tokens, display=display)
    typer.echo(f"wrote {out}")
    show_corpus(out)


@data_app.command("list")
def list_command() -> None:
    """List the corpora that can be prepared by name, and what each needs."""
    from rich.table import Table

    from chiar.cli import show
    from chiar.data.catalog import CATALOG

    table = Table("name", "kind", "what", "read from", "offline", box=None)
    for name, entry in CATALOG.items():
        table.add_row(name, entry.kind, entry.about, entry.needs, entry.offline)
    show(table)


@data_app.command("show")
def show_corpus(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A prepared corpus.")],
    verify: Annotated[bool, typer.Option("--verify", help="Read all of it and compare every hash.")] = False,
) -> None:
    """Show a prepared corpus: its splits, tokenizer and counts."""
    from rich.table import Table

    from chiar.cli import show
    from chiar.data.shards import Corpus

    corpus = Corpus.open(folder, verify=verify)
    typer.echo(f"{corpus.name}: {corpus.kind}, {corpus.tokenizer_kind} with {corpus.vocab_size:,} entries")
    typer.echo(f"fingerprint {corpus.fingerprint}" + (", every hash is right" if verify else ""))
    columns = ["split", "tokens", "documents", "bytes", "words", "lines", "bytes/token", "tokens/word", "shards"]
    table = Table(*columns, box=None)
    for name in corpus.splits:
        entry = corpus.manifest["splits"][name]
        counts = [f"{entry[column]:,}" for column in columns[1:6]]
        ratios = [f"{entry['bytes'] / entry['tokens']:.3f}", f"{entry['tokens'] / max(entry['words'], 1):.3f}"]
        table.add_row(name, *counts, *ratios, str(len(entry["shards"])))
    show(table)
    for remark in corpus.remarks:
        typer.echo(f"note: {remark}")
    if corpus.labels:
        balance = Table("split", *corpus.labels, box=None)
        for name in corpus.splits:
            counts = corpus.manifest["splits"][name]["label_counts"]
            balance.add_row(name, *(f"{count:,} ({count / sum(counts):.1%})" for count in counts))
        show(balance)


def three_counts(text: str) -> tuple[int, int, int]:
    try:
        train, valid, test = (int(part) for part in text.split(","))
    except ValueError:
        raise InputError(f"--examples takes three whole numbers (train, valid, test), got {text!r}.") from None
    return train, valid, test
