"""Runs the Triton kernels on the CPU and prints their errors as JSON. Triton reads TRITON_INTERPRET when it is
imported, so this is a process of its own."""

import json
import sys

import torch
from triton.runtime import interpreter

from chiar.kernels.packed_attention import packed_attention

NAMES = ("out", "dq", "dk", "dv")


def allow_loops_of_runtime_length() -> None:
    """Triton 3.6 turns a loop's bound, an array of one number, into an int; NumPy 2.4 only does that with .item()."""
    original = interpreter._patch_lang_tensor

    def patch(tensor, scope):
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch


def poison_new_memory() -> None:
    """What the kernels leave unwritten is NaN."""
    empty = torch.Tensor.new_empty

    def poisoned_empty(*args, **options):
        result = empty(*args, **options)
        return result.fill_(torch.nan) if result.is_floating_point() else result

    torch.Tensor.new_empty = poisoned_empty


def offsets(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def poisoned(values: torch.Tensor, capacity: int) -> torch.Tensor:
    """`values` followed by NaN (or far numbers) up to `capacity`; rows are strided, as slices of a wider tensor are."""
    fill = float("nan") if values.is_floating_point() else -(2**30)
    whole = torch.full((capacity, 2, *values.shape[1:]), fill, dtype=values.dtype)
    whole[: len(values), 1] = values
    return whole[:, 1]


def relative(found: torch.Tensor, true: torch.Tensor) -> float:
    """The largest error, in units of the largest entry."""
    if not true.numel():
        return 0.0
    return float(((found - true).abs().max() / true.abs().max().clamp(min=1e-9)).detach())


def run(lengths: list[int], chosen: list[int], keys: str, heads: int, d: int, dtype: str, padding: int) -> dict:
    """Rows of `lengths` tokens, of which `chosen` are queries; keys are "all" tokens or the "routed" ones."""
    torch.manual_seed(0)
    positions = [torch.randperm(n)[:m].sort().values for n, m in zip(lengths, chosen, strict=True)]
    query_position = torch.cat(positions).int()
    query_rows, used = offsets(chosen), sum(chosen)
    if keys == "all":
        key_rows, key_position = offsets(lengths), torch.cat([torch.arange(n) for n in lengths]).int()
    else:
        key_rows, key_position = query_rows, query_position
    number, key_padding = int(key_rows[-1]), padding if keys == "routed" else 0
    kind = getattr(torch, dtype)
    q, grad = (torch.randn(used, heads, d).to(kind) for _ in range(2))
    k, v = (torch.randn(number, heads, d).to(kind) for _ in range(2))
    rows = query_rows, key_rows
    inputs = [
        poisoned(q, used + padding).requires_grad_(),
        poisoned(k, number + key_padding).requires_grad_(),
        poisoned(v, number + key_padding).requires_grad_(),
    ]
    found = packed_attention(
        *inputs,
        *rows,
        poisoned(query_position, used + padding),
        poisoned(key_position, number + key_padding),
        max(1, *lengths),
        implementation="triton",
    )
    found = found, *torch.autograd.grad(found, inputs, poisoned(grad, used + padding))
    exact_inputs = [x.double().requires_grad_() for x in (q, k, v)]
    exact = packed_attention(
        *exact_inputs, *rows, query_position, key_position, max(1, *lengths), implementation="torch"
    )
    exact = exact, *torch.autograd.grad(exact, exact_inputs, grad.double())
    errors = {}
    for name, ours, true in zip(NAMES, found, exact, strict=True):
        assert ours.dtype == kind
        used_part, rest = ours[: len(true)].double(), ours[len(true) :]
        errors[name] = relative(used_part, true)
        errors[f"{name} padding"] = float(rest.double().abs().nan_to_num(9.0).sum())
    return errors


if __name__ == "__main__":
    allow_loops_of_runtime_length()
    poison_new_memory()
    print(json.dumps([run(*case) for case in json.loads(sys.argv[1])]))
