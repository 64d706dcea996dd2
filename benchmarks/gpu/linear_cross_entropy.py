"""The fused language loss on a GPU: is it right, how fast is it, how much memory does it take?

    python benchmarks/gpu/linear_cross_entropy.py [--rows 32768] [--repeats 20]

Needs a CUDA device and no test framework; exits with 1 if a comparison fails, before anything is timed.
"""

import argparse
import statistics
import sys
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from chiar.kernels import linear_cross_entropy as module
from chiar.kernels.linear_cross_entropy import linear_cross_entropy

say = partial(print, flush=True)

# rows, width, vocabulary, chunk_rows: odd sizes, chunks that do not divide, more than one block of the kernel.
SHAPES = [(1, 8, 2, 4096), (7, 16, 11, 3), (300, 64, 257, 128), (513, 256, 50257, 200), (64, 1024, 50257, 4096)]
VOCABULARY, WIDTHS, CHUNKS = 50257, (1024, 256), (512, 1024, 2048, 4096, 8192)


def example(rows: int, width: int, vocabulary: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    options = {"generator": generator, "device": "cuda"}
    states = torch.randn(rows, width, **options).to(dtype)
    weight = (torch.randn(vocabulary, width, **options) * width**-0.5).to(dtype)
    targets = torch.randint(0, vocabulary, (rows,), **options)
    targets[1::5] = -100
    return states.requires_grad_(), weight.requires_grad_(), targets


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found.detach().double() - expected.detach()).norm() / expected.detach().norm().clamp(min=1e-30))


def errors(
    loss_of: Callable[..., Tensor], states: Tensor, weight: Tensor, targets: Tensor, reduction: str
) -> list[float]:
    """Relative errors of the loss and both gradients against float64."""
    loss = loss_of(states, weight, targets, reduction=reduction)
    found = loss, *torch.autograd.grad(loss * 1.7, (states, weight))
    exact_states, exact_weight = (t.detach().double().requires_grad_() for t in (states, weight))
    exact = F.cross_entropy(exact_states @ exact_weight.T, targets, reduction=reduction)
    expected = exact, *torch.autograd.grad(exact * 1.7, (exact_states, exact_weight))
    return [relative(*pair) for pair in zip(found, expected, strict=True)]


