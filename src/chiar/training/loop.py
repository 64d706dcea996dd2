"""A run from beginning to end: open the folder, resume or start, step, measure, save."""

import math
import os
import time
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers.utils import logging

from chiar.config import ChiarConfig
from chiar.training import checkpoint
from chiar.training.display import Display
from chiar.training.distributed import Processes, start
from chiar.training.events import Events
from chiar.training.export import export
from chiar.training.interruption import explained
from chiar.training.opening import check_rows, check_run, describe, goes_on, open_run
from chiar.training.precision import settle
from chiar.training.run_folder import Metrics, RunFolder
from chiar.training.settings import TrainSettings
from chiar.training.trainer import Trainer
from chiar.training.utilisation import Utilisation


class TrainingStopped(RuntimeError):
    """Training cannot go on; the message says why and what is kept."""


@explained
def train(
    config: ChiarConfig,
    settings: TrainSettings,
    out: Path,
    resume: bool = False,
    device: str = "auto",
    quiet: bool = False,
) -> dict[str, Any] | None:
    """Train to `settings.steps`, writing to the run folder `out`. Returns the last record."""
    settings.validate()
    logging.disable_progress_bar()  # ours is enough
    processes = start(device)
    try:
        return train_among(processes, config, settings, out, resume, quiet)
    finally:
        processes.close()


def train_among(
    processes: Processes, config: ChiarConfig, settings: TrainSettings, out: Path, resume: bool, quiet: bool
) -> dict[str, Any] | None:
    from chiar.data import Corpus

    corpora = [Corpus.open(Path(path)) for path in settings.data]
    if config.positions == "rope":
        config = deepcopy(config)
        config.max_position_embeddings = settings.length  # the trained length, which evaluation takes as its own
    notes = check_run(config, settings, corpora)
    check_rows(settings, corpora, processes)
    if settings.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS refuses
        torch.use_deterministic_algorithms(True)
    folder = RunFolder(out)
    resume = processes.from_main(lambda: goes_on(folder, resume))
    settings = settle(settings, processes, folder if resume else None)
    torch.set_float32_matmul_precision("high" if settings.precision == "bf16" else "highest")
    trainer, metrics = Trainer(config, settings, corpora, processes), None  # what cannot be built leaves no folder
    record = describe(config, settings, corpora, processes)
    found = processes.from_main(lambda: open_run(folder, record, resume))
    display = Display(settings.steps, found.state["step"] if found else 0, quiet or not processes.main)
    try:
        for note in notes:
            display.say(f"note: {note}")
        if found is not None:
            trainer.restore(found)
            for complaint in found.complaints:
                display.say(f"warning: {complaint}")
            left = "" if trainer.step < settings.steps else ": nothing is left to train"
            display.say(f"resuming after step {trainer.step} of {settings.steps}{left}")
        if settings.compile and trainer.step < settings.steps:
            display.say("compiling: the first step takes a minute or two (--no-compile starts at once)")
        if processes.main:
            events = Events(out / "tensorboard", trainer.step, config) if settings.tensorboard else None
            metrics = Metrics(folder.metrics_path, found.state["metrics_bytes"] if found else 0, events)
        return Run(trainer, folder, metrics, display).go()
    finally:
        display.close()
        if metrics is not None:
            metrics.close()


def is_better(now: dict[str, float], best: dict[str, float]) -> bool:
    """A classifier by its accuracy, which is what it is judged by, and by its loss where that is equal; a language
    model by its loss."""
    return (now.get("accuracy", 0.0), -now["loss"]) > (best.get("accuracy", 0.0), -best["loss"])


