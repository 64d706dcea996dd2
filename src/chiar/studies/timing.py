"""Step times of the variants, one after another in one process: forward, backward and optimiser as training runs them.

A variant with a finished run is timed with its trained weights, so that its router sends as many tokens to attention as
it learned to; the learning rate is 0, so timing changes nothing. Others are timed as they start, which for a learned
router says little: `weights` tells which.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from chiar.data.shards import Corpus
from chiar.evaluation.harness import describe_device
from chiar.model.load import load_config
from chiar.studies.runner import TIMES, StudyFolder, read_json
from chiar.studies.study import Plan, Run, require
from chiar.training.compiling import clear_device
from chiar.training.distributed import Processes, start
from chiar.training.loop import Trainer, settle
from chiar.training.run_folder import versions

FORMAT = "chiar-study-times/1"
WEIGHTS = ("first", "trained")
WARM_UP = 8
"""Steps before the clock: compiling, first allocations, and recording CUDA graphs happen in them."""


def time_study(plan: Plan, folder: StudyFolder, steps: int, device: str, say: Callable[[str], None] = print) -> None:
    """Times every planned variant that was not timed before with the same weights; writes times.json after each."""
    processes, settings, path = start(device), plan.runs[0].train_settings(), folder.path / TIMES
    record: dict[str, Any] = {"format": FORMAT, "device": describe_device(processes.device), "batch": settings.batch}
    record |= {"length": settings.length, "versions": {k: versions().get(k) for k in ("chiar", "torch", "gpu")}}
    stored = read_json(path) if path.is_file() else {**record, "drift": None, "variants": {}}
    for name, value in record.items():
        was = f"{path} was measured with {name} = {stored.get(name)}, not {value}"
        why = "times of two machines do not compare; move the file away to measure all again"
        require(stored.get(name) == value, f"{was}: {why}.")
    timed, first = stored["variants"], {run.variant: run for run in reversed(plan.runs)}
    known = {
        name: one["weights"] == WEIGHTS[folder.finished(first[name].name)]
        for name, one in timed.items()
        if name in first
    }
    left = [run for run in plan.runs if run is first[run.variant] and not known.get(run.variant)]
    for run in left:
        found = timed[run.variant] = time_run(run, folder, processes, steps)
        folder.save(TIMES, stored)
        say(f"{run.variant}: {found['step_ms']:,.2f} ms a step, f {found['fraction']}, {found['weights']} weights")
    base = plan.study.baseline
    if left and base in first:
        stored["drift"] = time_run(first[base], folder, processes, steps)["step_ms"] / timed[base]["step_ms"]
        folder.save(TIMES, stored)
        say(f"{base} again: {stored['drift']:.3f} times as long")


def time_run(run: Run, folder: StudyFolder, processes: Processes, steps: int) -> dict[str, Any]:
    clear_device()
    trained = str(folder.run(run.name) / "final") if folder.finished(run.name) else ""
    settings = replace(run.train_settings(), learning_rate=0.0, final_learning_rate=0.0, initial=trained)
    settings = settle(replace(settings, steps=WARM_UP + steps), processes, None)
    config = load_config(trained) if trained else run.model_config()
    config.execution = run.model_config().execution  # it may be chosen anew, and exports say how they were last run
    config.max_position_embeddings = max(config.max_position_embeddings, settings.length)
    trainer = Trainer(config, settings, [Corpus.open(path) for path in settings.data], processes)
    torch.set_float32_matmul_precision("high" if settings.precision == "bf16" else "highest")
    for _ in range(WARM_UP):
        measured = trainer.train_step()
    if settings.recalibrate_every and not trained:
        trainer.recalibrate()
    times, cuda = [], processes.device.type == "cuda"
    wait = torch.cuda.synchronize if cuda else lambda: None
    for _ in range(steps):
        wait()
        began = time.perf_counter()
        measured = trainer.train_step()
        wait()
        times.append(1e3 * (time.perf_counter() - began))
    fractions, middle = [row[-1] for row in trainer.summary(measured)["use"]], statistics.median(times)
    trainer.prefetch.thread.shutdown()
    found: dict[str, Any] = {
        **{"step_ms": round(middle, 4), "fastest_ms": round(min(times), 4), "slowest_ms": round(max(times), 4)},
        **{"steps": steps, "tokens_per_second": round(1e3 * settings.batch * settings.length / middle, 1)},
        "fraction": round(statistics.mean(fractions), 4) if fractions else None,
        **{"weights": WEIGHTS[bool(trained)], "execution": config.execution, "compiled": trainer.forward.compiled},
        "compile_failure": trainer.forward.failure,
        "cuda_graphs": trainer.graphs is not None and not trainer.graphs.failure,
    }
    if cuda:
        found["peak_memory_gb"] = round(torch.cuda.max_memory_allocated() / 1e9, 3)
    return found
