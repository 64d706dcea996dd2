"""The corpora themselves: where each one's documents lie in the files its publisher gives out, or the user has."""

import ast
import json
import platform
import re
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from chiar.data import documents
from chiar.data.documents import SPLITS, Document, Fractions, Source, Table, plain_name, read_lines
from chiar.errors import InputError, first_line, optional_module, unknown_name

# Of WikiText's train sets, which are published in one order.
FIRST_TITLE = "Valkyria Chronicles III"
# Corpora of two labels: the folder inside the given one, the labels.
LABELLED = {
    "imdb": ("aclImdb", ("neg", "pos")),
    "sst-2": ("SST-2", ("negative", "positive")),
    "cola": ("CoLA", ("unacceptable", "acceptable")),
    "mrpc": ("MRPC", ("different", "paraphrase")),
    "rte": ("RTE", ("entailment", "not_entailment")),
}
TEXT_ENDINGS = (".txt", ".md", ".rst", ".text", ".jsonl", ".parquet")
TOKEN_FILE = re.compile(r"(\w+?)(?:\.(\d+))?\.(?:u16|bin)")
BLOCK_BYTES = 1 << 22
DEFINITIONS = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
# What JSON and Python sources can spell and no text file holds: NUL, and halves of characters.
NO_CHARACTER = re.compile("[\0\ud800-\udfff]")


class WikiText(Source):
    """WikiText-103 and -2, in the tokens form (rare words are <unk>) and the raw form. A document is an article.

    The articles of a split, joined, are the published file byte for byte, so words and lines in the manifest add up to
    the token counts of the literature (each newline counts there as one `<eos>`): 245,569 for either test set.
    """

    def __init__(self, paths: list[Path], name: str, from_hub: bool = False) -> None:
        form = "raw" if name.endswith("-raw") else "tokens"
        layout = f"wiki.train.{form}, wiki.valid.{form} and wiki.test.{form}"
        given: dict[str, list[Path]] = {}
        if paths:
            folder = documents.one_folder(name, paths, layout)
            given = documents.find_files(folder, {split: [f"wiki.{split}.{form}"] for split in SPLITS})
            if not given:
                raise InputError(f"{folder} holds none of {layout} (also as .xz or .gz).")
        elif not from_hub:
            raise InputError(f"{name} needs its files: a folder with {layout}, or --from-hub to fetch them.")
        super().__init__(name, given or SPLITS, {"form": form})

    def read(self, given: str) -> Iterator[Document]:
        return map(Document, articles(read_lines(self.paths[given][0]) if self.paths else self._hub_lines(given)))

    def remarks(self, entries: dict[str, Any]) -> list[str]:
        remarks = super().remarks(entries)
        if "train" in self.splits and f" = {FIRST_TITLE} = \n" not in next(self.read("train")).text:
            remarks.append(f"train does not begin with {FIRST_TITLE}: its articles are not in the published order.")
        return remarks

    def _hub_lines(self, split: str) -> Iterator[str]:
        """The Hub's rows are the lines of the file, except that it empties blank ones."""
        datasets = optional_module("datasets", "hub", f"{self.name} from the Hub")
        name = "validation" if split == "valid" else split
        try:
            for row in datasets.load_dataset("Salesforce/wikitext", f"{self.name}-v1", split=name, streaming=True):
                yield row["text"] or " \n"
        except Exception as error:  # of many libraries; each means that the text did not come
            raise InputError(f"{self.name} could not be fetched from the Hub: {first_line(error)}") from error


def articles(lines: Iterable[str]) -> Iterator[str]:
    """Cuts before the blank line that precedes a title: ` = Title = ` between blank lines.

    Deeper headings have more equals signs; formulas and tables give such lines too, but not between blank ones.
    """
    article: list[str] = []
    for line in lines:
        article.append(line)
        blank = len(article) >= 4 and line.isspace() and article[-3].isspace()
        if blank and re.fullmatch(r"= (?!=).+(?<!=) =", article[-2].strip()):
            yield "".join(article[:-3])
            del article[:-3]
    if article:
        yield "".join(article)


