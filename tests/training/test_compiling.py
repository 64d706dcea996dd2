"""How passes are computed: where a way fails the run goes on without it and says so; other errors stay."""

import pytest
import torch
from runs import assert_same_run, metrics
from torch._dynamo.exc import TorchDynamoException
from torch._inductor.exc import CppCompileError

from chiar import presets
from chiar.errors import InputError
from chiar.training import loop
from chiar.training.compiling import Forward, miscompiled
from chiar.training.run_folder import RunFolder
from helpers import refused


@pytest.fixture
def compile_with(monkeypatch):
    """Make torch.compile use a backend of the test's."""
    real = torch.compile
    torch.compiler.reset()

    def use(backend):
        monkeypatch.setattr(torch, "compile", lambda call, **more: real(call, backend=backend, **more))

    return use


def broken(error):
    @torch.compiler.disable
    def fail(x):
        raise error

    return lambda x: fail(x) + 1


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("full"), InputError("wrong"), ValueError("bug")], ids=repr)
def test_other_errors_are_not_swallowed(error, compile_with):
    compile_with("eager")
    forward = Forward(broken(error), compile=True)
    with pytest.raises(type(error)) as raised:
        forward.call(torch.ones(3))
    assert not forward.fall_back(raised.value)
    wrapped = TorchDynamoException("in a backend")
    wrapped.inner_exception = torch.OutOfMemoryError("full")
    assert not forward.fall_back(wrapped), "out of memory stays what it is"
    assert forward.compiled and not forward.failure


@pytest.mark.parametrize("layers", [False, True], ids=["whole", "by layers"])
def test_a_step_is_run_again_from_its_beginning(layers, config, go, tmp_path, compile_with):
    """Compiling fails in a later micro-batch, when gradients of others are there already."""
    go("plain", config(dropout=0.1), steps=4)
    calls = []

    def backend(graph, inputs):
        def run(*values):
            calls.append(len(values))
            if len(calls) == (6 if layers else 2):
                raise CppCompileError(["c++"], "no space")
            return graph(*values)

        return run

    compile_with(backend)
    go("fallen", config(dropout=0.1), steps=4, compile=True, compile_layers=layers)
    assert calls and not any(record["compiled"] for record in metrics(tmp_path / "fallen"))
    assert_same_run(tmp_path / "plain", tmp_path / "fallen")


def test_layers_are_compiled_one_by_one_and_alike_ones_once(config, go, tmp_path, compile_with):
    """Three routed layers and one of attention make two graphs."""
    graphs, model = [], config(meta_router=False, layer_types=["routed"] * 3 + ["attention"])
    compile_with(lambda graph, inputs: graphs.append(graph) or graph)
    plain = go("plain", model, steps=2, micro_batch=4)
    assert not graphs
    layers = go("layers", model, steps=2, micro_batch=4, compile=True, compile_layers=True)
    assert len(graphs) == 2 and layers["compiled"] and not plain["compiled"]
    # The same operations, but tracing may take another path through a kernel's wrapper; two steps of fp32.
    assert layers["loss"] == pytest.approx(plain["loss"], abs=1e-5)


def test_a_stack_on_a_cpu_runs_for_dark_tokens_alone_also_compiled(config, go, compile_with):
    """The host counts them, which it cannot inside one graph of the whole model."""
    places = []

    def backend(graph, inputs):
        def run(*values):
            places.extend(x.shape[1] for x in values if isinstance(x, torch.Tensor) and x.ndim == 3 and x.shape[0] == 2)
            return graph(*values)

        return run

    compile_with(backend)
    stack = {"layer_types": ["attention", "dark", "attention"], "router": "stride", "target_fraction": 0.25}
    assert go("dark", config("v5-tiny", **stack), steps=1, compile=True)["compiled"]
    assert set(places) == {16, 4}, "rows of 16 bytes, every fourth of them dark"


def test_what_would_be_compiled_wrongly_is_not_compiled():
    why = miscompiled(presets.get("v1-tiny"), torch.device("cpu"), "bf16")
    forward = Forward(broken(ValueError()), compile=True, obstacle=why)
    assert "NaN" in why and not forward.compiled and forward.failure == why
    for preset, device, precision in (("v1", "cpu", "fp32"), ("v1", "cuda", "bf16"), ("v3", "cpu", "bf16")):
        assert miscompiled(presets.get(f"{preset}-tiny"), torch.device(device), precision) == ""


@pytest.mark.parametrize(("capability", "expected"), [("none", "fp32"), ("amx_bf16", "bf16"), ("bf16", "bf16")])
def test_auto_is_what_the_device_multiplies_and_stays_on_another_machine(
    capability, expected, go, tmp_path, monkeypatch
):
    used, build, folder = [], loop.Run, RunFolder(tmp_path / "run")
    monkeypatch.setattr(loop, "Run", lambda c, s, *rest: used.append(s.precision) or build(c, s, *rest))
    for steps, has in ((1, capability), (2, "none" if expected == "bf16" else "bf16")):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda has=has: {"avx512_bf16": False, has: True})
        go("run", resume=steps > 1, precision="auto", steps=steps)
    assert used == [expected] * 2 and folder.read()["settings"]["precision"] == expected
    folder.write({})
    refused("has no settings", go, "run", resume=True, precision="auto")
