"""How fast is a contender relative to the compiled dense baseline, and how fast could it be?

    python benchmarks/speed.py --device cuda --lengths 256,2048,8192 --fractions 0.5,0.25 --csv speed.csv
    python benchmarks/speed.py --list

Every contender is first compared with its own dense execution (parity.py); one that differs gets no row, and the exit
code is 1. Routes are forced: exactly f of the tokens of every row, at random positions, the same for all contenders;
with --own-routes, decoding models route themselves. See docs/execution.md.
"""

import argparse
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch._dynamo

from chiar import presets
from chiar.errors import InputError, first_line, unknown_name
from comparison import Comparison, free, log
from contenders import BASELINE, MODES, REGISTRY, Contender, external
from models import Setting
from parity import Parity, Verdict, matmul_precision
from rows import Table, check_new_file, draw_speedups
from timing import make_parser, numbers
from workloads import BACKENDS, best_backend, preferring


class ParityChecks:
    """The parity of each contender and fraction, checked once per run."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.verdicts: dict[tuple[str, float], Verdict] = {}
        self.failed: list[str] = []

    def check(self, contender: Contender, fractions: Sequence[float]) -> dict[float, Verdict]:
        """The fractions that passed, with their verdicts."""
        parity = None
        for fraction in fractions:
            if (contender.name, fraction) in self.verdicts:
                continue
            if parity is None or contender.fixed_capacity:
                setting = Setting(self.options.size, self.options.layers, 0, fraction)
                decode = self.options.mode == "decode"
                compile, whole = self.options.compile, self.options.whole
                parity = Parity(contender, setting, self.options.device, compile, decode, whole)
            verdict = parity.check(fraction)
            self.verdicts[contender.name, fraction] = verdict
            name = f"{contender.name} f {fraction:g}" if contender.takes_fraction else contender.name
            if verdict.passed:
                log(f"{name}: parity holds, {verdict.message}")
            else:
                self.fail(f"{name}: PARITY FAILED, no speed is reported: {verdict.message}")
        parity = None
        free(self.options.device)
        passed = {fraction: self.verdicts[contender.name, fraction] for fraction in fractions}
        return {fraction: verdict for fraction, verdict in passed.items() if verdict.passed}

    def fail(self, sentence: str) -> None:
        self.failed.append(sentence)
        log(sentence)


def measure(options: argparse.Namespace, registry: Mapping[str, Contender], table: Table) -> int:
    baseline, checks = registry[BASELINE], ParityChecks(options)
    chosen = [registry[name] for name in options.only or registry if name != BASELINE]
    for contender in [c for c in chosen if options.mode not in c.modes]:
        log(f"{contender.name} cannot {options.mode}: left out.")
        chosen.remove(contender)
    for length in options.lengths:
        verdicts = checks.check(baseline, [1.0])
        if not verdicts:
            break
        backend = choose_backend(options, length)
        with preferring(backend):
            comparison = Comparison(options, length, backend, table)
            timed_baseline = comparison.run_baseline(baseline, verdicts[1.0])
            for contender in chosen:
                fractions = options.fractions if contender.takes_fraction else [1.0]
                try:
                    passed = checks.check(contender, fractions)
                    if passed:
                        comparison.run(contender, passed, timed_baseline)
                except Exception as error:  # the other contenders still get their rows
                    traceback.print_exc()
                    checks.fail(f"{contender.name} T {length}: FAILED, {type(error).__name__}: {first_line(error)}")
                free(options.device)
            del timed_baseline, comparison
            free(options.device)
        # Drawn after every length, because a run may be interrupted.
        if options.picture is not None and any(row.contender != BASELINE for row in table.rows):
            draw_speedups(table.rows, BASELINE).savefig(options.picture, format="svg")
    for sentence in checks.failed:
        log(f"not measured: {sentence}")
    return 1 if checks.failed else 0


def choose_backend(options: argparse.Namespace, length: int) -> str:
    if options.device != "cuda":
        return "default"
    if options.sdpa is not None:
        return str(options.sdpa)
    config = presets.get(f"{BASELINE}-{options.size}")
    rows = max(1, options.tokens // length)
    backend = best_backend(rows, config.num_attention_heads, length, config.head_size, options.mode == "train")
    log(f"T {length}: {backend} is the faster attention backend")
    return backend


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("--only", nargs="+", metavar="NAME", help="contenders besides the baseline (default: all)")
    add("--list", action="store_true", help="list the contenders and exit")
    add("--lengths", type=numbers(int, 2, 1 << 20), default=[256, 2048, 8192])
    add("--fractions", type=numbers(float, 0.001, 1.0), default=[0.5, 0.25], help="f: share of tokens that attend")
    add("--mode", choices=MODES, default="train")
    add("--tokens", type=int, default=32768, help="tokens per batch: tokens / length rows (decode: of the prompt)")
    add("--size", choices=("400m", "16m", "tiny"), default="400m")
    add("--layers", type=int, help="number of layers, for quick runs; bounds are for this depth")
    add("--turns", type=int, default=10, help="turns per contender and baseline")
    add("--steps", type=int, default=3, help="steps per turn")
    add("--compile", action=argparse.BooleanOptionalAction, default=True)
    add("--whole", action="store_true", help="compile a model as one graph, not layer by layer (minutes at 28 layers)")
    add("--graphs", action=argparse.BooleanOptionalAction, default=True, help="CUDA graphs, as in training on one GPU")
    add("--apart", action="store_true", help="time models one after another, each alone on the device, not in turns")
    add("--own-routes", action="store_true", help="decode: models route themselves, calibrated to f")
    add("--sdpa", choices=tuple(BACKENDS), help="attention backend on CUDA (default: the faster at each length)")
    add("--csv", type=Path, help="new file for the rows")
    add("--picture", type=Path, help="new SVG of speed-up against length")
    add("--peer", type=Path, metavar="FOLDER", action="append", default=[], help="folder with a peer.py to time")
    return parser.parse_args(arguments)


def check(options: argparse.Namespace, registry: Mapping[str, Contender]) -> None:
    """InputError for what argparse cannot check."""
    for name in options.only or []:
        if name not in registry:
            raise unknown_name("contender", name, registry)
    for name in ("tokens", "turns", "steps"):
        if getattr(options, name) < 1:
            raise InputError(f"--{name} must be at least 1, got {getattr(options, name)}.")
    if options.layers is not None and options.layers < 3:
        raise InputError(f"--layers {options.layers} is too few: models need a first, a routed and a last layer.")
    if options.own_routes and options.mode != "decode":
        raise InputError("--own-routes needs --mode decode: other modes force routes.")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise InputError("this torch sees no CUDA device: use --device cpu.")
    for path in (options.csv, options.picture):
        check_new_file(path)


def main(arguments: Sequence[str] | None = None, registry: Mapping[str, Contender] = REGISTRY) -> int:
    options = parse(arguments)
    try:
        registry = dict(registry)
        for folder in options.peer:
            peer = external(folder)
            if peer.name in registry:
                raise InputError(f"there is a contender called {peer.name!r} already: rename the folder of the peer.")
            registry[peer.name] = peer
        if options.list:
            for contender in registry.values():
                print(f"{contender.name:16} {contender.execution:7} {contender.description}")
            return 0
        check(options, registry)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    # One process compiles many models through the same code: none may silently fall back to eager execution.
    limits: dict[str, Any] = {"recompile_limit": 1024, "accumulated_recompile_limit": 4096}
    table = Table(options.csv)
    try:
        with matmul_precision("high"), torch._dynamo.config.patch({**limits, "fail_on_recompile_limit_hit": True}):
            return measure(options, registry, table)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    finally:
        table.close()


if __name__ == "__main__":
    sys.exit(main())
