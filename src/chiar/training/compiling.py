"""How passes are computed: in what precision, under torch.compile, as CUDA graphs; plainly where that fails."""

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

PLAIN = 4  # passes of a shape before it is recorded: compiling and first allocations happen in them


def computes_bf16(device: torch.device) -> bool:
    """Whether the device multiplies bf16 itself; elsewhere it is emulated, and slower than fp32."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    capabilities: dict[str, bool] = getattr(torch.cpu, "get_capabilities", dict)()  # an older torch cannot tell
    return any(capabilities.get(name, False) for name in ("amx_bf16", "avx512_bf16", "bf16"))


def miscompiled(config: ChiarConfig, device: torch.device, precision: str) -> str:
    """What torch compiles without an error but wrongly (seen with 2.13: the gradient of φφᵀ is NaN in places)."""
    rightly = all(OPERATORS[name].compiles_in_bf16 for name in config.operators or ())
    if device.type == "cpu" and precision == "bf16" and config.routed_layers and not rightly:
        return "in bf16 on a CPU the gradient of RBF mixing comes out NaN when compiled (fp32 compiles well)"
    return ""


def clear_device() -> None:
    """Between models that share a process: without this the compiled graphs of all would count against one limit."""
    gc.collect()
    torch.compiler.reset()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


class Forward:
    """Calls the model; compiling happens, and fails, in the first calls and backward passes. A sharded model compiles
    in `parts`, its layers, so that gathering weights stays outside; `obstacle` says why compiling would be wrong."""

    def __init__(
        self, model: Any, compile: bool, parts: Sequence[nn.Module] = (), sharded: bool = False, obstacle: str = ""
    ) -> None:
        self.model, self.parts, self.sharded, self.compiled = model, parts, sharded, False
        self.call: Any = model
        self.failure = obstacle if compile else ""  # why it is not compiled although that was asked for
        if compile and not obstacle:
            try:
                for part in parts:
                    part.compile()
                self.call = model if parts else torch.compile(model)
                self.compiled = True
            except RuntimeError as error:  # this Python or this system has no compiler at all
                self.failure = first_line(error)

    def fall_back(self, error: Exception) -> bool:
        """Whether `error`, of a step, came from tracing or a code generator (out of memory stays what it is, also where
        a compiler wrapped it); then the model is called plainly from now on, and the step must be run again."""
        from torch._dynamo.exc import TorchDynamoException

        inner = getattr(error, "inner_exception", None) or error
        compiling = isinstance(error, TorchDynamoException) or type(error).__module__ == "torch._inductor.exc"
        if not self.compiled or not compiling or isinstance(inner, torch.OutOfMemoryError):
            return False
        if self.sharded:  # other processes may be in the middle of the same step: it cannot be begun again
            raise InputError(f"torch.compile failed ({first_line(inner)}): add --no-compile.") from error
        for part in self.parts:
            if isinstance(part, DarkStack):
                part.uncompile()
            part._compiled_call_impl = None  # torch has no call that undoes Module.compile
        self.call, self.compiled, self.failure = self.model, False, first_line(inner)
        return True


class GraphedPasses:
    """Calls `run(*tensors)`, a forward and perhaps a backward pass that adds to the parameters' gradients. What it
    starts depends on shapes alone, so it is recorded for each and replayed: small kernels do not wait for Python.
    The last plain pass is watched: waiting for the device breaks a recording. `failure`: why it goes on plainly."""

    def __init__(self, run: Callable[..., tuple[Tensor, ...]], parameters: Iterable[nn.Parameter] = ()) -> None:
        self.run, self.parameters = run, list(parameters)
        self.passes: Counter[Any] = Counter()
        # By shape: the graph, where it reads its inputs, and where it leaves results and gradients.
        self.records: dict[Any, tuple[Any, list[Tensor], tuple[Tensor, ...], list[Tensor | None]]] = {}
        self.stream: Any = None
        self.failure: str | None = None

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        shape = tuple((tuple(x.shape), x.dtype) for x in inputs)
        if shape not in self.records and self.failure is None:
            self.passes[shape] += 1
            if self.passes[shape] == PLAIN:
                return self.watched(inputs)
            if self.passes[shape] > PLAIN and (failure := self.record(shape, inputs)):
                self.give_up(failure)  # here, where no error holds the tensors of the pass that failed any more
        return self.replay(shape, inputs) if shape in self.records else self.plainly(inputs)

    def plainly(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """On the stream of the recordings: autograd remembers the stream a parameter was first used on."""
        self.stream, current = self.stream or torch.cuda.Stream(), torch.cuda.current_stream()
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            found = self.run(*inputs)
        current.wait_stream(self.stream)
        return found

    def watched(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """A plain pass; sets `failure` if anything in it waits for the device."""
        before = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                found = self.plainly(inputs)
            finally:
                torch.cuda.set_sync_debug_mode(before)
        # Once a process torch also says that the mode "does not yet detect all synchronizing operations".
        if waits := [str(warning.message) for warning in told if "called a synchronizing" in str(warning.message)]:
            self.failure = f"a pass waits for the device ({first_line(Warning(waits[0]))})"
        return found

    def give_up(self, reason: str) -> None:
        """Passes are launched plainly from here on, and what recordings held is free."""
        self.failure = reason
        self.records.clear()
        torch.cuda.synchronize()
        gc.collect()
        torch.cuda.empty_cache()

    def record(self, shape: Any, inputs: tuple[Tensor, ...]) -> str | None:
        """Returns why it could not be done, most likely for want of memory for a second set of activations."""
        places, graph = [x.clone() for x in inputs], torch.cuda.CUDAGraph()
        before = [parameter.grad for parameter in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None
        try:
            # Other threads, such as the one that reads batches ahead, may use the device meanwhile.
            with torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):
                results = self.run(*places)
            self.records[shape] = graph, places, results, [parameter.grad for parameter in self.parameters]
            return None
        except RuntimeError as error:
            first: BaseException = error
            while first.__context__ is not None:  # those after the first say that a recording was broken
                first = first.__context__
            return first_line(first)
        finally:
            for parameter, gradient in zip(self.parameters, before, strict=True):
                parameter.grad = gradient

    def replay(self, shape: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Results are copies. Gradients are added to what is there; where nothing is, the recorded tensor itself."""
        graph, places, results, gradients = self.records[shape]
        pairs = [(p, gradient) for p, gradient in zip(self.parameters, gradients, strict=True) if gradient is not None]
        for parameter, gradient in pairs:
            if parameter.grad is gradient:
                parameter.grad = gradient.clone()  # of an earlier pass: this one writes to the same place
        for place, x in zip(places, inputs, strict=True):
            place.copy_(x, non_blocking=True)
        graph.replay()
        if there := [(p.grad, gradient) for p, gradient in pairs if p.grad is not None]:
            torch._foreach_add_(*(list(side) for side in zip(*there, strict=True)))
        for parameter, gradient in pairs:
            parameter.grad = gradient if parameter.grad is None else parameter.grad
        return tuple(result.clone() for result in results)
