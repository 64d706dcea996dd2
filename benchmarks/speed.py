"""How fast is a contender against the compiled dense baseline, and how fast could it be?

    python benchmarks/speed.py --device cuda --lengths 256,2048,8192 --fractions 0.5,0.25 --csv speed.csv
    python benchmarks/speed.py --list

Every contender is first compared with its own dense execution (parity.py); one that differs gets no row, and the exit
code is 1. Routes are forced: exactly f of every row's tokens at random places, the same for all; with --own-routes a
model that decodes routes itself. See docs/execution.md.
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
from contenders import BASELINE, MODES, REGISTRY, Contender, foreign
from jobs import BACKENDS, best_backend, preferring
from lap import Lap, free, say
from models import Setting
from parity import Parity, Verdict, precision
from rows import Table, draw_speedups, new_file
from timing import numbers, parser


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
                compile, whole = self.options.compile, self.options.whole
                asked = Parity(contender, setting, self.options.device, compile, decode, whole)
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
        # The picture so far, again after every length: a run may be cut short.
        if options.picture is not None and any(row.contender != BASELINE for row in table.rows):
            draw_speedups(table.rows, BASELINE).savefig(options.picture, format="svg")
    for sentence in referee.failed:
        say(f"not measured: {sentence}")
    return 1 if referee.failed else 0


def choose_backend(options: argparse.Namespace, length: int) -> str:
    if options.device != "cuda":
        return "default"
    if options.sdpa is not None:
        return str(options.sdpa)
    config = presets.get(f"{BASELINE}-{options.size}")
    rows = max(1, options.tokens // length)
    backend = best_backend(rows, config.num_attention_heads, length, config.head_size, options.mode == "train")
    say(f"T {length}: {backend} is the faster attention")
    return backend


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    made = parser(__doc__)
    add = made.add_argument
    add("--only", nargs="+", metavar="NAME", help="contenders besides the baseline (default: all)")
    add("--list", action="store_true", help="name the contenders and stop")
    add("--lengths", type=numbers(int, 2, 1 << 20), default=[256, 2048, 8192])
    add("--fractions", type=numbers(float, 0.001, 1.0), default=[0.5, 0.25], help="f: share of tokens that attend")
    add("--mode", choices=MODES, default="train")
    add("--tokens", type=int, default=32768, help="in a batch: tokens / length rows (decode: rows and context)")
    add("--size", choices=("400m", "16m", "tiny"), default="400m")
    add("--layers", type=int, help="another depth, for a quick look; bounds are for this depth")
    add("--turns", type=int, default=10, help="turns of baseline and contender")
    add("--steps", type=int, default=3, help="steps a turn")
    add("--compile", action=argparse.BooleanOptionalAction, default=True)
    add("--whole", action="store_true", help="compile a model as one graph, not layer by layer: minutes at 28 layers")
    add("--graphs", action=argparse.BooleanOptionalAction, default=True, help="CUDA graphs, as in training on one GPU")
    add("--apart", action="store_true", help="time models one after the other, each alone on the device, not in turns")
    add("--own-routes", action="store_true", help="decode: models route themselves, calibrated for f")
    add("--sdpa", choices=tuple(BACKENDS), help="attention on CUDA (default: the faster at each length)")
    add("--csv", type=Path, help="a new file for the rows")
    add("--picture", type=Path, help="a new SVG of speed-up against length")
    add("--peer", type=Path, metavar="FOLDER", action="append", default=[], help="a folder with peer.py")
    return made.parse_args(arguments)


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
    if options.own_routes and options.mode != "decode":
        raise InputError("--own-routes needs --mode decode: elsewhere routes are forced.")
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
    limits: dict[str, Any] = {"recompile_limit": 1024, "accumulated_recompile_limit": 4096}
    table = Table(options.csv)
    try:
        with precision("high"), torch._dynamo.config.patch({**limits, "fail_on_recompile_limit_hit": True}):
            return measure(options, registry, table)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    finally:
        table.close()


if __name__ == "__main__":
    sys.exit(main())
