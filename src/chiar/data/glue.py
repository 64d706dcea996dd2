"""GLUE tasks from the official TSV files: SST-2, CoLA, MRPC and RTE.

Official test sets carry no labels, so a corpus has train and valid (the file dev.tsv) only. Pairs of sentences become
one text with a newline between them.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from chiar.data.documents import Document, Source
from chiar.data.files import find_file, one_folder
from chiar.data.tables import labelled_rows, whole_number
from chiar.errors import InputError

PAIR = "\n"


@dataclass(frozen=True)
class Task:
    folder: str
    labels: tuple[str, ...]
    header: bool
    columns: int
    read: Callable[[list[str]], tuple[str, int]]


def _rte_label(text: str) -> int:
    return ("entailment", "not_entailment").index(text)


TASKS = {
    "sst-2": Task("SST-2", ("negative", "positive"), True, 2, lambda row: (row[0], whole_number(row[1], 2))),
    "cola": Task("CoLA", ("unacceptable", "acceptable"), False, 4, lambda row: (row[3], whole_number(row[1], 2))),
    "mrpc": Task(
        "MRPC", ("different", "paraphrase"), True, 5, lambda row: (row[3] + PAIR + row[4], whole_number(row[0], 2))
    ),
    "rte": Task(
        "RTE", ("entailment", "not_entailment"), True, 4, lambda row: (row[1] + PAIR + row[2], _rte_label(row[3]))
    ),
}


class Glue(Source):
    kind = "classification"

    def __init__(self, name: str, paths: list[Path]) -> None:
        self.task = TASKS[name]
        self.labels = self.task.labels
        folder = one_folder(name, paths, "train.tsv and dev.tsv")
        if (folder / self.task.folder).is_dir():
            folder = folder / self.task.folder
        found = {"train": find_file(folder, "train.tsv"), "valid": find_file(folder, "dev.tsv")}
        self.paths = {split: path for split, path in found.items() if path is not None}
        if not self.paths:
            raise InputError(f"{folder} holds neither train.tsv nor dev.tsv (also as .xz or .gz).")
        options = {"pair_separator": PAIR} if name in ("mrpc", "rte") else {}
        super().__init__(name, self.paths, options, list(self.paths.values()))

    def read(self, given: str) -> Iterator[Document]:
        return labelled_rows(self.paths[given], self.task.header, self.task.columns, self.task.read)
