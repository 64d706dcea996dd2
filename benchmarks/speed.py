"""How fast is a contender against the compiled dense baseline, and how fast could it be?

    python benchmarks/speed.py --device cuda --lengths 256,2048,8192 --fractions 0.5,0.25 --csv speed.csv
    python benchmarks/speed.py --list

Every contender is first compared with its own dense execution (parity.py); one that differs gets no row, and the exit
code is 1. Routes are forced: exactly f of every row's tokens at random places, the same for all. See
docs/execution.md, "Measuring".
"""

import argparse
import gc
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from chiar import presets
from chiar.errors import InputError, first_line, unknown_name
from contenders import BASELINE, MODES, REGISTRY, Contender, foreign
from parity import Parity, Verdict, precision
from rows import Row, Table, draw_speedups, new_file, surroundings
from timed import Setting, Work, exact_routes
from timing import (
    DecodeJob,
    Job,
    PrefillJob,
    Times,
    TrainJob,
    best_backend,
    interleave,
    preferring,
    speedup,
    synchronises,
    synchronize,
)

BEGAN = time.perf_counter()
WARM_UP = 3
JOBS = {"train": TrainJob, "prefill": PrefillJob, "decode": DecodeJob}


def say(text: str) -> None:
    print(f"[{time.perf_counter() - BEGAN:7.1f} s] {text}", flush=True)


class Lap:
    """All contenders at one length, beside one baseline."""

    def __init__(self, options: argparse.Namespace, length: int, backend: str, table: Table) -> None:
        self.options, self.length, self.backend, self.table = options, length, backend, table
        self.batch = max(1, options.tokens // length)
        self.device: str = options.device
        # Decoding grows its cache: torch has no static shape to compile, so the model is called as it is.
        self.compiled = options.compile and options.mode != "decode"
        generator = torch.Generator().manual_seed(0)
        vocabulary = presets.get(f"{BASELINE}-{options.size}").vocab_size
        self.ids_BT = torch.randint(0, vocabulary, (self.batch, length), generator=generator).to(self.device)
        self.surroundings = surroundings(self.device)

    def setting(self, fraction: float) -> Setting:
        return Setting(self.options.size, self.options.layers, self.length, fraction)

    def job(self, contender: Contender, fraction: float) -> Job:
        """The contender, built and ready for its first step."""
        torch.manual_seed(0)
        model = contender.build(self.setting(fraction), contender.execution, self.compiled).to(self.device)
        model.train(self.options.mode == "train")
        call = torch.compile(model, dynamic=False) if self.compiled else model
        job = JOBS[self.options.mode](model, call, self.ids_BT, {}, self.device)
        self.force(job, fraction)
        return job

    def force(self, job: Job, fraction: float) -> None:
        """Give the job the routes of this fraction."""
        attending, layers = self.setting(fraction).attending, job.model.routed_layers
        job.routes = exact_routes(self.batch, self.length, attending, layers, self.device)
        if isinstance(job, DecodeJob):
            job.attending, job.most = fraction, WARM_UP + 1 + self.options.turns * self.options.steps

    def warm_up(self, name: str, job: Job, new: bool) -> bool | None:
        """Compile, touch all memory; says whether a step waits for the device."""
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
        waits = synchronises(job)
        if waits:
            job.start()  # the step was cut off in the middle: its cache is of no use
        return waits

    def bound(self, baseline: Job, job: Job, fraction: float) -> float | None:
        setting = self.setting(fraction)
        full, own = baseline.model.work(setting), job.model.work(setting)
        if full is None or own is None or self.options.mode == "decode":
            return None  # decoding is bound by memory, not by FLOPs

        def flops(work: Work) -> float:
            return work.training() if self.options.mode == "train" else work.prefill(self.length)

        return flops(full) / flops(own)

    def row(
        self,
        contender: Contender,
        fraction: float | None,
        job: Job,
        times: Times,
        baseline: Job,
        baseline_times: Times,
        resident: int,
        waits: bool | None,
        recompiled: bool | None,
        verdict: Verdict,
    ) -> Row:
        p20, p50, p80 = times.percentiles()
        faster = speedup(baseline_times, times)
        bound = self.bound(baseline, job, 1.0 if fraction is None else fraction)
        cache, baseline_cache = job.cache_bytes(), baseline.cache_bytes()
        tokens = self.batch if self.options.mode == "decode" else self.batch * self.length
        layers = presets.get(f"{BASELINE}-{self.options.size}").num_hidden_layers
        return Row(
            contender=contender.name,
            what=contender.what,
            mode=self.options.mode,
            size=self.options.size,
            layers=self.options.layers or layers or 0,
            length=self.length,
            batch=self.batch,
            fraction=fraction,
            execution=contender.execution if contender.defined else "",
            compiled=self.compiled,
            precision="bf16" if self.device == "cuda" else "fp32",
            sdpa=self.backend,
            samples=len(times.steps),
            p20_ms=p20,
            p50_ms=p50,
            p80_ms=p80,
            tokens_per_second=1e3 * tokens / p50,
            peak_gb=(times.peak_bytes - resident) / 1e9 if self.device == "cuda" else None,
            baseline_p50_ms=baseline_times.percentiles()[1],
            speedup=faster,
            bound=bound,
            realised=None if bound is None else faster / bound,
            synchronises=waits,
            recompiled=recompiled,
            parity_error=verdict.error,
            cache_bytes=cache,
            cache_share=cache / baseline_cache if cache and baseline_cache else None,
            **self.surroundings,
        )

    def run_baseline(self, contender: Contender, verdict: Verdict) -> Job:
        resident = allocated(self.device)
        job = self.job(contender, 1.0)
        waits = self.warm_up(contender.name, job, new=True)
        (times,) = interleave([job], self.options.turns, self.options.steps)
        row = self.row(contender, None, job, times, job, times, resident, waits, self.recompiled(None), verdict)
        self.publish(row)
        return job

    def run(self, contender: Contender, verdicts: Mapping[float, Verdict], baseline: Job) -> None:
        """A row for every fraction whose parity held. One compiled model serves all fractions where it can."""
        resident = allocated(self.device)
        job = None
        for fraction, verdict in verdicts.items():
            rebuilt = job is None or contender.capacity_is_built_in
            if rebuilt:
                job = None
                free(self.device)
                job = self.job(contender, fraction)
            assert job is not None
            self.force(job, fraction)
            graphs = None if rebuilt else compiled_graphs()
            waits = self.warm_up(contender.name, job, rebuilt)
            baseline.start()
            while isinstance(baseline, DecodeJob) and isinstance(job, DecodeJob) and baseline.taken < job.taken:
                baseline.step()  # as many tokens in both caches
            graphs = compiled_graphs() if graphs is None else graphs
            before, after = interleave([baseline, job], self.options.turns, self.options.steps)
            forced = fraction if contender.takes_fraction else None
            recompiled = self.recompiled(graphs)
            self.publish(
                self.row(contender, forced, job, after, baseline, before, resident, waits, recompiled, verdict)
            )

    def recompiled(self, graphs: int | None) -> bool | None:
        return compiled_graphs() > graphs if self.compiled and graphs is not None else None

    def publish(self, row: Row) -> None:
        self.table.add(row)
        say(row.sentence())


def compiled_graphs() -> int:
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]


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


