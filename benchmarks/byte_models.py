"""Do the FLOPs saved by a dark stack save time? Training and prefill of v5, against dense byte models and BLT.

    python benchmarks/byte_models.py --device cuda --lengths 2048,8192 --csv bytes.csv
    python benchmarks/byte_models.py --device cpu --size tiny --lengths 256 --tokens 2048

Timed in turns in one process: `dense`, attention in all layers; `v5`, which routes itself (in training f is exact);
`equal`, the dense model closest to v5 in counted FLOPs; `rows`, v5 packed in padded rows of 1.3 f T places; `blt`,
transformers' BltForCausalLM with the same number of layers outside and inside and given patches of 1/f bytes. Weights
are random, the text is the source of the standard library. Layers are compiled; passes that do not synchronise with the
host are recorded as CUDA graphs.
"""

import argparse
import csv
import gc
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from chiar import presets
from chiar.config import ChiarConfig
from chiar.kernels.linear_cross_entropy import linear_cross_entropy
from chiar.layers.context import Memory, TokenContext
from chiar.layers.dark import DarkStack, Layout, PackedLayout
from chiar.model.modeling import ChiarForCausalLM
from chiar.routing.flops import count_flops
from chiar.training.compiling import GraphedPasses
from timing import (
    WARM_UP,
    echo,
    environment,
    forbid_sync,
    interleave,
    make_parser,
    numbers,
    ratios,
    speedup,
    synchronize,
)
from workloads import autocast

NAMES = ("dense", "equal", "v5", "rows", "blt")


