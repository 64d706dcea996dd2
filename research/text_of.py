"""Writes the text of a prepared corpus to files, one per split, to prepare it again with another tokenizer.

python -m research.text_of runs/enwiki44m --out runs/enwiki44m-text
chiar data prepare runs/enwiki44m-text --tokenizer bytes --out runs/enwiki44m-bytes
"""

from pathlib import Path
from typing import Annotated

import typer

from chiar.console import guarded
from chiar.data.shards import Corpus
from chiar.files import check_new

CHUNK_TOKENS = 1 << 20


def write_text(corpus: Path, out: Path) -> None:
    """Writes train.txt, valid.txt and test.txt, without end-of-text tokens."""
    source = Corpus.open(corpus)
    tokenizer = source.tokenizer()
    check_new(out, False)
    out.mkdir(parents=True)
    for name in source.splits:
        split = source.split(name)
        with (out / f"{name}.txt").open("wb") as file:
            for start in range(0, split.tokens, CHUNK_TOKENS):
                ids = split.read(start, min(CHUNK_TOKENS, split.tokens - start))
                file.write(tokenizer.decode_bytes(ids[ids != source.end_of_text]))
        typer.echo(f"wrote {out / name}.txt, {(out / f'{name}.txt').stat().st_size:,} bytes")


def main(corpus: Path, out: Annotated[Path, typer.Option(metavar="FOLDER", help="New folder.")]) -> None:
    """Write the text of a prepared corpus, one file per split."""
    guarded(lambda: write_text(corpus, out))


if __name__ == "__main__":
    typer.run(main)
