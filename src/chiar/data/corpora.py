"""Sources of documents in a fixed order: the base classes, and corpora read from their published files."""

import ast
import bz2
import csv
import gzip
import hashlib
import lzma
import platform
import re
import sysconfig
import zlib
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property
from itertools import accumulate, chain
from lzma import LZMAError
from pathlib import Path
from typing import IO, Any, NamedTuple

from chiar.errors import InputError, errors_as, optional_module, require

SPLITS = ("train", "valid", "test")
# Names of the three splits in file names.
SPLIT_ALIASES = {name: name for name in SPLITS} | dict.fromkeys(("validation", "val", "dev"), "valid")
Fractions = tuple[float, float, float] | None
DEFAULT_FRACTIONS = (0.9, 0.05, 0.05)
COMPRESSIONS: dict[str, Any] = {".xz": lzma.open, ".gz": gzip.open, ".bz2": bz2.open}
# Usual columns of tables, in lower case; the texts of a pair are joined by a newline.
TEXT_COLUMNS = (["text"], ["review"], ["sentence"], ["source"], ["sentence1", "sentence2"], ["#1 string", "#2 string"])
LABEL_COLUMNS = ("label", "sentiment", "target", "quality")
# Corpora with two labels: the folder inside the given one, and the labels.
LABELLED = {"imdb": ("aclImdb", "neg", "pos"), "sst-2": ("SST-2", "negative", "positive")}
LABELLED |= {"cola": ("CoLA", "unacceptable", "acceptable"), "mrpc": ("MRPC", "different", "paraphrase")}
LABELLED |= {"rte": ("RTE", "entailment", "not_entailment")}
DEFINITIONS = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
# Characters that escapes in JSON and Python can write but no text may hold: NUL and lone surrogates.
NO_CHARACTER = re.compile("[\0\ud800-\udfff]")


class Document(NamedTuple):
    text: str
    label: int | None = None


class Source:
    """The documents of a corpus, by split. Subclasses define `read`, or pass files by split as `given` and define
    `read_file`. `carve` divides the given train split: the share of each new one."""

    kind = "language"
    labels: tuple[str, ...] = ()

    def __init__(
        self, name: str, given: Collection[str], options: dict[str, Any], files: Iterable[Path] = (),
        carve: dict[str, float] | None = None,
    ) -> None:  # fmt: skip
        self.name, self.carve = name, carve or {}
        self.splits = tuple(split for split in SPLITS if split in given or split in self.carve)
        self.options = options | ({"hash_split": carve} if carve else {})
        self.paths: dict[str, list[Path]] = given if isinstance(given, dict) else {}
        self.files = [*files] or [path for paths in self.paths.values() for path in paths]

    def read(self, given: str) -> Iterator[Document]:
        """The documents of one of the given splits, in the same order each time."""
        return (document for path in self.paths[given] for document in self.read_file(path))

    def read_file(self, path: Path) -> Iterator[Document]:
        raise NotImplementedError

    @property
    def notes(self) -> list[str]:
        """How the splits were made; empty if the corpus came with them."""
        shares = ", ".join(f"{split} {share:.1%}" for split, share in self.carve.items())
        return [f"splits by a hash of each document: {shares}."] if len(self.carve) > 1 else []

    def documents(self, split: str) -> Iterator[Document]:
        if split not in self.carve:
            return self.read(split)
        return (document for document in self.read("train") if split_by_hash(document.text, self.carve) == split)


