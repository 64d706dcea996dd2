"""`chiar data` as a user runs it."""

import subprocess
import sys
from pathlib import Path

import pytest
from corpora import text_file, tree, wikitext_folder

import commands
from chiar.data.catalog import CATALOG, SPELLINGS
from chiar.data.shards import Corpus


def run(*arguments):
    return commands.run("data", *arguments)


def test_the_commands_import_nothing_heavy():
    heavy = "{'torch', 'transformers', 'tokenizers', 'numpy', 'rich'}"
    code = "import sys, chiar.data.cli as cli; sys.argv = ['data', 'prepare', '--help']\n"
    code += f"try: cli.data_app()\nfinally: assert not {heavy} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    for spelling in SPELLINGS.values():
        assert spelling in done.stdout


def test_preparing_needs_no_torch(tmp_path):
    """Preparation is quick to start, and its processes are small."""
    text_file(tmp_path / "notes.txt")
    code = "import sys, chiar.data.cli as cli\n"
    code += f"sys.argv = ['data', 'prepare', {str(tmp_path / 'notes.txt')!r}, '--out', {str(tmp_path / 'out')!r}]\n"
    code += "try: cli.data_app()\nfinally: assert not {'torch', 'transformers'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert "wrote" in done.stdout
    assert not done.stderr


def test_list_names_every_corpus():
    code, output = run("list")
    assert code == 0
    for name in CATALOG:
        assert name in output


def test_prepare_and_show(tmp_path):
    wikitext_folder(tmp_path / "files")
    out = tmp_path / "out"
    code, output = run("prepare", "wikitext-2", tmp_path / "files", "--out", out, "--vocab-size", 300, "--workers", 1)
    assert code == 0
    assert "wikitext-2: language, bpe with 300 entries" in output
    code, shown = run("show", out, "--verify")
    assert code == 0
    assert "every hash is right" in shown
    corpus = Corpus.open(out)
    for name in corpus.splits:
        assert f"{corpus.split(name).tokens:,}" in shown
    assert corpus.fingerprint in shown


def test_listops_options_reach_the_generator(tmp_path):
    code, output = run(
        "prepare", "listops", "--out", tmp_path / "out", "--tokenizer", "bytes", "--examples", "30,10,10", "--depth", 6,
        "--arguments", 3, "--min-length", 4, "--max-length", 40, "--no-brackets", "--seed", 3,
    )  # fmt: skip
    assert code == 0
    options = Corpus.open(tmp_path / "out").manifest["options"]
    assert options == {
        "depth": 6, "arguments": 3, "min_length": 4, "max_length": 40, "brackets": False, "seed": 3,
        "examples": [30, 10, 10],
    }  # fmt: skip
    assert "%)" in output  # the balance of the labels


def test_text_options_and_like(tmp_path):
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"body": "document {n}"}}\n' for n in range(100)))
    first = tmp_path / "first"
    fractions = ("--split-fractions", "0.6,0.2,0.2")
    assert run("prepare", tmp_path / "rows.jsonl", "--field", "body", *fractions, "--out", first)[0] == 0
    text_file(tmp_path / "notes.txt")
    second = tmp_path / "second"
    assert (
        run("prepare", tmp_path / "notes.txt", "--documents", "lines", *fractions, "--like", first, "--out", second)[0]
        == 0
    )
    Corpus.open(first).require_same_tokenizer(Corpus.open(second))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["prepare", "wikitext-3", "--out", "x"], "Did you mean 'wikitext-103'"),
        (["prepare", "missing.txt", "--out", "x"], "there is no file or folder missing.txt"),
        (["prepare", "stdlib"], "Missing option"),
        (["prepare", "notes.txt", "--out", "x", "--tokenizer", "gpt"], "Did you mean 'gpt2'"),
        (["prepare", "notes.txt", "--out", "x", "--tokenizer", "gpt2"], "--tokenizer-path FOLDER"),
        (["prepare", "notes.txt", "--out", "x", "--from-hub"], "--from-hub is an option of wikitext-103"),
        (["prepare", "notes.txt", "--out", "x", "--depth", "3"], "--depth is an option of listops"),
        (["prepare", "notes.txt", "--out", "x", "--split-fractions", "1"], "three numbers"),
        (["prepare", "notes.txt", "--out", "x", "--workers", "9999"], "9999 workers are more than"),
        (["prepare", "notes.txt", "--out", "notes.txt"], "exists already"),
        (["prepare", "binary.txt", "--out", "x"], "is it binary"),
        (["prepare", "empty.txt", "--out", "x"], "is empty"),
        (["prepare", "listops", "--out", "x", "--examples", "many"], "three whole numbers"),
        (["show", "."], "not a prepared corpus"),
    ],
    ids=lambda value: " ".join(value)[:50] if isinstance(value, list) else "",
)
def test_bad_input_is_refused_and_nothing_written(arguments, message, tmp_path, monkeypatch):
    text_file(tmp_path / "notes.txt")
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / "binary.txt").write_bytes(bytes(range(256)))
    monkeypatch.chdir(tmp_path)
    before = tree(Path())
    code, output = run(*arguments)
    assert code == 2
    assert message in output
    assert tree(Path()) == before
    assert not list(tmp_path.glob(".*"))


def test_a_damaged_shard_is_named(tmp_path):
    text_file(tmp_path / "notes.txt")
    run("prepare", tmp_path / "notes.txt", "--out", tmp_path / "out", "--tokenizer", "bytes")
    path = tmp_path / "out" / "train.000.bin"
    data = bytearray(path.read_bytes())
    data[100] ^= 4
    path.write_bytes(data)
    assert run("show", tmp_path / "out")[0] == 0
    code, output = run("show", tmp_path / "out", "--verify")
    assert code == 2
    assert "train.000.bin does not have the hash" in output
