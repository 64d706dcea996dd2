"""What the entropy and the filter cost in each form of the transform, compiled, on bf16 rows.

    python benchmarks/gpu/spectral_path.py [--rows 32768] [--widths 1024,2048] [--repeats 20] [--device cuda]

Needs no test framework. A form is timed only after it agreed with the plain matrix in float64; exits with 1 otherwise.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch._inductor.utils import run_and_get_code

from chiar.kernels.basis import basis_matrix
from chiar.kernels.spectral_entropy import spectral_entropy
from chiar.kernels.transform import Transform, apply_filter, make_transform

say = partial(print, flush=True)
# H is a sum over the row in fp32, by TF32 products of 10 bits; a filtered row is bf16 (8 bits) after two products.
ALLOWED = {"entropy": 1e-4, "filter": 2e-2}


def forms(width: int, device: str) -> dict[str, Transform]:
    moved = {
        "identity": Transform(),
        "dct, whole matrix": Transform(basis_matrix("dct", width).to(device)),
    }
    halves = make_transform("dct", width)
    assert halves.even_hh is not None and halves.odd_hh is not None
    moved["dct, even/odd"] = Transform(even_hh=halves.even_hh.to(device), odd_hh=halves.odd_hh.to(device))
    return moved


def exact(kind: str, name: str, x: Tensor, weight: Tensor) -> Tensor:
    """By the plain matrix, in float64."""
    basis = "identity" if name == "identity" else "dct"
    whole = Transform(basis_matrix(basis, x.shape[-1], dtype=torch.float64).to(x.device))
    if kind == "entropy":
        return spectral_entropy(x.double(), whole)
    return whole.inverse(whole.forward(x.double()) * weight.double())


def calls(kind: str, transform: Transform, weight: Tensor, folded: bool) -> Callable[[Tensor], Tensor]:
    if kind == "entropy":
        return lambda x: spectral_entropy(x, transform)
    if folded:
        matrices = tuple(matrix.to(weight) for matrix in transform.filter_matrices(weight))
        return lambda x: apply_filter(x, matrices)
    return lambda x: transform.inverse(transform.forward(x) * weight)


def timed(call: Callable[[Tensor], Tensor], x: Tensor, repeats: int) -> float:
    """The median, in ms."""
    times = []
    for _ in range(repeats + 3):
        synchronise(x)
        start = time.perf_counter()
        for _ in range(10):
            call(x)
        synchronise(x)
        times.append((time.perf_counter() - start) * 100)
    return statistics.median(times[3:])


def synchronise(x: Tensor) -> None:
    if x.device.type == "cuda":
        torch.cuda.synchronize()


def measure(kind: str, name: str, transform: Transform, folded: bool, x: Tensor, weight: Tensor, repeats: int) -> bool:
    torch.compiler.reset()
    compiled = torch.compile(calls(kind, transform, weight, folded), fullgraph=True)
    with torch.no_grad():
        found, code = run_and_get_code(compiled, x)
        rows = slice(0, 256)
        expected = exact(kind, name, x[rows], weight)
        error = float((found[rows].double() - expected).abs().max() / expected.abs().max())
        label = f"D {x.shape[-1]}, {kind}, {name}{', folded' if folded else ''}"
        if error > ALLOWED[kind]:
            say(f"FAIL {label}: relative error {error:.1e}")
            return False
        kernels = sum(text.count("async_compile.triton(") + text.count("async_compile.cpp_pybinding(") for text in code)
        products = sum(text.count("extern_kernels.") for text in code)
        ms = timed(compiled, x, repeats)
    moved = x.nbytes * (1 if kind == "entropy" else 2) / ms / 1e9
    say(
        f"ok   {label}: {ms:.3f} ms, {moved:.2f} TB/s of rows, {kernels} fused kernels, {products} products, "
        f"relative error {error:.1e}"
    )
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=32768)
    parser.add_argument("--widths", default="1024,2048")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        say("no CUDA device: nothing was run.")
        return 2
    torch.set_float32_matmul_precision("high")  # as in bf16 training: TF32 for what is fp32
    name = torch.cuda.get_device_name() if options.device == "cuda" else options.device
    say(f"{name}, torch {torch.__version__}, {options.rows} rows")
    passed = True
    for width in map(int, options.widths.split(",")):
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(options.rows, width, generator=generator).to(options.device, torch.bfloat16)
        weight = (1 + 0.3 * torch.randn(width, generator=generator)).to(options.device, torch.bfloat16)
        for kind in ALLOWED:
            for form, transform in forms(width, options.device).items():
                for folded in (False, True) if kind == "filter" and form != "identity" else (False,):
                    passed &= measure(kind, form, transform, folded, x, weight, options.repeats)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
