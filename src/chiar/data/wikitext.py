"""WikiText-103 and WikiText-2, in the tokens form (rare words are <unk>) and the raw form.

The files are `wiki.{train,valid,test}.{tokens,raw}` as published, compressed or not. A document is an article. The
articles of a split, joined, are the file byte for byte: no line is stripped, so words and lines in the manifest add up
to the token counts of the literature (each newline counts there as one `<eos>`): 245,569 for either test set.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from chiar.data.documents import SPLITS, Document, Source
from chiar.data.files import find_file, one_folder, read_lines, total_bytes
from chiar.data.official import FIRST_TITLE
from chiar.data.optional import optional_module
from chiar.errors import InputError

HUB_REPOSITORY = "Salesforce/wikitext"
HUB_SPLITS = {"train": "train", "valid": "validation", "test": "test"}
NAMES = ("wikitext-103", "wikitext-103-raw", "wikitext-2", "wikitext-2-raw")
BLANK = " \n"


class WikiText(Source):
    def __init__(self, name: str, paths: list[Path], from_hub: bool = False) -> None:
        self.form = "raw" if name.endswith("-raw") else "tokens"
        self.paths: dict[str, Path] = {}
        self.hub = from_hub and not paths
        if not paths and not from_hub:
            raise InputError(
                f"{name} needs its files: chiar data prepare {name} FOLDER, a folder with wiki.train.{self.form} and "
                f"so on, or --from-hub to fetch them."
            )
        if not self.hub:
            layout = f"wiki.train.{self.form}, wiki.valid.{self.form} and wiki.test.{self.form}"
            folder = one_folder(name, paths, layout)
            for split in SPLITS:
                found = find_file(folder, f"wiki.{split}.{self.form}")
                if found is not None:
                    self.paths[split] = found
            if not self.paths:
                raise InputError(f"{folder} holds none of {layout} (also as .xz or .gz).")
        super().__init__(name, SPLITS if self.hub else self.paths, {"form": self.form}, list(self.paths.values()))

    def read(self, given: str) -> Iterator[Document]:
        lines = self._hub_lines(given) if self.hub else read_lines(self.paths[given])
        return (Document(text) for text in articles(lines))

    def remarks(self, entries: dict[str, Any]) -> list[str]:
        remarks = super().remarks(entries)
        if "train" in self.splits and f" = {FIRST_TITLE} = \n" not in next(self.read("train")).text:
            remarks.append(f"train does not begin with {FIRST_TITLE}: its articles are not in the published order.")
        return remarks

    def expected_bytes(self, split: str) -> int | None:
        return None if self.hub else total_bytes([self.paths[split]])

    def _hub_lines(self, split: str) -> Iterator[str]:
        """The Hub's rows are the lines of the file, except that it empties blank ones."""
        datasets = optional_module("datasets", "hub", f"{self.name} from the Hub")
        try:
            rows = datasets.load_dataset(HUB_REPOSITORY, f"{self.name}-v1", split=HUB_SPLITS[split], streaming=True)
            for row in rows:
                yield row["text"] or BLANK
        except Exception as error:
            # The Hub's client raises errors of many libraries; each means that the text did not come.
            raise InputError(f"{self.name} could not be fetched from the Hub: {str(error).splitlines()[0]}") from error


def articles(lines: Iterable[str]) -> Iterator[str]:
    """Cuts at each title, before the blank line that precedes it.

    A title is ` = Title = ` between blank lines; deeper headings have more equals signs. Blank lines around it are
    asked for because formulas and tables also give lines that begin and end so.
    """
    article: list[str] = []
    for line in lines:
        article.append(line)
        if len(article) >= 4 and line.isspace() and is_title(article[-2]) and article[-3].isspace():
            yield "".join(article[:-3])
            del article[:-3]
    if article:
        yield "".join(article)


def is_title(line: str) -> bool:
    text = line.strip()
    title = text.startswith("= ") and text.endswith(" =") and len(text) > 4
    return title and not text.startswith("= =") and not text.endswith("= =")
