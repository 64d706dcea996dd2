"""Prefill and generation of a byte model with a dark stack against the dense model of its depth, in turns.

    OMP_NUM_THREADS=2 python benchmarks/byte_decoding.py --preset v5-16m --rows 1 --prompt 4096
    python benchmarks/byte_decoding.py --device cuda --preset v5-400m --rows 64 --prompt 8192 --compile
    OMP_NUM_THREADS=2 python benchmarks/byte_decoding.py --blt --prompt 512 --new 20

Weights are random, so routes are forced unless --own-routes is given: exactly a fraction f of the bytes of every row
is dark, evenly spread, with another offset in every row. On CUDA models are bf16 and steps captured as CUDA graphs.
With --blt transformers' `generate` is timed instead, with the preset and with a BltForCausalLM that has the same number
of layers outside and inside; each routes itself, and BLT has no cache, which does not work there. On CUDA the peak of
each is that of its first generation, including captures, with both models on the device.
"""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from byte_models import BltModel, source_bytes
from chiar import presets
from chiar.config import ChiarConfig
from chiar.errors import InputError
from chiar.model.cache import ChiarCache
from chiar.model.modeling import ChiarForCausalLM
from timing import describe_environment, echo, exit_code, interleave, make_parser, speedup, synchronize
from workloads import tensors


def dark_bytes(rows: int, first: int, count: int, fraction: float, device: str) -> Tensor:
    """(B, T): exactly a fraction f of a long text, evenly spread, with another offset in every row."""
    position_BT = torch.arange(first, first + count).double() + (torch.arange(rows) / rows / fraction)[:, None]
    return ((position_BT + 1) * fraction).floor().sub((position_BT * fraction).floor()).long().to(device)


def peak_of(work: Callable[[], object], device: str) -> int:
    """Peak memory of the device during a call, in bytes, whoever holds it; 0 on a CPU."""
    if device != "cuda":
        work()
        return 0
    torch.cuda.reset_peak_memory_stats()
    work()
    synchronize(device)
    return torch.cuda.max_memory_allocated()


class Decoder:
    """A model with its cache."""

    cache: ChiarCache

    def __init__(self, config: ChiarConfig, options: argparse.Namespace) -> None:
        self.others_bytes = torch.cuda.memory_allocated() if options.device == "cuda" else 0
        torch.manual_seed(0)
        model = ChiarForCausalLM(config).eval().to(options.device)
        self.model, self.options, self.position = model.bfloat16() if options.device == "cuda" else model, options, 0
        if options.fast or options.device == "cuda":
            self.model.enable_fast_decoding(compile=options.compile)

    def routes(self, count: int) -> dict[int, Tensor] | None:
        options, config = self.options, self.model.config
        if options.own_routes or not config.stacks:
            return None
        shares = [options.fraction] * len(config.stacks) if options.fraction else config.layer_fractions() or [0.2]
        routes = (dark_bytes(options.rows, self.position, count, share, options.device) for share in shares)
        return dict(zip(config.stacks, routes, strict=True))

    def feed(self, ids_BT: Tensor, routes: dict[int, Tensor] | None) -> Tensor:
        arguments: dict[str, Any] = {"past_key_values": self.cache, "forced_routes": routes, "logits_to_keep": 1}
        if ids_BT.shape[1] == 1:
            arguments.pop("logits_to_keep")
        logits_B1V = self.model(ids_BT, **arguments).logits
        self.position += ids_BT.shape[1]
        return logits_B1V.argmax(-1)

    @torch.no_grad()
    def prefill(self) -> None:
        options, self.position = self.options, 0
        generator = torch.Generator().manual_seed(1)
        ids_BT = torch.randint(0, 256, (options.rows, options.prompt), generator=generator).to(options.device)
        self.forget()
        self.next_B1 = self.feed(ids_BT, self.routes(options.prompt))

    @torch.no_grad()
    def generate(self) -> None:
        routes = self.routes(self.options.new)
        for n in range(self.options.new):
            forced = None if routes is None else {i: choice_BT[:, n : n + 1] for i, choice_BT in routes.items()}
            self.next_B1 = self.feed(self.next_B1, forced)

    def forget(self) -> None:
        """Free the cache, whose memory the next prompt of either model may need."""
        self.cache = ChiarCache(len(self.model.model.layers))

    def prefill_only(self) -> None:
        self.prefill()
        self.forget()

    def cache_bytes(self) -> int:
        return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors(self.cache)}.values())

    def peak(self) -> int:
        """Peak memory of prefill in bytes, weights and cache included, other models excluded."""
        return peak_of(self.prefill, self.options.device) - self.others_bytes


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("--preset", default="v5-16m", help="a preset with dark layers")
    add("--rows", type=int, default=1)
    add("--prompt", type=int, default=4096, help="bytes of prompt per row")
    add("--new", type=int, default=50, help="bytes generated per row and turn")
    add("--fraction", type=float, help="f (default: the preset's)")
    add("--own-routes", action="store_true", help="let the untrained router decide")
    add("--fast", action="store_true", help="fast decoding on a CPU too")
    add("--compile", action="store_true", help="compile the layers of a fast step")
    add("--turns", type=int, default=7)
    add("--blt", action="store_true", help="compare with BLT, both by transformers' generate")
    return parser.parse_args(arguments)


