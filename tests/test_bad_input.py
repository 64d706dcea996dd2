"""Bad input: one sentence, exit code 2, nothing written and nothing overwritten."""

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import commands

CHIAR = Path(sys.executable).parent / "chiar"
TRAIN = ("train", "v3-tiny", "--steps", "2", "--batch", "4", "--micro-batch", "2", "--length", "16", "--no-compile")
EXPORT = ("explore", "v3-tiny", "--out")
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
    "an existing run": ([*TRAIN, "--data", "corpus", "--out", "run"], "chiar train --resume run continues"),
    "another folder as run": ([*TRAIN, "--data", "corpus", "--out", "corpus"], "exists already"),
    "resuming what is no run": ([*TRAIN, "--data", "corpus", "--out", "nothing", "--resume"], "no run.json"),
    "resuming otherwise": ([*TRAIN, "--data", "corpus", "--out", "run", "--resume", "--seed", "1"], "seed = 0, not 1"),
    "extending a new run": ([*TRAIN, "--data", "corpus", "--out", "new", "--extend"], "add --resume"),
    "nowhere to write": ([*TRAIN, "--data", "corpus"], "--out RUN, a new one"),
    "nothing to read": ([*TRAIN, "--out", "new"], "no data: name at least one prepared corpus with --data"),
    "resuming by name what is no run": (["train", "--resume", "nothing"], "no run.json"),
    "a length it has passed": (["train", "--resume", "run", "--steps", "1", "--extend"], "has step-00000002 already"),
    "another length": (["train", "--resume", "run", "--steps", "3"], "Add --extend"),
    "unknown preset": (["train", "v3-tinny", "--data", "corpus", "--out", "new"], "Did you mean 'v3-tiny'"),
    "unknown setting": ([*TRAIN, "--data", "corpus", "--out", "new", "--set", "warmpu=3"], "Did you mean 'warmup'"),
    "a setting of another name": (
        [*TRAIN, "--data", "corpus", "--out", "new", "--set", "checkpoint_every=3"],
        "'checkpoint_every'. Did you mean 'recalibrate_every' or 'log_every' or 'save_every' or 'evaluate_every'? "
        "chiar train --settings lists all.",
    ),
    "a setting like none": ([*TRAIN, "--data", "corpus", "--out", "new", "--set", "wibble=3"], "'wibble'. chiar train"),
    "said twice": (
        [*TRAIN, "--data", "corpus", "--out", "new", "--set", "steps=3"],
        "--steps and --set steps set the same thing",
    ),
    "no value": ([*TRAIN, "--data", "corpus", "--out", "new", "--set", "warmup"], "--set takes NAME=VALUE"),
    "a value of another type": (
        [*TRAIN, "--data", "corpus", "--out", "new", "--set", "warmup=x"],
        "warmup must be a whole number, got 'x'",
    ),
    "a batch that does not divide": ([*TRAIN, "--data", "corpus", "--out", "new", "--batch", "5"], "does not divide"),
    "a batch of none": ([*TRAIN, "--data", "corpus", "--out", "new", "--batch", "0"], "batch must lie between 1 and"),
    "a negative micro-batch": ([*TRAIN, "--data", "corpus", "--out", "new", "--micro-batch", "-2"], "between 1 and"),
    "rows longer than the corpus": (
        [*TRAIN, "--data", "corpus", "--out", "new", "--length", "99999"],
        "tokens in train: too few",
    ),
    "rows longer than its smallest split": (
        [*TRAIN, "--data", "corpus", "--out", "new", "--length", "200"],
        "in valid: too",
    ),
    "validation rows": ([*TRAIN, "--data", "corpus", "--out", "new", "--set", "evaluate_rows=-1"], "between 0 and"),
    "no decay": ([*TRAIN, "--data", "corpus", "--out", "new", "--set", "beta2=2.0"], "between 0 and 0.999999, got 2.0"),
    "no such data": ([*TRAIN, "--data", "none", "--out", "new"], "there is no folder none"),
    "data that is no corpus": ([*TRAIN, "--data", "nothing", "--out", "new"], "not a prepared corpus"),
    "data that is a file": ([*TRAIN, "--data", "notes.txt", "--out", "new"], "not a prepared corpus"),
    "a run of nothing to compare": (["eval", "nothing"], "neither a training run"),
    "a run that is not there": (["eval", "nowhere"], "nowhere is no file or folder here"),
    "lengths in words": (["flops", "v3-400m", "--length", "long"], "whole numbers"),
    "no length": (["flops", "v3-400m", "--length", "0"], "at least 1"),
    "more than every token": (["flops", "v3-400m", "--fraction", "2"], "between 0 and 1"),
    "unknown keys": (["flops", "v3-400m", "--keys", "route"], "Did you mean 'routed'"),
    "an empty prompt": (["trace", "v3-tiny", "--prompt", ""], "empty"),
    "no tokenizer": (["trace", "v3-16m", "--prompt", "a"], "--tokenizer"),
    "no such model": (["trace", "no-such-model", "--prompt", "a"], "unknown preset or folder"),
    "a folder without a model": (["trace", "nothing", "--prompt", "a"], "with a config.json"),
    "too long a prompt": (["trace", "v2-tiny", "--prompt", "a" * 257], "257 tokens, but the model has 256 learned"),
    "two to print": (["trace", "v3-tiny", "--prompt", "a", "--csv", "-", "--json", "-"], "would both print"),
    "nothing to calibrate on": (["calibrate", "v3-tiny"], "exactly one of --text-file"),
    "no such text": (["calibrate", "v3-tiny", "--text-file", "missing.txt"], "there is no file"),
    "less than a row": (["calibrate", "v3-tiny", "--text-file", "empty.txt"], "fewer than one row"),
    "no UTF-8": (["calibrate", "v3-tiny", "--text-file", "binary.txt"], "is it binary"),
    "no such checkpoint": (["convert", "missing.pt", "--out", "new"], "there is no file"),
    "a folder's option": (["convert", "missing.pt", "--out", "new", "--coordinates", "dct"], "is for a model folder"),
    "a preset to convert": (["convert", "v2-tiny", "--out", "new"], "is a preset"),
    "a checkpoint's option": (["convert", "v2-tiny", "--out", "new", "--tau", "0.5"], "--tau is for a .pt file"),
    "no such model to serve": (["serve", "nowhere/model"], "there is no folder"),
    "unknown gate": (["serve", "run", "--gate", "open"], "unknown gate"),
    "a gate that cannot generate": (["serve", "v3-tiny", "--gate", "refuse"], "generation is not defined"),
    "unknown device": (["serve", "run", "--device", "tpu"], "unknown device"),
    "no host": (["serve", "run", "--host", ""], "--host is empty"),
    "unknown host": (["serve", "run", "--host", "no.such.host.invalid"], "cannot listen on no.such"),
    "more than learned positions": (["serve", "v2-tiny", "--max-length", "257"], "256 learned positions"),
    "a page in another format": ([*EXPORT, "x.pdf", "--prompt", "a"], "name the file x.html"),
    "a page of nothing": ([*EXPORT, "x.html", "--prompt="], "the text is empty"),
    "no such evaluation": ([*EXPORT, "x.html", "--prompt", "a", "--evaluation", "none.json"], "there is no file"),
    "a page without a prompt": ([*EXPORT, "x.html"], "go together"),
    "a prompt without a page": (["explore", "v3-tiny", "--prompt", "a"], "go together"),
    "one model twice": ([*EXPORT, "x.html", "--prompt", "a", "--beside", "v3-tiny"], "given twice"),
    "too long a page": (["explore", "v2-tiny", "--out", "x.html", "--prompt", "x" * 257], "at most 256"),
    "a second model alone": (["explore", "--beside", "v3-tiny"], "--beside needs a first model"),
    "a model without a tokenizer": (["explore", "v3-16m", "--port", "0"], "--tokenizer"),
    "unknown basis": (["convert", "v2-tiny", "--out", "new", "--coordinates", "spectrl"], "Did you mean 'spectral'"),
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


@pytest.mark.parametrize(("command", "extra"), [("serve", "serve"), ("explore", "page")])
def test_what_keeps_a_server_from_starting(command, extra, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        code, said = commands.run(command, "v3-tiny", "--port", taken.getsockname()[1])
    assert code == 2 and "cannot listen" in said and "choose others with --host and --port 0" in said
    for package in ("uvicorn", "starlette"):
        monkeypatch.setitem(sys.modules, package, None)
        code, said = commands.run(command, "v3-tiny", "--port", 0)
        assert code == 2 and f"needs the package {package}: pip install 'chiar[{extra}]'" in said


# The others would only start the same program again: every case ends in `guarded`.
@pytest.mark.parametrize("program", [[CHIAR], [sys.executable, "-m", "chiar"]], ids=["script", "module"])
def test_the_program_says_one_sentence_and_exits_with_2(place, program):
    arguments, sentence = CASES["an existing run"]
    done = subprocess.run([*program, *arguments], cwd=place, capture_output=True, text=True)
    assert done.returncode == 2 and sentence in done.stderr and not done.stdout, done.stderr
    assert len(done.stderr.strip().splitlines()) == 1 and done.stderr.startswith("error: "), done.stderr
