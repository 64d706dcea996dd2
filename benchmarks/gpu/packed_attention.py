"""Packed attention on a GPU: is it right, and how fast is it beside dense attention?

    python benchmarks/gpu/packed_attention.py [--repeats 10] [--sweep]

Needs a CUDA device and no test framework; exits with 1 if a comparison fails, before anything is timed. `--sweep`
tries other blocks, warps and stages for each kernel instead of the usual timings.
"""

import argparse
import inspect
import statistics
import sys
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from chiar.kernels.packed_attention import packed_attention, visible_counts

say = partial(print, flush=True)

HEADS, HEAD = 16, 64
SHAPES = [(128, 256), (16, 2048), (4, 8192)]
FRACTIONS = (1.0, 0.5, 0.25)
NAMES = ("out", "∂q", "∂k", "∂v")
# lengths of rows, fraction of queries, heads, head size, dtype, unused places.
CASES = [
    ([1, 2, 3], 1.0, 2, 64, "bfloat16", 0),
    ([256, 0, 200, 1, 77], 1.0, 4, 64, "bfloat16", 100),
    ([256, 0, 200, 1, 77], 0.4, 4, 64, "bfloat16", 1000),
    ([300, 129, 511], 0.5, 2, 32, "bfloat16", 77),
    ([300, 129, 511], 0.5, 2, 128, "float16", 77),
    ([2000, 0, 700], 1.0, 4, 64, "bfloat16", 0),
    ([2000, 0, 700], 0.5, 4, 64, "bfloat16", 1300),
    ([1999, 13, 700], 0.1, 4, 64, "float16", 3000),
    ([1500, 800], 0.5, 2, 128, "bfloat16", 11),
    ([1500, 800], 0.5, 2, 32, "bfloat16", 11),
    ([300, 129, 40], 0.5, 2, 64, "float32", 50),
    ([90, 33], 0.5, 2, 48, "bfloat16", 5),
]
SWEEP = {
    "forward": [(128, 128, 4, 3), (128, 128, 8, 3), (128, 64, 4, 3), (128, 64, 8, 3), (64, 128, 4, 3), (64, 64, 4, 3)],
    "queries": [(128, 64, 8, 3), (128, 64, 4, 3), (64, 64, 4, 3), (64, 128, 4, 2), (128, 32, 4, 3), (128, 128, 8, 2)],
    "keys": [(64, 128, 8, 3), (64, 128, 8, 2), (64, 64, 4, 3), (64, 64, 4, 2), (32, 128, 8, 3), (32, 64, 4, 3)],
}


class Example:
    """Packed inputs at full capacity; what lies behind the last query (and routed key) is NaN."""

    def __init__(self, lengths: list[int], fraction: float, keys: str, H: int, d: int, dtype: str, spare: int) -> None:
        generator = torch.Generator("cuda").manual_seed(0)
        chosen = [torch.rand(n, generator=generator, device="cuda") < fraction for n in lengths]
        positions = [x.nonzero().squeeze(1) for x in chosen]
        self.query_rows, position = offsets([len(x) for x in positions]), torch.cat(positions).int()
        self.key_rows, key_position = self.query_rows, position
        if keys == "all":
            self.key_rows = offsets(lengths)
            key_position = torch.cat([torch.arange(n, device="cuda") for n in lengths]).int()
        self.queries, self.keys = len(position), len(key_position)
        # Where all tokens could be queries the capacity is the number of tokens: nothing is ever dropped.
        capacity = sum(lengths) + spare
        key_capacity = capacity if keys == "routed" else self.keys
        self.positions = padded(position, capacity), padded(key_position, key_capacity)
        kind, options = getattr(torch, dtype), {"generator": generator, "device": "cuda"}
        q, grad = (torch.randn(self.queries, H, d, **options).to(kind) for _ in range(2))
        k, v = (torch.randn(self.keys, H, d, **options).to(kind) for _ in range(2))
        self.grad = padded(grad, capacity)
        self.inputs = [padded(q, capacity), padded(k, key_capacity), padded(v, key_capacity)]
        self.inputs = [x.requires_grad_() for x in self.inputs]
        self.max_keys = max(lengths)
        self.pairs = int(visible_counts(self.query_rows, self.key_rows, *self.positions)[0].sum())
        self.flops = 4.0 * H * d * self.pairs

    def attend(self, implementation: str = "auto") -> Tensor:
        layout = self.query_rows, self.key_rows, *self.positions, self.max_keys
        return packed_attention(*self.inputs, *layout, implementation=implementation)

    def truth(self) -> tuple[Tensor, ...]:
        """Output and gradients of the reference in float64, without padding."""
        sizes = self.queries, self.keys, self.keys
        exact = [x.detach()[:n].double().requires_grad_() for x, n in zip(self.inputs, sizes, strict=True)]
        positions = self.positions[0][: self.queries], self.positions[1][: self.keys]
        layout = self.query_rows, self.key_rows, *positions, self.max_keys
        out = packed_attention(*exact, *layout, implementation="torch")
        return out, *torch.autograd.grad(out, exact, self.grad[: self.queries].double())


