"""`precision = auto` is settled before the first step, recorded, and kept when a run is resumed elsewhere."""

import json

import pytest
import torch

from chiar.errors import InputError
from chiar.training import loop
from chiar.training.command import train_arguments
from chiar.training.distributed import Processes
from chiar.training.loop import train
from chiar.training.precision import computes_bf16, settle
from chiar.training.run_folder import RunFolder
from commands import run

ALONE = Processes(0, 1, torch.device("cpu"))


@pytest.fixture
def here(monkeypatch):
    """Say what the CPU of the test can do."""

    def say(**capabilities):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)

    return say


@pytest.mark.parametrize(
    ("capabilities", "expected"),
    [({}, "fp32"), ({"avx512_bf16": False}, "fp32"), ({"amx_bf16": True}, "bf16"), ({"bf16": True}, "bf16")],
)
def test_auto_takes_what_the_device_multiplies(settings, here, capabilities, expected):
    here(**capabilities)
    assert settle(settings(precision="auto"), ALONE, None).precision == expected


def test_a_named_precision_stays(settings, here):
    here(amx_bf16=True)
    assert settle(settings(precision="fp32"), ALONE, None).precision == "fp32"


def test_a_torch_that_cannot_tell_trains_in_fp32(settings, monkeypatch):
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    assert settle(settings(precision="auto"), ALONE, None).precision == "fp32"


def test_a_run_records_it_and_keeps_it_on_another_machine(settings, config, here, tmp_path, monkeypatch):
    def recorded():
        return json.loads((tmp_path / "run" / "run.json").read_text())["settings"]["precision"]

    used = []
    build = loop.Trainer
    monkeypatch.setattr(loop, "Trainer", lambda c, s, *rest: used.append(s.precision) or build(c, s, *rest))
    here(amx_bf16=True)
    train(config(), settings(precision="auto", steps=4), tmp_path / "run", device="cpu", quiet=True)
    assert recorded() == "bf16"
    here()
    train(config(), settings(precision="auto", steps=6), tmp_path / "run", resume=True, device="cpu", quiet=True)
    assert used == ["bf16", "bf16"] and recorded() == "bf16"


def test_a_run_that_does_not_say_how_it_began_is_refused(settings, tmp_path):
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(InputError, match="says nothing of its settings"):
        settle(settings(precision="auto"), ALONE, RunFolder(tmp_path))


@pytest.mark.parametrize(("precision", "said"), [("auto", False), ("bf16", True), ("fp32", True)])
def test_a_printed_command_names_it_where_it_was_decided(settings, tmp_path, precision, said):
    words = train_arguments("v3-tiny", {}, settings(precision=precision), tmp_path)
    assert (f"precision={precision}" in words) == said


def test_the_commands_ask_for_auto(corpus, labelled, tmp_path):
    expected = "bf16" if computes_bf16(torch.device("cpu")) else "fp32"
    small = [
        "--steps",
        "1",
        "--batch",
        "2",
        "--micro-batch",
        "2",
        "--set",
        "hidden_size=16",
        "--set",
        "evaluate_rows=2",
    ]
    for name, data in (("train", corpus), ("finetune", labelled)):
        out = tmp_path / name
        code, said = run(name, "v3-tiny", "--data", data, *small, "--no-compile", "--device", "cpu", "--out", out)
        assert code == 0, said
        assert json.loads((tmp_path / name / "run.json").read_text())["settings"]["precision"] == expected