class Table(Source):
    """Labelled texts, one per row."""

    kind = "classification"
    spellings: dict[str, int]  # the number of each label, by its spellings in files
    columns: tuple[list[int], int] = ([1], 0)  # of the text and the label, if no header names them

    def checked(self, text: str, label: int) -> str:
        return text  # the text to keep; subclasses may raise ValueError

    def read_file(self, path: Path) -> Iterator[Document]:
        rows = read_table(path)
        try:
            if (first := next(rows, None)) is None:
                raise InputError(f"{path} is empty.")
            head, (texts, label_at) = [cell.strip().lower() for cell in first], self.columns
            columns = next((names for names in TEXT_COLUMNS if {*names} <= {*head}), None)
            labels = [name for name in LABEL_COLUMNS if name in head]
            if columns and labels:
                texts, label_at = [head.index(name) for name in columns], head.index(labels[0])
            for row in filter(any, rows if columns and labels else chain([first], rows)):
                if len(row) <= max(*texts, label_at):
                    raise ValueError(f"it has {len(row)} columns, expected {max(*texts, label_at) + 1}")
                label, text = self.spellings.get(row[label_at].strip().lower()), "\n".join(row[at] for at in texts)
                if label is None:
                    raise ValueError(f"label {row[label_at]!r} is none of {', '.join(self.spellings)}")
                if not text.strip():
                    raise ValueError("it has a label but no text")
                yield Document(self.checked(text, label), label)
        except InputError:
            raise
        except (csv.Error, ValueError) as error:
            raise InputError(f"{path}, line {rows.line_num} cannot be read: {error}.") from error


def split_by_hash(text: str, fractions: dict[str, float]) -> str:
    """The split of a document by its text alone: adding documents moves no others, and copies stay in one split."""
    share = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") / 2**64
    bounds = zip(fractions, accumulate(fractions.values()), strict=True)
    return next((name for name, bound in bounds if share < bound), list(fractions)[-1])


def carve_all(fractions: Fractions = None) -> dict[str, float]:
    """Shares for a corpus without splits; a split with a share of 0 is left out."""
    fractions = fractions or DEFAULT_FRACTIONS
    if min(fractions) < 0.0 or abs(sum(fractions) - 1.0) > 1e-6 or fractions[0] == 0.0:
        raise InputError(f"split fractions must be from 0 to 1, add up to 1 and leave some for train: {fractions}.")
    return {name: fraction for name, fraction in zip(SPLITS, fractions, strict=True) if fraction}


def carve_valid(given: Collection[str], fractions: Fractions = None) -> dict[str, float]:
    """Shares that take a validation split out of train, or none if the corpus has one."""
    valid = carve_all(fractions).get("valid")
    return {"train": 1.0 - valid, "valid": valid} if valid and "train" in given and "valid" not in given else {}


def plain_name(path: Path) -> str:
    """The file name without the suffix of a compression."""
    return path.stem if path.suffix in COMPRESSIONS else path.name


def split_of_file(path: Path) -> str | None:
    """The split in a file name, as in train.txt, test_d20s.tsv, basic_val.tsv; None if it names none or several."""
    named = {SPLIT_ALIASES[part] for part in re.split(r"[_.\-]", path.name.lower()) if part in SPLIT_ALIASES}
    return named.pop() if len(named) == 1 else None


def by_split(files: Iterable[Path]) -> dict[str, list[Path]]:
    """Files by the split in their names; those without one under the empty name."""
    splits: dict[str, list[Path]] = {}
    for file in files:
        splits.setdefault(split_of_file(file) or "", []).append(file)
    return splits


def one_folder(name: str, paths: list[Path], layout: str, inner: str = "") -> tuple[Path, dict[str, Path]]:
    """The folder a corpus is read from, or `inner` inside it if that exists; its files by name without compression."""
    if len(paths) != 1 or not paths[0].is_dir():
        got = f"{paths[0]} is not a folder" if len(paths) == 1 else f"got {len(paths)}"
        raise InputError(f"{name} is read from one folder with {layout}: {got}.")
    folder = paths[0] / inner if (paths[0] / inner).is_dir() else paths[0]
    return folder, {plain_name(path): path for path in sorted(folder.iterdir(), reverse=True) if path.is_file()}