def offsets(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths], device="cuda").cumsum(0).int()


def padded(values: Tensor, capacity: int) -> Tensor:
    fill = torch.nan if values.is_floating_point() else -(2**31)
    whole = values.new_full((capacity, *values.shape[1:]), fill)
    whole[: len(values)] = values
    return whole


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found.detach().double() - expected.detach()).norm() / expected.detach().norm().clamp(min=1e-30))


def check(name: str, example: Example, attend: Callable[[], Tensor], dtype: str) -> bool:
    out = attend()
    found = out, *torch.autograd.grad(out, example.inputs, example.grad)
    expected = example.truth()
    errors = [relative(ours[: len(true)], true) for ours, true in zip(found, expected, strict=True)]
    clean = all(bool((ours[len(true) :] == 0).all()) for ours, true in zip(found, expected, strict=True))
    # Rounded: the weights and dS before a product, the output, and (in delta) the output again; most in short rows,
    # where dS is a small difference.
    limit = 1e-5 if dtype == "float32" else 4 * torch.finfo(getattr(torch, dtype)).eps
    passed = clean and all(error <= limit for error in errors)
    shown = ", ".join(f"{part} {error:.1e}" for part, error in zip(NAMES, errors, strict=True))
    say(f"{'ok  ' if passed else 'FAIL'} {name}: {shown}{'' if clean else ', padding is not zero'}")
    return passed


def parity() -> bool:
    torch.set_float32_matmul_precision("highest")
    good = True
    for lengths, fraction, heads, head, dtype, spare in CASES:
        for keys in ("all", "routed"):
            example = Example(lengths, fraction, keys, heads, head, dtype, spare)
            name = f"{lengths} f {fraction} keys {keys} H {heads} d {head} {dtype} spare {spare}"
            good &= check(name, example, example.attend, dtype)
    example = Example([300, 200], 0.5, "all", 2, 64, "bfloat16", 7)
    return good & check("compiled", example, torch.compile(example.attend, fullgraph=True), "bfloat16")


def measure(step: Callable[[], object], repeats: int) -> float:
    """Median in ms; waiting for the device inside a step is an error."""
    for _ in range(3):
        step()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            start.record()
            step()
            end.record()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def timed(attend: Callable[[], Tensor], inputs: list[Tensor], grad: Tensor, repeats: int) -> tuple[float, float]:
    """Forward, and forward with backward, in ms."""

    def forward() -> None:
        with torch.no_grad():
            attend()

    return measure(forward, repeats), measure(lambda: torch.autograd.grad(attend(), inputs, grad), repeats)


def show(name: str, times: tuple[float, float], flops: float) -> None:
    forward, both = times
    say(
        f"{name}: forward {forward:.3f} ms, {flops / forward / 1e9:.0f} TFLOP/s; "
        f"forward + backward {both:.3f} ms, {3.5 * flops / both / 1e9:.0f} TFLOP/s"
    )


