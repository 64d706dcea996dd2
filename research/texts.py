"""Texts on which no rule for spaces helps, as folders to prepare with `chiar data prepare FOLDER --tokenizer bytes`.

python -m research.texts without-spaces runs/enwiki44m-text --out runs/enwiki44m-joined
python -m research.texts source-code --out runs/code
"""

import hashlib
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from chiar.console import guarded
from chiar.errors import require
from chiar.files import new_folder

AT_ONCE = 1 << 24
SPLITS = ("train", "valid", "test")
app = typer.Typer(add_completion=False, help=__doc__)
Out = Annotated[Path, typer.Option(help="A new folder.")]


def joined(path: Path) -> Iterator[bytes]:
    """A text without its ASCII white space."""
    with path.open("rb") as file:
        while part := file.read(AT_ONCE):
            yield part.translate(None, b" \t\n\r\v\f")


@app.command()
def without_spaces(folder: Path, out: Out) -> None:
    """The .txt files of a folder, every one without its white space."""

    def work() -> None:
        files = sorted(folder.glob("*.txt"))
        require(files, f"there is no .txt file in {folder}.")
        with new_folder(out) as made:
            for path in files:
                with (made / path.name).open("wb") as file:
                    file.writelines(joined(path))
                typer.echo(f"{path.name}: {(made / path.name).stat().st_size:,} of {path.stat().st_size:,} bytes")

    guarded(work)


def sources(folders: list[Path]) -> Iterator[bytes]:
    """Every Python file of UTF-8 once, in order of their paths."""
    seen = set()
    for path in sorted({path for folder in folders for path in folder.rglob("*.py") if path.is_file()}):
        text = path.read_bytes().rstrip()
        try:
            text.decode()
        except UnicodeDecodeError:
            continue
        if text and (digest := hashlib.sha256(text).digest()) not in seen:
            seen.add(digest)
            yield text + b"\n\n\n"


def split_of(text: bytes) -> str:
    """By hash, so that a file is in the same split on any machine: 1 of 100 each for valid and test."""
    number = int.from_bytes(hashlib.sha256(text).digest()[:4]) % 100
    return SPLITS[number] if number in (1, 2) else "train"


@app.command()
def source_code(
    out: Out,
    folder: Annotated[list[Path] | None, typer.Argument(help="[default: Python's library and its packages]")] = None,
) -> None:
    """Python files as one text a split, each once."""

    def work() -> None:
        installed = [Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib")]
        folders = folder or [*installed, *(Path(place) for place in sys.path if place.endswith("site-packages"))]
        with new_folder(out) as made:
            files = {split: (made / f"{split}.txt").open("wb") for split in SPLITS}
            for text in sources(folders):
                files[split_of(text)].write(text)
            for split, file in files.items():
                size = file.tell()
                file.close()
                require(size, f"too few Python files for three splits in {', '.join(map(str, folders))}.")
                typer.echo(f"{split}.txt: {size:,} bytes")

    guarded(work)


if __name__ == "__main__":
    app()
