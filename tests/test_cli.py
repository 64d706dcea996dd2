"""The command as a user runs it: quick help, clear errors with exit code 2, nothing written on failure."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from chiar import ChiarForCausalLM, RoutingTrace
from chiar.cli import app, main
from commands import run

GOLDEN = Path(__file__).parent / "golden"
CHIAR = Path(sys.executable).parent / "chiar"
TEXT = "The overwhelming consensus of many scientists is that carbon matters. " * 40


def refused(*arguments):
    code, output = run(*arguments)
    assert code == 2, output
    assert "Traceback" not in output
    return output


@pytest.fixture
def text_file(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def test_help_imports_nothing_heavy():
    """The command answers at once because of this, measured at under 0.1 s; a timed test would only be flaky."""
    heavy = "{'torch', 'transformers', 'numpy', 'rich'}"
    code = "import sys; from chiar.cli import main; sys.argv = ['chiar', '--help']\ntry: main()\n"
    code += f"finally: assert not {heavy} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert "import-checkpoint" in done.stdout


def test_every_command_has_help():
    for command in app.registered_commands:
        name = command.name or command.callback.__name__
        code, output = run(name, "--help")
        assert code == 0
        assert "Usage" in output


def test_errors_reach_the_shell_as_one_sentence_and_code_2(tmp_path):
    done = subprocess.run([CHIAR, "flops", "v3-40m"], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("error: unknown preset or folder 'v3-40m'. Did you mean 'v3-400m'?")
    assert len(done.stderr.strip().splitlines()) == 1
    assert not done.stdout


def test_operating_system_errors_are_sentences_too(monkeypatch, capsys, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(sys, "argv", ["chiar", "plot", "model", "v3-tiny", "--out", str(tmp_path / "file" / "x.svg")])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_presets_prints_the_exact_counts():
    _, output = run("presets")
    for count in ("404,159,488", "400,043,009", "16,025,344", "15,764,225", "15,829,504", "15,898,124"):
        assert count in output


def test_flops_prints_both_models_the_ratio_and_the_claim():
    _, output = run("flops", "v3-400m", "--length", "256,4096", "--fraction", "0.5", "--keys", "routed")
    for figure in ("35–40%", "62.5%", "15.6%", "5.4%", "51.5%", "4,096", "0.895", "dark (attention)"):
        assert figure in output
    _, output = run("flops", "v3-400m", "--keys", "routed", "--json", "-")
    (record,) = json.loads(output)
    assert record["saved_free_transform"] == pytest.approx(0.156, abs=1e-3)
    assert sum(record["chiar"].values()) == pytest.approx(record["chiar_total"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["flops", "v3-400m", "--length", "long"], "whole numbers"),
        (["flops", "v3-400m", "--length", "0"], "at least 1"),
        (["flops", "v3-400m", "--fraction", "2"], "between 0 and 1"),
        (["flops", "v3-400m", "--keys", "route"], "Did you mean 'routed'"),
        (["flops"], "Missing argument"),
        (["trace", "v3-tiny", "--text", ""], "empty"),
        (["trace", "v3-16m", "--text", "a"], "--tokenizer"),
        (["trace", "no-such-model", "--text", "a"], "unknown preset or folder"),
        (["trace", "v2-tiny", "--text", "a" * 257], "257 tokens, but the model has 256 learned positions"),
        (["calibrate", "v3-tiny"], "exactly one of --text-file"),
        (["calibrate", "v3-tiny", "--text-file", "missing.txt"], "there is no file"),
        (["import-checkpoint", "missing.pt", "out"], "there is no file"),
        (["plot", "model", "v3-mini", "--out", "x.svg"], "Did you mean 'v3-tiny'"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_bad_input_is_refused(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert message in refused(*arguments)
    assert not list(tmp_path.iterdir())


def test_trace_shows_and_stores_routes(tmp_path):
    stored = tmp_path / "trace.json"
    code, output = run("trace", "v3-tiny", "--text", "light and dark", "--json", stored)
    assert code == 0
    assert "random weights" in output
    assert len(re.findall(r"^layer \d", output, re.MULTILINE)) == 4
    assert "rbf" not in output
    trace = RoutingTrace.from_json(stored.read_text())
    assert trace.token_ids_BT.tolist() == [list(b"light and dark")]
    marks = "".join("░█"[k] for k in trace.layers[1].choice_BT[0].tolist())
    assert marks in output
    assert "exists already" in refused("trace", "v3-tiny", "--text", "x", "--json", stored)


def test_calibrate_reports_and_writes_a_model(text_file, tmp_path):
    code, output = run("calibrate", "v3-tiny", "--text-file", text_file, "--length", 64, "--out", tmp_path / "model")
    assert code == 0
    assert "KS from noise" in output
    thresholds = ChiarForCausalLM.from_pretrained(tmp_path / "model").config.thresholds
    report = json.loads((tmp_path / "model" / "calibration.json").read_text())
    assert thresholds == [layer["thresholds"][0] for layer in report["layers"]]
    assert "exists already" in refused(
        "calibrate", "v3-tiny", "--text-file", text_file, "--length", 64, "--out", tmp_path / "model"
    )


def test_the_papers_calibration_from_a_baseline_to_a_routed_model(text_file, tmp_path):
    run("calibrate", "v3-tiny", "--text-file", text_file, "--length", 64, "--out", tmp_path / "v3")
    code, _ = run(
        "calibrate", "baseline-tiny", "--text-file", text_file, "--length", 64, "--rule", "embeddings",
        "--apply-to", tmp_path / "v3", "--out", tmp_path / "calibrated",
    )  # fmt: skip
    assert code == 0
    first, second = ChiarForCausalLM.from_pretrained(tmp_path / "calibrated").config.thresholds
    assert first == second
    assert "--out" in refused("calibrate", "baseline-tiny", "--text-file", text_file, "--apply-to", tmp_path / "v3")
    assert "no routed layers" in refused(
        "calibrate", "baseline-tiny", "--text-file", text_file, "--rule", "embeddings", "--out", tmp_path / "x"
    )
    assert not (tmp_path / "x").exists()


def test_calibrate_reads_token_files(tmp_path):
    ids = np.frombuffer(TEXT.encode(), dtype=np.uint8)
    np.save(tmp_path / "ids.npy", ids.astype(np.int32))
    ids.astype("<u2").tofile(tmp_path / "ids.u16")
    outputs = [
        run("calibrate", "v3-tiny", "--token-file", tmp_path / name, "--length", 64) for name in ("ids.npy", "ids.u16")
    ]
    assert outputs[0] == outputs[1]
    assert outputs[0][0] == 0
    (tmp_path / "odd.u16").write_bytes(b"abc")
    assert "odd number of bytes" in refused("calibrate", "v3-tiny", "--token-file", tmp_path / "odd.u16")
    (tmp_path / "bad.npy").write_bytes(b"abc")
    assert "not a readable .npy" in refused("calibrate", "v3-tiny", "--token-file", tmp_path / "bad.npy")
    np.save(tmp_path / "floats.npy", np.zeros(9))
    assert "expected one row of integers" in refused("calibrate", "v3-tiny", "--token-file", tmp_path / "floats.npy")
    np.array([300] * 64, dtype="<u2").tofile(tmp_path / "large.u16")
    assert "outside the vocabulary" in refused(
        "calibrate", "v3-tiny", "--token-file", tmp_path / "large.u16", "--length", 64
    )


@pytest.mark.parametrize(
    ("data", "message"),
    [(b"", "fewer than one row"), (b"short", "fewer than one row"), (b"\xff\xfe\x00\x81", "not UTF-8")],
    ids=["empty", "short", "binary"],
)
def test_text_that_cannot_be_used(data, message, tmp_path):
    (tmp_path / "text").write_bytes(data)
    assert message in refused("calibrate", "v3-tiny", "--text-file", tmp_path / "text")


def test_import_checkpoint_states_what_it_assumed(tmp_path):
    code, output = run("import-checkpoint", GOLDEN / "soft.pt", tmp_path / "soft", "--tau", "0.5")
    assert code == 0
    assert "--tau is not used" in output
    assert "exists already" in refused("import-checkpoint", GOLDEN / "soft.pt", tmp_path / "soft")
    assert "pass --tau" in refused("import-checkpoint", GOLDEN / "threshold.pt", tmp_path / "threshold")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["soft"]


def test_a_folder_without_a_model_is_named(tmp_path):
    assert "no config.json" in refused("trace", tmp_path, "--text", "a")
    shutil.rmtree(tmp_path)


@pytest.fixture
def model_folder(tmp_path):
    run("import-checkpoint", GOLDEN / "threshold.pt", tmp_path / "model", "--tau", "0.79")
    return tmp_path / "model"


def test_damaged_model_folders_are_named(model_folder):
    weights = model_folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    assert "cannot be loaded" in refused("trace", model_folder, "--text", "a")
    (model_folder / "tokenizer.json").write_text("{broken")
    weights.write_bytes(whole)
    assert "tokenizer in" in refused("trace", model_folder, "--text", "a")
    tensors = load_file(weights)
    del tensors["model.norm.weight"]
    save_file(tensors, weights, metadata={"format": "pt"})
    assert "no weights for model.norm.weight" in refused("trace", model_folder, "--text", "a")
    (model_folder / "config.json").write_text('{"model_type": "gpt2"}')
    assert "holds a 'gpt2' model" in refused("flops", model_folder)
    (model_folder / "config.json").write_text("{")
    assert "is damaged" in refused("flops", model_folder)


def test_thresholds_go_only_where_entropy_is_the_same_function(model_folder, text_file, tmp_path):
    command = ["calibrate", "baseline-tiny", "--text-file", text_file, "--length", 64, "--rule", "embeddings"]
    assert "differ in vocab_size" in refused(*command, "--apply-to", model_folder, "--out", tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_existing_output_is_refused_before_any_work(text_file, tmp_path, monkeypatch):
    monkeypatch.setattr("chiar.analysis.calibration_report.load_model", lambda *_: pytest.fail("worked first"))
    assert "exists already" in refused("calibrate", "v3-tiny", "--text-file", text_file, "--out", text_file)


def test_a_calibrated_model_keeps_the_tokenizer_it_was_given(text_file, tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(
        models.WordLevel({"[UNK]": 0} | {w: i + 1 for i, w in enumerate(sorted(set(TEXT.split())))}, "[UNK]")
    )
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    (tmp_path / "words").mkdir()
    words.save(str(tmp_path / "words" / "tokenizer.json"))
    (tmp_path / "words" / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    command = ["--text-file", text_file, "--length", 16, "--tokenizer", tmp_path / "words", "--out", tmp_path / "model"]
    assert run("calibrate", "v3-tiny", *command)[0] == 0
    _, output = run("trace", tmp_path / "model", "--text", "many scientists")
    assert "m" in output
    assert "         ms" in output  # two words, two tokens


def test_a_terminal_without_unicode_is_served():
    done = subprocess.run(
        [CHIAR, "trace", "v3-tiny", "--text", "abc"], env={"PYTHONIOENCODING": "ascii"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "layer 1" in done.stdout


def test_version():
    _, output = run("--version")
    assert re.fullmatch(r"chiar \d+\.\d+\.\d+\n", output)


def test_narrow_terminals_lose_no_digits(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    _, output = run("presets")
    assert "404,159,488" in output
    assert "baseline-400m" in output
