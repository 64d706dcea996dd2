"""How passes run: precision, torch.compile and CUDA graphs, each with a fallback where it fails."""

import gc
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from chiar.config import ChiarConfig
from chiar.errors import InputError, first_line
from chiar.layers.dark import DarkStack
from chiar.registry import OPERATORS

PLAIN = 4  # passes of a shape before it is recorded as a CUDA graph: in them compiling and first allocations happen


def computes_bf16(device: torch.device) -> bool:
    """Whether the device multiplies bf16 natively; emulation is slower than fp32."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    capabilities: dict[str, bool] = getattr(torch.cpu, "get_capabilities", dict)()  # an older torch lacks it
    return any(capabilities.get(name, False) for name in ("amx_bf16", "avx512_bf16", "bf16"))


def miscompiled(config: ChiarConfig, device: torch.device, precision: str) -> str:
    """Why torch.compile would silently give wrong results, else "" (torch 2.13: the gradient of φφᵀ has NaN)."""
    correct = all(OPERATORS[name].compiles_in_bf16 for name in config.operators or ())
    if device.type == "cpu" and precision == "bf16" and config.routed_layers and not correct:
        return "in bf16 on a CPU the gradient of RBF mixing comes out NaN when compiled (fp32 compiles well)"
    return ""


def clear_device() -> None:
    """Call between models in one process: otherwise all their compiled graphs count against torch's recompile limit."""
    gc.collect()
    torch.compiler.reset()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


class Forward:
    """Calls the model, compiled if `compile`. Compiling happens, and may fail, in the first forward and backward
    passes. With `parts`, its layers, each is compiled by itself, so that a sharded model gathers weights outside of
    compiled code. `obstacle`: why compiling would be wrong."""

    def __init__(
        self, model: Any, compile: bool, parts: Sequence[nn.Module] = (), sharded: bool = False, obstacle: str = ""
    ) -> None:
        self.model, self.parts, self.sharded, self.compiled = model, parts, sharded, False
        self.call: Any = model
        self.failure = obstacle if compile else ""  # why it is not compiled despite `compile`
        if compile and not obstacle:
            try:
                for part in parts:
                    part.compile()
                self.call = model if parts else torch.compile(model)
                self.compiled = True
            except RuntimeError as error:  # not supported by this Python or system
                self.failure = first_line(error)

    def fall_back(self, error: Exception) -> bool:
        """If a step's `error` came from torch.compile, stop compiling and return True: the step must be repeated.
        Out of memory is not such an error, even if the compiler wrapped it."""
        from torch._dynamo.exc import TorchDynamoException

        inner = getattr(error, "inner_exception", None) or error
        compiling = isinstance(error, TorchDynamoException) or type(error).__module__ == "torch._inductor.exc"
        if not self.compiled or not compiling or isinstance(inner, torch.OutOfMemoryError):
            return False
        if self.sharded:  # other processes may be in the middle of this step, so it cannot be repeated
            raise InputError(f"torch.compile failed ({first_line(inner)}): add --no-compile.") from error
        for part in self.parts:
            if isinstance(part, DarkStack):
                part.uncompile()
            part._compiled_call_impl = None  # torch has no call that undoes Module.compile
        self.call, self.compiled, self.failure = self.model, False, first_line(inner)
        return True


class GraphedPasses:
    """Calls `run(*tensors)`, a forward and perhaps a backward pass that accumulates the parameters' gradients. Its
    kernels depend on shapes alone, so it is recorded once per shape and replayed: small kernels do not wait for Python.
    The last pass before a recording is checked for device synchronisation, which a CUDA graph cannot contain.
    `failure`: why nothing is recorded any more."""

    def __init__(self, run: Callable[..., tuple[Tensor, ...]], parameters: Iterable[nn.Parameter] = ()) -> None:
        self.run, self.parameters = run, list(parameters)
        self.passes: Counter[Any] = Counter()
        # By shape: the graph, and the fixed tensors of its inputs, results and gradients.
        self.records: dict[Any, tuple[Any, list[Tensor], tuple[Tensor, ...], list[Tensor | None]]] = {}
        self.stream: Any = None
        self.failure: str | None = None

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        shape = tuple((tuple(x.shape), x.dtype) for x in inputs)
        if shape not in self.records and self.failure is None:
            self.passes[shape] += 1
            if self.passes[shape] == PLAIN:
                return self.run_checked(inputs)
            if self.passes[shape] > PLAIN and (failure := self.record(shape, inputs)):
                self.give_up(failure)  # not in `record`, where the error keeps the tensors of the failed pass alive
        return self.replay(shape, inputs) if shape in self.records else self.run_unrecorded(inputs)

    def run_unrecorded(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Runs on the stream of the recordings: autograd remembers the stream a parameter was first used on."""
        self.stream, current = self.stream or torch.cuda.Stream(), torch.cuda.current_stream()
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            outputs = self.run(*inputs)
        current.wait_stream(self.stream)
        return outputs

    def run_checked(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Runs unrecorded and sets `failure` if anything waits for the device."""
        before = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                outputs = self.run_unrecorded(inputs)
            finally:
                torch.cuda.set_sync_debug_mode(before)
        # Once per process torch also warns that the mode "does not yet detect all synchronizing operations".
        if waits := [str(warning.message) for warning in caught if "called a synchronizing" in str(warning.message)]:
            self.failure = f"a pass waits for the device ({first_line(Warning(waits[0]))})"
        return outputs

    def give_up(self, reason: str) -> None:
        """Run all further passes unrecorded, and free the memory of the recordings."""
        self.failure = reason
        self.records.clear()
        torch.cuda.synchronize()
        gc.collect()
        torch.cuda.empty_cache()

    def record(self, shape: Any, inputs: tuple[Tensor, ...]) -> str | None:
        """Returns why it failed, if it did: most likely memory for a second set of activations is missing."""
        static_inputs, graph = [x.clone() for x in inputs], torch.cuda.CUDAGraph()
        before = [parameter.grad for parameter in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None
        try:
            # Other threads, such as the one that prefetches batches, may use the device meanwhile.
            with torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):
                results = self.run(*static_inputs)
            self.records[shape] = graph, static_inputs, results, [parameter.grad for parameter in self.parameters]
            return None
        except RuntimeError as error:
            first: BaseException = error
            while first.__context__ is not None:  # later ones only say that the capture is invalid
                first = first.__context__
            return first_line(first)
        finally:
            for parameter, gradient in zip(self.parameters, before, strict=True):
                parameter.grad = gradient

    def replay(self, shape: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Returns copies of the results. Adds to existing gradients; a missing one becomes the recorded tensor."""
        graph, static_inputs, results, gradients = self.records[shape]
        pairs = [(p, gradient) for p, gradient in zip(self.parameters, gradients, strict=True) if gradient is not None]
        for parameter, gradient in pairs:
            if parameter.grad is gradient:
                parameter.grad = gradient.clone()  # of an earlier pass, which this one would overwrite
        for static, x in zip(static_inputs, inputs, strict=True):
            static.copy_(x, non_blocking=True)
        graph.replay()
        if existing := [(p.grad, gradient) for p, gradient in pairs if p.grad is not None]:
            torch._foreach_add_(*(list(side) for side in zip(*existing, strict=True)))
        for parameter, gradient in pairs:
            parameter.grad = gradient if parameter.grad is None else parameter.grad
        return tuple(result.clone() for result in results)
