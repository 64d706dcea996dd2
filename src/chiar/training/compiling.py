"""How passes are computed: in what precision, under torch.compile, as CUDA graphs; plainly where that fails."""

import gc
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from chiar.config import ChiarConfig
from chiar.errors import InputError, first_line

PLAIN = 4
"""Passes of a shape before it is recorded: compiling and first allocations happen in them."""

Pass = Callable[..., tuple[Tensor, ...]]


def computes_bf16(device: torch.device) -> bool:
    """Whether the device multiplies bf16 itself; elsewhere it is emulated, and slower than fp32."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if not hasattr(torch.cpu, "get_capabilities"):  # an older torch cannot tell
        return False
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name, False) for name in ("amx_bf16", "avx512_bf16", "bf16"))


def miscompiled(config: ChiarConfig, device: torch.device, precision: str) -> str | None:
    """What torch compiles without an error but wrongly (seen with 2.13: the gradient of φφᵀ is NaN in places)."""
    if device.type == "cpu" and precision == "bf16" and config.routed_layers and "rbf" in (config.operators or ()):
        return "in bf16 on a CPU the gradient of RBF mixing comes out NaN when compiled (fp32 compiles well)"
    return None


def uncompiled() -> Any:
    """A block that runs plainly: evaluations and samples, whose shapes would each be compiled again."""
    return torch.compiler.set_stance("force_eager")


def clear_device() -> None:
    """Between models that share a process: without this the compiled graphs of all would count against one limit."""
    gc.collect()
    torch.compiler.reset()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def is_compile_error(error: BaseException) -> bool:
    """Of tracing or of a code generator. Out of memory stays what it is, also where a compiler wrapped it."""
    from torch._dynamo.exc import TorchDynamoException

    if isinstance(getattr(error, "inner_exception", error), torch.OutOfMemoryError):
        return False
    return isinstance(error, TorchDynamoException) or type(error).__module__ == "torch._inductor.exc"


class Forward:
    """Calls the model. Compiling happens inside the first calls and first backward passes, so that is where it fails.

    A model can be compiled in `parts`, its layers: a sharded one so that gathering weights stays outside. In `company`
    other processes take part in every step. `obstacle`: why it would be wrong to compile, where it would.
    """

    def __init__(
        self,
        model: nn.Module,
        compile: bool,
        parts: Sequence[nn.Module] = (),
        company: bool = False,
        obstacle: str | None = None,
    ) -> None:
        self.model, self.parts, self.company = model, parts, company
        self.call: Any = model
        self.compiled = False
        self.failure = obstacle if compile else None
        """Why the model is not compiled although that was asked for."""
        if compile and not obstacle:
            try:
                for part in parts:
                    part.compile()
                self.call = model if parts else torch.compile(model)
                self.compiled = True
            except RuntimeError as error:  # this Python or this system has no compiler at all
                self.failure = first_line(error)

    def __call__(self, *arguments: Any) -> Any:
        return self.call(*arguments)

    def fall_back(self, error: Exception) -> bool:
        """Whether `error`, of a step, came from compiling; if so the model is called plainly from now on, and the step
        must be run again from its beginning."""
        if not self.compiled or not is_compile_error(error):
            return False
        failure = first_line(getattr(error, "inner_exception", None) or error)
        if self.parts and self.company:  # others may be in the middle of the same step: it cannot be begun again
            raise InputError(f"torch.compile failed ({failure}): add --no-compile.") from error
        for part in self.parts:
            part._compiled_call_impl = None  # torch has no call that undoes Module.compile
        self.call, self.compiled, self.failure = self.model, False, failure
        return True


class GraphedPasses:
    """Calls `run(*tensors)`, a forward and perhaps a backward pass that adds to the parameters' gradients.

    What a pass of ours launches depends on shapes alone, sparse execution included (on a GPU with fast grouped
    products), so it is recorded once for each shape and replayed from then on: many small kernels that no longer wait
    for Python to launch them. The last plain pass is watched: one that waits for the device is never recorded, since
    that would break the recording and what comes after it. `failure` says why passes go on plainly.
    """

    def __init__(self, run: Pass, parameters: Iterable[nn.Parameter] = ()) -> None:
        self.run, self.parameters = run, list(parameters)
        self.passes: dict[Any, int] = {}
        self.records: dict[Any, Record] = {}
        self.stream: Any = None
        self.failure: str | None = None

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        shape = tuple((tuple(x.shape), x.dtype) for x in inputs)
        if shape not in self.records and self.failure is None:
            self.passes[shape] = self.passes.get(shape, 0) + 1
            if self.passes[shape] == PLAIN:
                return self.watched(inputs)
            if self.passes[shape] > PLAIN:
                self.record(shape, inputs)
        if shape in self.records:
            return self.records[shape].replay(inputs, self.parameters)
        return self.plainly(inputs)

    def record(self, shape: Any, inputs: tuple[Tensor, ...]) -> None:
        try:
            self.records[shape] = Record(self.run, inputs, self.parameters, self.stream)
        except RuntimeError as error:  # most likely no memory for a second set of activations
            self.failure = first_line(root_of(error))
        # Not inside the block above: there the error still holds every tensor of the pass that failed.
        if self.failure is not None:
            self.give_up(self.failure)

    def give_up(self, reason: str) -> None:
        """Passes are launched plainly from here on, and what recordings held is free."""
        self.failure = reason
        self.records.clear()
        torch.cuda.synchronize()
        gc.collect()
        torch.cuda.empty_cache()

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
        waits = [message for warning in told if tells_of_waiting(message := str(warning.message))]
        if waits:
            self.failure = f"a pass waits for the device ({waits[0].splitlines()[0]})"
        return found

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


def tells_of_waiting(message: str) -> bool:
    """Once a process torch also says that the mode itself "does not yet detect all synchronizing operations"."""
    return "called a synchronizing" in message


def root_of(error: BaseException) -> BaseException:
    """The first error: those after it say that a recording was broken, not by what."""
    while error.__context__ is not None:
        error = error.__context__
    return error


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
