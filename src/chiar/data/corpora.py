"""The corpora themselves: where each one's documents lie in the files its publisher gives out, or the user has."""

import ast
import hashlib
import json
import platform
import re
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from chiar.data import documents
from chiar.data.documents import SPLITS, Document, Fractions, Source, Table, plain_name, read_lines
from chiar.data.optional import optional_module
from chiar.errors import InputError, unknown_name

WIKITEXT_REPOSITORY = "Salesforce/wikitext"
# Of WikiText's train sets, which are published in one order.
FIRST_TITLE = "Valkyria Chronicles III"
TEXT_ENDINGS = (".txt", ".md", ".rst", ".text", ".jsonl", ".parquet")
TOKEN_FILE = re.compile(r"(\w+?)(?:\.(\d+))?\.(?:u16|bin)")
BLOCK_BYTES = 1 << 22


class WikiText(Source):
    """WikiText-103 and -2, in the tokens form (rare words are <unk>) and the raw form. A document is an article.

    The articles of a split, joined, are the published file byte for byte, so words and lines in the manifest add up to
    the token counts of the literature (each newline counts there as one `<eos>`): 245,569 for either test set.
    """

    def __init__(self, paths: list[Path], name: str, from_hub: bool = False) -> None:
        form = "raw" if name.endswith("-raw") else "tokens"
        given: dict[str, list[Path]] = {}
        if paths:
            layout = f"wiki.train.{form}, wiki.valid.{form} and wiki.test.{form}"
            folder = documents.one_folder(name, paths, layout)
            given = documents.find_files(folder, {split: (f"wiki.{split}.{form}",) for split in SPLITS})
            if not given:
                raise InputError(f"{folder} holds none of {layout} (also as .xz or .gz).")
        elif not from_hub:
            raise InputError(
                f"{name} needs its files: chiar data prepare {name} FOLDER, a folder with wiki.train.{form} and "
                f"so on, or --from-hub to fetch them."
            )
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
            for row in datasets.load_dataset(WIKITEXT_REPOSITORY, f"{self.name}-v1", split=name, streaming=True):
                yield row["text"] or " \n"
        except Exception as error:
            # The Hub's client raises errors of many libraries; each means that the text did not come.
            raise InputError(f"{self.name} could not be fetched from the Hub: {str(error).splitlines()[0]}") from error


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


class Imdb(Table):
    """Movie reviews: the official folder (aclImdb), or tables with a label and a text. Texts keep their `<br />`.

    The official set has no validation reviews: some of train, chosen by a hash of the text, become valid.
    """

    labels = ("neg", "pos")
    spellings = {"0": 0, "neg": 0, "negative": 0, "1": 1, "pos": 1, "positive": 1}  # noqa: RUF012

    def __init__(self, paths: list[Path], name: str = "imdb", fractions: Fractions | None = None) -> None:
        layout = "train/pos, train/neg, test/pos and test/neg, or train.tsv and test.tsv (.csv)"
        folder = documents.one_folder(name, paths, layout, "aclImdb")
        names = {split: (f"{split}.tsv", f"{split}.csv") for split in SPLITS}
        given = documents.find_files(folder, names | {"valid": (*names["valid"], "dev.tsv", "dev.csv")})
        for split in [split for split in SPLITS if (folder / split).is_dir()]:
            for label in self.labels:
                if not (folder / split / label).is_dir():
                    raise InputError(f"{folder / split} has no folder {label}.")
            reviews = [path for label in self.labels for path in (folder / split / label).glob("*.txt")]
            given[split] = sorted(reviews, key=review_order)
        if not given:
            raise InputError(f"{folder} holds neither {layout}.")
        super().__init__(name, given, {}, carve=documents.carve_valid(given, fractions))

    def read_file(self, path: Path) -> Iterator[Document]:
        if path.suffix != ".txt":
            yield from super().read_file(path)
            return
        text = "".join(read_lines(path))
        if not text.strip():
            raise InputError(f"{path} is empty.")
        yield Document(text, self.labels.index(path.parent.name))

    def columns(self, head: list[str]) -> tuple[bool, tuple[int, ...], int]:
        """Those that say so; without a header, label first."""
        text = next((head.index(name) for name in ("text", "review", "sentence") if name in head), None)
        label = next((head.index(name) for name in ("label", "sentiment") if name in head), None)
        return (False, (1,), 0) if text is None or label is None else (True, (text,), label)


