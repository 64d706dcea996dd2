"""Is a contender the function it claims to be? Asked before anything of it is timed.

The contender as it is timed (sparse, compiled) against its own dense execution, uncompiled, in fp32: the same weights,
tokens and forced routes, once with the exact fraction in every row and, where rows may differ, once with ragged rows,
one of them all light and one all attention. Compared are the states, H as the routers read it, and every gradient, as
‖difference‖ / ‖expected‖. For decoding, logits of tokens fed one by one through the cache are compared too: the
candidate's by the fast step that is timed, with weights in the precision that is timed.
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
# fp32 against fp32 in another order of summation.
OUTPUT_LIMIT, GRADIENT_LIMIT = 1e-5, 1e-4
# bf16 may err as the dense execution errs in bf16: other kernels round elsewhere, and a tensor of few numbers may be
# lucky, so the mean over all gradients counts too; then one step of bf16.
BF16_FACTOR, BF16_STEP = 1.5, 2.0**-8
# A gradient far below all others is what is left of sums that cancel: its rounding is judged against the largest.
SMALLEST_SHARE = 1e-4


@dataclass(frozen=True)
class Verdict:
    passed: bool
    error: float
    """The largest relative error."""
    message: str
    recompiled: bool | None = None
    """Whether another split of the same shapes was compiled anew; None where nothing is, or splits are shapes."""


def compiled_graphs() -> int:
    """How many graphs were compiled so far."""
    return counters["stats"]["unique_graphs"]


class Parity:
    """A contender and its definition with the same weights, at the full width and little depth."""

    def __init__(
        self, contender: Contender, setting: Setting, device: str, compile: bool, decode: bool, whole: bool = False
    ) -> None:
        layers = LAYERS if setting.layers is None else min(setting.layers, LAYERS)
        self.setting, self.device, self.decode = replace(setting, layers=layers, length=LENGTH), device, decode
        self.bf16 = device == "cuda"
        # whole=True in any case: then H is returned, and so compared.
        with torch.device(device):
            self.definition = contender.build(self.setting, "dense", True).to(device).train()
            candidate = contender.build(self.setting, contender.execution, True).to(device).train()
        if contender.defined:
            enliven(self.definition)
        candidate.load_state_dict(self.definition.state_dict())
        self.candidate = candidate
        self.compiled = compile
        self.splits, self.recompiled = 0, None
        self.call = compiled(candidate, candidate.states, whole) if compile and not decode else candidate.states
        vocabulary = self.definition.output_weight().shape[0] if contender.defined else 200
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
            if self.compiled and self.splits and not self.decode:
                self.recompiled = bool(self.recompiled) or compiled_graphs() > before
            self.splits += 1
            worst = max(worst, verdict.error)
            if not verdict.passed:
                return replace(verdict, message=case + verdict.message)
        return Verdict(True, worst, f"largest error {worst:.1e}", self.recompiled)

    def compare(self, routes: Routes) -> Verdict:
        with precision("highest"):
            expected = self.results(self.definition, self.definition.states, routes, bf16=False)
            if not self.bf16:
                found = self.results(self.candidate, self.call, routes, bf16=False)
                return judge(errors(found, expected), None)
        found = self.results(self.candidate, self.call, routes, bf16=True)
        dense = self.results(self.definition, self.definition.states, routes, bf16=True)
        return judge(errors(found, expected), errors(dense, expected))

    def results(self, model: TimedModel, call: Any, routes: Routes, bf16: bool) -> dict[str, Tensor]:
        model.zero_grad(set_to_none=True)
        with torch.autocast(self.device, torch.bfloat16, enabled=bf16):
            states_BTD, read = call(self.ids_BT, routes)
        generator = torch.Generator().manual_seed(2)
        probe_BTD = torch.randn(states_BTD.shape, generator=generator).to(self.device)
        (states_BTD.float() * probe_BTD).sum().backward()
        found = {"states": states_BTD.detach()}
        if self.decode:
            found["decoded logits"] = self.decoded(model, routes, bf16, fast=model is self.candidate)
        if read is not None:
            found["H"] = read.detach()
        for name, parameter in model.named_parameters():
            gradient = parameter.grad
            found[f"gradient of {name}"] = torch.zeros_like(parameter) if gradient is None else gradient
        model.zero_grad(set_to_none=True)
        return found

    def decoded(self, model: TimedModel, routes: Routes, bf16: bool, fast: bool) -> Tensor:
        """The last logits, each from the cache of all before it. `fast`: by the step that is timed; the definition has
        eager attention instead, which shares no kernel with it."""
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
                done = model.language(
                    self.ids_BT[:, part], past_key_values=cache, use_cache=True, forced_routes=forced or None
                )
                cache = done.past_key_values
                logits.append(done.logits[:, -1:])
        return torch.cat(logits, dim=1)


@contextmanager
def precision(wanted: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(wanted)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def enliven(model: nn.Module) -> None:
    """Weights under which every operator, filter and gate shows in the states; N(0, 0.02) would hide a wrong one."""
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


def errors(found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """‖difference‖ / ‖expected‖ of each; nan and what is missing become infinite."""
    if found.keys() != expected.keys():
        return {f"{sorted(found.keys() ^ expected.keys())} is missing": math.inf}
    norms = {name: float(value.double().norm()) for name, value in expected.items()}
    smallest = SMALLEST_SHARE * max(norm for name, norm in norms.items() if name.startswith("gradient"))
    result = {}
    for name, value in expected.items():
        scale = max(norms[name], smallest) if name.startswith("gradient") else norms[name]
        error = float((found[name].double() - value.double()).norm()) / max(scale, 1e-30)
        result[name] = error if math.isfinite(error) else math.inf
    return result


def judge(found: dict[str, float], dense: dict[str, float] | None) -> Verdict:
    """`dense`: what the definition itself loses in bf16; None in fp32."""
    gradients = [error for name, error in (dense or {}).items() if name.startswith("gradient")]
    typical = sum(gradients) / max(len(gradients), 1)
    worst_name, worst_excess = "", 0.0
    for name, error in found.items():
        is_gradient = name.startswith("gradient")
        if dense is None:
            limit = GRADIENT_LIMIT if is_gradient else OUTPUT_LIMIT
        else:
            limit = BF16_FACTOR * max(dense.get(name, 0.0), typical if is_gradient else 0.0) + BF16_STEP
        if error / limit > worst_excess:
            worst_name, worst_excess = f"{name}: error {error:.1e}, allowed {limit:.1e}", error / limit
    return Verdict(worst_excess <= 1.0, max(found.values()), worst_name)
