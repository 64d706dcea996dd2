"""One length: the baseline, and every contender beside it."""

import argparse
import gc
import time
from collections.abc import Mapping

import torch

from chiar import presets
from contenders import BASELINE, Contender
from jobs import DecodeJob, Finished, Job, PrefillJob, TrainJob, waits
from models import Setting, Work, compiled, exact_routes, prepare_decoding
from parity import Verdict
from rows import COLUMNS, Row, Table, sentence
from timing import WARM_UP, Times, interleave, ratios, speedup, surroundings, synchronize

BEGAN = time.perf_counter()
JOBS = {"train": TrainJob, "prefill": PrefillJob, "decode": DecodeJob}


def say(text: str) -> None:
    print(f"[{time.perf_counter() - BEGAN:7.1f} s] {text}", flush=True)


class Lap:
    """All contenders at one length, beside one baseline."""

    def __init__(self, options: argparse.Namespace, length: int, backend: str, table: Table) -> None:
        self.options, self.length, self.backend, self.table = options, length, backend, table
        self.batch = max(1, options.tokens // length)
        self.device: str = options.device
        self.compiled: bool = options.compile
        generator = torch.Generator().manual_seed(0)
        vocabulary = presets.get(f"{BASELINE}-{options.size}").vocab_size
        self.ids_BT = torch.randint(0, vocabulary, (self.batch, length), generator=generator).to(self.device)
        self.surroundings = surroundings(self.device)

    def setting(self, fraction: float) -> Setting:
        return Setting(self.options.size, self.options.layers, self.length, fraction)

    @property
    def ways(self) -> list[bool]:
        """Whether steps may be recorded as CUDA graphs, as training does on one GPU."""
        records = self.options.graphs and self.device == "cuda" and self.options.mode != "decode"
        return [False, True] if records else [False]

    def job(self, contender: Contender, fraction: float, graphs: bool) -> Job:
        """The contender, built and ready for its first step."""
        torch.manual_seed(0)
        whole = self.compiled and self.options.whole
        with torch.device(self.device):  # weights are drawn there: a CPU takes seconds for 400M
            model = contender.build(self.setting(fraction), contender.execution, whole).to(self.device)
        model.train(self.options.mode == "train")
        decodes = self.options.mode == "decode"
        if decodes:
            prepare_decoding(model, self.device == "cuda", self.compiled)
        call = compiled(model, model, whole) if self.compiled and not decodes else model
        job = JOBS[self.options.mode](model, call, self.ids_BT, {}, self.device, graphs)
        self.force(job, fraction)
        return job

    def force(self, job: Job, fraction: float) -> None:
        """Give the job the routes of this fraction."""
        attending, layers = self.setting(fraction).attending, job.model.routed_layers
        job.force(exact_routes(self.batch, self.length, attending, layers, self.device))
        if isinstance(job, DecodeJob):
            job.own = self.options.own_routes
            job.attending, job.most = fraction, WARM_UP + 1 + self.options.turns * self.options.steps

    def warm_up(self, name: str, job: Job, new: bool) -> None:
        """Compile, touch all memory; find out whether a step waits for the device."""
        fresh = new or job.recorder is None  # a recorded step says nothing about memory, waiting or compiling
        if fresh and self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        job.start()
        began = time.perf_counter()
        if self.compiled and new:
            say(f"{name}, T {self.length}: compiling …")
        for _ in range(WARM_UP):
            job.step()
        synchronize(self.device)
        if self.compiled and new:
            say(f"{name}, T {self.length}: first {WARM_UP} steps took {time.perf_counter() - began:.1f} s")
        check_finite(name, job)
        if fresh and self.device == "cuda":
            job.peak_bytes = torch.cuda.max_memory_allocated()
        if fresh:
            job.waits = waits(job)
            if job.waits:
                job.start()  # the step was cut off in the middle: its cache is of no use
        if job.recorder is not None:
            while not job.recorder.records and job.recorder.failure is None:
                job.step()
            if job.recorder.failure:
                say(f"{name}: not recorded as a graph: {job.recorder.failure}")
            check_finite(name, job)

    def bound(self, baseline: Job | Finished, job: Job, fraction: float) -> float | None:
        setting = self.setting(fraction)
        full, own = baseline.model.work(setting), job.model.work(setting)
        if full is None or own is None or self.options.mode == "decode":
            return None  # decoding is bound by memory, not by FLOPs

        def flops(work: Work) -> float:
            return work.training() if self.options.mode == "train" else work.prefill(self.length)

        return flops(full) / flops(own)

    def row(
        self, contender: Contender, fraction: float | None, job: Job, times: Times, baseline: Job | Finished,
        baseline_times: Times, resident: int, verdict: Verdict,
    ) -> Row:  # fmt: skip
        options, decodes, on_gpu = self.options, self.options.mode == "decode", self.device == "cuda"
        p20, p50, p80 = times.percentiles()
        faster, spread = speedup(baseline_times, times), ratios(baseline_times, times)
        bound = self.bound(baseline, job, 1.0 if fraction is None else fraction)
        cache, baseline_cache = job.cache_bytes(), baseline.cache_bytes()
        layers = options.layers or presets.get(f"{BASELINE}-{options.size}").num_hidden_layers
        values = dict(
            contender=contender.name, what=contender.what, mode=options.mode, size=options.size, layers=layers,
            length=self.length, batch=self.batch, fraction=fraction,
            chosen=job.chosen() if isinstance(job, DecodeJob) else None,
            execution=contender.execution if contender.defined else "",
            compiled=("whole" if options.whole else "layers") if self.compiled else "",
            precision="bf16" if on_gpu else "fp32", graph=recorded(job), sdpa=self.backend,
            samples=len(times.steps), p20_ms=p20, p50_ms=p50, p80_ms=p80,
            tokens_per_second=1e3 * self.batch * (1 if decodes else self.length) / p50,
            peak_gb=(job.peak_bytes - resident) / 1e9 if on_gpu else None,
            baseline_p50_ms=baseline_times.percentiles()[1], speedup=faster, lowest_speedup=min(spread),
            highest_speedup=max(spread), bound=bound, realised=None if bound is None else faster / bound,
            synchronises=job.waits, recompiled=verdict.recompiled, parity_error=verdict.error,
            cache_bytes=cache, cache_share=cache / baseline_cache if cache and baseline_cache else None,
            **self.surroundings,
        )  # fmt: skip
        return Row(**{name: values[name] for name in COLUMNS})

    def run_baseline(self, contender: Contender, verdict: Verdict) -> Job | Finished:
        """Launched from Python and as a CUDA graph, the faster of the two: no contender meets a slower one."""
        best: tuple[Job, Row, Times] | None = None
        for graphs in self.ways:
            free(self.device)
            resident = allocated(self.device)
            job = self.job(contender, 1.0, graphs)
            self.warm_up(contender.name, job, new=True)
            (times,) = interleave([job.step], self.device, self.options.turns, self.options.steps)
            row = self.row(contender, None, job, times, job, times, resident, verdict)
            if len(self.ways) > 1:
                say(f"{contender.name}, {'a CUDA graph' if graphs else 'launched from Python'}: {row.p50_ms:.2f} ms")
            if best is None or row.p50_ms < best[1].p50_ms:
                best = job, row, times
        assert best is not None
        job, row, times = best
        self.publish(row)
        return Finished(job.model.to("meta"), times, job.cache_bytes()) if self.options.apart else job

    def run(self, contender: Contender, verdicts: Mapping[float, Verdict], baseline: Job | Finished) -> None:
        """A row for every fraction whose parity held. One compiled model serves all fractions where it can."""
        free(self.device)
        resident = allocated(self.device)
        job = None
        for fraction, verdict in verdicts.items():
            rebuilt = job is None or contender.capacity_is_built_in
            if rebuilt:
                job = None
                free(self.device)
                job = self.job(contender, fraction, self.ways[-1])
            assert job is not None
            self.force(job, fraction)
            self.warm_up(contender.name, job, rebuilt)
            before, after = self.times(baseline, job)
            forced = fraction if contender.takes_fraction else None
            self.publish(self.row(contender, forced, job, after, baseline, before, resident, verdict))

    def times(self, baseline: Job | Finished, job: Job) -> list[Times]:
        turns, steps = self.options.turns, self.options.steps
        if isinstance(baseline, Finished):
            return [baseline.times, *interleave([job.step], self.device, turns, steps)]
        baseline.start()
        while isinstance(baseline, DecodeJob) and isinstance(job, DecodeJob) and baseline.taken < job.taken:
            baseline.step()  # as many tokens in both caches
        return interleave([baseline.step, job.step], self.device, turns, steps)

    def publish(self, row: Row) -> None:
        self.table.add(row)
        say(sentence(row))


def recorded(job: Job) -> bool:
    """Whether what was timed is a CUDA graph."""
    if isinstance(job, DecodeJob):
        return job.device == "cuda"
    return job.recorder is not None and bool(job.recorder.records)


def check_finite(name: str, job: Job) -> None:
    found = job.loss if isinstance(job, TrainJob) else job.logits_BV if isinstance(job, PrefillJob) else None
    if found is not None and not bool(found.isfinite().all()):
        raise RuntimeError(f"{name} gave a result that is not finite")


def allocated(device: str) -> int:
    return torch.cuda.memory_allocated() if device == "cuda" else 0


def free(device: str) -> None:
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