def review_order(path: Path) -> tuple[int, str, str]:
    """By the number of a review, 12 in 12_7.txt, which gave 7 stars: negative and positive ones take turns."""
    number = path.name.split("_")[0]
    return int(number) if number.isdigit() else 0, path.name, path.parent.name


class Glue(Table):
    """A GLUE task from the official TSV files. Pairs of sentences become one text with a newline between them.

    Official test sets carry no labels, so a corpus has train and valid (the file dev.tsv) only.
    """

    # Folder, labels, and layout: whether there is a header, columns of the text, column of the label.
    tasks: ClassVar[dict[str, tuple[str, tuple[str, str], tuple[bool, tuple[int, ...], int]]]] = {
        "sst-2": ("SST-2", ("negative", "positive"), (True, (0,), 1)),
        "cola": ("CoLA", ("unacceptable", "acceptable"), (False, (3,), 1)),
        "mrpc": ("MRPC", ("different", "paraphrase"), (True, (3, 4), 0)),
        "rte": ("RTE", ("entailment", "not_entailment"), (True, (1, 2), 3)),
    }

    def __init__(self, paths: list[Path], name: str) -> None:
        inner, self.labels, self.layout = self.tasks[name]
        self.spellings = {self.labels[n] if name == "rte" else str(n): n for n in (0, 1)}
        folder = documents.one_folder(name, paths, "train.tsv and dev.tsv", inner)
        given = documents.find_files(folder, {"train": ("train.tsv",), "valid": ("dev.tsv",)})
        if not given:
            raise InputError(f"{folder} holds neither train.tsv nor dev.tsv (also as .xz or .gz).")
        super().__init__(name, given, {"pair_separator": "\n"} if name in ("mrpc", "rte") else {})

    def columns(self, head: list[str]) -> tuple[bool, tuple[int, ...], int]:
        return self.layout


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
        if plain_name(path).endswith(".parquet"):
            texts = parquet_texts(path, self.field)
        elif plain_name(path).endswith((".jsonl", ".ndjson")):
            texts = json_texts(path, self.field)
        else:
            texts = plain_texts(path, self.unit)
        return (Document(text) for text in texts if text.strip())


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
        raise InputError(
            f"{path} holds no text file ({', '.join(TEXT_ENDINGS)}, also as {', '.join(documents.COMPRESSIONS)})."
        )
    return found


def plain_texts(path: Path, unit: str) -> Iterator[str]:
    """Paragraphs end at blank lines, which are left out, so that memory holds one paragraph at a time."""
    text: list[str] = []
    for line in read_lines(path):
        blank = unit == "paragraphs" and line.isspace()
        if not blank:
            text.append(line)
        if blank or unit == "lines":
            yield "".join(text)
            text.clear()
    yield "".join(text)


def json_texts(path: Path, field: str) -> Iterator[str]:
    for number, line in enumerate(read_lines(path), start=1):
        if line.isspace():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise InputError(f"{path}, line {number} is not JSON: {error}.") from error
        if not isinstance(row, dict) or field not in row:
            names = ", ".join(row) if isinstance(row, dict) else type(row).__name__
            raise InputError(f"{path}, line {number} has no field {field!r} (it has {names}): choose another --field.")
        yield checked(row[field], f"{path}, line {number}, field {field!r}")


def parquet_texts(path: Path, field: str) -> Iterator[str]:
    parquet = optional_module("pyarrow.parquet", "parquet", str(path))
    try:
        table = parquet.ParquetFile(path)
    except (ValueError, OSError) as error:  # pyarrow's own errors are kinds of these
        raise InputError(f"{path} is not a readable parquet file: {error}") from error
    with table:
        names = table.schema_arrow.names
        if field not in names:
            raise InputError(f"{path} has no column {field!r} (it has {', '.join(names)}): choose another --field.")
        batches = table.iter_batches(batch_size=1024, columns=[field])
        for number, text in enumerate((text for batch in batches for text in batch.column(0).to_pylist()), start=1):
            yield checked(text, f"{path}, row {number}, column {field!r}")


