"""What README and the docs show really runs."""

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from chiar.cli import app

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", README, re.DOTALL)
COMMANDS = [line for kind, text in BLOCKS if kind == "sh" for line in text.splitlines() if line.startswith("chiar ")]
EXAMPLES = [text for kind, text in BLOCKS if kind == "python"]


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    for name in ("README.md", "tests"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("workplace")
def test_commands_run_in_the_order_shown():
    for command in COMMANDS:
        result = CliRunner().invoke(app, shlex.split(command, comments=True)[1:])
        assert result.exit_code == 0, (command, result.exception)


@pytest.mark.usefixtures("workplace")
@pytest.mark.parametrize("example", EXAMPLES, ids=range(len(EXAMPLES)))
def test_examples(example):
    exec(compile(example, "README.md", "exec"), {})


def test_there_is_something_to_run():
    assert len(COMMANDS) >= 5
    assert EXAMPLES
    assert "make demo" in README
    assert "make test" in README


def test_the_file_map_is_complete():
    listed = set(re.findall(r"^(?:src/chiar/)?([\w/]+\.py|\w+/)\s", README, re.MULTILINE))
    source = ROOT / "src" / "chiar"
    present = {p.name for p in source.glob("*.py")} | {f"{p.parent.name}/" for p in source.glob("*/__init__.py")}
    assert present - {"__init__.py", "__main__.py"} <= listed, "README's file map misses files"
    assert {name for name in listed if (source / name).exists()} == listed, (
        "README's file map names files that are gone"
    )


@pytest.mark.parametrize(
    "document", ["README.md", "docs/architecture.md", "docs/execution.md", "docs/training.md", "docs/studies.md"]
)
def test_links_lead_somewhere(document):
    text = (ROOT / document).read_text()
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", text):
        assert ((ROOT / document).parent / target).exists(), target


def test_files_named_in_the_architecture_table_exist():
    text = (ROOT / "docs" / "architecture.md").read_text()
    named = re.findall(r"`(src/chiar/[\w/]+\.py)`, `(\w+)`", text)
    assert len(named) > 15
    for path, symbol in named:
        assert re.search(rf"^(class|def) {symbol}\b|^    def {symbol}\b", (ROOT / path).read_text(), re.MULTILINE), (
            symbol
        )