@contextmanager
def open_bytes(path: Path) -> Iterator[IO[bytes]]:
    damaged = errors_as(f"{path} is damaged or not a {path.suffix} file", OSError, LZMAError, zlib.error, EOFError)
    with damaged, COMPRESSIONS.get(path.suffix, open)(path, "rb") as handle:
        yield handle


def read_lines(path: Path) -> Iterator[str]:
    """Lines with their newlines, unchanged; only a byte order mark at the start is dropped."""
    position = 0
    with open_bytes(path) as handle:
        for raw in handle:
            try:
                line = raw.decode("utf-8")
            except UnicodeDecodeError as error:
                raise InputError(f"{path} is not UTF-8 text (byte {position + error.start}): is it binary?") from error
            if "\0" in line:
                raise InputError(f"{path} holds a NUL character (byte {position + raw.index(0)}): is it binary?")
            yield line if position else line.removeprefix("\ufeff")
            position += len(raw)


def read_table(path: Path) -> Any:
    """A csv.reader: .csv with the usual quoting, anything else tab-separated without quoting."""
    csv.field_size_limit(2**30)  # a review can be longer than the default of 128 KiB
    style: Any = {} if plain_name(path).endswith(".csv") else {"delimiter": "\t", "quoting": csv.QUOTE_NONE}
    return csv.reader(read_lines(path), **style)


class WikiText(Source):
    """WikiText-103 and -2. A document is an article; concatenated, they are the published file byte for byte."""

    def __init__(self, paths: list[Path], name: str, from_hub: bool = False) -> None:
        form = "raw" if name.endswith("-raw") else "tokens"
        names = {f"wiki.{split}.{form}": split for split in SPLITS}
        if not paths and not from_hub:
            raise InputError(f"{name} needs its files: a folder with {', '.join(names)}, or --from-hub to fetch them.")
        files = one_folder(name, paths, ", ".join(names))[1] if paths else {}
        given = {split: [files[file]] for file, split in names.items() if file in files}
        if paths and not given:
            raise InputError(f"{paths[0]} holds none of {', '.join(names)} (also as .xz or .gz).")
        super().__init__(name, given or SPLITS, {"form": form})

    def read(self, given: str) -> Iterator[Document]:
        return map(Document, articles(read_lines(self.paths[given][0]) if self.paths else self._hub_lines(given)))

    def _hub_lines(self, split: str) -> Iterator[str]:
        datasets = optional_module("datasets", "hub", f"{self.name} from the Hub")
        name = "validation" if split == "valid" else split
        with errors_as(f"{self.name} could not be fetched from the Hub", Exception):  # raised by many libraries
            for row in datasets.load_dataset("Salesforce/wikitext", f"{self.name}-v1", split=name, streaming=True):
                yield row["text"] or " \n"  # rows are the lines of the file; blank lines come empty


def articles(lines: Iterable[str]) -> Iterator[str]:
    """Splits before the blank line above a title: ` = Title = ` between blank lines (formulas are not between them)."""
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
    """IMDB and GLUE as tables, or IMDB's official folders. GLUE's test sets have no labels and are not read."""

    def __init__(self, paths: list[Path], name: str, fractions: Fractions = None) -> None:
        inner, self.labels = LABELLED[name][0], LABELLED[name][1:]
        self.spellings = {spelling: n for n in (0, 1) for spelling in (str(n), self.labels[n])}
        self.columns = ([3], 1) if name == "cola" else ([1], 0)
        layout, read = "train.tsv and dev.tsv", SPLITS[: 3 if name == "imdb" else 2]
        if name == "imdb":
            self.spellings |= {"negative": 0, "positive": 1}
            layout = "train/pos, train/neg, test/pos and test/neg, or train.tsv and test.tsv (.csv)"
        folder, files = one_folder(name, paths, layout, inner)
        named = [(split, f"{stem}{end}") for stem, split in SPLIT_ALIASES.items() for end in (".tsv", ".csv")]
        given = {split: [files[file]] for split, file in reversed(named) if file in files and split in read}
        for inside in [folder / split for split in read if name == "imdb" and (folder / split).is_dir()]:
            if missing := [label for label in self.labels if not (inside / label).is_dir()]:
                raise InputError(f"{inside} has no folder {missing[0]}.")
            reviews = [path for label in self.labels for path in (inside / label).glob("*.txt")]
            # By review number (12 in 12_7.txt, a review of 7 stars), so that negative and positive ones alternate.
            given[inside.name] = sorted(reviews, key=lambda file: (file.stem.split("_")[0].zfill(9), file.name, file))
        require(given, f"{folder} holds neither {layout} (also as .xz or .gz).")
        options = {"pair_separator": "\n"} if name in ("mrpc", "rte") else {}
        super().__init__(name, given, options, carve=carve_valid(given, fractions) if name == "imdb" else {})

    def read_file(self, path: Path) -> Iterator[Document]:
        if path.suffix != ".txt":
            return super().read_file(path)
        if not (text := "".join(read_lines(path))).strip():
            raise InputError(f"{path} is empty.")
        return iter([Document(text, self.labels.index(path.parent.name))])


