"""Each fast operation on a GPU: is it right, and how fast is it?

    python benchmarks/gpu/operations.py [attention texts decode loss filter] [--repeats 20]

Without names all of them. Every comparison comes before a timing; needs no test framework; exits with 1 if one fails.
On a CPU (`--device cpu --small`) the plain implementations run, on small shapes.
"""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from chiar.kernels.decode_attention import decode_attention
from chiar.kernels.flash import text_attention
from chiar.kernels.linear_cross_entropy import linear_cross_entropy
from chiar.kernels.packed_attention import prefix_attention
from chiar.kernels.temporal_filter import temporal_filter

sys.path.append(str(Path(__file__).parents[1]))
from timing import describe_environment, echo, make_parser, measure, relative_error, report

HEADS, HEAD, VOCABULARY = 16, 64, 50257
PEAK = 4800.0  # GB/s of an H200


class Run:
    """Where and how often, and whether everything agreed so far."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.device, self.repeats, self.small = options.device, options.repeats, options.small
        self.fast = "triton" if self.device == "cuda" else "auto"
        self.good = True

    def draw(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(shape, device=self.device).to(dtype)

    def check(self, name: str, found: tuple[Tensor, ...], expected: tuple[Tensor, ...], limit: float) -> None:
        errors = [
            relative_error(ours[: len(true)] if true.ndim else ours, true)
            for ours, true in zip(found, expected, strict=True)
        ]
        self.good &= report(name, max(errors) <= limit, ", ".join(f"{error:.1e}" for error in errors))

    def time(
        self, name: str, step: Callable[[], object], work: float, unit: str = "TFLOP/s", strict: bool = True
    ) -> float:
        """`work` in FLOPs or bytes; 10¹² of them a second are one unit."""
        try:
            p50 = measure(step, self.repeats, self.device, strict).median
        except RuntimeError as error:  # out of memory, or it waited for the device
            echo(f"     {name}: FAILED, {str(error).splitlines()[0]}")
            return float("nan")
        echo(f"     {name}: {p50:.3f} ms, {work / p50 / 1e9:.2f} {unit}")
        return p50


def with_gradients(call: Callable[..., Tensor], inputs: list[Tensor], grad: Tensor) -> tuple[Tensor, ...]:
    out = call(*inputs)
    return out.detach(), *torch.autograd.grad(out, inputs, grad)


class Packed:
    """Packed inputs at full capacity; everything after the last query (and routed key) is NaN."""

    def __init__(
        self, run: Run, lengths: list[int], fraction: float, keys: str, H: int, d: int, dtype: torch.dtype
    ) -> None:
        picked = [(torch.rand(n, device=run.device) < fraction).nonzero()[:, 0] for n in lengths]
        places = picked if keys == "routed" else [torch.arange(n, device=run.device) for n in lengths]
        before = [torch.searchsorted(key, query, right=True) for query, key in zip(picked, places, strict=True)]
        after = [torch.searchsorted(query, key) for query, key in zip(picked, places, strict=True)]
        self.queries, self.keys, capacity = sum(map(len, picked)), sum(map(len, places)), sum(lengths)

        def padded(x: Tensor, fill: float) -> Tensor:
            return torch.cat([x, x.new_full((capacity - len(x), *x.shape[1:]), fill)])

        rows = [torch.tensor([0, *map(len, parts)], device=run.device).cumsum(0).int() for parts in (picked, places)]
        limit, skip = (padded(torch.cat(parts).int(), 0) for parts in (before, after))
        self.layout = (*rows, limit, skip, max(lengths))
        sizes = self.queries, self.keys, self.keys, self.queries
        *inputs, self.grad = (padded(run.draw(n, H, d, dtype=dtype), torch.nan) for n in sizes)
        self.inputs = [x.requires_grad_() for x in inputs]
        self.flops = 4.0 * H * d * int(limit.sum())

    def attend(self, *inputs: Tensor, implementation: str = "auto") -> Tensor:
        return prefix_attention(*inputs, *self.layout, implementation=implementation)

    def truth(self) -> tuple[Tensor, ...]:
        sizes = self.queries, self.keys, self.keys
        exact = [x.detach()[:n].double().requires_grad_() for x, n in zip(self.inputs, sizes, strict=True)]
        query_rows, key_rows, limit, skip, longest = self.layout
        layout = query_rows, key_rows, limit[: self.queries], skip[: self.keys], longest
        call = partial(prefix_attention, implementation="torch")
        return with_gradients(lambda q, k, v: call(q, k, v, *layout), exact, self.grad[: self.queries].double())


def attention(run: Run) -> None:
    """Packed attention beside dense attention."""
    cases = [([1, 2, 3], 1.0, 2, 64), ([256, 0, 200, 1, 77], 0.4, 4, 64), ([300, 129, 511], 0.5, 2, 128)]
    if not run.small:
        cases += [([2000, 0, 700], 1.0, 4, 64), ([1999, 13, 700], 0.1, 2, 32), ([1500, 800], 0.5, 2, 128)]
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        # Rounded: the weights and dS before a product, the output, and (in delta) the output again.
        limit = 1e-5 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps
        for lengths, fraction, H, d in cases:
            for keys in ("all", "routed"):
                example = Packed(run, lengths, fraction, keys, H, d, dtype)
                call = partial(example.attend, implementation=run.fast)
                found = with_gradients(call, example.inputs, example.grad)
                run.check(f"attention {lengths} f {fraction} keys {keys} d {d} {dtype}", found, example.truth(), limit)
    for B, T in [(4, 32)] if run.small else [(128, 256), (16, 2048), (4, 8192)]:
        inputs = [run.draw(B, HEADS, T, HEAD).requires_grad_() for _ in range(3)]
        for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
            with sdpa_kernel([backend, SDPBackend.MATH], set_priority=True):
                dense, flops = (
                    partial(F.scaled_dot_product_attention, is_causal=True),
                    2.0 * HEADS * HEAD * B * T * (T + 1),
                )
                both(run, f"{B}×{T} dense, {backend.name}", dense, inputs, inputs[0].detach(), flops)
        for keys in ("all", "routed"):
            for fraction in (1.0, 0.5, 0.25):
                example = Packed(run, [T] * B, fraction, keys, HEADS, HEAD, torch.bfloat16)
                name = f"{B}×{T} keys {keys} f {fraction}"
                both(run, f"{name}, ours", example.attend, example.inputs, example.grad, example.flops)


def both(run: Run, name: str, call: Callable[..., Tensor], inputs: list[Tensor], grad: Tensor, flops: float) -> None:
    with torch.no_grad():
        run.time(f"{name}, forward", lambda: call(*inputs), flops)
    run.time(f"{name}, with gradients", lambda: with_gradients(call, inputs, grad), 3.5 * flops)


def decode(run: Run) -> None:
    """Attention of a decoding step, as a share of the memory's speed: keys and values that rows see, each read once."""

    def example(lengths: list[int], share: float, L: int, H: int, d: int, dtype: torch.dtype) -> list[Tensor]:
        B = len(lengths)
        stored = [run.draw(B, H, L, d, dtype=dtype) for _ in range(2)]
        for row, length in enumerate(lengths):
            for part in stored:
                part[row, :, length:] = torch.nan if run.device == "cuda" else 0.0
        takes_part_B = torch.arange(B, device=run.device) < round(share * B)
        new = run.draw(B, 3, H, d, dtype=dtype).unbind(1)
        return [*new, *stored, torch.tensor(lengths, device=run.device), takes_part_B]

    for lengths, share, L, H, d in (
        ([0, 1, 63, 64, 65, 200], 1.0, 256, 4, 64),
        ([2047, 5, 1000, 0, 700, 3], 0.5, 2112, 16, 64),
        ([300, 129, 510], 0.6, 512, 3, 48),
        ([300, 129, 510], 1.0, 512, 2, 256),
        ([40000, 30000], 1.0, 40064, 4, 64),
    )[: 3 if run.small else 5]:
        for dtype in (torch.bfloat16, torch.float32):
            tensors = example(lengths, share, L, H, d, dtype)
            copies = [x.clone() for x in tensors]
            ours, true = decode_attention(*tensors, run.fast), decode_attention(*copies, "torch")
            limit = 1e-5 if dtype == torch.float32 else torch.finfo(dtype).eps
            run.check(f"decode {lengths} of {L}, {share:g} take part, d {d} {dtype}", (ours,), (true,), limit)
            same = all(torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in zip(tensors, copies, strict=True))
            run.good &= report("    stored and lengths", same, "alike" if same else "DIFFERENT")
    for rows, length, share in (
        [(2, 16, 1.0)] if run.small else [(64, 2048, 1.0), (64, 1024, 0.5), (1, 2048, 1.0), (64, 8192, 1.0)]
    ):
        # Each call works on a store of its own, or small ones would be read from the GPU's cache.
        copies = max(2, 1 + int(2e8 // (4 * rows * HEADS * (length + 64) * HEAD))) if run.device == "cuda" else 2
        examples = [example([length] * rows, share, length + 64, HEADS, HEAD, torch.bfloat16) for _ in range(copies)]

        def step(examples: list[list[Tensor]] = examples, length: int = length) -> None:
            for tensors in examples:
                tensors[5].fill_(length)  # as before the step; a kernel of 2 µs, timed with it
                decode_attention(*tensors)

        seen = 4 * round(share * rows) * (length + 1) * HEADS * HEAD * copies
        name, captured = f"{rows} rows of {length}, {share:g} take part, {copies} calls", step
        if run.device == "cuda":
            step()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                step()
            captured = graph.replay  # launches cost nothing, as in decoding
        p50 = run.time(name, captured, seen, "TB/s")
        echo(f"         {1e3 * p50 / copies:.1f} µs a call, {seen / p50 / 1e6 / PEAK:.0%} of {PEAK:.0f} GB/s")


def unfused(states: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(states, weight).float(), targets)


def loss(run: Run) -> None:
    """The fused language loss beside the unfused one: fp32 within rounding of float64, half precision as good."""

    def example(rows: int, width: int, vocabulary: int, dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
        weight = run.draw(vocabulary, width, dtype=torch.float32) * width**-0.5
        inputs = [run.draw(rows, width, dtype=dtype).requires_grad_(), weight.to(dtype).requires_grad_()]
        targets = torch.randint(0, vocabulary, (rows,), device=run.device)
        targets[1::5] = -100
        return inputs, targets

    one = torch.tensor(1.7, device=run.device)
    shapes = [(7, 16, 11, 3), (300, 64, 257, 128)] if run.small else [(300, 64, 257, 128), (513, 256, VOCABULARY, 200)]
    for *shape, chunk in shapes:
        for dtype in (torch.float32, torch.bfloat16):
            inputs, targets = example(*shape, dtype)
            exact = [x.detach().double().requires_grad_() for x in inputs]
            true = with_gradients(lambda x, w, t=targets: F.cross_entropy(x @ w.T, t), exact, one.double())
            plain = with_gradients(lambda x, w, t=targets: unfused(x, w, t), inputs, one)
            rounded = 1.3 * max(map(relative_error, plain, true)) + torch.finfo(dtype).eps / 2
            allowed = 1e-5 if dtype == torch.float32 else rounded
            fused = partial(linear_cross_entropy, chunk_rows=chunk, implementation=run.fast)
            found = with_gradients(lambda x, w, t=targets, f=fused: f(x, w, t), inputs, one)
            run.check(f"loss {shape} {dtype}", found, true, allowed)
    if not run.small:  # a chunk of more than 2³¹ logits: the last row lies beyond 32-bit offsets
        rows = 2**31 // VOCABULARY + 200
        inputs, targets = example(rows, 64, VOCABULARY, torch.bfloat16)
        ways = [partial(linear_cross_entropy, chunk_rows=chunk) for chunk in (rows, 4096)]
        whole, parts = (with_gradients(lambda x, w, f=f: f(x, w, targets), inputs, one) for f in ways)
        run.check(f"loss, chunk of {rows * VOCABULARY / 2**31:.2f} × 2³¹ logits", whole, parts, 4e-3)
    for width in (32,) if run.small else (1024, 256):
        rows, vocabulary = (64, 257) if run.small else (32768, VOCABULARY)
        (states, weight), targets = example(rows, width, vocabulary, torch.bfloat16)
        weight = weight.detach().float().requires_grad_()
        ways = {"fused": linear_cross_entropy, "unfused": unfused} if run.small else {
            "unfused, compiled": torch.compile(unfused), "fused": linear_cross_entropy,
            "fused, compiled": torch.compile(linear_cross_entropy),
        }  # fmt: skip
        for name, way in ways.items():
            step = partial(loss_step, way, [states, weight], targets)
            run.time(f"loss N {rows} D {width} V {vocabulary}, {name}", step, 6.0 * rows * width * vocabulary)


def loss_step(way: Callable[..., Tensor], inputs: list[Tensor], targets: Tensor) -> None:
    with torch.autocast(targets.device.type, torch.bfloat16):
        out = way(*inputs, targets)
    torch.autograd.grad(out, inputs)


def shifts(x: Tensor, taps: Tensor) -> Tensor:
    """The temporal filter as torch's own operators, for the compiler to fuse."""
    y = taps[0] * x
    for j in range(1, len(taps)):
        y = y + taps[j] * F.pad(x[:, : x.shape[1] - j], (0, 0, j, 0))
    return y.to(x.dtype)


def filter_along_time(run: Run) -> None:
    """Its kernel and compiled shifts, against one pass over memory."""
    for width in (32,) if run.small else (384, 1024):
        x = run.draw(*((2, 64) if run.small else (64, 1024)), width).requires_grad_()
        taps, grad = run.draw(16, width, dtype=torch.float32).requires_grad_(), run.draw(*x.shape)
        run.time(f"D {width}, a copy", x.detach().clone, 2 * x.nbytes, "TB/s")
        compiled = {} if run.small else {"compiled shifts": torch.compile(shifts, fullgraph=True)}
        for form, call in {"as the layers run it": temporal_filter, **compiled}.items():
            few = [x.detach()[:2].requires_grad_(), taps]
            exact = [part.detach().double().requires_grad_() for part in few]
            true = with_gradients(shifts, exact, grad[:2].double())
            # y and dx are rounded to bf16 once; dtaps is an fp32 sum over all tokens of products of bf16 numbers.
            run.check(f"filter D {width}, {form}", with_gradients(call, few, grad[:2]), true, 8e-3)
            with torch.no_grad():
                run.time(f"D {width}, {form}, forward", partial(call, x, taps), 2 * x.nbytes, "TB/s")
            step = partial(with_gradients, call, [x, taps], grad)
            run.time(f"D {width}, {form}, with gradients", step, 5 * x.nbytes, "TB/s")


def texts(run: Run) -> None:
    """Many short concatenated texts, as in a dark stack."""
    for rows, mean in ((3, 20),) if run.small else ((64, 410), (16, 1640)):
        lengths = (mean * (1 + 0.12 * torch.randn(rows))).long().clamp_min(1).tolist()
        example = Packed(run, lengths, 1.0, "all", HEADS, HEAD, torch.bfloat16)

        def layers(*qkv: Tensor, example: Packed = example) -> Tensor:
            heads_first = (x.transpose(0, 1) for x in qkv)
            return text_attention(*heads_first, example.layout[0], example.layout[-1]).transpose(0, 1)

        found, expected = (with_gradients(way, example.inputs, example.grad) for way in (layers, example.attend))
        # Two roundings of the weights and of the output, four of gradients.
        run.check(f"{rows} texts of {mean}", found, expected, 4 * torch.finfo(torch.bfloat16).eps)
        for name, way in {"as the layers run it": layers, "packed kernel": example.attend}.items():
            both(run, f"{rows} texts of {mean}, {name}", way, example.inputs, example.grad, example.flops)


PARTS = {"attention": attention, "texts": texts, "decode": decode, "loss": loss, "filter": filter_along_time}


def main(arguments: list[str] | None = None) -> int:
    parser = make_parser(__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--small", action="store_true", help="small shapes, nothing compiled")
    options = parser.parse_args(arguments)
    unknown = set(options.parts) - set(PARTS)
    if unknown or (options.device == "cuda" and not torch.cuda.is_available()):
        echo(
            f"error: there is no {', '.join(unknown) or 'CUDA device'}: parts are {', '.join(PARTS)}.", file=sys.stderr
        )
        return 2
    echo(describe_environment(options.device))
    run = Run(options)
    for name in options.parts or PARTS:
        torch.manual_seed(0)
        torch.set_float32_matmul_precision("highest")
        PARTS[name](run)
    return 0 if run.good else 1


if __name__ == "__main__":
    sys.exit(main())
