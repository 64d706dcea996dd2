"""How fast corpora are prepared and read, on one core.

    python benchmarks/data_throughput.py [--text FOLDER] [--gpt2 FOLDER]

Text is the embedded corpus, or WikiText-2 (tokens form) from --text; the gpt2 row needs that tokenizer's files.
"""

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from chiar.data.corpora import Document, Source, Stdlib, TokensFile, WikiText
from chiar.data.prepare import prepare
from chiar.data.shards import Corpus
from chiar.data.tokenizers import Tokenizer, TokenizerChoice
from timing import elapsed, hardware, parser

READ_TOKENS = 1 << 25
ROW = 257


class InMemory(Source):
    """Text that is there already, so that what is timed is the preparation and not a parser."""

    def __init__(self, name: str, texts: list[str]) -> None:
        self.texts = texts
        super().__init__(name, ["train"], {}, [])

    def read(self, given: str):
        return map(Document, self.texts)


def best(work: Callable[[], object], repeats: int = 3) -> float:
    return min(elapsed(work) for _ in range(repeats))


def prepare_rows(table: Table, source: InMemory, gpt2: Path | None, folder: Path) -> None:
    megabytes = sum(len(text.encode()) for text in source.texts) / 1e6
    seconds = elapsed(lambda: Tokenizer.train(source.texts, 8192).save(folder / "bpe"))
    table.add_row("train bpe, 8,192 entries", f"{megabytes / seconds:.2f} MB/s", "all cores")
    choices = {"bytes": TokenizerChoice("bytes"), "bpe": TokenizerChoice("bpe", path=folder / "bpe")}
    if gpt2 is not None:
        choices["gpt2"] = TokenizerChoice("gpt2", path=gpt2)
    for name, choice in choices.items():
        # Once, as a user runs it: pieces of text are remembered only within a run.
        seconds = elapsed(partial(prepare, source, folder / f"{name}-corpus", choice))
        corpus = Corpus.open(folder / f"{name}-corpus")
        note = f"{corpus.split('train').tokens:,} tokens, one process, tokenizer loading and hashes included"
        table.add_row(f"prepare, {name}", f"{megabytes / seconds:.2f} MB/s", note)


def read_rows(table: Table, folder: Path) -> None:
    generator = np.random.default_rng(0)
    (folder / "ids").mkdir()
    generator.integers(0, 256, READ_TOKENS, dtype=np.uint16).astype("<u2").tofile(folder / "ids" / "train.u16")
    for label, shard in (("one shard", 1 << 26), ("shards of 1 Mi", 1 << 20)):
        out = folder / f"read-{shard}"
        corpus = prepare(TokensFile([folder / "ids"]), out, TokenizerChoice("bytes"), shard_tokens=shard)
        seconds = best(lambda out=out: Corpus.open(out, verify=True))
        table.add_row(f"open with hashes, {label}", f"{READ_TOKENS * 2 / seconds / 1e6:.0f} MB/s", "")
        split = corpus.split("train")
        starts = generator.integers(0, split.tokens - ROW, 50_000)
        batches = starts.reshape(-1, 125)
        listed = starts.tolist()
        works = {
            "read, views": lambda split=split, listed=listed: [split.read(start, ROW) for start in listed],
            "read, batches of 125 as int64": lambda split=split, batches=batches: [
                split.rows(batch, ROW) for batch in batches
            ],
        }
        for name, work in works.items():
            work()  # warms the cache
            rate = len(starts) * ROW / best(work) / 1e6
            table.add_row(f"{name}, {label}", f"{rate:.0f} M tokens/s", f"rows of {ROW} at random starts")


def main() -> None:
    made = parser(__doc__, device=False)
    made.add_argument("--text", type=Path, help="folder with wiki.train.tokens")
    made.add_argument("--gpt2", type=Path, help="folder with GPT-2's vocab.json and merges.txt")
    arguments = made.parse_args()
    whole = WikiText([arguments.text], "wikitext-2") if arguments.text else Stdlib(fractions=(1.0, 0.0, 0.0))
    source = InMemory(whole.name, [document.text for document in whole.documents("train")])
    title = f"{source.name} on {hardware('cpu')}"
    table = Table("measured", "rate", "with", box=None, title=title, title_justify="left")
    with tempfile.TemporaryDirectory() as folder:
        prepare_rows(table, source, arguments.gpt2, Path(folder))
        read_rows(table, Path(folder))
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
