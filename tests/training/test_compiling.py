"""torch.compile: where it cannot, the run goes on without it and says so; other errors stay what they are."""

import os
import subprocess

import pytest
import torch
from test_loop import assert_same_run, command, metrics
from torch import nn

from chiar import presets
from chiar.errors import InputError
from chiar.training.compiling import Forward, is_compile_error, miscompiled
from chiar.training.loop import train
from runs import final_state


def run_without_compiler(arguments, cache):
    """In a process that finds no C++ compiler, nor anything compiled before."""
    arguments = [argument for argument in arguments if argument != "--no-compile"]
    environment = {**os.environ, "CXX": "/nonexistent", "TORCHINDUCTOR_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1"}
    return subprocess.run(arguments, capture_output=True, text=True, env=environment)


@pytest.mark.slow
def test_without_a_compiler_the_run_is_the_plain_run(corpus, tmp_path):
    more = ["--set", "dropout=0.1"]
    subprocess.run(command(corpus, tmp_path / "plain", *more), check=True, capture_output=True)
    done = run_without_compiler(command(corpus, tmp_path / "fallen", *more), tmp_path / "cache")
    assert done.returncode == 0, done.stderr[-2000:]
    said = [line for line in done.stdout.splitlines() if "torch.compile failed" in line]
    assert len(said) == 1 and "goes on without it: No working C++ compiler" in said[0]
    assert not done.stderr
    assert [record["compiled"] for record in metrics(tmp_path / "fallen")] == [False] * 12
    assert_same_run(tmp_path / "plain", tmp_path / "fallen")


class Broken(nn.Module):
    def __init__(self, error):
        super().__init__()
        self.weight, self.error = nn.Parameter(torch.ones(3)), error

    @torch.compiler.disable
    def fail(self):
        raise self.error

    def forward(self, x):
        self.fail()
        return self.weight * x


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("full"), InputError("wrong"), ValueError("bug")], ids=repr)
def test_other_errors_are_not_swallowed(error):
    torch.compiler.reset()
    forward = Forward(Broken(error), compile=True)
    with pytest.raises(type(error)) as raised:
        forward(torch.ones(3))
    assert not forward.fall_back(raised.value)
    assert forward.compiled and forward.failure is None


def test_a_compiler_that_runs_out_of_memory_is_out_of_memory():
    from torch._dynamo.exc import BackendCompilerFailed

    def backend(graph, inputs):
        raise torch.OutOfMemoryError("full")

    torch.compiler.reset()
    with pytest.raises(BackendCompilerFailed) as raised:
        torch.compile(nn.Linear(2, 2), backend=backend)(torch.ones(1, 2))
    assert not is_compile_error(raised.value)


def test_a_step_is_run_again_from_its_beginning(config, settings, tmp_path, monkeypatch):
    """Compiling fails in the third micro-batch, when gradients of two are there already."""
    from chiar.training import trainer

    train(config(dropout=0.1), settings(), tmp_path / "plain", device="cpu", quiet=True)
    calls = []

    def backend(graph, inputs):
        def run(*values):
            calls.append(len(values))
            if len(calls) == 3:
                from torch._inductor.exc import CppCompileError

                raise CppCompileError(["c++"], "no space")
            return graph(*values)

        return run

    real = torch.compile
    monkeypatch.setattr(trainer.torch, "compile", lambda model: real(model, backend=backend))
    torch.compiler.reset()
    train(config(dropout=0.1), settings(compile=True), tmp_path / "fallen", device="cpu", quiet=True)
    assert len(calls) == 3
    assert_same_run(tmp_path / "plain", tmp_path / "fallen")


def test_layers_are_compiled_one_by_one_and_alike_ones_once(config, settings, tmp_path, monkeypatch):
    """Three routed layers and one of attention make two graphs."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda call, **options: real(call, backend=backend, **options))
    torch.compiler.reset()
    changes = {"meta_router": False, "layer_types": ["routed"] * 3 + ["attention"]}
    one = settings(steps=2, micro_batch=8)
    train(config(**changes), one, tmp_path / "plain", device="cpu", quiet=True)
    assert not graphs
    train(
        config(**changes),
        settings(steps=2, micro_batch=8, compile=True, compile_layers=True),
        tmp_path / "layers",
        device="cpu",
        quiet=True,
    )
    assert len(graphs) == 2
    assert [record["compiled"] for record in metrics(tmp_path / "layers")] == [True] * 2
    ours, plain = final_state(tmp_path / "layers"), final_state(tmp_path / "plain")
    assert all(torch.equal(value, plain[name]) for name, value in ours.items())


def test_layers_that_cannot_be_compiled_run_plainly(config, settings, tmp_path, monkeypatch):
    def backend(graph, inputs):
        from torch._inductor.exc import CppCompileError

        raise CppCompileError(["c++"], "no space")

    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda call, **options: real(call, backend=backend, **options))
    torch.compiler.reset()
    train(config(), settings(), tmp_path / "plain", device="cpu", quiet=True)
    train(config(), settings(compile=True, compile_layers=True), tmp_path / "fallen", device="cpu", quiet=True)
    assert_same_run(tmp_path / "plain", tmp_path / "fallen")


def test_a_resumed_run_says_when_it_is_computed_otherwise(config, settings, tmp_path, capsys, monkeypatch):
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda model: real(model, backend="eager"))
    train(config(), settings(steps=4, compile=True), tmp_path / "run", device="cpu", quiet=True)
    train(config(), settings(steps=8), tmp_path / "run", resume=True, device="cpu")
    assert capsys.readouterr().out.count("the steps before were compiled, from here on they are not compiled") == 1
    assert [record["compiled"] for record in metrics(tmp_path / "run")] == [True] * 4 + [False] * 4


def test_what_would_be_compiled_wrongly_is_not_compiled():
    cpu = torch.device("cpu")
    why = miscompiled(presets.get("v1-tiny"), cpu, "bf16")
    assert why is not None and "NaN" in why
    forward = Forward(Broken(ValueError()), compile=True, obstacle=why)
    assert not forward.compiled and forward.failure == why
    assert miscompiled(presets.get("v1-tiny"), cpu, "fp32") is None
    assert miscompiled(presets.get("v1-tiny"), torch.device("cuda"), "bf16") is None
    assert miscompiled(presets.get("v3-tiny"), cpu, "bf16") is None