class Labelled(Table):
    """IMDB and GLUE: train.tsv, dev.tsv and test.tsv (.csv), or IMDB's official folders, whose texts keep their `<br />`.

    IMDB has no validation reviews: some of train become valid. GLUE's test sets carry no labels and are not read.
    """

    def __init__(self, paths: list[Path], name: str, fractions: Fractions | None = None) -> None:
        inner, self.labels = LABELLED[name]
        self.spellings = {spelling: n for n in (0, 1) for spelling in (str(n), self.labels[n])}
        stems = {"train": ["train"], "valid": ["valid", "dev"], "test": ["test"] if name == "imdb" else []}
        names = {split: [f"{stem}{end}" for stem in stems[split] for end in (".tsv", ".csv")] for split in SPLITS}
        layout = "train.tsv and dev.tsv"
        if name == "imdb":
            self.spellings |= {"negative": 0, "positive": 1}
            layout = "train/pos, train/neg, test/pos and test/neg, or train.tsv and test.tsv (.csv)"
        if name == "cola":
            self.columns = ([3], 1)
        folder = documents.one_folder(name, paths, layout, inner)
        given = documents.find_files(folder, names)
        for place in [folder / split for split in SPLITS if name == "imdb" and (folder / split).is_dir()]:
            if lacking := [label for label in self.labels if not (place / label).is_dir()]:
                raise InputError(f"{place} has no folder {lacking[0]}.")
            reviews = [path for label in self.labels for path in (place / label).glob("*.txt")]
            # By the number of a review, 12 in 12_7.txt, which gave 7 stars: negative and positive ones take turns.
            given[place.name] = sorted(
                reviews, key=lambda file: (file.stem.split("_")[0].zfill(9), file.name, file.parts)
            )
        if not given:
            raise InputError(f"{folder} holds neither {layout} (also as .xz or .gz).")
        options = {"pair_separator": "\n"} if name in ("mrpc", "rte") else {}
        super().__init__(
            name, given, options, carve=documents.carve_valid(given, fractions) if name == "imdb" else None
        )

    def read_file(self, path: Path) -> Iterator[Document]:
        if path.suffix != ".txt":
            yield from super().read_file(path)
            return
        text = "".join(read_lines(path))
        if not text.strip():
            raise InputError(f"{path} is empty.")
        yield Document(text, self.labels.index(path.parent.name))


class Text(Source):
    """The user's own text: .jsonl, .parquet and anything else that is UTF-8 text, compressed or not.

    `unit`: what a document is in plain text. `field`: where the text lies in JSON lines and parquet. Files whose names
    say train, valid or test make those splits; otherwise documents are sent to splits by hash.
    """

    def __init__(
        self, paths: list[Path], name: str = "text", unit: str = "paragraphs", field: str = "text",
        fractions: Fractions | None = None,
    ) -> None:  # fmt: skip
        if unit not in (units := ("paragraphs", "lines", "files")):
            raise unknown_name("--documents", unit, units)
        self.unit, self.field = unit, field
        files = [file for path in paths for file in text_files(path)]
        if not files:
            raise InputError("name at least one text file or folder: chiar data prepare FILE… --out DIR.")
        splits = [documents.split_of_file(file) or "" for file in files]
        named = "train" in splits and "" not in splits
        given: dict[str, list[Path]] = {}
        for file, split in zip(files, splits, strict=True):
            given.setdefault(split if named else "train", []).append(file)
        carve = documents.carve_valid(given, fractions) if named else documents.carve_all(fractions)
        super().__init__(name, given, {"documents": unit, "field": field}, files, carve)

    def read_file(self, path: Path) -> Iterator[Document]:
        fields = plain_name(path).endswith((".parquet", ".jsonl", ".ndjson"))
        texts = self._fields(path) if fields else self._plain(path)
        return (Document(text) for text in texts if text.strip())

    def _plain(self, path: Path) -> Iterator[str]:
        """Paragraphs end at blank lines, which are left out, so that memory holds one paragraph at a time."""
        text: list[str] = []
        for line in read_lines(path):
            blank = self.unit == "paragraphs" and line.isspace()
            if not blank:
                text.append(line)
            if blank or self.unit == "lines":
                yield "".join(text)
                text.clear()
        yield "".join(text)

    def _fields(self, path: Path) -> Iterator[str]:
        for where, row in rows(path, self.field):
            if not isinstance(row, dict) or self.field not in row:
                names = ", ".join(row) if isinstance(row, dict) else type(row).__name__
                raise InputError(f"{where} has no field {self.field!r} (it has {names}): choose another --field.")
            text = row[self.field]
            if not isinstance(text, str):
                raise InputError(f"{where}, field {self.field!r} is {type(text).__name__}, expected text.")
            if NO_CHARACTER.search(text):
                raise InputError(f"{where}, field {self.field!r} holds NUL or half of a surrogate pair: is it binary?")
            yield text


