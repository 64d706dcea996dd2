"""Small corpora in the layouts their publishers use, for the tests of data."""

import hashlib
import random
from pathlib import Path

import pytest

from chiar.data.tokenizers import TokenizerChoice
from chiar.errors import InputError

BYTES = TokenizerChoice("bytes")
WHOLE = (1.0, 0.0, 0.0)
WORDS = "the of many light dark filter attention carbon naïve 漢字 don't 42 , .".split()  # noqa: SIM905


def sentence(seed: int, words: int = 12) -> str:
    return " ".join(random.Random(seed).choices(WORDS, k=words))


def article(title: str, seed: int) -> str:
    """As in WikiText: a blank line, the title, sections and a line that only looks like a title."""
    body = f" {sentence(seed)} \n = = Section of {title} = = \n \n {sentence(seed + 1)} \n = x = \n {sentence(seed)} \n"
    return f" \n = {title} = \n \n{body}"


def wikitext_folder(folder: Path, form: str = "tokens", articles: int = 5) -> dict[str, list[str]]:
    folder.mkdir(parents=True, exist_ok=True)
    texts = {}
    for number, split in enumerate(("train", "valid", "test")):
        texts[split] = [article(f"{split} {n}", 100 * number + n) for n in range(articles)]
        (folder / f"wiki.{split}.{form}").write_text("".join(texts[split]), encoding="utf-8")
    return texts


def text_file(path: Path, documents: int = 200, words: int = 12) -> Path:
    path.write_text("\n\n".join(sentence(n, words) for n in range(documents)) + "\n", encoding="utf-8")
    return path


def tree(folder: Path) -> dict[str, str]:
    """Every file below a folder with its hash: two folders are byte-identical if these are equal."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def refused(message: str):
    return pytest.raises(InputError, match=message)


def all_refused(make, path: Path, cases: dict):
    """Each content of the file is answered with its sentence."""
    for content, message in cases.items():
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        with refused(message):
            make()
