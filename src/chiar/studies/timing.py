"""Step times of the variants, one after another in one process: forward, backward and optimiser as training runs them.

A variant with a finished run is timed with its trained weights, so that its router sends as many tokens to attention as
it learned to; the learning rate is 0, so timing changes nothing. Others are timed as they start, which for a learned
router says little: `weights` tells which.
"""

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from chiar.data.shards import Corpus
from chiar.errors import InputError
from chiar.evaluation.harness import describe_device
from chiar.files import write_whole
from chiar.model.load import load_config
from chiar.studies.folder import TIMES, StudyFolder, read_json
from chiar.studies.plan import Plan, PlannedRun
from chiar.training.compiling import clear_device
from chiar.training.distributed import Processes, start
from chiar.training.loop import settle
from chiar.training.run_folder import versions
from chiar.training.trainer import Trainer

FORMAT = "chiar-study-times/1"
WARM_UP = 8
"""Steps before the clock: compiling, first allocations, and recording CUDA graphs happen in them."""
VERSIONS = ("chiar", "torch", "gpu")


def time_study(
    plan: Plan, folder: StudyFolder, steps: int, device: str, say: Callable[[str], None] = print
) -> dict[str, Any]:
    """Times every planned variant that was not timed before with the same weights; writes times.json after each."""
    processes = start(device)
    record = begin(plan, folder, processes)
    base = plan.study.baseline
    first_of = {run.variant.name: run for run in reversed(plan.runs)}
    runs = [first_of[name] for name in dict.fromkeys(run.variant.name for run in plan.runs)]
    left = [
        run for run in runs if record["variants"].get(run.variant.name, {}).get("weights") != weights_of(folder, run)
    ]
    for run in left:
        found = time_run(run, folder, processes, steps)
        record["variants"][run.variant.name] = found
        write_whole(folder.path / TIMES, json.dumps(record, indent=1, ensure_ascii=False))
        say(f"{run.variant.name}: {found['step_ms']:,.2f} ms a step, f {found['fraction']}, {found['weights']} weights")
    if left and base in first_of:
        again = time_run(first_of[base], folder, processes, steps)
        record["drift"] = again["step_ms"] / record["variants"][base]["step_ms"]
        write_whole(folder.path / TIMES, json.dumps(record, indent=1, ensure_ascii=False))
        say(f"{base} again: {record['drift']:.3f} times as long")
    return record


def begin(plan: Plan, folder: StudyFolder, processes: Processes) -> dict[str, Any]:
    """The record so far, which must be of this machine, or an empty one."""
    settings, path = plan.runs[0].settings, folder.path / TIMES
    here = {"format": FORMAT, "device": describe_device(processes.device), "batch": settings.batch}
    here |= {"length": settings.length, "versions": {name: v for name, v in versions().items() if name in VERSIONS}}
    if not path.is_file():
        return {**here, "drift": None, "variants": {}}
    stored = read_json(path)
    for name, value in here.items():
        if stored.get(name) != value:
            raise InputError(
                f"{path} was measured with {name} = {stored.get(name)}, not {value}: times of two machines do not "
                "compare; move the file away to measure all again."
            )
    return stored


def trained_weights(folder: StudyFolder, run: PlannedRun) -> str | None:
    """The final weights of the run, where it is finished."""
    return str(folder.run(run.name) / "final") if folder.finished_here(run.name) else None


def weights_of(folder: StudyFolder, run: PlannedRun) -> str:
    return "first" if trained_weights(folder, run) is None else "trained"


def time_run(run: PlannedRun, folder: StudyFolder, processes: Processes, steps: int) -> dict[str, Any]:
    clear_device()
    trained = trained_weights(folder, run)
    settings = replace(run.settings, learning_rate=0.0, final_learning_rate=0.0, initial=trained or "")
    settings = settle(replace(settings, steps=WARM_UP + steps), processes, None)
    config = load_config(trained) if trained else run.config()
    config.execution = run.config().execution  # it may be chosen anew, and exports say how they were last run
    config.max_position_embeddings = max(config.max_position_embeddings, settings.length)
    trainer = Trainer(config, settings, [Corpus.open(path) for path in settings.data], processes)
    torch.set_float32_matmul_precision("high" if settings.precision == "bf16" else "highest")
    for _ in range(WARM_UP):
        measured = trainer.train_step()
    if settings.recalibrate_every and not trained:
        trainer.recalibrate()
    times = []
    for _ in range(steps):
        wait(processes.device)
        began = time.perf_counter()
        measured = trainer.train_step()
        wait(processes.device)
        times.append(1e3 * (time.perf_counter() - began))
    use = trainer.summary(measured)["use"]
    fractions = [row[-1] for row in use]
    trainer.prefetch.thread.shutdown()
    found: dict[str, Any] = {
        "step_ms": round(statistics.median(times), 4),
        "fastest_ms": round(min(times), 4),
        "slowest_ms": round(max(times), 4),
        "steps": steps,
        "tokens_per_second": round(1e3 * settings.batch * settings.length / statistics.median(times), 1),
        "fraction": round(sum(fractions) / len(fractions), 4) if fractions else None,
        "weights": weights_of(folder, run),
        "execution": config.execution,
        "compiled": trainer.forward.compiled,
        "compile_failure": trainer.forward.failure,
        "cuda_graphs": trainer.graphs is not None and not trainer.graphs.failure,
    }
    if processes.device.type == "cuda":
        found["peak_memory_gb"] = round(torch.cuda.max_memory_allocated() / 1e9, 3)
    return found


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
