"""Passes as CUDA graphs: many small kernels that no longer wait for Python to launch them."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from chiar.errors import first_line

PLAIN = 4
"""Passes of a shape before it is recorded: compiling and first allocations happen in them."""

Pass = Callable[..., tuple[Tensor, ...]]


class GraphedPasses:
    """Calls `run(*tensors)`, a forward and perhaps a backward pass that adds to the parameters' gradients.

    Nothing in our passes looks at values on the host, sparse execution included, so what a pass launches depends on
    shapes alone: it is recorded once for each shape and replayed from then on. Where recording fails, passes go on
    plainly and `failure` says why.
    """

    def __init__(self, run: Pass, parameters: Iterable[nn.Parameter] = ()) -> None:
        self.run, self.parameters = run, list(parameters)
        self.passes: dict[Any, int] = {}
        self.records: dict[Any, Record] = {}
        self.stream: Any = None
        self.failure: str | None = None

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        shape = tuple((tuple(x.shape), x.dtype) for x in inputs)
        if shape in self.records:
            return self.records[shape].replay(inputs, self.parameters)
        self.passes[shape] = self.passes.get(shape, 0) + 1
        if self.failure is None and self.passes[shape] > PLAIN:
            try:
                self.records[shape] = Record(self.run, inputs, self.parameters, self.stream)
            except RuntimeError as error:  # an operation that waits, or no memory for a second set of activations
                self.failure = first_line(error)
                torch.cuda.synchronize()
                return self.plainly(inputs)
            return self.records[shape].replay(inputs, self.parameters)
        return self.plainly(inputs)

    def plainly(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """On the stream of the recordings: autograd remembers the stream a parameter was first used on."""
        if self.stream is None:
            self.stream = torch.cuda.Stream()
        current = torch.cuda.current_stream()
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            found = self.run(*inputs)
        current.wait_stream(self.stream)
        return found


class Record:
    """One recorded pass: where it reads its inputs, and where it leaves results and gradients."""

    def __init__(self, run: Pass, inputs: tuple[Tensor, ...], parameters: list[nn.Parameter], stream: Any) -> None:
        self.inputs = [x.clone() for x in inputs]
        before = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        self.graph = torch.cuda.CUDAGraph()
        try:
            # Other threads, such as the one that reads batches ahead, may use the device meanwhile.
            with torch.cuda.graph(self.graph, stream=stream, capture_error_mode="thread_local"):
                self.results = run(*self.inputs)
            self.gradients = [parameter.grad for parameter in parameters]
        finally:
            for parameter, gradient in zip(parameters, before, strict=True):
                parameter.grad = gradient

    def replay(self, inputs: tuple[Tensor, ...], parameters: list[nn.Parameter]) -> tuple[Tensor, ...]:
        """Results are copies. Gradients are added to what is there; where nothing is, the recorded tensor itself."""
        for parameter, gradient in zip(parameters, self.gradients, strict=True):
            if gradient is not None and parameter.grad is gradient:
                parameter.grad = gradient.clone()  # of an earlier pass: this one writes to the same place
        for place, x in zip(self.inputs, inputs, strict=True):
            place.copy_(x, non_blocking=True)
        self.graph.replay()
        sums, added = [], []
        for parameter, gradient in zip(parameters, self.gradients, strict=True):
            if gradient is None:
                continue
            if parameter.grad is None:
                parameter.grad = gradient
            else:
                sums.append(parameter.grad)
                added.append(gradient)
        if sums:
            torch._foreach_add_(sums, added)
        return tuple(result.clone() for result in self.results)
