"""What `chiar serve` says when it cannot."""

import socket
import sys

import pytest

from chiar.data.tokenizers import Tokenizer
from chiar.model.modeling import ChiarForCausalLM
from commands import run
from helpers import small_config


@pytest.mark.parametrize("package", ["starlette", "uvicorn"])
def test_packages_that_are_not_there(folder, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    code, output = run("serve", folder)
    assert code == 2
    assert f"needs the package {package}: pip install 'chiar[serve]'" in output


def test_a_port_that_is_taken(folder):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        code, output = run("serve", folder, "--port", taken.getsockname()[1])
    assert code == 2
    assert "choose others with --host and --port" in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gate", "open"], "unknown gate"),
        (["--gate", "refuse"], "generation is not defined"),
        (["--device", "tpu"], "unknown device"),
        (["--host", "no.such.host.invalid", "--port", "0"], "cannot listen"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input(folder, arguments, message):
    code, output = run("serve", folder, *arguments)
    assert code == 2
    assert message in output


def test_learned_positions_end(tmp_path):
    ChiarForCausalLM(small_config("v2-tiny", vocab_size=257)).save_pretrained(tmp_path / "model")
    Tokenizer.of_bytes().save(tmp_path / "model")
    code, output = run("serve", tmp_path / "model", "--max-length", 17)
    assert code == 2
    assert "16 learned positions" in output


def test_no_such_model():
    code, output = run("serve", "nowhere/model")
    assert code == 2
    assert "there is no folder" in output
