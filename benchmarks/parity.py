"""Checks that a contender computes the right function, before it is timed.

Compares the contender as it is timed (sparse, compiled) with its own dense execution, uncompiled and in fp32: same
weights, tokens and forced routes, with the exact fraction in every row and, if rows may differ, also with ragged rows,
one of them all light and one all attention. Compared are the states, the H that routers read, and every gradient, as
‖difference‖ / ‖expected‖. For decoding also the logits of tokens fed one by one through the cache, on the candidate's
side by the fast step that is timed, in the precision that is timed.
"""

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from chiar.layers.spectral import SpectralFilter
from contenders import Contender
from models import Routes, Setting, TimedChiar, TimedModel, compiled, exact_routes, prepare_decoding, ragged_routes

ROWS, LENGTH, LAYERS = 3, 96, 4
DECODED = 8
# fp32 against fp32 with sums in another order.
OUTPUT_LIMIT, GRADIENT_LIMIT = 1e-5, 1e-4
# In bf16 the error may be that of dense execution in bf16, times a factor, plus one bf16 step: other kernels round
# elsewhere. The mean over all gradients counts too, because a tensor of few numbers may be lucky.
BF16_FACTOR, BF16_STEP = 1.5, 2.0**-8
# A gradient far below all others is the remainder of sums that cancel: its error is relative to the largest gradient.
SMALLEST_SHARE = 1e-4


@dataclass(frozen=True)
class Verdict:
    passed: bool
    error: float
    """The largest relative error."""
    message: str
    recompiled: bool | None = None
    """Whether other routes of the same shapes caused a recompilation; None if nothing is compiled or f fixes shapes."""


def compiled_graphs() -> int:
    """The number of graphs compiled so far."""
    return counters["stats"]["unique_graphs"]


class Parity:
    """A contender and its definition with the same weights, at full width and few layers."""

    def __init__(
        self, contender: Contender, setting: Setting, device: str, compile: bool, decode: bool, whole: bool = False
    ) -> None:
        layers = LAYERS if setting.layers is None else min(setting.layers, LAYERS)
        self.setting, self.device, self.decode = replace(setting, layers=layers, length=LENGTH), device, decode
        self.bf16 = device == "cuda"
        # whole=True returns H, so that it is compared.
        with torch.device(device):
            self.definition = contender.build(self.setting, "dense", True).to(device).train()
            candidate = contender.build(self.setting, contender.execution, True).to(device).train()
        if contender.has_definition:
            randomise(self.definition)
        candidate.load_state_dict(self.definition.state_dict())
        self.candidate = candidate
        self.compiled = compile
        self.checked, self.recompiled = 0, None
        self.call = compiled(candidate, candidate.states, whole) if compile and not decode else candidate.states
        vocabulary = self.definition.output_weight().shape[0] if contender.has_definition else 200
        generator = torch.Generator().manual_seed(1)
        self.ids_BT = torch.randint(0, vocabulary, (ROWS, LENGTH), generator=generator).to(device)

    def check(self, fraction: float) -> Verdict:
        setting = replace(self.setting, fraction=fraction)
        layers = self.definition.routed_layers
        cases = {"": exact_routes(ROWS, LENGTH, setting.attending, layers, self.device)}
        if self.definition.ragged:
            cases["ragged rows, "] = ragged_routes(ROWS, LENGTH, fraction, layers, self.device)
        worst = 0.0
        for case, routes in cases.items():
            before = compiled_graphs()
            verdict = self.compare(routes)
            if self.compiled and self.checked and not self.decode:
                self.recompiled = bool(self.recompiled) or compiled_graphs() > before
            self.checked += 1
            worst = max(worst, verdict.error)
            if not verdict.passed:
                return replace(verdict, message=case + verdict.message)
        return Verdict(True, worst, f"largest error {worst:.1e}", self.recompiled)

    def compare(self, routes: Routes) -> Verdict:
        with matmul_precision("highest"):
            expected = self.results(self.definition, self.definition.states, routes, bf16=False)
            if not self.bf16:
                actual = self.results(self.candidate, self.call, routes, bf16=False)
                return judge(errors(actual, expected), None)
        actual = self.results(self.candidate, self.call, routes, bf16=True)
        dense = self.results(self.definition, self.definition.states, routes, bf16=True)
        return judge(errors(actual, expected), errors(dense, expected))

    def results(self, model: TimedModel, call: Any, routes: Routes, bf16: bool) -> dict[str, Tensor]:
        model.zero_grad(set_to_none=True)
        with torch.autocast(self.device, torch.bfloat16, enabled=bf16):
            states_BTD, entropy = call(self.ids_BT, routes)
        generator = torch.Generator().manual_seed(2)
        probe_BTD = torch.randn(states_BTD.shape, generator=generator).to(self.device)
        (states_BTD.float() * probe_BTD).sum().backward()
        results = {"states": states_BTD.detach()}
        if self.decode:
            results["decoded logits"] = self.decode_logits(model, routes, bf16, fast=model is self.candidate)
        if entropy is not None:
            results["H"] = entropy.detach()
        for name, parameter in model.named_parameters():
            gradient = parameter.grad
            results[f"gradient of {name}"] = torch.zeros_like(parameter) if gradient is None else gradient
        model.zero_grad(set_to_none=True)
        return results

    def decode_logits(self, model: TimedModel, routes: Routes, bf16: bool, fast: bool) -> Tensor:
        """The logits of the last tokens, fed one by one. `fast`: by the step that is timed; the definition has eager
        attention, which shares no kernel with it."""
        model = copy.deepcopy(model).eval()
        assert isinstance(model, TimedChiar)
        if fast:
            prepare_decoding(model, bf16, self.compiled)
        else:
            model.language.config._attn_implementation = "eager"
            model.to(torch.bfloat16 if bf16 else torch.float32)
        first, cache, logits = LENGTH - DECODED, None, []
        with torch.no_grad():
            for part in (slice(0, first), *(slice(n, n + 1) for n in range(first, LENGTH))):
                forced = {layer: routes[layer][:, part].contiguous() for layer in model.routed_layers}
                output = model.language(
                    self.ids_BT[:, part], past_key_values=cache, use_cache=True, forced_routes=forced or None
                )
                cache = output.past_key_values
                logits.append(output.logits[:, -1:])
        return torch.cat(logits, dim=1)


