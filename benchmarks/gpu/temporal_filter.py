"""What the filter along time costs, alone: its kernel and compiled shifts, against one pass over memory.

    python benchmarks/gpu/temporal_filter.py [--rows 64] [--length 1024] [--widths 384,1024] [--window 16]

Needs no test framework. A form is timed only after it agreed with float64, gradients too; exits with 1 otherwise.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from chiar.kernels.temporal_filter import temporal_filter

say = partial(print, flush=True)
# y and dx are rounded to bf16 once; dtaps is an fp32 sum over all tokens of products of bf16 numbers.
ALLOWED = 8e-3


def shifts(x: Tensor, taps: Tensor) -> Tensor:
    """The filter as torch's own operators, for the compiler to fuse."""
    y = taps[0] * x
    for j in range(1, len(taps)):
        y = y + taps[j] * F.pad(x[:, : x.shape[1] - j], (0, 0, j, 0))
    return y.to(x.dtype)


def results(call: Callable[..., Tensor], x: Tensor, taps: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    y = call(x, taps)
    return (y.detach(), *torch.autograd.grad(y, (x, taps), grad))


def timed(call: Callable[[], object], device: str, repeats: int) -> float:
    """The median, in ms."""
    times = []
    for _ in range(repeats + 3):
        start = time.perf_counter()
        for _ in range(10):
            call()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 100)
    return statistics.median(times[3:])


def measure(name: str, call: Callable[..., Tensor], x: Tensor, taps: Tensor, repeats: int) -> bool:
    grad = torch.randn_like(x)
    few = slice(0, 2)
    small = x[few].detach().requires_grad_()
    found = results(call, small, taps, grad[few])
    true = results(shifts, small.detach().double().requires_grad_(), taps.double(), grad[few].double())
    error = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, true, strict=True))
    label = f"D {x.shape[-1]}, {name}"
    if error > ALLOWED:
        say(f"FAIL {label}: relative error {error:.1e}")
        return False
    device = x.device.type
    with torch.no_grad():
        forward = timed(lambda: call(x, taps), device, repeats)
    both = timed(lambda: results(call, x, taps, grad), device, repeats)
    # Read x, write y; then read x and the gradient, write dx.
    rates = 2 * x.nbytes / forward / 1e9, 5 * x.nbytes / both / 1e9
    say(f"ok   {label}: {forward:.3f} ms forward ({rates[0]:.2f} TB/s), {both:.3f} ms with gradients ({rates[1]:.2f})")
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--widths", default="384,1024")
    parser.add_argument("--window", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        say("no CUDA device: nothing was run.")
        return 2
    name = torch.cuda.get_device_name() if options.device == "cuda" else options.device
    say(f"{name}, torch {torch.__version__}, {options.rows} × {options.length} tokens, window {options.window}")
    passed = True
    for width in map(int, options.widths.split(",")):
        torch.manual_seed(0)
        x = torch.randn(options.rows, options.length, width, device=options.device).bfloat16().requires_grad_()
        taps = torch.randn(options.window, width, device=options.device, requires_grad=True)
        copied = timed(lambda x=x: x.detach().clone(), options.device, options.repeats)
        say(f"     D {width}, a copy: {copied:.3f} ms ({2 * x.nbytes / copied / 1e9:.2f} TB/s)")
        torch.compiler.reset()
        forms = {"as the layers run it": temporal_filter, "compiled shifts": torch.compile(shifts, fullgraph=True)}
        for form, call in forms.items():
            passed &= measure(form, call, x, taps, options.repeats)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
