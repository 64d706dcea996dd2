"""`chiar data` as a user runs it."""

import subprocess
import sys
from pathlib import Path

import pytest
from corpora import text_file, tree, wikitext_folder

import commands
from chiar.data.catalog import CATALOG, spelling
from chiar.data.shards import Corpus


def run(*arguments):
    return commands.run("data", *arguments)


def in_new_process(arguments, heavy):
    """The command's output, from a process that has imported none of the heavy packages in the end."""
    code = f"import sys, chiar.data.cli as cli; sys.argv = ['data', *{[str(a) for a in arguments]}]\n"
    code += f"try: cli.data_app()\nfinally: assert not {heavy} & set(sys.modules)"
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)


def test_help_imports_nothing_heavy():
    done = in_new_process(["prepare", "--help"], {"torch", "transformers", "tokenizers", "numpy", "rich"})
    for option in {option for *_, options, _ in CATALOG.values() for option in options}:
        assert spelling(option) in done.stdout


def test_preparing_needs_no_torch(tmp_path):
    """Preparation is quick to start, and its processes are small."""
    text_file(tmp_path / "notes.txt")
    done = in_new_process(["prepare", tmp_path / "notes.txt", "--out", tmp_path / "out"], {"torch", "transformers"})
    assert "wrote" in done.stdout
    assert not done.stderr


def test_prepare_and_show(tmp_path):
    wikitext_folder(tmp_path / "files")
    out = tmp_path / "out"
    code, output = run("prepare", "wikitext-2", tmp_path / "files", "--out", out, "--vocab-size", 300)
    assert code == 0
    assert "wikitext-2: language, bpe with 300 entries" in output
    code, shown = run("show", out, "--verify")
    assert code == 0
    corpus = Corpus.open(out)
    counts = [f"{corpus.split(split).tokens:,}" for split in corpus.splits]
    assert all(expected in shown for expected in ("every hash is right", corpus.fingerprint, *counts))
    path = out / "train.000.bin"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    assert run("show", out)[0] == 0
    code, output = run("show", out, "--verify")
    assert code == 2
    assert "train.000.bin does not have the hash" in output
    assert "not a prepared corpus" in run("show", tmp_path)[1]
    assert all(name in run("show")[1] for name in CATALOG)


def test_listops_options_reach_the_generator(tmp_path):
    code, output = run(
        *("prepare", "listops", "--out", tmp_path / "out", "--tokenizer", "bytes", "--examples", "30,10,10"),
        *("--depth", 6, "--arguments", 3, "--min-length", 4, "--max-length", 40, "--no-brackets", "--seed", 3),
    )
    assert code == 0
    shape = {"depth": 6, "arguments": 3, "min_length": 4, "max_length": 40, "brackets": False, "seed": 3}
    assert Corpus.open(tmp_path / "out").manifest["options"] == {**shape, "examples": [30, 10, 10]}
    assert "%)" in output  # the balance of the labels


def test_text_options_and_like(tmp_path):
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"body": "document {n}"}}\n' for n in range(100)))
    notes, first, second = text_file(tmp_path / "notes.txt"), tmp_path / "first", tmp_path / "second"
    fractions = ("--split-fractions", "0.6,0.2,0.2")
    assert run("prepare", tmp_path / "rows.jsonl", "--field", "body", *fractions, "--out", first)[0] == 0
    assert run("prepare", notes, "--documents", "lines", *fractions, "--like", first, "--out", second)[0] == 0
    Corpus.open(first).require_same_tokenizer(Corpus.open(second))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["wikitext-3"], "Did you mean 'wikitext-103'"),
        (["missing.txt"], "there is no file or folder missing.txt"),
        (["notes.txt", "--tokenizer", "gpt"], "Did you mean 'gpt2'"),
        (["notes.txt", "--tokenizer", "gpt2"], "--tokenizer-path FOLDER"),
        (["notes.txt", "--from-hub"], "--from-hub is an option of wikitext-103"),
        (["notes.txt", "--depth", "3"], "--depth is an option of listops"),
        (["notes.txt", "--split-fractions", "1"], "three numbers"),
        (["notes.txt", "--split-fractions", "a,b,c"], "three numbers"),
        (["notes.txt", "--out", "notes.txt"], "exists already"),
        (["binary.txt"], "is it binary"),
        (["empty.txt"], "is empty"),
        (["listops", "--examples", "many"], "three whole numbers"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_refused_and_nothing_written(arguments, message, tmp_path, monkeypatch):
    text_file(tmp_path / "notes.txt")
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / "binary.txt").write_bytes(bytes(range(256)))
    monkeypatch.chdir(tmp_path)
    before = tree(Path())
    code, output = run("prepare", "--out", "x", *arguments)
    assert code == 2
    assert message in output
    assert tree(Path()) == before
    assert not list(tmp_path.glob(".*"))
