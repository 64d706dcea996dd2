"""All contenders at one sequence length, timed in turns with the baseline."""

import argparse
import gc
import time
from collections.abc import Mapping

import torch

from chiar import presets
from contenders import BASELINE, Contender
from models import ForwardFlops, Setting, compiled, exact_routes, prepare_decoding
from parity import Verdict
from rows import COLUMNS, Row, Table, sentence
from timing import WARM_UP, Times, environment, interleave, ratios, speedup, synchronize
from workloads import DecodeWorkload, Finished, PrefillWorkload, TrainWorkload, Workload, synchronizes

START = time.perf_counter()
WORKLOADS = {"train": TrainWorkload, "prefill": PrefillWorkload, "decode": DecodeWorkload}


def log(text: str) -> None:
    print(f"[{time.perf_counter() - START:7.1f} s] {text}", flush=True)


class Comparison:
    """Times contenders and the baseline at one length."""

    def __init__(self, options: argparse.Namespace, length: int, backend: str, table: Table) -> None:
        self.options, self.length, self.backend, self.table = options, length, backend, table
        self.batch = max(1, options.tokens // length)
        self.device: str = options.device
        self.compiled: bool = options.compile
        generator = torch.Generator().manual_seed(0)
        vocabulary = presets.get(f"{BASELINE}-{options.size}").vocab_size
        self.ids_BT = torch.randint(0, vocabulary, (self.batch, length), generator=generator).to(self.device)
        self.environment = environment(self.device)

    def setting(self, fraction: float) -> Setting:
        return Setting(self.options.size, self.options.layers, self.length, fraction)

    @property
    def graph_choices(self) -> list[bool]:
        """Whether to record steps as CUDA graphs: both if possible, as training on one GPU does it."""
        possible = self.options.graphs and self.device == "cuda" and self.options.mode != "decode"
        return [False, True] if possible else [False]

    def build(self, contender: Contender, fraction: float, graphs: bool) -> Workload:
        """Build the contender up to its first step."""
        torch.manual_seed(0)
        whole = self.compiled and self.options.whole
        with torch.device(self.device):  # initialising 400M weights on a CPU takes seconds
            model = contender.build(self.setting(fraction), contender.execution, whole).to(self.device)
        model.train(self.options.mode == "train")
        decodes = self.options.mode == "decode"
        if decodes:
            prepare_decoding(model, self.device == "cuda", self.compiled)
        call = compiled(model, model, whole) if self.compiled and not decodes else model
        workload = WORKLOADS[self.options.mode](model, call, self.ids_BT, {}, self.device, graphs)
        self.force(workload, fraction)
        return workload

    def force(self, workload: Workload, fraction: float) -> None:
        """Force routes with this fraction."""
        attending, layers = self.setting(fraction).attending, workload.model.routed_layers
        workload.force(exact_routes(self.batch, self.length, attending, layers, self.device))
        if isinstance(workload, DecodeWorkload):
            workload.own_routes = self.options.own_routes
            workload.fraction, workload.steps = fraction, WARM_UP + 1 + self.options.turns * self.options.steps

    def warm_up(self, name: str, workload: Workload, new: bool) -> None:
        """Compile, allocate all memory, and find out whether a step synchronises with the device."""
        fresh = new or workload.recorder is None  # a recorded step shows neither memory nor synchronisation
        if fresh and self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        workload.start()
        start = time.perf_counter()
        if self.compiled and new:
            log(f"{name}, T {self.length}: compiling …")
        for _ in range(WARM_UP):
            workload.step()
        synchronize(self.device)
        if self.compiled and new:
            log(f"{name}, T {self.length}: first {WARM_UP} steps took {time.perf_counter() - start:.1f} s")
        check_finite(name, workload)
        if fresh and self.device == "cuda":
            workload.peak_bytes = torch.cuda.max_memory_allocated()
        if fresh:
            workload.synchronizes = synchronizes(workload)
            if workload.synchronizes:
                workload.start()  # the step was interrupted: its cache is incomplete
        if workload.recorder is not None:
            while not workload.recorder.records and workload.recorder.failure is None:
                workload.step()
            if workload.recorder.failure:
                log(f"{name}: not recorded as a graph: {workload.recorder.failure}")
            check_finite(name, workload)

    def bound(self, baseline: Workload | Finished, workload: Workload, fraction: float) -> float | None:
        """The speed-up if time were proportional to counted FLOPs."""
        setting = self.setting(fraction)
        dense, own = baseline.model.flops(setting), workload.model.flops(setting)
        if dense is None or own is None or self.options.mode == "decode":
            return None  # decoding is bound by memory, not by FLOPs

        def total(flops: ForwardFlops) -> float:
            return flops.training() if self.options.mode == "train" else flops.prefill(self.length)

        return total(dense) / total(own)

    def row(
        self, contender: Contender, fraction: float | None, workload: Workload, times: Times,
        baseline: Workload | Finished, baseline_times: Times, resident: int, verdict: Verdict,
    ) -> Row:  # fmt: skip
        options, decodes, on_gpu = self.options, self.options.mode == "decode", self.device == "cuda"
        p20, p50, p80 = times.percentiles()
        faster, spread = speedup(baseline_times, times), ratios(baseline_times, times)
        bound = self.bound(baseline, workload, 1.0 if fraction is None else fraction)
        cache, baseline_cache = workload.cache_bytes(), baseline.cache_bytes()
        layers = options.layers or presets.get(f"{BASELINE}-{options.size}").num_hidden_layers
        values = dict(
            contender=contender.name, what=contender.description, mode=options.mode, size=options.size, layers=layers,
            length=self.length, batch=self.batch, fraction=fraction,
            chosen=workload.attending_share() if isinstance(workload, DecodeWorkload) else None,
            execution=contender.execution if contender.has_definition else "",
            compiled=("whole" if options.whole else "layers") if self.compiled else "",
            precision="bf16" if on_gpu else "fp32", graph=recorded(workload), sdpa=self.backend,
            samples=len(times.steps), p20_ms=p20, p50_ms=p50, p80_ms=p80,
            tokens_per_second=1e3 * self.batch * (1 if decodes else self.length) / p50,
            peak_gb=(workload.peak_bytes - resident) / 1e9 if on_gpu else None,
            baseline_p50_ms=baseline_times.percentiles()[1], speedup=faster, lowest_speedup=min(spread),
            highest_speedup=max(spread), bound=bound, realised=None if bound is None else faster / bound,
            synchronises=workload.synchronizes, recompiled=verdict.recompiled, parity_error=verdict.error,
            cache_bytes=cache, cache_share=cache / baseline_cache if cache and baseline_cache else None,
            **self.environment,
        )  # fmt: skip
        return Row(**{name: values[name] for name in COLUMNS})

    def run_baseline(self, contender: Contender, verdict: Verdict) -> Workload | Finished:
        """The baseline as it is faster: launched from Python, or as a CUDA graph."""
        best: tuple[Workload, Row, Times] | None = None
        for graphs in self.graph_choices:
            free(self.device)
            resident = allocated(self.device)
            workload = self.build(contender, 1.0, graphs)
            self.warm_up(contender.name, workload, new=True)
            (times,) = interleave([workload.step], self.device, self.options.turns, self.options.steps)
            row = self.row(contender, None, workload, times, workload, times, resident, verdict)
            if len(self.graph_choices) > 1:
                log(f"{contender.name}, {'a CUDA graph' if graphs else 'launched from Python'}: {row.p50_ms:.2f} ms")
            if best is None or row.p50_ms < best[1].p50_ms:
                best = workload, row, times
        assert best is not None
        workload, row, times = best
        self.publish(row)
        return Finished(workload.model.to("meta"), times, workload.cache_bytes()) if self.options.apart else workload

    def run(self, contender: Contender, verdicts: Mapping[float, Verdict], baseline: Workload | Finished) -> None:
        """Add a row for every fraction that passed parity. One compiled model serves all fractions if it can."""
        free(self.device)
        resident = allocated(self.device)
        workload = None
        for fraction, verdict in verdicts.items():
            rebuilt = workload is None or contender.fixed_capacity
            if rebuilt:
                workload = None
                free(self.device)
                workload = self.build(contender, fraction, self.graph_choices[-1])
            assert workload is not None
            self.force(workload, fraction)
            self.warm_up(contender.name, workload, rebuilt)
            baseline_times, times = self.times(baseline, workload)
            forced = fraction if contender.takes_fraction else None
            self.publish(self.row(contender, forced, workload, times, baseline, baseline_times, resident, verdict))

    def times(self, baseline: Workload | Finished, workload: Workload) -> list[Times]:
        turns, steps = self.options.turns, self.options.steps
        if isinstance(baseline, Finished):
            return [baseline.times, *interleave([workload.step], self.device, turns, steps)]
        baseline.start()
        if isinstance(baseline, DecodeWorkload) and isinstance(workload, DecodeWorkload):
            while baseline.done < workload.done:
                baseline.step()  # until both caches hold equally many tokens
        return interleave([baseline.step, workload.step], self.device, turns, steps)

    def publish(self, row: Row) -> None:
        self.table.add(row)
        log(sentence(row))


def recorded(workload: Workload) -> bool:
    """Whether the timed step is a CUDA graph."""
    if isinstance(workload, DecodeWorkload):
        return workload.device == "cuda"
    return workload.recorder is not None and bool(workload.recorder.records)


def check_finite(name: str, workload: Workload) -> None:
    if workload.result is not None and not bool(workload.result.isfinite().all()):
        raise RuntimeError(f"the result of {name} is not finite")


def allocated(device: str) -> int:
    return torch.cuda.memory_allocated() if device == "cuda" else 0


def free(device: str) -> None:
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