def rows(path: Path, field: str) -> Iterator[tuple[str, Any]]:
    """Of parquet or JSON lines, with where each lies; of parquet only the column of this name, if there is one."""
    if not plain_name(path).endswith(".parquet"):
        for number, line in enumerate(read_lines(path), start=1):
            try:
                row = None if line.isspace() else json.loads(line)
            except ValueError as error:
                raise InputError(f"{path}, line {number} is not JSON: {error}.") from error
            if not line.isspace():
                yield f"{path}, line {number}", row
        return
    parquet = optional_module("pyarrow.parquet", "parquet", str(path))
    try:
        table = parquet.ParquetFile(path)
    except (ValueError, OSError) as error:  # pyarrow's own errors are kinds of these
        raise InputError(f"{path} is not a readable parquet file: {error}") from error
    with table:
        batches = table.iter_batches(1024, columns=[field] if field in table.schema_arrow.names else None)
        for number, row in enumerate((row for batch in batches for row in batch.to_pylist()), start=1):
            yield f"{path}, row {number}", row


def text_files(path: Path) -> list[Path]:
    """The file itself, or the text files anywhere below a folder, by name."""
    if path.is_file():
        if plain_name(path).endswith((".csv", ".tsv")):
            raise InputError(f'{path} is a table: write its text column as .jsonl, one object with a "text" a line.')
        return [path]
    if not path.is_dir():
        raise InputError(f"there is no file or folder {path}.")
    found = sorted(file for file in path.rglob("*") if file.is_file() and plain_name(file).endswith(TEXT_ENDINGS))
    if not found:
        raise InputError(f"{path} holds no text file ({', '.join(TEXT_ENDINGS)}, compressed or not).")
    return found