def dense(B: int, T: int, repeats: int) -> None:
    """scaled_dot_product_attention on all tokens, by the backend whose forward and backward are fastest."""
    options = {"device": "cuda", "dtype": torch.bfloat16}
    inputs = [torch.randn(B, T, HEADS, HEAD, **options).transpose(1, 2).requires_grad_() for _ in range(3)]
    grad = torch.randn(B, T, HEADS, HEAD, **options).transpose(1, 2)
    found = {}
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION):
        try:
            with sdpa_kernel(backend):
                attend = partial(F.scaled_dot_product_attention, *inputs, is_causal=True)
                found[backend.name] = timed(attend, inputs, grad, repeats)
        except RuntimeError as error:
            say(f"{backend.name}: {str(error).splitlines()[0]}")
    best = min(found, key=lambda name: found[name][1])
    show(f"{B}×{T} dense, {best}", found[best], 4.0 * HEADS * HEAD * B * T * (T + 1) / 2)


def varlen(example: Example) -> Callable[[], Tensor] | None:
    """torch's own packed attention for routed keys, where this torch has it."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    causal = {"is_causal": True}
    if "window_size" in inspect.signature(varlen_attn).parameters:
        causal = {"window_size": (-1, 0)}
    rows, length = example.query_rows, example.max_keys
    return partial(varlen_attn, *example.inputs, rows, rows, length, length, **causal)


def examples(B: int, T: int) -> Iterator[tuple[str, str, Example]]:
    for keys in ("all", "routed"):
        for fraction in FRACTIONS:
            example = Example([T] * B, fraction, keys, HEADS, HEAD, "bfloat16", 0)
            yield f"{B}×{T} keys {keys} f {fraction}", keys, example


def speed(repeats: int) -> None:
    for B, T in SHAPES:
        dense(B, T, repeats)
        for name, keys, example in examples(B, T):
            show(f"{name}, ours", timed(example.attend, example.inputs, example.grad, repeats), example.flops)
            peer = varlen(example) if keys == "routed" else None
            if peer is None:
                continue
            try:
                show(f"{name}, varlen_attn", timed(peer, example.inputs, example.grad, repeats), example.flops)
            except (RuntimeError, TypeError) as error:
                say(f"{name}, varlen_attn: {str(error).splitlines()[0]}")


def sweep(repeats: int) -> None:
    """Each kernel by itself, with other tiles."""
    from chiar.kernels.triton import packed_attention as module

    usual = module.tiles
    for B, T in SHAPES:
        for name, _, example in examples(B, T):
            rows = example.query_rows, example.key_rows
            limit, skip = visible_counts(*rows, *example.positions)
            data = [x.detach() for x in example.inputs]
            forward = partial(module.triton_forward, *data, *rows, limit, T)
            saved = forward()
            backward = partial(module.triton_backward, example.grad, *data, *saved, *rows, limit, skip, T)
            for kernel, candidates in SWEEP.items():
                step = forward if kernel == "forward" else backward
                say(f"{name} {kernel}{'' if step is forward else ' (whole backward)'}:")
                for candidate in candidates:

                    def tiles(
                        asked: str, *rest: object, kernel: str = kernel, candidate: tuple[int, ...] = candidate
                    ) -> module.Tiles:
                        return module.Tiles(*candidate) if asked == kernel else usual(asked, *rest)

                    module.tiles = tiles
                    try:
                        say(f"    {candidate}: {measure(step, repeats):.3f} ms")
                    except RuntimeError as error:
                        say(f"    {candidate}: {str(error).splitlines()[0]}")
                    finally:
                        module.tiles = usual


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--sweep", action="store_true")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        say("needs a CUDA device")
        return 2
    import triton

    say(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Triton {triton.__version__}")
    if not parity():
        return 1
    (sweep if args.sweep else speed)(args.repeats)
    return 0


if __name__ == "__main__":
    sys.exit(main())
