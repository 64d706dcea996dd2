"""What README and the docs show really runs."""

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from chiar.cli import app

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PAGES = ("README.md", "docs/guide.md")


def blocks(page, *kinds):
    found = re.findall(r"```(\w+)\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    return [(kind, text) for kind, text in found if kind in kinds]


def commands(text):
    return [line for line in text.splitlines() if line.startswith("chiar ")]


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    for name in ("README.md", "tests", "research"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("workplace")
@pytest.mark.parametrize("page", PAGES)
def test_commands_and_examples_run_in_the_order_shown(page):
    assert sum(len(commands(text)) for _, text in blocks(page, "sh")) >= 5 and blocks(page, "python")
    for kind, text in blocks(page, "sh", "python"):
        if kind == "python":
            exec(compile(text, page, "exec"), {})
        for command in commands(text) if kind == "sh" else ():
            result = CliRunner().invoke(app, shlex.split(command, comments=True)[1:])
            assert result.exit_code == 0, (command, result.exception)


def test_the_file_map_is_complete():
    map_of_files = README.split("## File map")[1].split("```")[1]
    heads = [re.split(r"\s{2,}", line)[0] for line in map_of_files.split("src/chiar/\n")[1].splitlines()]
    listed = {name for head in heads for name in head.split() if not (ROOT / name).is_dir() or name.startswith("src")}
    source = ROOT / "src" / "chiar"
    present = {p.name for p in source.glob("*.py")} | {f"{p.parent.name}/" for p in source.glob("*/__init__.py")}
    assert present - {"__init__.py", "__main__.py"} <= listed, "README's file map misses files"
    assert all((source / name).exists() for name in listed), "README's file map names files that are gone"


@pytest.mark.parametrize("document", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))], ids=lambda p: p.name)
def test_links_lead_somewhere_and_no_placeholder_is_left(document):
    text = document.read_text()
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", text):
        assert (document.parent / target).exists(), target
    assert not re.search(r"@[A-Z0-9]+@", text)


def test_files_named_in_the_architecture_table_exist():
    text = (ROOT / "docs" / "architecture.md").read_text()
    named = re.findall(r"`(src/chiar/[\w/]+\.py)`, `(\w+)`", text)
    assert len(named) > 12
    for path, symbol in named:
        assert re.search(rf"^(class|def|    def) {symbol}\b", (ROOT / path).read_text(), re.MULTILINE), symbol


def test_documents_and_records_name_no_folder_of_a_machine():
    files = [path for path in (ROOT / "docs").rglob("*") if path.suffix in (".md", ".json", ".jsonl", ".csv", ".txt")]
    named = re.compile(r"(?<![\w.~])/(tmp|root|home|work|mnt)/")
    assert [path.name for path in files if named.search(path.read_text(encoding="utf-8"))] == []
