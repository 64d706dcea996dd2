"""The model under torch.compile, or plainly where compiling fails."""

import gc
from typing import Any

import torch
from torch import nn

from chiar.errors import InputError, first_line


class Forward:
    """Calls the model. Compiling happens inside the first calls and first backward passes, so that is where it fails.

    `fall_back` is asked about an error of a step; after it said yes the step must be run again from its beginning.
    A model can be compiled in `parts`, its layers: a sharded one so that gathering weights stays outside. In `company`
    other processes take part in every step.
    """

    def __init__(
        self,
        model: nn.Module,
        compile: bool,
        parts: list[nn.Module] | None = None,
        company: bool = False,
        obstacle: str | None = None,
    ) -> None:
        """`obstacle`: why it would be wrong to compile, where it would."""
        self.model, self.parts, self.company = model, parts or [], company
        self.call: Any = model
        self.compiled = False
        self.failure: str | None = None
        """Why the model is not compiled although that was asked for."""
        self.told = False
        if compile and obstacle:
            self.failure = obstacle
        elif compile:
            try:
                for part in self.parts:
                    part.compile()
                self.call = model if self.parts else torch.compile(model)
                self.compiled = True
            except RuntimeError as error:  # this Python or this system has no compiler at all
                self.failure = first_line(error)

    def __call__(self, *arguments: Any) -> Any:
        return self.call(*arguments)

    def fall_back(self, error: Exception) -> bool:
        """Whether `error` came from compiling; if so the model is called plainly from now on."""
        if not self.compiled or not is_compile_error(error):
            return False
        if self.parts and self.company:  # others may be in the middle of the same step: it cannot be begun again
            raise InputError(f"torch.compile failed ({failure_of(error)}): add --no-compile.") from error
        for part in self.parts:
            part._compiled_call_impl = None  # torch has no call that undoes Module.compile
        self.call, self.compiled = self.model, False
        self.failure = failure_of(error)
        return True


def miscompiled(config: Any, device: torch.device, precision: str) -> str | None:
    """What torch compiles without an error but wrongly (seen with 2.13: the gradient of φφᵀ is NaN in places)."""
    if device.type == "cpu" and precision == "bf16" and config.routed_layers and "rbf" in config.operators:
        return "in bf16 on a CPU the gradient of RBF mixing comes out NaN when compiled (fp32 compiles well)"
    return None


def failure_of(error: BaseException) -> str:
    return first_line(getattr(error, "inner_exception", None) or error)


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