class Run:
    """The loop around the steps."""

    def __init__(self, trainer: Trainer, folder: RunFolder, metrics: Metrics | None, display: Display) -> None:
        self.trainer, self.folder, self.metrics, self.display = trainer, folder, metrics, display
        self.settings = trainer.settings
        processes = trainer.processes
        self.utilisation = Utilisation(
            trainer.config, trainer.settings, trainer.corpora, processes.count, processes.device
        )
        self.told_graphs = False
        self.compiled = metrics.last.get("compiled") if metrics is not None else None
        """Whether the steps before were compiled; None before the first."""

    def go(self) -> dict[str, Any] | None:
        trainer, settings, record = self.trainer, self.settings, None
        self.marked_step, self.marked_time = trainer.step, time.perf_counter()
        while trainer.step < settings.steps:
            measured = trainer.train_step()
            self.tell_compiling()
            step, last = trainer.step, trainer.step == settings.steps
            self.display.advance(step)
            evaluates = step % settings.evaluate_every == 0 or last
            if step % settings.log_every == 0 or evaluates or step == 1:
                record = self.measure(measured)
                if evaluates:
                    self.evaluate(record)
                if self.metrics is not None:
                    self.metrics.write(record)
                    self.display.record(record)
            if settings.recalibrate_every and step % settings.recalibrate_every == 0:
                self.display.say(f"thresholds set to {trainer.recalibrate()}")
            if step % settings.save_every == 0 or last:
                self.save()
        self.export(self.folder.final)  # here, so that a run killed after its last step is completed when resumed
        return record

    def tell_compiling(self) -> None:
        """Say where compiling failed, and where steps are computed otherwise than those before them."""
        forward = self.trainer.forward
        if forward.failure and not forward.told:
            forward.told = True
            self.display.say(f"warning: torch.compile failed, so the run goes on without it: {forward.failure}")
        graphs = self.trainer.graphs
        if graphs is not None and graphs.failure and not self.told_graphs:
            self.told_graphs = True
            self.display.say(f"warning: passes cannot be recorded as CUDA graphs and run plainly: {graphs.failure}")
        if self.compiled is not None and self.compiled != forward.compiled:
            before, now = ("", "not ") if self.compiled else ("not ", "")
            self.display.say(f"warning: the steps before were {before}compiled, from here on they are {now}compiled.")
        self.compiled = forward.compiled

    def measure(self, measured: dict[str, Any]) -> dict[str, Any]:
        record = self.trainer.summary(measured)
        bad = int(self.trainer.first_bad_step)
        if bad >= 0 or not math.isfinite(record["loss"]):
            self.stop_at(bad if bad >= 0 else self.trainer.step - 1)
        now = time.perf_counter()
        tokens = self.trainer.take_tokens()
        record["tokens_per_second"] = round(tokens / (now - self.marked_time), 1)
        self.marked_step, self.marked_time = self.trainer.step, now
        mfu = self.utilisation.of(record["tokens_per_second"], record["use"])
        if mfu is not None:
            record["mfu"] = mfu
        record["compiled"] = self.compiled
        if self.trainer.processes.device.type == "cuda":
            record["peak_memory_gb"] = round(torch.cuda.max_memory_allocated() / 1e9, 3)
        return record

    def evaluate(self, record: dict[str, Any]) -> None:
        trainer = self.trainer
        found = trainer.evaluate()
        record["validation"] = found.losses
        if found.accuracies:
            record["accuracy"] = found.accuracies
        first = trainer.names[0]
        now = {"step": trainer.step, "loss": found.losses[first]}
        if first in found.accuracies:
            now["accuracy"] = found.accuracies[first]
        if trainer.best is None or is_better(now, trainer.best):
            trainer.best = now
            self.export(self.folder.best)
        if self.settings.sample:
            record["sample"] = self.sample()
        self.marked_step, self.marked_time = trainer.step, time.perf_counter()

    def save(self) -> None:
        trainer = self.trainer
        if int(trainer.first_bad_step) >= 0:
            self.stop_at(int(trainer.first_bad_step))
        target = self.folder.checkpoints / checkpoint.step_name(trainer.step)
        written = self.metrics.bytes if self.metrics is not None else 0
        try:
            checkpoint.save(target, trainer.tensors(), trainer.state(written), trainer.processes)
        except checkpoint.NotWrittenError as error:
            raise TrainingStopped(
                f"the checkpoint of step {trainer.step} could not be written ({error}): earlier ones are kept."
            ) from error
        if trainer.processes.main:
            checkpoint.point(self.folder.checkpoints / "latest", target)
            best = int(trainer.best["step"]) if trainer.best else None
            checkpoint.retain(self.folder.checkpoints, self.settings.keep, best)

    def export(self, link: Path) -> None:
        """The weights of this step as a folder from_pretrained opens, with tokenizer and thresholds: best or final."""
        trainer = self.trainer
        model = trainer.whole()
        try:
            with checkpoint.agreed(trainer.processes):
                if model is not None:
                    export(model, trainer.corpora[0], self.folder, link, trainer.step)
        except checkpoint.NotWrittenError as error:
            raise TrainingStopped(
                f"the {link.name} model, of step {trainer.step}, could not be written ({error}): checkpoints are kept."
            ) from error

    def sample(self, new_tokens: int = 48) -> str:
        """The prompt continued greedily. A gate that sees the future is frozen at the prompt for this."""
        with self.trainer.language() as language:
            return self.continued(language, new_tokens)

    def continued(self, language: Any, new_tokens: int) -> str:
        tokenizer = self.trainer.corpora[0].tokenizer()
        ids = torch.tensor([tokenizer.encode_batch([self.settings.sample])[0].tolist()], device=language.device)
        before, language.config.gate_generation = language.config.gate_generation, "prefill"
        language.eval()
        room = new_tokens
        if language.config.positions == "learned":
            room = min(room, language.config.max_position_embeddings - ids.shape[1])
        out = language.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=room, do_sample=False)
        language.config.gate_generation = before
        language.train()
        return tokenizer.decode(out[0].cpu().numpy())

    def stop_at(self, step: int) -> None:
        """The loss or gradient of `step` was not finite: keep its batches, say so, stop."""
        trainer = self.trainer
        path = self.folder.path / f"not-finite-{checkpoint.step_name(step + 1)}.safetensors"
        kept = f"its batches are in {path.name}"
        try:
            with checkpoint.agreed(trainer.processes):
                if trainer.processes.main:
                    save_file(trainer.batch_tensors(step), path)
        except checkpoint.NotWrittenError as error:
            kept = f"its batches could not be written ({error})"
        saved = checkpoint.steps(self.folder.checkpoints)
        last = f"{saved[0].name} is the last good checkpoint" if saved else "no checkpoint was saved before"
        raise TrainingStopped(f"the gradient of step {step + 1} is not finite: {kept}, and {last}.")