@contextmanager
def matmul_precision(precision: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def randomise(model: nn.Module) -> None:
    """Draw weights with which every operator, filter and gate affects the states; N(0, 0.02) would hide errors."""
    generator = torch.Generator().manual_seed(0)

    def normal(parameter: Tensor, mean: float, std: float) -> None:
        parameter.copy_(mean + std * torch.randn(parameter.shape, generator=generator))

    with torch.no_grad():
        for name, module in model.named_modules():
            if isinstance(module, nn.Embedding):
                normal(module.weight, 0.0, 1.0)
            elif isinstance(module, SpectralFilter):
                normal(module.weight, 1.0, 0.5)
            elif isinstance(module, nn.LayerNorm | nn.RMSNorm):
                normal(module.weight, 1.0, 0.2)
            elif isinstance(module, nn.Linear) and module.bias is not None:
                normal(module.weight, 0.0, (1.0 if name.endswith("gate") else 0.7) * module.in_features**-0.5)
                normal(module.bias, 0.0, 0.1)


def errors(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """‖difference‖ / ‖expected‖ of each tensor; infinite for NaN and missing ones."""
    if actual.keys() != expected.keys():
        return {f"{sorted(actual.keys() ^ expected.keys())} is missing": math.inf}
    norms = {name: float(value.double().norm()) for name, value in expected.items()}
    smallest = SMALLEST_SHARE * max(norm for name, norm in norms.items() if name.startswith("gradient"))
    result = {}
    for name, value in expected.items():
        scale = max(norms[name], smallest) if name.startswith("gradient") else norms[name]
        error = float((actual[name].double() - value.double()).norm()) / max(scale, 1e-30)
        result[name] = error if math.isfinite(error) else math.inf
    return result


def judge(actual: dict[str, float], dense: dict[str, float] | None) -> Verdict:
    """`dense`: the errors of the definition itself in bf16; None in fp32."""
    gradients = [error for name, error in (dense or {}).items() if name.startswith("gradient")]
    typical = sum(gradients) / max(len(gradients), 1)
    worst_name, worst_excess = "", 0.0
    for name, error in actual.items():
        is_gradient = name.startswith("gradient")
        if dense is None:
            limit = GRADIENT_LIMIT if is_gradient else OUTPUT_LIMIT
        else:
            limit = BF16_FACTOR * max(dense.get(name, 0.0), typical if is_gradient else 0.0) + BF16_STEP
        if error / limit > worst_excess:
            worst_name, worst_excess = f"{name}: error {error:.1e}, allowed {limit:.1e}", error / limit
    return Verdict(worst_excess <= 1.0, max(actual.values()), worst_name)
