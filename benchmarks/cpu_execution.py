"""Sparse against dense execution of the same model on a CPU, uncompiled, in turns.

    OMP_NUM_THREADS=2 python benchmarks/cpu_execution.py --size 16m --mode prefill --lengths 16,64,256,1024 --rows 1,2

Each cell is dense time / sparse time (with `--execution auto`: / auto time) for the same weights, tokens and forced
routes; above 1 sparse execution is faster. That the two agree is checked by `speed.py`.
"""

import argparse
import sys
from functools import partial

import torch

from chiar.errors import InputError, unknown_name
from comparison import WORKLOADS
from contenders import REGISTRY
from models import Setting, TimedChiar, exact_routes
from timing import WARM_UP, Times, interleave, make_parser, numbers, speedup
from workloads import Workload

SPARSE = ("routed", "routed-light", "routed-all-keys", "v3", "v3-routed-keys")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = make_parser(__doc__, device=False)
    add = parser.add_argument
    add("--only", nargs="+", default=list(SPARSE), metavar="NAME", help="contenders of speed.py")
    add("--execution", choices=("sparse", "auto"), default="sparse", help="execution to compare with dense")
    add("--size", choices=("400m", "16m", "tiny"), default="16m")
    add("--layers", type=int, help="number of layers, if not the preset's")
    add("--mode", choices=("train", "prefill"), default="prefill")
    add("--lengths", type=numbers(int, 2, 1 << 20), default=[16, 64, 256, 1024])
    add("--rows", type=numbers(int, 1, 1 << 16), default=[1, 2], help="rows per batch")
    add("--fractions", type=numbers(float, 0.001, 1.0), default=[0.25, 0.5, 0.9])
    add("--turns", type=int, default=9)
    add("--steps", type=int, default=2, help="steps per turn")
    return parser.parse_args(arguments)


def compare(workload: Workload, executions: tuple[str, str], turns: int, steps: int) -> list[Times]:
    """Time two executions of one model in turns."""
    model = workload.model
    assert isinstance(model, TimedChiar)

    def step(execution: str) -> None:
        model.language.model.config.execution = execution
        workload.step()

    both = [partial(step, execution) for execution in executions]
    for warm_up in both * WARM_UP:
        warm_up()
    return interleave(both, "cpu", turns, steps)


def measure(options: argparse.Namespace) -> None:
    print(f"{options.mode}, {options.size}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    print(f"dense ms / {options.execution} ms = speed-up; one column per f\n")
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
                workload = WORKLOADS[options.mode](model, model, ids_BT, {}, "cpu")
                cells = []
                for fraction in options.fractions:
                    attending = Setting(options.size, options.layers, length, fraction).attending
                    workload.routes = exact_routes(rows, length, attending, model.routed_layers, "cpu")
                    dense, sparse = compare(workload, ("dense", options.execution), options.turns, options.steps)
                    medians = dense.percentiles()[1], sparse.percentiles()[1]
                    cells.append(f"{medians[0]:.1f} / {medians[1]:.1f} = {speedup(dense, sparse):.2f}")
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
