"""`precision = auto` is settled before the first step, recorded, and kept when a run is resumed elsewhere."""

import json

import pytest
import torch

from chiar.training import loop, precision
from chiar.training.loop import train

CPU = torch.device("cpu")


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
    assert precision.settle(settings(precision="auto"), CPU).precision == expected


def test_a_named_precision_stays(settings, here):
    here(amx_bf16=True)
    assert precision.settle(settings(precision="fp32"), CPU, before="bf16").precision == "fp32"


def test_a_torch_that_cannot_tell_trains_in_fp32(settings, monkeypatch):
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    assert precision.settle(settings(precision="auto"), CPU).precision == "fp32"


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
