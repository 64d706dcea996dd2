"""Bad input on the real command line: one sentence, exit code 2, nothing overwritten."""

import json
import os
import shutil
import subprocess
import sys

import pytest

import commands

TRAIN = ("train", "v3-tiny", "--steps", "2", "--batch", "4", "--micro-batch", "2", "--length", "16", "--no-compile")
PREPARE = ("data", "prepare", "--tokenizer", "bytes", "--out", "new")


def tree(folder):
    return {str(path.relative_to(folder)): path.is_file() and path.read_bytes() for path in folder.rglob("*")}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Texts good and bad, a corpus, one with another tokenizer, a damaged one, and a run."""
    folder = tmp_path_factory.mktemp("place")
    (folder / "notes.txt").write_text("\n\n".join(f"Note {n}: light and dark tokens." for n in range(60)))
    (folder / "few.jsonl").write_text("".join(json.dumps({"text": f"{n}"}) + "\n" for n in range(30)))
    (folder / "empty.txt").write_bytes(b"")
    (folder / "blank.txt").write_text("\n \n")
    (folder / "binary.txt").write_bytes(bytes(range(256)) * 8)
    (folder / "nothing").mkdir()
    for out, tokenizer in (("corpus", ["bytes"]), ("bpe", ["bpe", "--vocab-size", "270"])):
        prepared = ["data", "prepare", folder / "notes.txt", "--out", folder / out, "--tokenizer", *tokenizer]
        assert commands.run(*prepared)[0] == 0
    shutil.copytree(folder / "corpus", folder / "damaged")
    shard = bytearray((folder / "damaged" / "train.000.bin").read_bytes())
    shard[50] ^= 1
    (folder / "damaged" / "train.000.bin").write_bytes(shard)
    shutil.copytree(folder / "corpus", folder / "cut")
    os.truncate(folder / "cut" / "train.000.bin", 100)
    with pytest.MonkeyPatch.context() as here:  # names in run.json are compared with those a case gives
        here.chdir(folder)
        code, said = commands.run(*TRAIN, "--data", "corpus", "--out", "run", "--device", "cpu")
    assert code == 0, said
    return folder


CASES = {
    "empty text": ([*PREPARE, "empty.txt"], "is empty"),
    "blank text": ([*PREPARE, "blank.txt"], "no text"),
    "binary text": ([*PREPARE, "binary.txt"], "is it binary"),
    "an existing corpus": (["data", "prepare", "notes.txt", "--out", "corpus"], "exists already"),
    "a shard with a wrong hash": (["data", "show", "damaged", "--verify"], "train.000.bin does not have the hash"),
    "a shard that is cut off": ([*TRAIN, "--data", "cut", "--out", "new"], "train.000.bin"),
    "a tokenizer that does not match": ([*TRAIN, "--data", "corpus", "--data", "bpe", "--out", "new"], "tokenizer"),
    "a model of another tokenizer": (["eval", "run", "--data", "bpe", "--length", "16"], "vocabulary of 2"),
    "an existing run": ([*TRAIN, "--data", "corpus", "--out", "run"], "add --resume"),
    "another folder as run": ([*TRAIN, "--data", "corpus", "--out", "corpus"], "exists already"),
    "resuming what is no run": ([*TRAIN, "--data", "corpus", "--out", "nothing", "--resume"], "no run.json"),
    "resuming otherwise": ([*TRAIN, "--data", "corpus", "--out", "run", "--resume", "--seed", "1"], "seed = 0, not 1"),
    "unknown preset": (["train", "v3-tinny", "--data", "corpus", "--out", "new"], "Did you mean 'v3-tiny'"),
    "unknown setting": ([*TRAIN, "--data", "corpus", "--out", "new", "--set", "warmpu=3"], "Did you mean 'warmup'"),
    "no value": ([*TRAIN, "--data", "corpus", "--out", "new", "--set", "warmup"], "--set takes NAME=VALUE"),
    "a value of another type": ([*TRAIN, "--data", "corpus", "--out", "new", "--set", "warmup=x"], "must be int"),
    "a batch that does not divide": ([*TRAIN, "--data", "corpus", "--out", "new", "--batch", "5"], "does not divide"),
    "a batch of none": ([*TRAIN, "--data", "corpus", "--out", "new", "--batch", "0"], "batch must be at least 1"),
    "a negative micro-batch": ([*TRAIN, "--data", "corpus", "--out", "new", "--micro-batch", "-2"], "at least 1"),
    "rows longer than the corpus": ([*TRAIN, "--data", "corpus", "--out", "new", "--length", "99999"], "too few"),
    "validation rows": ([*TRAIN, "--data", "corpus", "--out", "new", "--set", "evaluate_rows=-1"], "not be negative"),
    "no such data": ([*TRAIN, "--data", "none", "--out", "new"], "there is no folder none"),
    "data that is no corpus": ([*TRAIN, "--data", "nothing", "--out", "new"], "not a prepared corpus"),
    "data that is a file": ([*TRAIN, "--data", "notes.txt", "--out", "new"], "not a prepared corpus"),
    "a run of nothing to compare": (["eval", "nothing"], "neither a training run"),
}


@pytest.mark.parametrize("case", CASES)
def test_refused_and_nothing_overwritten(case, place, monkeypatch):
    arguments, sentence = CASES[case]
    before = tree(place)
    monkeypatch.chdir(place)
    code, said = commands.run(*arguments)
    assert code == 2, said
    assert sentence in said and said.startswith("error: ") and len(said.splitlines()) == 1
    assert tree(place) == before


# The others would only start the same program again: every case ends in `guarded`.
def test_the_program_says_one_sentence_and_exits_with_2(place):
    arguments, sentence = CASES["an existing run"]
    before, command = tree(place), [sys.executable, "-m", "chiar", *arguments]
    done = subprocess.run(command, cwd=place, capture_output=True, text=True)
    assert done.returncode == 2 and sentence in done.stderr, done.stdout + done.stderr
    assert len(done.stderr.strip().splitlines()) == 1 and done.stderr.startswith("error: "), done.stderr
    assert tree(place) == before
