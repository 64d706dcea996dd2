"""How many kernels does a decoding step launch, and which?

    python benchmarks/decode_kernels.py [--only routed] [--fraction 0.5] [--own-routes]

One row behind a prompt, captured and compiled as `speed.py --mode decode` times it, under torch's profiler. Counts are
a step's. On a CPU (`--device cpu --size tiny`) operators are counted instead, uncompiled.
"""

import argparse
import sys

import torch
from torch.profiler import ProfilerActivity, profile

from chiar import presets
from contenders import BASELINE, REGISTRY
from jobs import DecodeJob
from models import Setting, exact_routes, prepare_decoding
from timing import parser, say, synchronize

WARM_UP, STEPS = 20, 4


def main(arguments: list[str] | None = None) -> int:
    made = parser(__doc__)
    add = made.add_argument
    add("--only", choices=tuple(REGISTRY), default="routed", help="beside the baseline")
    add("--size", choices=("400m", "16m", "tiny"), default="400m")
    add("--length", type=int, default=2048, help="tokens in the cache")
    add("--fraction", type=float, default=0.5)
    add("--own-routes", action="store_true", help="models route themselves")
    add("--rows", type=int, default=30, help="lines to print for a model")
    options = made.parse_args(arguments)
    for name, fraction in ((BASELINE, 1.0), (options.only, options.fraction)):
        count(name, fraction, options)
    return 0


def count(name: str, fraction: float, options: argparse.Namespace) -> None:
    """Profile a few steps of one model."""
    contender, on_gpu = REGISTRY[name], options.device == "cuda"
    config = presets.get(f"{BASELINE}-{options.size}")
    setting = Setting(options.size, len(config.layer_types or []), options.length, fraction)
    with torch.device(options.device):
        model = contender.build(setting, contender.execution, False).to(options.device).eval()
        ids_BT = torch.randint(0, config.vocab_size, (1, options.length))
    prepare_decoding(model, on_gpu, on_gpu)
    job = DecodeJob(model, model, ids_BT, {}, options.device, on_gpu)
    job.force(exact_routes(1, options.length, setting.attending, model.routed_layers, options.device))
    job.attending, job.most, job.own = fraction, WARM_UP + STEPS, options.own_routes
    job.start()
    for _ in range(WARM_UP):
        job.step()
    synchronize(options.device)
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as seen:
        for _ in range(STEPS):
            job.step()
        synchronize(options.device)
    events = sorted(seen.key_averages(), key=lambda e: -(e.device_time_total if on_gpu else e.self_cpu_time_total))
    launched = [e for e in events if e.device_time_total > 0] if on_gpu else events
    chosen = job.chosen()
    own = "" if chosen is None else f" (own routes: {chosen:.3f})"
    say(f"\n{name}, f {fraction:g}{own}: {sum(e.count for e in launched) / STEPS:.1f} a step")
    for event in launched[: options.rows]:
        time = event.device_time_total if on_gpu else event.self_cpu_time_total
        say(f"{time / STEPS / 1e3:9.3f} ms {event.count / STEPS:7.1f} × {event.key[:140]}")


if __name__ == "__main__":
    sys.exit(main())
