"""Several processes: the losses of one, sharded or not, and one that dies does no harm."""

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
import torch
from runs import assert_same_run, command, final_state, metrics, run, sets, torchrun

from chiar import ChiarForCausalLM, presets
from chiar.training import checkpoint
from commands import wait_until
from helpers import randomise

# Hard routing, where an operator may get no token; five batches to validate on, more than three processes share evenly.
CHANGES = ("dropout=0.0", "gate_pool=causal", "routing=hard", "sample=light", "ema=0.5", "keep=9", "evaluate_rows=10")
CHANGES += ("learning_rate=0.003", "warmup=3")
STATE = "model.language.model.router_state."


def arguments(corpus, out, parallel, *more):
    return command(corpus, out, "--steps", "6", "--batch", "12", *sets(*CHANGES, f"parallel={parallel}"), *more)


def finished(parallel, count):
    @pytest.fixture(scope="module")
    def out(corpus, tmp_path_factory):
        folder = tmp_path_factory.mktemp("runs") / "run"
        run(arguments(corpus, folder, parallel), folder, count)
        return folder

    return out


alone, replicated, sharded = finished("ddp", 1), finished("ddp", 2), finished("fsdp", 2)


def assert_close(first, second, evaluated=True):
    """Sums over six micro-batches in another order, six steps of fp32. What counts in evaluation alone may be left out:
    validation losses and the state of routers."""
    for ours, theirs in zip(metrics(first), metrics(second), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=2e-5)
        assert ours["gradient_norm"] == pytest.approx(theirs["gradient_norm"], abs=1e-4)
        if evaluated:
            assert ours.get("validation", {}) == pytest.approx(theirs.get("validation", {}), abs=2e-5)
    ours, theirs = final_state(first), final_state(second)
    assert ours.keys() == theirs.keys()
    for name in ours:
        if evaluated or not name.startswith(STATE):
            torch.testing.assert_close(ours[name], theirs[name], atol=2e-4, rtol=0, msg=name)


@pytest.mark.parametrize("kind", ["replicated", "sharded"])
def test_two_processes_compute_what_one_does(kind, alone, request):
    out = request.getfixturevalue(kind)
    assert_close(alone, out)
    ours, theirs = (ChiarForCausalLM.from_pretrained(folder / "best").eval() for folder in (alone, out))
    ids = torch.arange(20)[None]
    # Weights agree to 2e-4 as above.
    torch.testing.assert_close(ours(ids).logits, theirs(ids).logits, atol=1e-3, rtol=0)
    sizes = {path.name: path.stat().st_size for path in (out / "checkpoints" / "latest").glob("*.safetensors")}
    assert sizes.keys() == {f"tensors-{rank}.safetensors" for rank in range(1 + (kind == "sharded"))}
    assert min(sizes.values()) > 0.8 * max(sizes.values()), "each holds about half"


@pytest.mark.parametrize(("start", "parallel", "count"), [("sharded", "ddp", 1), ("alone", "fsdp", 3)])
def test_a_run_goes_on_with_another_number_of_processes(start, parallel, count, alone, corpus, tmp_path, request):
    """From two that shard to one that does not, and from one to three, whose rows do not divide evenly."""
    out = tmp_path / "run"
    shutil.copytree(request.getfixturevalue(start), out, symlinks=True)
    shutil.rmtree(out / "checkpoints" / checkpoint.step_name(6))
    said = run(arguments(corpus, out, parallel, "--resume"), tmp_path / "log", count)
    assert "resuming after step 4 of 6" in said
    assert_close(alone, out)


def test_sharded_processes_with_unequal_batches_wait_for_each_other(corpus, labelled, tmp_path):
    """Added corpora give one process two batches where another has one."""
    more = ("--data", str(labelled), "--steps", "3", "--length", "32")
    mixed = (*more, *sets("mixing=added", "added_share=0.5", "sample="))
    for parallel in ("fsdp", "ddp"):
        run(arguments(corpus, tmp_path / parallel, parallel, *mixed), tmp_path / "log", 2)
    assert_close(tmp_path / "fsdp", tmp_path / "ddp")


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_sparse_execution_leaves_no_parameter_out(parallel, corpus, tmp_path):
    """Every token is light, so nothing is sent to attention, whose weights must have a gradient all the same."""
    light = ("routing=threshold", "router=random", "random_fraction=0.0", "execution=sparse", "keys=routed", "sample=")
    run(arguments(corpus, tmp_path / "run", parallel, "--steps", "2", *sets(*light)), tmp_path / "log", 2)
    assert [record["use"] for record in metrics(tmp_path / "run")] == [[[1.0, 0.0], [1.0, 0.0]]] * 2


def of_dark_layers(arguments):
    return ["v5-tiny" if word == "v3-tiny" else word for word in arguments]


@pytest.mark.parametrize(("parallel", "count"), [("ddp", 2), ("fsdp", 2)])
def test_dark_stacks_in_two_processes(parallel, count, corpus, tmp_path):
    """By a rule: at the beginning so many entropies are alike that rounding decides which of them are dark."""
    rule = ("routing=threshold", "router=space", "early_weight=0.5")
    for name, kind, number in (("alone", "ddp", 1), ("together", parallel, count)):
        given = arguments(corpus, tmp_path / name, kind, "--steps", "3", *sets(*rule))
        run(of_dark_layers(given), tmp_path / "log", number)
    assert_close(tmp_path / "alone", tmp_path / "together")
    for record in metrics(tmp_path / "together"):
        assert 0.1 < record["use"][0][1] < 0.5 and record["dropped"] == 0.0