def measure(options: argparse.Namespace) -> None:
    config = presets.get(options.preset)
    layers = len(config.layer_types or [])
    if not config.stacks:
        raise InputError(f"{options.preset} has no dark layers: choose v5-tiny, v5-16m, v5-50m or v5-400m.")
    fraction = options.fraction or config.target_fraction
    routes = "its own routes" if options.own_routes else f"routes forced at f = {fraction}"
    model = f"{options.preset} ({describe_environment(options.device)})"
    echo(f"{model}, {options.rows} rows, prompt {options.prompt}, {routes}")
    dense = presets.get(options.preset, layer_types=["attention"] * layers, window=None)
    names, decoders, peaks = [f"dense, {layers} layers", options.preset], [], []
    for one in (dense, config):
        decoders.append(Decoder(one, options))
        peaks.append(decoders[-1].peak())
    for decoder in decoders:
        decoder.generate()  # warms up, captures and compiles
    timed = partial(interleave, device=options.device, turns=options.turns, per_turn=1)
    generation = timed([decoder.generate for decoder in decoders])
    cache_bytes = [decoder.cache_bytes() for decoder in decoders]
    for decoder in decoders:
        decoder.forget()
    prefill = timed([decoder.prefill_only for decoder in decoders])
    generated_bytes, prompt_bytes = options.rows * options.new, options.rows * options.prompt
    echo(
        "| model | generated bytes/s | ms per step | prefill ms | prefill bytes/s | cache MB |"
        + " peak MB |" * bool(peaks[0])
    )
    echo("|---|---|---|---|---|---|" + "---|" * bool(peaks[0]))
    for i, name in enumerate(names):
        generate_ms, prefill_ms = generation[i].median, prefill[i].median
        cells = f"{1e3 * generated_bytes / generate_ms:.0f}", f"{generate_ms / options.new:.2f}"
        cells = *cells, f"{prefill_ms:.0f}", f"{1e3 * prompt_bytes / prefill_ms:.0f}"
        cells = *cells, f"{cache_bytes[i] / 1e6:.1f}", *([f"{peaks[i] / 1e6:.0f}"] if peaks[i] else [])
        echo(f"| {name} | " + " | ".join(cells) + " |")
    speedups = f"generation {speedup(*generation):.2f} ×, prefill {speedup(*prefill):.2f} × (median over turns)"
    echo(f"\n{speedups}, cache {cache_bytes[1] / cache_bytes[0]:.1%}")


def compare_with_blt(options: argparse.Namespace) -> None:
    """Time and peak memory of whole `generate` calls, prefill included."""
    config, ids_BT = presets.get(options.preset), source_bytes(options.rows, options.prompt).to(options.device)
    torch.manual_seed(0)
    ours = ChiarForCausalLM(config).to(options.device).train()
    ours.model(ids_BT)  # the first pass in training sets the threshold
    blt = BltModel(config, options.prompt + options.new).model.to(options.device)
    if options.device == "cuda":
        ours, blt = ours.bfloat16(), blt.bfloat16()
        ours.enable_fast_decoding()

    def generate(model: Any, **kwargs: Any) -> None:
        model.generate(ids_BT, max_new_tokens=options.new, do_sample=False, eos_token_id=None, **kwargs)

    both = [partial(generate, ours.eval()), partial(generate, blt.eval(), use_cache=False)]
    peaks = [peak_of(call, options.device) for call in both]
    times = interleave(both, options.device, options.turns, 1)
    echo(f"{options.preset} ({describe_environment(options.device)}), {options.rows} rows")
    for name, time, peak in zip((options.preset, "BltForCausalLM, no cache"), times, peaks, strict=True):
        rate = 1e3 * options.rows * options.new / time.median
        memory = f", peak {peak / 1e6:.0f} MB with both models on the device" * bool(peak)
        echo(f"{name}: {time.median:.0f} ms for {options.new} bytes after {options.prompt}, {rate:.1f} bytes/s{memory}")
    echo(f"{speedup(times[1], times[0]):.1f} times as fast (median over turns)")


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    return exit_code(partial(compare_with_blt if options.blt else measure, options))


if __name__ == "__main__":
    sys.exit(main())