def unfused(states: Tensor, weight: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    return F.cross_entropy(F.linear(states, weight).float(), targets, reduction=reduction)


def allowed(dtype: torch.dtype, peer: list[float]) -> list[float]:
    """fp32 within rounding of float64; half precision as good as the unfused loss.

    The two run other kernels, so logits round differently here and there; gradients are rounded once more, when the
    backward pass scales them.
    """
    if dtype == torch.float32:
        return [1e-5] * 3
    step = torch.finfo(dtype).eps
    return [1.3 * error + more for error, more in zip(peer, (step / 16, step / 2, step / 2), strict=True)]


def parity() -> bool:
    torch.set_float32_matmul_precision("highest")
    good = True
    for shape in SHAPES:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            inputs = example(*shape[:3], dtype)
            for reduction in ("mean", "sum"):
                peer = errors(unfused, *inputs, reduction)
                limits = allowed(dtype, peer)
                for implementation in ("triton", "torch"):
                    loss_of = partial(linear_cross_entropy, chunk_rows=shape[3], implementation=implementation)
                    mine = errors(loss_of, *inputs, reduction)
                    passed = all(error <= limit for error, limit in zip(mine, limits, strict=True))
                    good &= passed
                    shown = " ".join(f"{error:.1e}" for error in mine), " ".join(f"{error:.1e}" for error in peer)
                    name = f"{shape} {str(dtype)[6:]} {reduction} {implementation}"
                    say(
                        f"{'ok  ' if passed else 'FAIL'} {name}: loss, ∂states, ∂weight {shown[0]} (unfused {shown[1]})"
                    )
    return good and special_cases()


def special_cases() -> bool:
    states, weight, targets = example(40, 32, 257, torch.bfloat16)
    by_states = torch.autograd.grad(linear_cross_entropy(states, weight, targets, chunk_rows=16), states)[0]
    nothing = linear_cross_entropy(states, weight, torch.full_like(targets, -100))
    unknown = targets.clone()
    unknown[0] = 257
    with torch.no_grad():
        rows = linear_cross_entropy(states, weight, targets, reduction="none")
        same = torch.allclose(rows, F.cross_entropy((states @ weight.T).float(), targets, reduction="none"), atol=2e-2)
        outside = linear_cross_entropy(states, weight, unknown)
    compiled = torch.compile(linear_cross_entropy, fullgraph=True, dynamic=True)
    with torch.autocast("cuda", torch.bfloat16):
        plain = torch.autograd.grad(linear_cross_entropy(states, weight, targets), (states, weight))
        graph = torch.autograd.grad(compiled(states, weight, targets), (states, weight))
    found = {
        "ignored rows have no gradient": bool((by_states[targets == -100] == 0).all() and by_states.isfinite().all()),
        "all targets ignored: 0": float(nothing.detach()) == 0.0,
        "an unknown target: nan": bool(outside.isnan()),
        "rows by themselves": same,
        "compiled": all(relative(a, b.double()) < 4e-3 for a, b in zip(graph, plain, strict=True)),
    }
    for name, passed in found.items():
        say(f"{'ok  ' if passed else 'FAIL'} {name}")
    return all(found.values()) and far_offsets()


def far_offsets() -> bool:
    """A chunk of more than 2³¹ logits: the last row lies beyond 32-bit offsets."""
    rows = 2**31 // VOCABULARY + 200
    states, weight, targets = example(rows, 64, VOCABULARY, torch.bfloat16)
    whole = linear_cross_entropy(states, weight, targets, reduction="sum", chunk_rows=rows)
    found = torch.autograd.grad(whole, (states, weight))
    parts = linear_cross_entropy(states, weight, targets, reduction="sum", chunk_rows=4096)
    expected = torch.autograd.grad(parts, (states, weight))
    passed = relative(found[0][-100:], expected[0][-100:].double()) < 4e-3
    passed &= relative(found[1], expected[1].double()) < 4e-3 and relative(whole, parts.double()) < 1e-5
    say(f"{'ok  ' if passed else 'FAIL'} chunk of {rows * VOCABULARY / 2**31:.2f} × 2³¹ logits")
    return passed


def measure(step: Callable[[], None], repeats: int) -> tuple[float, float, float]:
    """p20 and p50 in ms, and the peak in GB above what lay there before."""
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.set_sync_debug_mode("error")
        start.record()
        step()
        end.record()
        torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    peak = (torch.cuda.max_memory_allocated() - before) / 1e9
    return statistics.quantiles(times, n=5)[0], statistics.median(times), peak


def stepper(loss_of: Callable[..., Tensor], states: Tensor, weight: Tensor, targets: Tensor) -> Callable[[], None]:
    def step() -> None:
        states.grad = weight.grad = None
        with torch.autocast("cuda", torch.bfloat16):
            loss = loss_of(states, weight, targets)
        loss.backward()

    return step


def report(name: str, step: Callable[[], None], repeats: int, flops: float) -> None:
    try:
        p20, p50, peak = measure(step, repeats)
    except RuntimeError as error:  # out of memory, or it waited for the device
        say(f"{name}: FAILED, {str(error).splitlines()[0]}")
        return
    finally:
        torch.cuda.set_sync_debug_mode("default")
    say(f"{name}: p20 {p20:.2f} ms, p50 {p50:.2f} ms, {flops / p50 / 1e9:.0f} TFLOP/s, peak {peak:.2f} GB")


def speed(rows: int, repeats: int) -> None:
    """Forward and backward under bf16 autocast over fp32 weights, states in bf16, no waiting for the device."""
    torch.set_float32_matmul_precision("high")
    for width in WIDTHS:
        states, weight, targets = example(rows, width, VOCABULARY, torch.float32)
        states = states.detach().bfloat16().requires_grad_()
        torch.compiler.reset()
        flops = 6.0 * rows * width * VOCABULARY
        timed = partial(report, repeats=repeats, flops=flops)
        label = f"N {rows} D {width} V {VOCABULARY}"
        timed(f"{label} unfused, compiled", stepper(torch.compile(unfused), states, weight, targets))
        for chunk_rows in CHUNKS:
            for implementation in ("triton", "torch"):
                loss_of = partial(linear_cross_entropy, chunk_rows=chunk_rows, implementation=implementation)
                timed(f"{label} fused {implementation}, chunk {chunk_rows}", stepper(loss_of, states, weight, targets))
        timed(f"{label} fused, compiled", stepper(torch.compile(linear_cross_entropy), states, weight, targets))
        kept = module.COLUMN_MULTIPLE
        for multiple in (64, 128):
            module.COLUMN_MULTIPLE = multiple
            timed(
                f"{label} fused, vocabulary padded to {multiple}",
                stepper(linear_cross_entropy, states, weight, targets),
            )
        module.COLUMN_MULTIPLE = kept


def kernel_settings(repeats: int) -> None:
    """The kernel alone, with other blocks and numbers of warps."""
    from chiar.kernels.triton import softmax_gradient as kernel

    rows, padded = 4096, VOCABULARY + -VOCABULARY % module.COLUMN_MULTIPLE
    logits = torch.zeros(rows, padded, device="cuda", dtype=torch.bfloat16)
    targets, losses = torch.zeros(rows, device="cuda", dtype=torch.int64), torch.empty(rows, device="cuda")
    kept = kernel.MAX_BLOCK, kernel.WARPS
    for kernel.MAX_BLOCK in (1024, 2048, 4096, 8192):
        for kernel.WARPS in (4, 8, 16):
            p20, p50, _ = measure(
                lambda: kernel.triton_softmax_gradient(logits, VOCABULARY, targets, -100, losses, True), repeats
            )
            moved = 3 * logits.nbytes / p50 / 1e9
            name = f"kernel block {kernel.MAX_BLOCK} warps {kernel.WARPS}"
            say(f"{name}: p20 {p20:.3f} ms, p50 {p50:.3f} ms, {moved:.2f} TB/s")
    kernel.MAX_BLOCK, kernel.WARPS = kept


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=32768)
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        say("no CUDA device: nothing was run.")
        return 2
    import triton

    say(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
    if not parity():
        say("parity failed: nothing is timed.")
        return 1
    kernel_settings(options.repeats)
    speed(options.rows, options.repeats)
    return 0


if __name__ == "__main__":
    sys.exit(main())