def source_bytes(rows: int, length: int) -> Tensor:
    """Real text: random bytes would all be equally uncertain."""
    text, needed = bytearray(), rows * length
    for path in sorted(Path(argparse.__file__).parent.glob("*.py")):
        text += path.read_bytes()
        if len(text) >= needed:
            break
    repeated = bytes(text) * (needed // len(text) + 1)
    return torch.frombuffer(bytearray(repeated[:needed]), dtype=torch.uint8).view(rows, length).long()


def dense_like(config: ChiarConfig, layers: int) -> ChiarConfig:
    """A dense model of the same design."""
    fields = {name: getattr(config, name) for name in ("hidden_size", "num_attention_heads", "vocab_size")}
    design = {name: value for name, value in presets.V5.items() if name not in ("router", "target_fraction")}
    return ChiarConfig(**{**design, **fields, "layer_types": ["attention"] * layers})


def equal_layers(config: ChiarConfig, length: int) -> int:
    """The number of dense layers closest to the model in FLOPs."""
    target = count_flops(config, length).total
    costs = {n: count_flops(dense_like(config, n), length).total for n in range(1, len(config.layer_types or []) + 1)}
    return min(costs, key=lambda n: abs(costs[n] - target))


def pack_in_rows(stack: DarkStack) -> None:
    """Pack into rows with room for 1.3 times the target share of dark bytes; excess dark bytes become light."""

    def make_layout(x_BTD: Tensor, dark_BT: Tensor, context: TokenContext, memory: Memory) -> Layout:
        room = min(x_BTD.shape[1], -(-int(1.3 * stack.share * x_BTD.shape[1]) // 16) * 16)
        inner = replace(context, keep_entropy=False, threshold=None, share=None)
        return PackedLayout(dark_BT & (dark_BT.cumsum(1) <= room), inner, stack, room, room, in_rows=True)

    stack.make_layout = make_layout  # type: ignore[method-assign]


class BytesModel(nn.Module):
    """A single call: in training the loss, including the early head's; in prefill the logits of the last byte."""

    def __init__(self, config: ChiarConfig) -> None:
        super().__init__()
        self.config, self.language = config, ChiarForCausalLM(config)

    def forward(self, ids_BT: Tensor, targets_BT: Tensor | None, routes: Any = None) -> tuple[Tensor, None]:
        model, head = self.language.model, self.language.lm_head
        decoded = model(ids_BT, output_routes=self.training)
        if targets_BT is None:
            return head(decoded.last_hidden_state[:, -1]), None
        loss = linear_cross_entropy(decoded.last_hidden_state.flatten(0, 1), head.weight, targets_BT.flatten())
        return loss + model.early_loss(decoded, targets_BT, head), None

    def compile_parts(self, trains: bool) -> None:
        """Compile each part for its shape; only the number of dark bytes of a prompt is dynamic."""
        for kind, layer in zip(self.config.layer_types or [], self.language.model.layers, strict=True):
            layer.compile(dynamic=kind == "dark" and not trains)
        for stack in self.language.model.dark_stacks:
            stack.compile(dynamic=False if trains else None)

    def flops(self, length: int) -> float:
        return count_flops(self.config, length).total


class BltModel(nn.Module):
    def __init__(self, config: ChiarConfig, length: int) -> None:
        super().__init__()
        from transformers import BltConfig, BltForCausalLM

        kinds, width, heads = config.layer_types or [], config.hidden_size, config.num_attention_heads
        outer = kinds.index("dark")
        size = {"hidden_size": width, "num_attention_heads": heads, "intermediate_size": 4 * width * 2 // 3}
        size["max_position_embeddings"] = length
        local = {**size, "num_hidden_layers": outer, "hidden_size_global": width, "vocab_size": 260}
        blt = BltConfig(
            encoder_config={**local}, decoder_config={**local, "cross_attn_all_layers": False},
            global_config={**size, "num_hidden_layers": kinds.count("dark")}, max_position_embeddings=length,
            patcher_config={**size, "num_hidden_layers": outer, "vocab_size": 260},
            encoder_hash_byte_group_size=[3], encoder_hash_byte_group_vocab=4096, vocab_size=260,
        )  # fmt: skip
        self.model, self.patch = BltForCausalLM(blt), round(1 / float(config.target_fraction or 0.2))

    def forward(self, ids_BT: Tensor, targets_BT: Tensor | None, routes: Any = None) -> tuple[Tensor, None]:
        (B, T), patch = ids_BT.shape, self.patch
        lengths = [1, *[patch] * ((T - 1) // patch)]
        lengths += [T - sum(lengths)] if sum(lengths) < T else []
        patches = torch.tensor(lengths, device=ids_BT.device).expand(B, -1)
        logits = self.model(ids_BT, patch_lengths=patches, use_cache=False).logits
        if targets_BT is None:
            return logits[:, -1], None
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets_BT.flatten()), None

    def compile_parts(self, trains: bool) -> None:
        inner = self.model.model
        for part in (inner.local_encoder, inner.global_transformer, inner.local_decoder):
            for layer in part.layers:
                layer.compile(dynamic=False)

    def flops(self, length: int) -> float | None:
        return None


@dataclass
class Timed:
    """A model with its input, ready for timing."""

    name: str
    model: Any
    step: Callable[[], object]
    peak_gb: float | None
    execution: str
    synchronizes: bool


def prepare(name: str, options: argparse.Namespace, ids_BT: Tensor) -> Timed:
    device, length, trains = options.device, ids_BT.shape[1], options.mode == "train"
    resident = torch.cuda.memory_allocated() if device == "cuda" else 0
    config = presets.get(
        f"v5-{options.size}", execution="auto", target_fraction=options.fraction, window=options.window
    )
    layers = {"dense": len(config.layer_types or []), "equal": equal_layers(config, length)}
    torch.manual_seed(0)
    with torch.device(device):
        model = BltModel(config, length) if name == "blt" else BytesModel(
            dense_like(config, layers[name]) if name in layers else config
        )  # fmt: skip
    model.train()
    if name in ("v5", "rows"):  # the first pass in training sets the threshold
        with torch.no_grad(), autocast(device):
            model.language.model(ids_BT[: max(1, 8192 // length)])
        state = model.language.model.router_state
        state.updates_L.zero_()
        with torch.no_grad(), autocast(device):
            model.language.model(ids_BT)
    model.train(trains)
    if name == "rows":
        for stack in model.language.model.dark_stacks:
            pack_in_rows(stack)
    if options.compile:
        model.compile_parts(trains)
    targets_BT = ids_BT.roll(-1, 1)

    def train(ids: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
        with autocast(device):
            loss, _ = model(ids, targets)
        loss.backward()
        return (loss.detach(),)

    def prefill(ids: Tensor) -> tuple[Tensor, ...]:
        with torch.no_grad(), autocast(device):
            return (model(ids, None)[0],)

    inputs = (ids_BT, targets_BT) if trains else (ids_BT,)
    run = train if trains else prefill

    def plain() -> None:
        run(*inputs)
        model.zero_grad(set_to_none=True)

    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    if not trains:  # another number of dark bytes, so that it is compiled as dynamic
        run((ids_BT + 1) % 256)
    for _ in range(WARM_UP):
        plain()
    synchronize(device)
    if options.profile:
        profile_kernels(name, plain, device)
    peak = (torch.cuda.max_memory_allocated() - resident) / 1e9 if device == "cuda" else None

    synchronizes = False
    if device == "cuda":
        try:
            with forbid_sync(device):
                plain()
        except RuntimeError as error:
            if "synchroniz" not in str(error):
                raise
            synchronizes = True
            model.zero_grad(set_to_none=True)
    if not (options.graphs and device == "cuda") or synchronizes:
        return Timed(name, model, plain, peak, "launched from Python", synchronizes)
    torch.cuda.empty_cache()  # a recording has its own memory pool
    recorder = GraphedPasses(run, model.parameters() if trains else ())

    def recorded() -> None:
        recorder(*inputs)
        model.zero_grad(set_to_none=True)

    while not recorder.records and recorder.failure is None:
        recorded()
    execution = "a CUDA graph" if recorder.failure is None else f"launched from Python ({recorder.failure})"
    return Timed(name, model, recorded, peak, execution, synchronizes)


def profile_kernels(name: str, step: Callable[[], object], device: str) -> None:
    """Print the most expensive kernels of one step launched from Python."""
    activity = ProfilerActivity.CUDA if device == "cuda" else ProfilerActivity.CPU
    with profile(activities=[activity]) as profiler:
        step()
        synchronize(device)
    time = "self_device_time_total" if device == "cuda" else "self_cpu_time_total"
    rows = sorted(profiler.key_averages(), key=lambda row: -getattr(row, time))
    echo(f"{name}: {sum(getattr(row, time) for row in rows) / 1e3:.2f} ms in all kernels of a step")
    for row in rows[:40]:
        echo(f"  {getattr(row, time) / 1e3:8.3f} ms, {row.count} × {row.key[:90]}")


def measure(options: argparse.Namespace, write: Callable[[dict[str, Any]], None]) -> None:
    for length in options.lengths:
        rows = max(1, options.tokens // length)
        ids_BT = source_bytes(rows, length).to(options.device)
        ready: list[Timed] = []
        for name in options.only:
            try:
                ready.append(prepare(name, options, ids_BT))
                echo(f"{name}, T {length}: ready, {ready[-1].execution}")
            except Exception as error:  # the other models still get their rows
                echo(f"{name}, T {length}: FAILED, {type(error).__name__}: {str(error)[:300]}")
                if options.strict:
                    raise
        times = interleave([timed.step for timed in ready], options.device, options.turns, options.steps)
        times_of = {timed.name: time for timed, time in zip(ready, times, strict=True)}
        flops_of = {timed.name: timed.model.flops(length) for timed in ready}
        for timed in ready:
            time, flops = times_of[timed.name], flops_of[timed.name]
            row: dict[str, Any] = {"mode": options.mode, "model": timed.name, "size": options.size, "length": length}
            row |= {"rows": rows, "fraction": options.fraction, "how": timed.execution, "waits": timed.synchronizes}
            row |= {"layers": len(timed.model.config.layer_types) if flops else None, "flops_per_byte": flops}
            row |= {"ms": time.median, "bytes_per_second": 1e3 * rows * length / time.median, "peak_gb": timed.peak_gb}
            for other in ("dense", "equal"):
                if other in times_of and other != timed.name:
                    faster = speedup(times_of[other], time)
                    row |= {f"against_{other}": faster, f"lowest_against_{other}": min(ratios(times_of[other], time))}
                    if flops:
                        allowed = flops_of[other] / flops
                        row |= {f"allowed_{other}": allowed, f"realised_{other}": faster / allowed}
            write(row)
        del ready, times
        gc.collect()
        torch.compiler.reset()
        if options.device == "cuda":
            torch.cuda.empty_cache()


COLUMNS = (
    *("mode", "model", "size", "layers", "length", "rows", "fraction", "how", "waits", "flops_per_byte", "ms"),
    *("bytes_per_second", "peak_gb", "against_dense", "lowest_against_dense", "allowed_dense", "realised_dense"),
    *("against_equal", "lowest_against_equal", "allowed_equal", "realised_equal"),
    *("hardware", "torch", "cuda", "triton", "python", "commit"),
)


def main(arguments: list[str] | None = None) -> int:
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("--only", nargs="+", choices=NAMES, default=["dense", "equal", "v5", "rows"])
    add("--mode", choices=("train", "prefill"), default="train")
    add("--size", choices=tuple(presets.V5_SIZES), default="400m")
    add("--lengths", type=numbers(int, 2, 1 << 20), default=[2048, 8192])
    add("--tokens", type=int, default=32768, help="bytes per batch: tokens / length rows")
    add("--fraction", type=float, default=0.2, help="f: share of bytes that pass the stack")
    add("--window", type=int, help="attention window of v5's outer layers")
    add("--profile", action="store_true", help="print the kernels of a step of each model")
    add("--turns", type=int, default=6)
    add("--steps", type=int, default=3, help="steps per turn")
    add("--compile", action=argparse.BooleanOptionalAction, default=True)
    add("--graphs", action=argparse.BooleanOptionalAction, default=True)
    add("--strict", action="store_true", help="stop at the first failure")
    add("--csv", type=Path, help="new file for the rows")
    options = parser.parse_args(arguments)
    machine = environment(options.device)
    rows: list[dict[str, Any]] = []

    def write(row: dict[str, Any]) -> None:
        rows.append({**row, **machine})
        cells = (
            f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in row.items()
        )
        echo(", ".join(cells))
        if options.csv is not None:
            with options.csv.open("w", newline="") as file:
                table = csv.DictWriter(file, COLUMNS)
                table.writeheader()
                table.writerows(rows)

    if options.csv is not None and options.csv.exists():
        print(f"error: {options.csv} exists already: choose another name.", file=sys.stderr)
        return 2
    torch.set_float32_matmul_precision("high")
    with torch._dynamo.config.patch({"recompile_limit": 1024, "accumulated_recompile_limit": 4096}):
        measure(options, write)
    return 0


if __name__ == "__main__":
    sys.exit(main())
