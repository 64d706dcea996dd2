"""A byte model with a dark stack against the dense model of its depth: reading a prompt and writing, in turns.

    OMP_NUM_THREADS=2 python benchmarks/byte_decoding.py --preset v5-16m --rows 1 --prompt 4096
    python benchmarks/byte_decoding.py --device cuda --preset v5-400m --rows 64 --prompt 8192 --compile
    OMP_NUM_THREADS=2 python benchmarks/byte_decoding.py --blt --prompt 512 --new 20

Weights are random, so routes are forced unless --own-routes is given: of every row exactly a share f of the bytes is
dark, evenly spread, and rows take turns. On CUDA models are bf16, and steps are captured as CUDA graphs. With --blt
transformers' `generate` writes instead, with the preset and with a BltForCausalLM of as many layers around and inside,
each routing itself; BLT without a cache, which it cannot make there. The peak printed of each on CUDA is the most
that was allocated in its first generation, captures included, with both models on the device.
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
from jobs import tensors
from timing import exit_code, header, interleave, parser, say, speedup, synchronize


def dark_bytes(rows: int, first: int, count: int, fraction: float, device: str) -> Tensor:
    """(B, T): exactly f of a long text, evenly spread; each row begins elsewhere."""
    place_BT = torch.arange(first, first + count).double() + (torch.arange(rows) / rows / fraction)[:, None]
    return ((place_BT + 1) * fraction).floor().sub((place_BT * fraction).floor()).long().to(device)


def peak_of(work: Callable[[], object], device: str) -> int:
    """Bytes of the device that are held at most while it is done, by whatever there is; 0 on a CPU."""
    if device != "cuda":
        work()
        return 0
    torch.cuda.reset_peak_memory_stats()
    work()
    synchronize(device)
    return torch.cuda.max_memory_allocated()


class Contender:
    """One model with the text it has read and written."""

    cache: ChiarCache

    def __init__(self, config: ChiarConfig, options: argparse.Namespace) -> None:
        self.held = torch.cuda.memory_allocated() if options.device == "cuda" else 0
        torch.manual_seed(0)
        model = ChiarForCausalLM(config).eval().to(options.device)
        self.model, self.options, self.at = model.bfloat16() if options.device == "cuda" else model, options, 0
        if options.fast or options.device == "cuda":
            self.model.enable_fast_decoding(compile=options.compile)

    def routes(self, count: int) -> dict[int, Tensor] | None:
        options, config = self.options, self.model.config
        if options.own_routes or not config.stacks:
            return None
        shares = [options.fraction] * len(config.stacks) if options.fraction else config.layer_fractions() or [0.2]
        made = (dark_bytes(options.rows, self.at, count, share, options.device) for share in shares)
        return dict(zip(config.stacks, made, strict=True))

    def feed(self, ids_BT: Tensor, routes: dict[int, Tensor] | None) -> Tensor:
        given: dict[str, Any] = {"past_key_values": self.cache, "forced_routes": routes, "logits_to_keep": 1}
        if ids_BT.shape[1] == 1:
            given.pop("logits_to_keep")
        logits_B1V = self.model(ids_BT, **given).logits
        self.at += ids_BT.shape[1]
        return logits_B1V.argmax(-1)

    @torch.no_grad()
    def read(self) -> None:
        options, self.at = self.options, 0
        generator = torch.Generator().manual_seed(1)
        ids_BT = torch.randint(0, 256, (options.rows, options.prompt), generator=generator).to(options.device)
        self.cache = ChiarCache(len(self.model.model.layers))
        self.next_B1 = self.feed(ids_BT, self.routes(options.prompt))

    @torch.no_grad()
    def write(self) -> None:
        routes = self.routes(self.options.new)
        for n in range(self.options.new):
            forced = None if routes is None else {i: choice_BT[:, n : n + 1] for i, choice_BT in routes.items()}
            self.next_B1 = self.feed(self.next_B1, forced)

    def cache_bytes(self) -> int:
        return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors(self.cache)}.values())

    def peak(self) -> int:
        """Bytes of the device that reading takes, with weights and cache, without what others hold."""
        return peak_of(self.read, self.options.device) - self.held


def parse(arguments: list[str] | None) -> argparse.Namespace:
    made = parser(__doc__)
    add = made.add_argument
    add("--preset", default="v5-16m", help="a preset with dark layers")
    add("--rows", type=int, default=1)
    add("--prompt", type=int, default=4096, help="bytes of each row that are read")
    add("--new", type=int, default=50, help="bytes of each row that are written in a turn")
    add("--fraction", type=float, help="f; the preset's own when not given")
    add("--own-routes", action="store_true", help="let the untrained router decide")
    add("--fast", action="store_true", help="fixed steps on a CPU too")
    add("--compile", action="store_true", help="compile the layers of a fixed step")
    add("--turns", type=int, default=7)
    add("--blt", action="store_true", help="beside BLT, both by transformers' generate")
    return made.parse_args(arguments)


def measure(options: argparse.Namespace) -> None:
    config = presets.get(options.preset)
    layers = len(config.layer_types or [])
    if not config.stacks:
        raise InputError(f"{options.preset} has no dark layers: take v5-tiny, v5-16m, v5-50m or v5-400m.")
    routes = (
        "its own routes" if options.own_routes else f"routes forced at f = {options.fraction or config.target_fraction}"
    )
    say(f"{options.preset} ({header(options.device)}), {options.rows} rows, prompt {options.prompt}, {routes}")
    dense = presets.get(options.preset, layer_types=["attention"] * layers, window=None)
    names, both, peaks = [f"dense, {layers} layers", options.preset], [], []
    for one in (dense, config):
        both.append(Contender(one, options))
        peaks.append(both[-1].peak())
    for contender in both:
        contender.write()  # warms up, captures and compiles
    timed = partial(interleave, device=options.device, turns=options.turns, per_turn=1)
    writing = timed([contender.write for contender in both])
    held = [contender.cache_bytes() for contender in both]
    reading = timed([contender.read for contender in both])
    amount = options.rows * options.new, options.rows * options.prompt
    say(
        "| model | written bytes/s | ms a step | prompt read in ms | read bytes/s | cache MB |"
        + " peak MB |" * bool(peaks[0])
    )
    say("|---|---|---|---|---|---|" + "---|" * bool(peaks[0]))
    for i, name in enumerate(names):
        write, read = writing[i].median, reading[i].median
        cells = (
            f"{1e3 * amount[0] / write:.0f}",
            f"{write / options.new:.2f}",
            f"{read:.0f}",
            f"{1e3 * amount[1] / read:.0f}",
        )
        cells = *cells, f"{held[i] / 1e6:.1f}", *([f"{peaks[i] / 1e6:.0f}"] if peaks[i] else [])
        say(f"| {name} | " + " | ".join(cells) + " |")
    written, read_ = speedup(*writing), speedup(*reading)
    say(f"\nwriting {written:.2f} ×, reading {read_:.2f} × (median over turns), cache {held[1] / held[0]:.1%}")


def beside_blt(options: argparse.Namespace) -> None:
    """Seconds and peak memory of whole calls, the prompt read with them."""
    config, ids_BT = presets.get(options.preset), source_bytes(options.rows, options.prompt).to(options.device)
    torch.manual_seed(0)
    ours = ChiarForCausalLM(config).to(options.device).train()
    ours.model(ids_BT)  # a first pass in training sets the threshold
    blt = BltModel(config, options.prompt + options.new).model.to(options.device)
    if options.device == "cuda":
        ours, blt = ours.bfloat16(), blt.bfloat16()
        ours.enable_fast_decoding()

    def write(model: Any, **how: Any) -> None:
        model.generate(ids_BT, max_new_tokens=options.new, do_sample=False, eos_token_id=None, **how)

    both = [partial(write, ours.eval()), partial(write, blt.eval(), use_cache=False)]
    peaks = [peak_of(one, options.device) for one in both]
    times = interleave(both, options.device, options.turns, 1)
    say(f"{options.preset} ({header(options.device)}), {options.rows} rows")
    for name, time, peak in zip((options.preset, "BltForCausalLM, no cache"), times, peaks, strict=True):
        rate = 1e3 * options.rows * options.new / time.median
        held = f", peak {peak / 1e6:.0f} MB with both models on the device" * bool(peak)
        say(f"{name}: {time.median:.0f} ms for {options.new} bytes behind {options.prompt}, {rate:.1f} bytes/s{held}")
    say(f"{speedup(times[1], times[0]):.1f} times as fast (median over turns)")


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    return exit_code(partial(beside_blt if options.blt else measure, options))


if __name__ == "__main__":
    sys.exit(main())
