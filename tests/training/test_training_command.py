"""`chiar train` and `chiar finetune` as commands: defaults that are seen, and a first run that shows something."""

import re
import shutil

import pytest
from runs import metrics

from chiar import ChiarConfig
from chiar.evaluation.harness import evaluate
from chiar.training.cli import NOT_IN_FINETUNE, SETTINGS
from chiar.training.run_folder import RunFolder
from chiar.training.settings import TrainSettings, train_arguments
from commands import run


@pytest.mark.parametrize("command", ["train", "finetune"])
def test_help_shows_every_default(command):
    code, said = run(command, "--help")
    options = [" ".join(text.split()) for text in re.split(r"\n  (?=-)", said.split("Options:")[1])[1:]]
    plain = [line for line in options if not re.search(r"\[(default: .+|required)\]$", line)]
    assert code == 0 and [line.split()[0] for line in plain] == ["--settings", "-h,"]
    batch = "[default: 32]" if command == "finetune" else "[default: 128; tiny presets on a CPU: 8]"
    assert any("--batch" in line and batch in line for line in options)


@pytest.mark.parametrize("command", ["train", "finetune"])
def test_settings_are_listed_with_type_default_and_a_line(command):
    code, said = run(command, "--settings")
    names = [name for name in SETTINGS if command == "train" or name not in NOT_IN_FINETUNE]
    names += ChiarConfig.__annotations__
    found = re.findall(r"^  (\w+) \(.+\) (?:= .+|\[.+\])\n      \S", said, re.MULTILINE)
    assert code == 0 and found == names and max(map(len, said.splitlines())) <= 100
    assert "  beta2 (a number) = 0.95\n      AdamW's decay of the second moment. Between 0 and 0.999999.\n" in said
    assert ("  warmup (a whole number) [default: 6% of the steps]\n" in said) == (command == "finetune")


def test_a_tiny_preset_on_a_cpu_begins_with_what_shows_progress(corpus, tmp_path):
    out = tmp_path / "run"
    code, said = run(
        "train", "v3-tiny", "--data", corpus, "--out", out, "--device", "cpu", "--steps", 40, "--length", 32
    )
    assert code == 0, said
    model, training, writing, first, *_ = said.splitlines()
    assert re.fullmatch(r"model: [\d,]+ parameters, width 32, layers spectral, 2 × routed, attention", model)
    assert re.fullmatch(r"training: 40 steps of 8 × 32 = 256 tokens, on cpu in (fp32|bf16)", training)
    assert writing == f"writing to: {out}" and first.startswith("step 1/40  loss ")
    assert f"done: the best model is {out / 'best'}, validation loss" in said
    assert said.split("next: ")[1].splitlines()[0] == f"chiar eval {out} --data {corpus}"
    chosen = "on which training chose its best model"
    assert chosen in " ".join(evaluate(str(out), corpus, rows=1).remarks)
    copy = shutil.copytree(out / "best", tmp_path / "copy")  # of which nothing is known
    assert chosen not in " ".join(evaluate(str(copy), corpus, rows=1).remarks)
    records, settings = metrics(out), RunFolder(out).config_and_settings()[1]
    assert records[-1]["loss"] < 0.8 * records[0]["loss"]
    assert (settings.warmup, settings.micro_batch, settings.compile) == (20, 8, False)


def test_the_command_of_a_tiny_run_says_what_another_device_would_choose_otherwise():
    settings = TrainSettings(data=["corpus"], precision="auto")
    told, big = (train_arguments(model, {}, settings, "out") for model in ("v3-tiny", "v3-16m"))
    assert "batch=128" in told and "compile=true" in told and "micro_batch=32" in told and "--set" not in big


def test_rows_of_a_pass_divide_the_batch_by_themselves(corpus, tmp_path):
    more = ["--device", "cpu", "--steps", 1, "--length", 8, "--batch", 48]
    assert run("train", "v3-tiny", "--data", corpus, "--out", tmp_path / "run", *more)[0] == 0
    assert RunFolder(tmp_path / "run").config_and_settings()[1].micro_batch == 16


def test_a_run_stands_for_its_best_model(corpus, tmp_path):
    more = ["--data", corpus, "--device", "cpu", "--steps", 1, "--length", 8]
    assert run("train", "v3-tiny", "--out", tmp_path / "run", "--set", "hidden_size=16", *more)[0] == 0
    assert run("train", tmp_path / "run", "--out", tmp_path / "alike", *more)[0] == 0
    assert RunFolder(tmp_path / "alike").config_and_settings()[0].hidden_size == 16
    assert run("plot", "model", tmp_path / "run", "--out", tmp_path / "model.svg")[0] == 0
