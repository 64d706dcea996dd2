"""IMDB movie reviews: the official folder (aclImdb), or tables with a label and a text.

The official set has no validation reviews: some of train, chosen by a hash of the text, become valid. Texts stay as
they are, with their `<br />`.
"""

from collections.abc import Iterator
from pathlib import Path

from chiar.data.documents import DEFAULT_FRACTIONS, SPLITS, Document, Source, carve_valid
from chiar.data.files import find_file, one_folder, read_lines
from chiar.data.tables import first_row, labelled_rows
from chiar.errors import InputError

LABELS = ("neg", "pos")
LABEL_NAMES = {"0": 0, "neg": 0, "negative": 0, "1": 1, "pos": 1, "positive": 1}
TEXT_COLUMNS = ("text", "review", "sentence")
LABEL_COLUMNS = ("label", "sentiment")
TABLES = {
    "train": ("train.tsv", "train.csv"),
    "valid": ("valid.tsv", "valid.csv", "dev.tsv", "dev.csv"),
    "test": ("test.tsv", "test.csv"),
}


class Imdb(Source):
    kind = "classification"
    labels = LABELS

    def __init__(
        self, paths: list[Path], name: str = "imdb", fractions: tuple[float, float, float] = DEFAULT_FRACTIONS
    ) -> None:
        layout = "train/pos, train/neg, test/pos and test/neg, or train.tsv and test.tsv (.csv)"
        folder = one_folder(name, paths, layout)
        if (folder / "aclImdb").is_dir():
            folder = folder / "aclImdb"
        self.reviews: dict[str, list[tuple[Path, int]]] = {}
        self.tables: dict[str, Path] = {}
        for split in SPLITS:
            if (folder / split).is_dir():
                self.reviews[split] = review_files(folder / split)
            elif (table := find_file(folder, *TABLES[split])) is not None:
                self.tables[split] = table
        given = {*self.reviews, *self.tables}
        if not given:
            raise InputError(f"{folder} holds neither {layout}.")
        files = [*self.tables.values(), *(path for reviews in self.reviews.values() for path, _ in reviews)]
        super().__init__(name, given, {}, files, carve_valid(given, fractions))

    def read(self, given: str) -> Iterator[Document]:
        if given in self.tables:
            yield from read_table(self.tables[given])
            return
        for path, label in self.reviews[given]:
            text = "".join(read_lines(path))
            if not text.strip():
                raise InputError(f"{path} is empty.")
            yield Document(text, label)


def review_files(folder: Path) -> list[tuple[Path, int]]:
    """The reviews of one split, by number: positive and negative ones take turns."""
    files = []
    for label, name in enumerate(LABELS):
        if not (folder / name).is_dir():
            raise InputError(f"{folder} has no folder {name}.")
        files += [(path, label) for path in (folder / name).glob("*.txt")]
    return sorted(files, key=lambda item: (number_of(item[0]), item[0].name, item[1]))


def number_of(path: Path) -> int:
    """12 for 12_7.txt, the twelfth review, which gave 7 stars."""
    number = path.name.split("_")[0]
    return int(number) if number.isdigit() else 0


def read_table(path: Path) -> Iterator[Document]:
    """Label and text in the columns that say so; without a header, label first."""
    head = [cell.strip().lower() for cell in first_row(path)]
    label = next((head.index(name) for name in LABEL_COLUMNS if name in head), None)
    text = next((head.index(name) for name in TEXT_COLUMNS if name in head), None)
    header = label is not None and text is not None
    label, text = (label, text) if label is not None and text is not None else (0, 1)

    def read(row: list[str]) -> tuple[str, int]:
        value = row[label].strip().lower()
        if value not in LABEL_NAMES:
            raise ValueError(f"label {row[label]!r} is none of {', '.join(LABEL_NAMES)}")
        return row[text], LABEL_NAMES[value]

    return labelled_rows(path, header, max(label, text) + 1, read)
