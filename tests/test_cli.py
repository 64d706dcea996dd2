"""The command line as users run it: fast help, output and files, and messages about damaged folders."""

import csv
import json
import math
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import typer
from rich.cells import cell_len
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from chiar import ChiarForCausalLM, RoutingTrace
from chiar.cli import app, main
from chiar.console import guarded
from chiar.routing.tables import COLUMNS
from commands import run

GOLDEN = Path(__file__).parent / "golden"
CHIAR = Path(sys.executable).parent / "chiar"
TEXT = "The overwhelming consensus of many scientists is that carbon matters. " * 40


def accepted(*arguments, code=0):
    exit_code, output = run(*arguments)
    assert exit_code == code and "Traceback" not in output, output
    return output


refused = partial(accepted, code=2)


@pytest.fixture
def text_file(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path / "text.txt"


def test_help_imports_nothing_heavy():
    """This keeps it fast, measured at under 0.1 s; a timed test would be flaky."""
    heavy = "{'torch', 'transformers', 'numpy', 'rich', 'matplotlib', 'starlette'}"
    code = "import sys; from chiar.cli import main; sys.argv = ['chiar', '--help']\ntry: main()\n"
    code += f"finally: assert not {heavy} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert "convert" in done.stdout
    assert re.fullmatch(r"chiar \d+\.\d+\.\d+\n", accepted("--version"))


def test_options_of_one_meaning_have_one_spelling_and_one_default():
    """Commands that write have --overwrite, except runs and studies, which are resumed. One split is the default."""
    commands = {}
    for name, command in walk(typer.main.get_command(app)):
        commands[name] = {flag: option for option in command.params for flag in option.opts}
    writes = {name for name, options in commands.items() if options.keys() & {"--out", "--json", "--csv"}}
    assert {name for name in writes if "--overwrite" not in commands[name]} == {
        "train",
        "finetune",
        "study run",
        "study time",
    }
    assert {options["--split"].default for options in commands.values() if "--split" in options} == {"valid"}
    other = {"--output", "--text", "--batch-size", "--file"}
    assert not any(options.keys() & other for options in commands.values())
    names = [option.opts for options in commands.values() for option in options.values()]
    assert all(len(spellings) == 1 for spellings in names)


def test_help_shows_every_default():
    """Except flags, which are off, and options that request something additional."""
    additional = "json csv out beside prompt evaluation tokenizer tokenizer-path like name text-file data limit-minutes"
    additional += " api-key top-k top-p harness harness-path help"
    for name, command in walk(typer.main.get_command(app)):
        options = [option for option in command.params if option.opts[0].startswith("--") and not option.required]
        silent = {option.opts[0][2:] for option in options if option.default in (None, "")} - {*additional.split()}
        documented = {option.opts[0][2:] for option in options if "[default: " in (option.help or "")}
        assert silent <= documented, name


def walk(group, *names):
    for name, command in group.commands.items():
        yield from (
            walk(command, *names, name) if hasattr(command, "commands") else [(" ".join((*names, name)), command)]
        )


def test_operating_system_errors_become_sentences(monkeypatch, capsys, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(sys, "argv", ["chiar", "flops", "v3-tiny", "--json", str(tmp_path / "file" / "x.json")])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2 and capsys.readouterr().err.startswith("error: ")


@pytest.mark.parametrize(("size", "what"), [(2**60, "a tensor of 1,152,921,504.6 GB did not fit"), (0, "a tensor did")])
def test_failed_allocations_become_sentences(size, what, capsys):
    def allocates():
        if not size:
            raise MemoryError
        torch.empty(size, dtype=torch.uint8)

    with pytest.raises(SystemExit) as stopped:
        guarded(allocates)
    message = capsys.readouterr().err
    assert stopped.value.code == 2 and message.startswith(f"error: {what}") and message.count("\n") == 1
    assert "--batch" in message
    with pytest.raises(RuntimeError, match="another"):
        guarded(Mock(side_effect=RuntimeError("another")))


def test_a_terminal_without_unicode_is_supported():
    command, environment = [CHIAR, "trace", "v3-tiny", "--prompt", "abc"], {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "layer 1" in done.stdout, done.stderr


def test_models_prints_the_exact_counts_on_narrow_terminals_too(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    output = accepted("models")
    counts = ("404,159,488", "400,043,009", "16,025,344", "15,764,225", "15,829,504", "15,898,124")
    assert all(shown in output for shown in (*counts, "baseline-400m"))


def test_flops_prints_both_models_the_ratio_and_the_claim(tmp_path):
    output = accepted("flops", "v3-400m", "--length", "256,4096", "--fraction", "0.5", "--keys", "routed")
    figures = ("35–40%", "62.5%", "15.6%", "51.5%", "27.8%", "4,096", "a token to attention")
    assert all(figure in output for figure in figures)
    (record,) = json.loads(accepted("flops", "v3-400m", "--keys", "routed", "--json", "-"))
    assert f"{1 - record['saved']:.3f}" in output and f"{record['saved_matrix_transform']:.1%}" in output
    assert record["saved_free_transform"] == pytest.approx(0.156, abs=1e-3)
    assert sum(record["chiar"].values()) == pytest.approx(record["chiar_total"])
    out = tmp_path / "flops.json"
    out.write_text("keep")
    command = ["flops", "v3-400m", "--keys", "routed", "--json", out]
    assert "exists already" in refused(*command) and out.read_text() == "keep"
    accepted(*command, "--overwrite")
    assert json.loads(out.read_text()) == [record]


def test_trace_shows_and_stores_routes(tmp_path):
    prompt, stored, table = 'dark, "light"\n\x1b', tmp_path / "trace.json", tmp_path / "routes.csv"
    output = accepted("trace", "v3-tiny", "--prompt", prompt, "--json", stored, "--csv", table)
    assert "random weights" in output and f"wrote {table}" in output and "rbf" not in output
    assert len(re.findall(r"^layer \d", output, re.MULTILINE)) == 4
    trace = RoutingTrace.from_json(stored.read_text())
    assert trace.token_ids_BT.tolist() == [list(prompt.encode())]
    assert "".join("░█"[k] for k in trace.layers[1].choice_BT[0].tolist()) in output

    rows = list(csv.DictReader(table.open()))
    assert len(rows) == len(prompt) * 4 and tuple(rows[0]) == COLUMNS
    for number, row in enumerate(rows):
        token, layer = number // 4, trace.layers[number % 4]
        operator, entropy = layer.operators[int(layer.choice_BT[0, token])], float(layer.entropy_BT[0, token])
        where = (str(token), str(prompt.encode()[token]), str(layer.index + 1), layer.kind)
        assert tuple(row[name] for name in ("position", "token_id", "layer", "kind")) == where
        assert (row["operator"], float(row["entropy"])) == (operator, entropy)
        assert float(row["attention_weight"]) == float(operator == "attention")
        assert bool(row["thresholds"]) == (layer.kind == "routed") and bool(row["gate"]) == (layer.index == 0)

    printed = accepted("trace", "v3-tiny", "--prompt", prompt, "--csv", "-")
    assert printed.strip() == table.read_text().strip()
    for option in ("--json", "--csv"):
        assert "exists already" in refused("trace", "v3-tiny", "--prompt", "x", option, stored)
    accepted("trace", "v3-tiny", "--prompt", "x", "--json", stored, "--overwrite")
    both = ["trace", "v3-tiny", "--prompt", "x", "--json", "-", "--csv", str(tmp_path / "more.csv")]
    assert CliRunner().invoke(app, both).stdout == stored.read_text() + "\n"
    assert RoutingTrace.from_json(stored.read_text()).token_ids_BT.tolist() == [list(b"x")]


def test_calibrate_writes_a_model(text_file, tmp_path, monkeypatch):
    stream = ["--text-file", text_file, "--length", 64]
    output = accepted("calibrate", "v3-tiny", *stream, "--out", tmp_path / "v3")
    assert "KS from" in output and f"wrote {tmp_path / 'v3'}" in output
    report = json.loads((tmp_path / "v3" / "calibration.json").read_text())
    thresholds = ChiarForCausalLM.from_pretrained(tmp_path / "v3").config.thresholds
    assert thresholds == [layer["thresholds"][0] for layer in report["layers"]]
    paper = ["calibrate", "baseline-tiny", *stream, "--rule", "embeddings", "--out", tmp_path / "x"]
    assert "no routed layers" in refused(*paper) and not (tmp_path / "x").exists()
    monkeypatch.setattr("chiar.model.load.load_model", lambda *_: pytest.fail("worked first"))
    assert "exists already" in refused("calibrate", "v3-tiny", *stream, "--out", tmp_path / "v3")


def test_a_calibrated_model_keeps_its_tokenizer(text_file, tmp_path):
    vocabulary = {"[UNK]": 0} | {word: i + 1 for i, word in enumerate(sorted(set(TEXT.split())))}
    words = Tokenizer(models.WordLevel(vocabulary, "[UNK]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path / "words")
    stream = ["--text-file", text_file, "--length", 16, "--tokenizer", tmp_path / "words"]
    accepted("calibrate", "v3-tiny", *stream, "--out", tmp_path / "model")
    output = accepted("trace", tmp_path / "model", "--prompt", "many scientists")
    assert "         ms" in output  # two words, two tokens


def test_convert_states_its_assumptions_about_a_file(tmp_path):
    output = accepted("convert", GOLDEN / "soft.pt", "--out", tmp_path / "soft", "--tau", "0.5")
    assert "--tau is not used" in output and "4 layers, width 32" in output
    assert "exists already" in refused("convert", GOLDEN / "soft.pt", "--out", tmp_path / "soft")
    assert "pass --tau" in refused("convert", GOLDEN / "threshold.pt", "--out", tmp_path / "threshold")
    assert [p.name for p in tmp_path.iterdir()] == ["soft"]


def test_damaged_model_folders_are_named(tmp_path):
    folder = tmp_path / "model"
    accepted("convert", GOLDEN / "threshold.pt", "--out", folder, "--tau", "0.79")
    weights, trace = folder / "model.safetensors", ["trace", folder, "--prompt", "a"]
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    assert "are damaged, restore them or take another model" in refused(*trace)
    (folder / "tokenizer.json").write_text("{broken")
    weights.write_bytes(whole)
    assert "tokenizer in" in refused(*trace)
    tensors = load_file(weights)
    save_file({**tensors, "model.norm.weight": torch.ones(31)}, weights, metadata={"format": "pt"})
    assert refused(*trace).endswith("model.norm.weight is (31,), and the configuration wants (32,).")
    del tensors["model.norm.weight"]
    save_file(tensors, weights, metadata={"format": "pt"})
    assert "no weights for model.norm.weight" in refused(*trace)
    for value in (math.nan, math.inf):
        save_file({**tensors, "model.norm.weight": torch.full((32,), value)}, weights, {"format": "pt"})
        for command in (trace, ["generate", *trace[1:]], ["serve", folder, "--port", 0]):
            assert "model.norm.weight in" in (said := refused(*command)) and "not finite: its training diverged" in said
    (folder / "config.json").write_text('{"model_type": "gpt2"}')
    assert "holds a 'gpt2' model" in refused("flops", folder)
    (folder / "config.json").write_text("{")
    assert "is damaged" in refused("flops", folder)


@pytest.mark.parametrize(
    ("given", "count"), [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "ACTIVE"}, None)]
)
def test_idle_threads_spin_briefly_unless_the_user_chose(given, count, monkeypatch):
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    seen = []
    guarded(lambda: seen.append(os.environ.get("GOMP_SPINCOUNT")))
    assert seen == [count]


def test_characters_of_several_bytes_are_shown_whole():
    code, said = run("trace", "v5-tiny", "--prompt", "naïve 你")
    lines = said.splitlines()
    text = next(number for number, line in enumerate(lines) if "na◦ïve ◦◦你" in line)
    assert code == 0 and cell_len(lines[text + 1]) == cell_len(lines[text].rstrip()), "a mark for every column"
