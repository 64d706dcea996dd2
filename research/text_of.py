"""The text of a prepared corpus as files, one a split, to prepare it again with another tokenizer.

python -m research.text_of runs/enwiki44m --out runs/enwiki44m-text
chiar data prepare runs/enwiki44m-text --tokenizer bytes --out runs/enwiki44m-bytes
"""

from pathlib import Path
from typing import Annotated

import typer

from chiar.console import guarded
from chiar.data.shards import Corpus
from chiar.files import check_new

TOKENS = 1 << 20  # decoded at once


def write_text(corpus: Path, out: Path) -> None:
    """train.txt, valid.txt and test.txt; an end of text becomes nothing."""
    opened = Corpus.open(corpus)
    tokenizer = opened.tokenizer()
    check_new(out, False)
    out.mkdir(parents=True)
    for name in opened.splits:
        split = opened.split(name)
        with (out / f"{name}.txt").open("wb") as file:
            for start in range(0, split.tokens, TOKENS):
                ids = split.read(start, min(TOKENS, split.tokens - start))
                file.write(tokenizer.decode_bytes(ids[ids != opened.end_of_text]))
        typer.echo(f"wrote {out / name}.txt, {(out / f'{name}.txt').stat().st_size:,} bytes")


def main(corpus: Path, out: Annotated[Path, typer.Option(metavar="FOLDER", help="New folder.")]) -> None:
    """The text of a prepared corpus, one file a split."""
    guarded(lambda: write_text(corpus, out))


if __name__ == "__main__":
    typer.run(main)
