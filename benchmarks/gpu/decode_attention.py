"""Attention of a decoding step on a GPU: is it right, how much of the memory's speed does it reach, and is a whole
model's captured step right?

    python benchmarks/gpu/decode_attention.py [--repeats 50] [--sweep]

Needs a CUDA device and no test framework; exits with 1 if a comparison fails, before anything is timed. `--sweep` tries
other numbers of programs. GB/s count keys and values of the entries that rows see, each read once.
"""

import argparse
import statistics
import sys
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from chiar import ChiarForCausalLM, presets
from chiar.kernels.decode_attention import decode_attention

say = partial(print, flush=True)

PEAK = 4800.0
"""GB/s of an H200."""
HEADS, HEAD = 16, 64
# lengths, share of rows that take part, capacity, heads, head size, dtype
CASES = [
    ([0, 1, 63, 64, 65, 200], 1.0, 256, 4, 64, "bfloat16"),
    ([2047, 5, 1000, 0], 1.0, 2080, 16, 64, "bfloat16"),
    ([2047, 5, 1000, 0, 700, 3], 0.5, 2112, 16, 64, "bfloat16"),
    ([2047, 5, 1000, 0, 700, 3], 0.0, 2112, 16, 64, "bfloat16"),
    ([300, 129, 510], 0.6, 512, 2, 128, "float16"),
    ([300, 129, 510], 0.6, 512, 3, 48, "bfloat16"),
    ([300, 129, 510], 1.0, 512, 2, 256, "bfloat16"),
    ([300, 129, 510], 1.0, 512, 2, 64, "float32"),
    ([7000], 1.0, 7072, 16, 64, "bfloat16"),
    ([40000, 30000], 1.0, 40064, 16, 64, "bfloat16"),
]
# rows, length, capacity, share of rows that take part: the baseline at batch 64 and 1, and routed layers beside it
SHAPES = [
    (64, 2048, 2112, 1.0),
    (64, 1024, 1088, 0.5),
    (64, 512, 576, 0.25),
    (1, 2048, 2112, 1.0),
    (1, 1024, 1088, 1.0),
    (1, 1024, 1088, 0.0),
    (64, 8192, 8256, 1.0),
]
DESIGNS = {
    "baseline": ("baseline-tiny", {}),
    "baseline, pre-norm": ("baseline-tiny", {"norm": "rmsnorm", "norm_position": "pre"}),
    "v2": ("v2-tiny", {"max_position_embeddings": 512}),
    "v3": ("v3-tiny", {"gate_pool": "causal"}),
    "routed": (
        "v3-tiny",
        {"gate_pool": "causal", "keys": "routed", "norm": "rmsnorm", "norm_position": "pre", "basis": "identity"},
    ),
}


class Example:
    """A step's inputs; what was never stored is NaN."""

    def __init__(self, lengths: list[int], share: float, L: int, H: int, d: int, dtype: str) -> None:
        generator, B = torch.Generator("cuda").manual_seed(0), len(lengths)
        kind = getattr(torch, dtype)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device="cuda").to(kind)

        self.new = list(draw(B, 3, H, d).unbind(1))
        self.stored = [draw(B, H, L, d) for _ in range(2)]
        for part in self.stored:
            for row, length in enumerate(lengths):
                part[row, :, length:] = torch.nan
        self.length_B = torch.tensor(lengths, device="cuda")
        self.takes_part_B = torch.arange(B, device="cuda") < round(share * B)
        seen = sum(n + 1 for n in lengths[: round(share * B)])
        self.bytes = 2 * seen * H * d * kind.itemsize

    def attend(self, implementation: str) -> tuple[Tensor, list[Tensor], Tensor]:
        """Output, stores and lengths after one step, from copies."""
        stored, length_B = [part.clone() for part in self.stored], self.length_B.clone()
        out = decode_attention(*self.new, *stored, length_B, self.takes_part_B, implementation)
        return out, stored, length_B


def check(name: str, example: Example, dtype: str) -> bool:
    (out, stored, length_B), (true, true_stored, true_length_B) = (example.attend(i) for i in ("triton", "torch"))
    error = float((out.double() - true.double()).norm() / true.double().norm().clamp(min=1e-30))
    limit = 1e-5 if dtype == "float32" else torch.finfo(getattr(torch, dtype)).eps
    alike = all(torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in zip(stored, true_stored, strict=True))
    passed = error <= limit and alike and torch.equal(length_B, true_length_B)
    say(f"{'ok  ' if passed else 'FAIL'} {name}: error {error:.1e}, stored {'alike' if alike else 'DIFFERENTLY'}")
    return passed


def parity() -> bool:
    good = True
    for lengths, share, capacity, heads, head, dtype in CASES:
        example = Example(lengths, share, capacity, heads, head, dtype)
        good &= check(f"{lengths} of {capacity}, {share:g} take part, H {heads} d {head} {dtype}", example, dtype)
    return good


