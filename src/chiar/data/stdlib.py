"""The embedded corpus: the documentation that came with the running Python.

Every module's documentation strings, with the names and arguments they belong to, and the language topics of `help()`.
Sources are parsed, never imported, so nothing of them runs. Another version of Python gives another corpus: the
manifest says which one it was.
"""

import ast
import platform
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from chiar.data.documents import DEFAULT_FRACTIONS, Document, Source, carve_all
from chiar.errors import InputError

TOPICS = Path("pydoc_data", "topics.py")
# Installed packages differ from one environment to the next, and some systems leave the tests out.
SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
Definition = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


class Stdlib(Source):
    def __init__(
        self,
        name: str = "stdlib",
        fractions: tuple[float, float, float] = DEFAULT_FRACTIONS,
        folder: Path | None = None,
    ) -> None:
        self.folder = folder or Path(sysconfig.get_paths()["stdlib"])
        files = source_files(self.folder)
        if not files:
            raise InputError(
                f"{self.folder} holds no Python sources, so there is no documentation to harvest: "
                f"this Python was packed without them; give a text of your own instead."
            )
        self._harvest: list[Document] | None = None
        super().__init__(name, ["train"], {"python": platform.python_version()}, files, carve_all(fractions))

    def read(self, given: str) -> Iterator[Document]:
        assert given == "train"
        if self._harvest is None:  # a few MB, and parsing takes seconds for each of the three splits
            self._harvest = [Document(text) for text in harvest(self.folder, self.files)]
        return iter(self._harvest)


def source_files(folder: Path) -> list[Path]:
    found = (path for path in folder.rglob("*.py") if not SKIPPED & set(path.relative_to(folder).parts))
    return sorted(found, key=lambda path: path.relative_to(folder).as_posix())


def harvest(folder: Path, files: list[Path]) -> Iterator[str]:
    """One document a module or topic; a documentation string that was seen before is left out."""
    seen: set[str] = set()
    for path in files:
        tree = parse(path)
        if tree is None:
            continue
        place = path.relative_to(folder)
        if place == TOPICS:
            yield from topics(tree)
            continue
        module = ".".join(place.with_suffix("").parts).removesuffix(".__init__")
        entries = []
        for heading, text in docstrings(tree, module):
            if text not in seen:
                seen.add(text)
                entries.append(f"{heading}\n\n{text}\n")
        if entries:
            yield "\n".join(entries)


def parse(path: Path) -> ast.Module | None:
    """A few files of the library are broken on purpose, as material for its tools."""
    try:
        return ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return None


def docstrings(node: Definition, name: str) -> Iterator[tuple[str, str]]:
    """Headings and documentation strings in the order of the source."""
    text = ast.get_docstring(node)
    # Text is stored as UTF-8, which cannot hold the lone surrogates that some examples spell out.
    if text and text.strip() and not any("\ud800" <= c <= "\udfff" or c == "\0" for c in text):
        arguments = f"({ast.unparse(node.args)})" if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else ""
        yield name + arguments, text.strip()
    for child in definitions(node.body):
        yield from docstrings(child, f"{name}.{child.name}")


def definitions(body: list[ast.stmt]) -> Iterator[ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    """Those in a body, also under if, try and with; looking at statements only is much quicker than `ast.walk`."""
    for statement in body:
        if isinstance(statement, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield statement
            continue
        for part in ("body", "orelse", "finalbody"):
            yield from definitions(getattr(statement, part, []))
        for handler in getattr(statement, "handlers", []):
            yield from definitions(handler.body)


def topics(tree: ast.Module) -> Iterator[str]:
    """The file assigns one dictionary of texts."""
    for statement in tree.body:
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Dict):
            table = ast.literal_eval(statement.value)
            for name in sorted(table):
                yield f"{name}\n\n{table[name].strip()}\n"
