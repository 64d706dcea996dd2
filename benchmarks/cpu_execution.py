"""Sparse against dense execution of the same model, in turns, uncompiled on a CPU.

    OMP_NUM_THREADS=2 python benchmarks/cpu_execution.py --size 16m --mode prefill --lengths 16,64,256,1024 --rows 1,2

Each cell is dense time / sparse time (or auto's, `--execution auto`) with the same weights, tokens and forced routes:
above 1 sparse execution wins.
Whether the two agree is `speed.py`'s business, which checks parity before it times anything.
"""

import argparse
import sys
from functools import partial

import torch

from chiar.errors import InputError, unknown_name
from contenders import REGISTRY
from jobs import Job
from lap import JOBS
from models import Setting, TimedChiar, exact_routes
from timing import WARM_UP, Times, interleave, numbers, parser, speedup

SPARSE = ("routed", "routed-light", "routed-all-keys", "v3", "v3-routed-keys")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    made = parser(__doc__, device=False)
    add = made.add_argument
    add("--only", nargs="+", default=list(SPARSE), metavar="NAME", help="contenders of speed.py")
    add("--execution", choices=("sparse", "auto"), default="sparse", help="what dense execution is compared with")
    add("--size", choices=("400m", "16m", "tiny"), default="16m")
    add("--layers", type=int, help="another depth")
    add("--mode", choices=("train", "prefill"), default="prefill")
    add("--lengths", type=numbers(int, 2, 1 << 20), default=[16, 64, 256, 1024])
    add("--rows", type=numbers(int, 1, 1 << 16), default=[1, 2], help="rows of the batch")
    add("--fractions", type=numbers(float, 0.001, 1.0), default=[0.25, 0.5, 0.9])
    add("--turns", type=int, default=9)
    add("--steps", type=int, default=2, help="steps a turn")
    return made.parse_args(arguments)


def compare(job: Job, ways: tuple[str, str], turns: int, steps: int) -> list[Times]:
    """Both executions of one model in turns."""
    model = job.model
    assert isinstance(model, TimedChiar)

    def step(way: str) -> None:
        model.language.model.config.execution = way
        job.step()

    both = [partial(step, way) for way in ways]
    for one in both * WARM_UP:
        one()
    return interleave(both, "cpu", turns, steps)


def measure(options: argparse.Namespace) -> None:
    print(f"{options.mode}, {options.size}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    print(f"dense ms / {options.execution} ms = speed-up; one column for each f\n")
    print("| contender | T | rows |" + "".join(f" f = {fraction:g} |" for fraction in options.fractions))
    print("|---|---|---|" + "---|" * len(options.fractions))
    for name in options.only:
        torch.manual_seed(0)
        model = REGISTRY[name].build(Setting(options.size, options.layers, 0, 0.5), "sparse", False)
        assert isinstance(model, TimedChiar)
        model.train(options.mode == "train")
        for length in options.lengths:
            for rows in options.rows:
                ids_BT = torch.randint(0, model.config.vocab_size, (rows, length))
                job = JOBS[options.mode](model, model, ids_BT, {}, "cpu")
                cells = []
                for fraction in options.fractions:
                    attending = Setting(options.size, options.layers, length, fraction).attending
                    job.routes = exact_routes(rows, length, attending, model.routed_layers, "cpu")
                    dense, sparse = compare(job, ("dense", options.execution), options.turns, options.steps)
                    found = dense.percentiles()[1], sparse.percentiles()[1]
                    cells.append(f"{found[0]:.1f} / {found[1]:.1f} = {speedup(dense, sparse):.2f}")
                print(f"| `{name}` | {length} | {rows} | " + " | ".join(cells) + " |", flush=True)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    try:
        for name in options.only:
            if name not in SPARSE:
                raise unknown_name("sparse contender", name, SPARSE)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    measure(options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