class Stdlib(Source):
    """The built-in corpus: documentation in the running Python's library. Sources are parsed, never executed."""

    # Installed packages differ between environments, and some systems leave out the tests.
    skipped = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
    folder = Path(sysconfig.get_paths()["stdlib"])

    def __init__(self, paths: Collection[Path] = (), name: str = "stdlib", fractions: Fractions = None) -> None:
        require(not paths, "stdlib is read from the running Python and takes no files.")
        modules = {path.relative_to(self.folder).as_posix(): path for path in self.folder.rglob("*.py")}
        files = [modules[module] for module in sorted(modules) if not self.skipped & set(Path(module).parts)]
        require(files, f"{self.folder} holds no Python sources to take texts from: give a text of your own.")
        super().__init__(name, ["train"], {"python": platform.python_version()}, files, carve_all(fractions))

    def read(self, given: str) -> Iterator[Document]:
        return map(Document, self._texts)

    @cached_property  # a few MB; parsing takes seconds, and each of the three splits needs it
    def _texts(self) -> list[str]:
        texts, seen = list[str](), set[str]()
        for path in self.files:
            try:
                tree = ast.parse(path.read_bytes())
            except (SyntaxError, ValueError):  # a few files of the library are invalid on purpose
                continue
            module = path.relative_to(self.folder).with_suffix("")
            if module == Path("pydoc_data", "topics"):  # the file assigns one dictionary of texts
                tables = [s.value for s in tree.body if isinstance(s, ast.Assign) and isinstance(s.value, ast.Dict)]
                topics = sorted(item for table in tables for item in ast.literal_eval(table).items())
                texts += [f"{name}\n\n{text.strip()}\n" for name, text in topics]
                continue
            new = []
            for heading, text in docstrings(tree, ".".join(module.parts).removesuffix(".__init__")):
                new += [] if text in seen else [f"{heading}\n\n{text}\n"]
                seen.add(text)
            texts += ["\n".join(new)] if new else []
        return texts


def docstrings(node: Any, name: str) -> Iterator[tuple[str, str]]:
    """Headings and docstrings of a module or definition and those inside it; those under `except` come last. Only
    statements are visited, which is quick."""
    text = (ast.get_docstring(node) or "").strip() if isinstance(node, ast.Module | DEFINITIONS) else ""
    if text and not NO_CHARACTER.search(text):
        yield name + (f"({ast.unparse(node.args)})" if hasattr(node, "args") else ""), text
    for child in sorted(ast.iter_child_nodes(node), key=lambda child: isinstance(child, ast.ExceptHandler)):
        if isinstance(child, DEFINITIONS):
            yield from docstrings(child, f"{name}.{child.name}")
        elif isinstance(child, ast.stmt | ast.ExceptHandler):
            yield from docstrings(child, name)