class Stdlib(Source):
    """The embedded corpus: every documentation string of the running Python's library, and the topics of `help()`.

    Sources are parsed, never imported, so nothing of them runs. Another version of Python gives another corpus: the
    manifest says which one it was.
    """

    # Installed packages differ from one environment to the next, and some systems leave the tests out.
    skipped = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})

    def __init__(
        self, paths: list[Path] | None = None, name: str = "stdlib", fractions: Fractions | None = None,
        folder: Path | None = None,
    ) -> None:  # fmt: skip
        if paths:
            raise InputError(f"stdlib is read from the running Python and takes no files, got {paths[0]}.")
        self.folder = folder = folder or Path(sysconfig.get_paths()["stdlib"])
        found = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*.py")}
        files = [found[place] for place in sorted(found) if not self.skipped & set(Path(place).parts)]
        if not files:
            raise InputError(f"{folder} holds no Python sources to take documentation from: give a text of your own.")
        self._harvest: list[Document] = []
        super().__init__(name, ["train"], {"python": platform.python_version()}, files, documents.carve_all(fractions))

    def read(self, given: str) -> Iterator[Document]:
        if not self._harvest:  # a few MB, and parsing takes seconds for each of the three splits
            self._harvest = [Document(text) for text in self._texts()]
        return iter(self._harvest)

    def _texts(self) -> Iterator[str]:
        """One document a module or topic; a documentation string that was seen before is left out."""
        seen: set[str] = set()
        for path in self.files:
            try:
                tree = ast.parse(path.read_bytes())
            except (SyntaxError, ValueError):  # a few files of the library are broken on purpose, for its tools
                continue
            place = path.relative_to(self.folder).with_suffix("")
            if place == Path("pydoc_data", "topics"):  # the file assigns one dictionary of texts
                tables = [s.value for s in tree.body if isinstance(s, ast.Assign) and isinstance(s.value, ast.Dict)]
                topics = sorted(item for table in tables for item in ast.literal_eval(table).items())
                yield from (f"{name}\n\n{text.strip()}\n" for name, text in topics)
                continue
            new = {}
            for heading, text in docstrings(tree, ".".join(place.parts).removesuffix(".__init__")):
                if text not in seen:
                    new[text] = f"{heading}\n\n{text}\n"
                    seen.add(text)
            if new:
                yield "\n".join(new.values())


def docstrings(node: Any, name: str) -> Iterator[tuple[str, str]]:
    """Headings and documentation strings of a definition and those inside it, those under `except` last.

    Looking at statements only is much quicker than `ast.walk`.
    """
    text = (ast.get_docstring(node) or "").strip() if isinstance(node, ast.Module | DEFINITIONS) else ""
    if text and not NO_CHARACTER.search(text):
        yield name + (f"({ast.unparse(node.args)})" if hasattr(node, "args") else ""), text
    for child in sorted(ast.iter_child_nodes(node), key=lambda child: isinstance(child, ast.ExceptHandler)):
        if isinstance(child, DEFINITIONS):
            yield from docstrings(child, f"{name}.{child.name}")
        elif isinstance(child, ast.stmt | ast.ExceptHandler):
            yield from docstrings(child, name)


class TokensFile(Source):
    """Ids made elsewhere: little-endian uint16 in `train.u16`, or `train.0.u16`, `train.1.u16`…, compressed or not.

    It gives ids, not documents. They are stored as they are: a document ends at each end of text, and what has none is
    one document.
    """

    def __init__(self, paths: list[Path], name: str = "tokens") -> None:
        folder = documents.one_folder(name, paths, "train.u16 (or train.0.u16, train.1.u16…), valid.u16 and test.u16")
        parts: dict[str, list[tuple[int, Path]]] = {}
        for path in sorted(folder.iterdir()):
            match = TOKEN_FILE.fullmatch(plain_name(path))
            if match and match[1] in documents.SPLIT_ALIASES:
                parts.setdefault(documents.SPLIT_ALIASES[match[1]], []).append((int(match[2] or 0), path))
        if not parts:
            raise InputError(f"{folder} holds no train, valid or test file of uint16 ids (.u16 or .bin).")
        for split, numbered in parts.items():
            if sorted(number for number, _ in numbered) != list(range(len(numbered))):
                raise InputError(f"{folder}: the files of {split} are not numbered 0 to {len(numbered) - 1}.")
        given = {split: [path for _, path in sorted(parts[split])] for split in SPLITS if split in parts}
        super().__init__(folder.resolve().name if name == "tokens" else name, given, {"documents": "ids as given"})

    def blocks(self, split: str) -> Iterator[np.ndarray]:
        """The ids of a split in order, a few million at a time."""
        for path in self.paths[split]:
            with documents.open_bytes(path) as handle:
                while data := handle.read(BLOCK_BYTES):
                    if len(data) % 2:
                        raise InputError(f"{path} has an odd number of bytes, so it is not uint16 token ids.")
                    yield np.frombuffer(data, "<u2")