class Referee:
    """Parity of each contender and fraction, asked once a run."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.verdicts: dict[tuple[str, float], Verdict] = {}
        self.failed: list[str] = []

    def ask(self, contender: Contender, fractions: Sequence[float]) -> dict[float, Verdict]:
        """The fractions that passed."""
        asked = None
        for fraction in fractions:
            if (contender.name, fraction) in self.verdicts:
                continue
            if asked is None or contender.capacity_is_built_in:
                setting = Setting(self.options.size, self.options.layers, 0, fraction)
                decode = self.options.mode == "decode"
                asked = Parity(contender, setting, self.options.device, self.options.compile and not decode, decode)
            verdict = asked.check(fraction)
            self.verdicts[contender.name, fraction] = verdict
            named = f"{contender.name} f {fraction:g}" if contender.takes_fraction else contender.name
            if verdict.passed:
                say(f"{named}: parity holds, {verdict.message}")
            else:
                self.fail(f"{named}: PARITY FAILED, no speed is reported: {verdict.message}")
        asked = None
        free(self.options.device)
        passed = {fraction: self.verdicts[contender.name, fraction] for fraction in fractions}
        return {fraction: verdict for fraction, verdict in passed.items() if verdict.passed}

    def fail(self, sentence: str) -> None:
        self.failed.append(sentence)
        say(sentence)


def measure(options: argparse.Namespace, registry: Mapping[str, Contender], table: Table) -> int:
    baseline, referee = registry[BASELINE], Referee(options)
    chosen = [registry[name] for name in options.only or registry if name != BASELINE]
    for contender in [c for c in chosen if options.mode not in c.modes]:
        say(f"{contender.name} cannot {options.mode}: left out.")
        chosen.remove(contender)
    for length in options.lengths:
        verdicts = referee.ask(baseline, [1.0])
        if not verdicts:
            break
        backend = choose_backend(options, length)
        with preferring(backend):
            lap = Lap(options, length, backend, table)
            standard = lap.run_baseline(baseline, verdicts[1.0])
            for contender in chosen:
                fractions = options.fractions if contender.takes_fraction else [1.0]
                try:
                    passed = referee.ask(contender, fractions)
                    if passed:
                        lap.run(contender, passed, standard)
                except Exception as error:  # one that breaks must not cost the others their rows
                    traceback.print_exc()
                    referee.fail(f"{contender.name} T {length}: FAILED, {type(error).__name__}: {first_line(error)}")
                free(options.device)
            del standard, lap
            free(options.device)
    for sentence in referee.failed:
        say(f"not measured: {sentence}")
    return 1 if referee.failed else 0


def choose_backend(options: argparse.Namespace, length: int) -> str:
    if options.device != "cuda":
        return "default"
    config = presets.get(f"{BASELINE}-{options.size}")
    rows = max(1, options.tokens // length)
    backend = best_backend(rows, config.num_attention_heads, length, config.head_size, options.mode == "train")
    say(f"T {length}: {backend} is the faster attention")
    return backend


def numbers(kind: type, low: float, high: float) -> object:
    """An argparse type: numbers with commas between, each inside the bounds."""

    def read(text: str) -> list:
        try:
            found = [kind(part) for part in text.split(",")]
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers with commas between") from None
        if not all(low <= number <= high for number in found):
            raise argparse.ArgumentTypeError(f"{text!r}: numbers must lie between {low:g} and {high:g}")
        return list(dict.fromkeys(found))

    return read


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    add("--only", nargs="+", metavar="NAME", help="contenders besides the baseline (default: all)")
    add("--list", action="store_true", help="name the contenders and stop")
    add("--lengths", type=numbers(int, 2, 1 << 20), default=[256, 2048, 8192])
    add("--fractions", type=numbers(float, 0.0, 1.0), default=[0.5, 0.25], help="f: share of tokens that attend")
    add("--mode", choices=MODES, default="train")
    add("--tokens", type=int, default=32768, help="in a batch: tokens / length rows (decode: rows and context)")
    add("--size", choices=("400m", "16m", "tiny"), default="400m")
    add("--layers", type=int, help="another depth, for a quick look; bounds are for this depth")
    add("--turns", type=int, default=10, help="turns of baseline and contender")
    add("--steps", type=int, default=3, help="steps a turn")
    add("--compile", action=argparse.BooleanOptionalAction, default=True)
    add("--csv", type=Path, help="a new file for the rows")
    add("--picture", type=Path, help="a new SVG of speed-up against length")
    add("--peer", type=Path, metavar="FOLDER", action="append", default=[], help="a folder with peer.py")
    return parser.parse_args(arguments)


def check(options: argparse.Namespace, registry: Mapping[str, Contender]) -> None:
    """InputError for what argparse cannot see."""
    for name in options.only or []:
        if name not in registry:
            raise unknown_name("contender", name, registry)
    for name in ("tokens", "turns", "steps"):
        if getattr(options, name) < 1:
            raise InputError(f"--{name} must be at least 1, got {getattr(options, name)}.")
    if options.layers is not None and options.layers < 3:
        raise InputError(f"--layers {options.layers} is too few: a model has a first, a routed and a last layer.")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise InputError("this torch sees no CUDA device: use --device cpu.")
    for path in (options.csv, options.picture):
        new_file(path)


def main(arguments: Sequence[str] | None = None, registry: Mapping[str, Contender] = REGISTRY) -> int:
    options = parse(arguments)
    try:
        registry = dict(registry)
        for folder in options.peer:
            other = foreign(folder)
            if other.name in registry:
                raise InputError(f"the peer's folder is called {other.name!r}, as a contender is: rename it.")
            registry[other.name] = other
        if options.list:
            for contender in registry.values():
                print(f"{contender.name:16} {contender.execution:7} {contender.what}")
            return 0
        check(options, registry)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    # One process compiles many models through the same code: none may fall back to plain execution unseen.
    many = {"recompile_limit": 1024, "accumulated_recompile_limit": 4096, "fail_on_recompile_limit_hit": True}
    table = Table(options.csv)
    try:
        with precision("high"), torch._dynamo.config.patch(**many):
            code = measure(options, registry, table)
        if options.picture is not None:
            options.picture.write_text(draw_speedups(table.rows, BASELINE), encoding="utf-8")
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    finally:
        table.close()
    return code


if __name__ == "__main__":
    sys.exit(main())