@pytest.fixture(scope="module")
def predictive(corpus, tmp_path_factory):
    """Runs of a v5 that begins with large weights: usual ones predict so much alike that rounding decides which
    entropies are above others."""
    place = tmp_path_factory.mktemp("predictive")
    config = presets.get("v5-tiny", hidden_size=16, router="predictive")
    randomise(ChiarForCausalLM(config)).save_pretrained(place / "model")
    changes = ("routing=threshold", "router=predictive", f"initial={place / 'model'}")

    def go(out, parallel, count, *more):
        given = arguments(corpus, out, parallel, "--steps", "4", *sets(*changes), *more)
        return run(of_dark_layers(given), place / "log", count)

    for name, parallel, count in (("alone", "ddp", 1), ("replicated", "ddp", 2), ("sharded", "fsdp", 2)):
        go(place / name, parallel, count)
    return go, place


def assert_same_but_for_thresholds(first, second, passes):
    """In training τ is a micro-batch's own, the same in any process. Evaluation takes its running mean, which each
    process moves by its own micro-batches before both are averaged: that weighs them otherwise."""
    assert_close(first, second, evaluated=False)
    ours, theirs = final_state(first), final_state(second)
    # Of one micro-batch, 32 entropies, it spreads by 0.003.
    name = STATE + "threshold_L"
    torch.testing.assert_close(ours[name], theirs[name], atol=0.005, rtol=0)
    assert theirs[STATE + "updates_L"].tolist() == [1 + passes], "the model came with one"


@pytest.mark.parametrize("kind", ["replicated", "sharded"])
def test_stacks_that_follow_entropies_in_two_processes(kind, predictive):
    _, place = predictive
    assert_same_but_for_thresholds(place / "alone", place / kind, 4 * 3)


def test_a_sharded_run_of_dark_stacks_goes_on_in_three_processes(predictive, tmp_path):
    go, place = predictive
    out = tmp_path / "run"
    shutil.copytree(place / "sharded", out, symlinks=True)
    shutil.rmtree(out / "checkpoints" / checkpoint.step_name(4))
    assert "resuming after step 2 of 4" in go(out, "fsdp", 3, "--resume")
    assert_same_but_for_thresholds(place / "alone", out, 2 * 3 + 2 * 2)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_a_stack_without_tokens_leaves_no_parameter_out(parallel, corpus, labelled, tmp_path):
    """Whether for want of dark tokens or, in a batch of labelled documents, of a next token to learn from. Evaluation
    needs every process too."""
    light = ("routing=threshold", "router=random", "random_fraction=0.0", "execution=sparse", "sample=")
    more = ("--data", str(labelled), "--steps", "2", "--length", "32")
    mixed = (*more, *sets("mixing=added", "added_share=0.5", *light))
    run(of_dark_layers(arguments(corpus, tmp_path / "run", parallel, *mixed)), tmp_path / "log", 2)
    assert [record["use"] for record in metrics(tmp_path / "run")] == [[[1.0, 0.0]]] * 2


def test_forecasts_without_an_early_head_leave_no_parameter_out(corpus, tmp_path):
    changes = ("routing=threshold", "router=forecast", "early_weight=0.0", "sample=")
    run(
        of_dark_layers(arguments(corpus, tmp_path / "run", "ddp", "--steps", "2", *sets(*changes))), tmp_path / "log", 2
    )


def test_thresholds_are_those_of_all_processes(corpus, tmp_path):
    """Each process sees half of the tokens; the mean of their thresholds goes on in both, or the routes would differ
    from a single process's."""
    more = ("--steps", "4", *sets("routing=threshold", "target_fraction=0.3", "sample="))
    found = {}
    for count, parallel in ((1, "ddp"), (2, "fsdp")):
        run(arguments(corpus, tmp_path / parallel, parallel, *more), tmp_path / "log", count)
        found[count] = final_state(tmp_path / parallel)
        assert set(found[count][STATE + "updates_L"].tolist()) == {4 * 6 / count}
    distance = (found[1][STATE + "threshold_L"] - found[2][STATE + "threshold_L"]).abs()
    # Averages over about 5 passes of 32 tokens; entropies at this width spread by 0.04 (white noise).
    assert (distance < 0.02).all()


@pytest.mark.slow
def test_a_killed_process_is_started_again_and_nothing_changes(corpus, tmp_path):
    """torchrun stops the others and starts all again; they go on from the last checkpoint."""
    straight = torchrun(2, 0, arguments(corpus, tmp_path / "straight", "ddp", "--steps", "40"))
    subprocess.run(straight, check=True, capture_output=True)
    out = tmp_path / "killed"
    command_line = torchrun(2, 1, arguments(corpus, out, "ddp", "--steps", "40"))
    launcher = subprocess.Popen(command_line, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    wait_until((out / "checkpoints" / "latest").exists)
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()  # Linux
    os.kill(max(map(int, children)), signal.SIGKILL)
    output, _ = launcher.communicate(timeout=120)
    assert launcher.returncode == 0
    assert b"resuming after step" in output
    assert_same_run(tmp_path / "straight", out)


def test_layers_are_found_where_torch_does_not_look_into_dataclasses(config, go, monkeypatch):
    """Before torch 2.13 FSDP searches a module's output as a tree only; this puts that search in place of today's."""
    from torch.distributed.fsdp._fully_shard import _fsdp_state
    from torch.utils._pytree import tree_leaves

    def as_before(output):
        return [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]

    if hasattr(_fsdp_state, "collect_grad_tensors"):
        monkeypatch.setattr(_fsdp_state, "collect_grad_tensors", as_before)
    losses = [go(kind, config(dropout=0.0), steps=3, parallel=kind)["loss"] for kind in ("ddp", "fsdp")]
    # Three steps of fp32 in another layout.
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)
