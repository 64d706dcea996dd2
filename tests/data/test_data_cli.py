"""`chiar data` as a user runs it."""

import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

import commands
from chiar.data.catalog import CATALOG, spelling
from chiar.data.shards import Corpus
from small_corpora import text_file, tree, wikitext_folder

run = partial(commands.run, "data")


def in_new_process(arguments, heavy):
    """The command's output, from a process that has imported none of the heavy packages in the end."""
    code = f"import sys, chiar.data.cli as cli; sys.argv = ['data', *{[str(a) for a in arguments]}]\n"
    code += f"try: cli.data_app()\nfinally: assert not {heavy} & set(sys.modules)"
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)


def test_help_imports_nothing_heavy_and_preparing_no_torch(tmp_path):
    done = in_new_process(["prepare", "--help"], {"torch", "transformers", "tokenizers", "numpy", "rich"})
    assert all(spelling(option) in done.stdout for *_, options, _ in CATALOG.values() for option in options)
    notes = text_file(tmp_path / "notes.txt")
    done = in_new_process(["prepare", notes, "--out", tmp_path / "out"], {"torch", "transformers"})
    assert "wrote" in done.stdout
    assert not done.stderr


def test_prepare_and_show(tmp_path):
    wikitext_folder(tmp_path / "files")
    out = tmp_path / "out"
    code, output = run("prepare", "wikitext-2", tmp_path / "files", "--out", out, "--vocab-size", 300)
    assert (code, "wikitext-2: language, bpe with 300 entries" in output) == (0, True)
    code, shown = run("show", out, "--verify")
    corpus = Corpus.open(out)
    counts = [f"{corpus.split(split).tokens:,}" for split in corpus.splits]
    assert code == 0
    assert all(expected in shown for expected in ("every hash is right", corpus.fingerprint, *counts))
    assert all(name in run("show")[1] for name in CATALOG)


def test_options_reach_the_corpus(tmp_path):
    code, output = run(
        *("prepare", "listops", "--out", tmp_path / "out", "--tokenizer", "bytes", "--examples", "30,10,10"),
        *("--depth", 6, "--arguments", 3, "--min-length", 4, "--max-length", 40, "--no-brackets", "--seed", 3),
    )
    assert (code, "%)" in output) == (0, True)  # the balance of the labels
    shape = {"depth": 6, "arguments": 3, "min_length": 4, "max_length": 40, "brackets": False, "seed": 3}
    assert Corpus.open(tmp_path / "out").manifest["options"] == {**shape, "examples": [30, 10, 10]}
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"body": "document {n}"}}\n' for n in range(100)))
    notes, first, second = text_file(tmp_path / "notes.txt"), tmp_path / "first", tmp_path / "second"
    fractions = ("--split-fractions", "0.6,0.2,0.2")
    assert run("prepare", tmp_path / "rows.jsonl", "--field", "body", *fractions, "--out", first)[0] == 0
    again = ["prepare", notes, "--documents", "lines", *fractions, "--like", first, "--out", second]
    assert (run(*again)[0], run(*again)[0], run(*again, "--overwrite")[0]) == (0, 2, 0)
    Corpus.open(first).require_same_tokenizer(Corpus.open(second))


WRONG = {"wikitext-3": "Did you mean 'wikitext-103'", "notes.txt --tokenizer gpt2": "--tokenizer-path FOLDER"}
WRONG |= {"notes.txt --from-hub": "--from-hub is an option of wikitext-103", "notes.txt --out notes.txt": "exists"}
WRONG |= {f"notes.txt --split-fractions {given}": "three numbers" for given in ("1", "a,b,c")}
# The flag is WikiText's too, in any spelling, not the tokenizer's alone.
WRONG |= {"listops --examples many": "three whole", "WikiText-2 --tokenizer gpt2 --from-hub": "from the Hub"}


@pytest.mark.parametrize("arguments", WRONG)
def test_bad_input_is_refused_and_nothing_written(arguments, tmp_path, monkeypatch):
    text_file(tmp_path / "notes.txt")
    monkeypatch.chdir(tmp_path)
    before = tree(Path())
    code, output = run("prepare", "--out", "x", *arguments.split())
    assert (code, WRONG[arguments] in output) == (2, True)
    assert tree(Path()) == before and not list(tmp_path.glob(".*"))