def checked(text: object, where: str) -> str:
    """JSON can spell what no text file holds: other types, NUL, and halves of characters."""
    if not isinstance(text, str):
        raise InputError(f"{where} is {type(text).__name__}, expected text.")
    if "\0" in text:
        raise InputError(f"{where} holds a NUL character: is it binary?")
    if re.search("[\ud800-\udfff]", text):
        raise InputError(f"{where} holds half of a surrogate pair, which is no character.")
    return text


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
            raise InputError(
                f"{folder} holds no Python sources, so there is no documentation to harvest: "
                f"this Python was packed without them; give a text of your own instead."
            )
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
                for name, text in sorted(item for table in tables for item in ast.literal_eval(table).items()):
                    yield f"{name}\n\n{text.strip()}\n"
                continue
            entries = []
            for heading, text in docstrings(tree, ".".join(place.parts).removesuffix(".__init__")):
                if text not in seen:
                    seen.add(text)
                    entries.append(f"{heading}\n\n{text}\n")
            if entries:
                yield "\n".join(entries)


def docstrings(node: Any, name: str) -> Iterator[tuple[str, str]]:
    """Headings and documentation strings of a definition and those inside it, in the order of the source."""
    text = (ast.get_docstring(node) or "").strip()
    # Text is stored as UTF-8, which cannot hold the lone surrogates that some examples spell out.
    if text and not re.search("[\ud800-\udfff\0]", text):
        yield name + (f"({ast.unparse(node.args)})" if hasattr(node, "args") else ""), text
    for child in definitions(node.body):
        yield from docstrings(child, f"{name}.{child.name}")


def definitions(body: list[ast.stmt]) -> Iterator[Any]:
    """Those in a body, also under if, try and with; looking at statements only is much quicker than `ast.walk`."""
    for statement in body:
        if isinstance(statement, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield statement
            continue
        handlers = [line for handler in getattr(statement, "handlers", []) for line in handler.body]
        for part in ("body", "orelse", "finalbody"):
            yield from definitions(getattr(statement, part, []))
        yield from definitions(handlers)


class TokensFile(Source):
    """Ids made elsewhere: little-endian uint16 in `train.u16`, or `train.0.u16`, `train.1.u16`…, compressed or not.

    It gives ids, not documents. They are stored as they are: a document ends at each end of text, and what has none is
    one document. A `meta.json` that counts tokens or hashes train is held to it.
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
        name = folder.resolve().name if name == "tokens" else name
        super().__init__(name, given, {"documents": "ids as given"})
        self.meta: dict[str, Any] = {}
        if (meta := folder / "meta.json").is_file():
            try:
                self.meta = json.loads(meta.read_text(encoding="utf-8"))
            except ValueError as error:
                raise InputError(f"{meta} is not JSON: {error}.") from error
            if not isinstance(self.meta, dict):
                raise InputError(f"{meta} does not hold an object.")

    def remarks(self, entries: dict[str, Any]) -> list[str]:
        return []

    def blocks(self, split: str) -> Iterator[np.ndarray]:
        """The ids of a split in order, a few million at a time."""
        digest, count = hashlib.sha256(), 0
        for path in self.paths[split]:
            with documents.open_bytes(path) as handle:
                while data := handle.read(BLOCK_BYTES):
                    if len(data) % 2:
                        raise InputError(f"{path} has an odd number of bytes, so it is not uint16 token ids.")
                    digest.update(data)
                    count += len(data) // 2
                    yield np.frombuffer(data, "<u2")
        expected = self.meta.get(split, count)
        if count != expected:
            raise InputError(f"{split} holds {count:,} tokens, but its meta.json says {expected:,}: a file is missing.")
        if self.meta.get(f"{split}_sha256", digest.hexdigest()) != digest.hexdigest():
            raise InputError(f"the ids of {split} do not have the hash its meta.json gives: a file is damaged.")