def models() -> bool:
    """Logits of 200 tokens fed one by one, captured (and compiled), against the whole pass without a cache, in fp32.
    Stores grow twice. An H that lies within rounding of a threshold would change a route; 1,200 are decided."""
    torch.set_float32_matmul_precision("highest")
    good = True
    for name, (preset, changes) in DESIGNS.items():
        torch.manual_seed(0)
        model = ChiarForCausalLM(presets.get(preset, dropout=0.0, **changes)).eval().cuda()
        for parameter in model.parameters():
            parameter.data += 0.1 * torch.randn_like(parameter)
        ids = torch.randint(0, model.config.vocab_size, (3, 240), device="cuda")
        mask = torch.ones_like(ids)
        mask[1, :17], mask[2, :30] = 0, 0
        with torch.no_grad():
            expected = model(ids, mask).logits[:, 40:]
        for compile in (False, True):
            model.enable_fast_decoding(compile=compile)
            found = decode(model, ids, mask)
            assert model.fast_decoder is not None
            error = float((found - expected).abs().max() / expected.abs().max())
            passed = error < 1e-4 and model.fast_decoder.steps == 200
            how = "compiled and captured" if compile else "captured"
            say(f"{'ok  ' if passed else 'FAIL'} {name}, {how}: error {error:.1e} of the largest logit")
            good &= passed
            model.disable_fast_decoding()
    return good


@torch.no_grad()
def decode(model: ChiarForCausalLM, ids: Tensor, mask: Tensor) -> Tensor:
    """A captured step must not wait for the device, but when it looks at lengths, and when it is captured."""
    cache, logits = None, []
    done = model(ids[:, :40], mask[:, :40], use_cache=True)
    cache = done.past_key_values
    for n in range(40, 240):
        fast = model.fast_decoder
        captured = None if fast is None else fast.captured
        ready = captured is not None and captured.graph is not None
        ready = ready and all(store.most + 1 < store.capacity for store in cache.shelf.stores)
        torch.cuda.set_sync_debug_mode("error" if ready else "default")
        try:
            logits.append(model(ids[:, n : n + 1], mask[:, : n + 1], past_key_values=cache).logits)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return torch.cat(logits, 1)


def measure(step: Callable[[], object], calls: int, repeats: int) -> float:
    """Median in ms of a call among `calls` captured ones: launches cost nothing there, as in decoding."""
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            step()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / calls)
    return statistics.median(times)


def speed(repeats: int) -> None:
    """Each call works on a store of its own, or the small ones would be read from the GPU's cache."""
    for rows, length, capacity, share in SHAPES:
        copies = max(2, 1 + int(2e8 // (4 * rows * HEADS * capacity * HEAD)))
        examples = [Example([length] * rows, share, capacity, HEADS, HEAD, "bfloat16") for _ in range(copies)]
        turn = 0

        def ours(examples: list[Example] = examples, length: int = length) -> None:
            nonlocal turn
            example = examples[turn % len(examples)]
            turn += 1
            example.length_B.fill_(length)  # as before the step; a kernel of 2 µs, timed with it
            decode_attention(*example.new, *example.stored, example.length_B, example.takes_part_B)

        milliseconds, size = measure(ours, copies, repeats), examples[0].bytes
        shown = f"{1e3 * milliseconds:.1f} µs"
        if size:
            shown += f", {size / milliseconds / 1e6:.0f} GB/s, {size / milliseconds / 1e6 / PEAK:.0%} of {PEAK:.0f}"
        say(f"{rows} rows of {length}, {share:g} take part, ours: {shown}")
        if share == 1.0:
            for example in examples:
                for part in example.stored:
                    part.nan_to_num_(0.0)

            def plain(examples: list[Example] = examples, length: int = length) -> None:
                nonlocal turn
                example = examples[turn % len(examples)]
                turn += 1
                key, value = (part[:, :, : length + 1] for part in example.stored)
                F.scaled_dot_product_attention(example.new[0][:, :, None], key, value)

            milliseconds = measure(plain, copies, repeats)
            say(f"    scaled_dot_product_attention: {1e3 * milliseconds:.1f} µs, {size / milliseconds / 1e6:.0f} GB/s")
        del examples
        torch.cuda.empty_cache()


def sweep(repeats: int) -> None:
    from chiar.kernels.triton import decode_attention as module

    usual = module.PROGRAMS
    for programs in (1024, 2048, 4096, 8192, 16384):
        module.PROGRAMS = programs
        say(f"PROGRAMS {programs}{' (usual)' if programs == usual else ''}:")
        speed(repeats)
    module.PROGRAMS = usual


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--sweep", action="store_true")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        say("needs a CUDA device")
        return 2
    import triton

    say(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Triton {triton.__version__}")
    if not (parity() & models()):
        return 1
    (sweep if args.sweep else speed)(args.repeats)
    return 0


if __name__ == "__main__":
    sys.exit(main())
