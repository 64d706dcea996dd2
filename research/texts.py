"""Makes texts on which a whitespace rule has no advantage, for `chiar data prepare FOLDER --tokenizer bytes`.

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

CHUNK_BYTES = 1 << 24
SPLITS = ("train", "valid", "test")
app = typer.Typer(add_completion=False, help=__doc__)
Out = Annotated[Path, typer.Option(help="New folder.")]


def without_whitespace(path: Path) -> Iterator[bytes]:
    """The text of a file without ASCII whitespace."""
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            yield chunk.translate(None, b" \t\n\r\v\f")


@app.command()
def without_spaces(folder: Path, out: Out) -> None:
    """Copy the .txt files of a folder without their whitespace."""

    def work() -> None:
        files = sorted(folder.glob("*.txt"))
        require(files, f"there is no .txt file in {folder}.")
        with new_folder(out) as target:
            for path in files:
                with (target / path.name).open("wb") as file:
                    file.writelines(without_whitespace(path))
                typer.echo(f"{path.name}: {(target / path.name).stat().st_size:,} of {path.stat().st_size:,} bytes")

    guarded(work)


def sources(folders: list[Path]) -> Iterator[bytes]:
    """The Python files that are valid UTF-8, without duplicates, ordered by path."""
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
    """By hash, so that a file is in the same split on any machine; valid and test get 1 in 100 files each."""
    number = int.from_bytes(hashlib.sha256(text).digest()[:4]) % 100
    return SPLITS[number] if number in (1, 2) else "train"


@app.command()
def source_code(
    out: Out,
    folder: Annotated[list[Path] | None, typer.Argument(help="[default: all installed Python code]")] = None,
) -> None:
    """Join Python files into one text per split, without duplicates."""

    def work() -> None:
        installed = [Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib")]
        folders = folder or [*installed, *(Path(entry) for entry in sys.path if entry.endswith("site-packages"))]
        with new_folder(out) as target:
            files = {split: (target / f"{split}.txt").open("wb") for split in SPLITS}
            for text in sources(folders):
                files[split_of(text)].write(text)
            for split, file in files.items():
                size = file.tell()
                file.close()
                require(size, f"too few Python files to fill three splits in {', '.join(map(str, folders))}.")
                typer.echo(f"{split}.txt: {size:,} bytes")

    guarded(work)


if __name__ == "__main__":
    app()
