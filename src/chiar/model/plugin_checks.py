"""Checks that a user's router or operator gives the guarantees of every model (docs/extending.md)."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from chiar import presets, registry
from chiar.config import ChiarConfig
from chiar.errors import errors_as, require, unknown_name
from chiar.layers.context import Maybe
from chiar.model.modeling import ChiarForCausalLM

ROWS, TOKENS, WORDS = 3, 20, 11  # few words, so that some repeat
STACK = ["attention", "dark", "dark", "attention"]
MISMATCH = 1e-5
"""Tolerance of logits in float64 models, where only RoPE and RBF mixing are rounded to fp32 (about 1e-7)."""
NOT_CAUSAL = "is not causal: what it does with a token changes with later tokens"
DIFFERS = {
    "each time": "gives other results each time: it may draw random numbers in training only",
    "rows": "mixes rows: what it does with a token changes with the other rows of the batch",
    "padding": "depends on padding: ignore tokens where context.real_BT is False, as context.past does",
    "cache": "gives other results if tokens come in pieces, as in generation: get earlier tokens from context.past",
    "sparse": "gives other results under execution='sparse': what looks at other tokens must be an Operator",
}


def check_router(router: str | Callable[[ChiarConfig, int], Any], **changes: Any) -> None:
    """Raise InputError, one sentence, if a router (its name or its class) makes an invalid choice, depends on later
    tokens, other rows or padding, or gives other results with a cache. `changes`: fields of the small model it is tried
    in; with dark layers in `layer_types` the router is that of a dark stack."""
    everything = registry.RouterKind(router, reads_entropy=True, reads_state=True, has_gradient=True)
    with known("router", registry.ROUTERS, router, everything) as name:
        place = {} if registry.ROUTERS[name].of_layers else {"layer_types": STACK}
        check("router", router, {"router": name, "hard_estimator": "selected", **place, **changes})


def check_operator(operator: str | Callable[[ChiarConfig], Any], **changes: Any) -> None:
    """The same for an operator."""
    with known("operator", registry.OPERATORS, operator, registry.OperatorKind(operator)) as name:
        kind = registry.OPERATORS[name]
        between = [] if kind.light or kind.is_layer else [name]
        operators = [name if kind.light else "spectral", *between, "attention"]
        check("operator", operator, {"operators": operators, "router": "random", **changes})


@contextmanager
def known(what: str, names: dict[str, Any], given: Any, kind: Any) -> Iterator[str]:
    """The name of what is given. Anything but a name is registered as "checked" meanwhile."""
    if isinstance(given, str):
        if given not in names:
            raise unknown_name(what, given, names)
        yield given
        return
    names["checked"] = kind
    try:
        yield "checked"
    finally:
        del names["checked"]


def check(what: str, given: Any, changes: dict[str, Any]) -> None:
    subject = f"the {what} {given if isinstance(given, str) else getattr(given, '__name__', given)!r}"
    with torch.random.fork_rng(devices=[]), torch.no_grad(), errors_as(f"{subject} failed", Exception):
        torch.manual_seed(0)
        small = {"vocab_size": WORDS, "dropout": 0.0, "meta_router": False, "keys": "routed", "norm_position": "pre"}
        model = ChiarForCausalLM(presets.get("v3-tiny", **{**small, **changes})).double().eval()
        for parameter in model.parameters():  # initial values of 0 or 1 would hide faults
            parameter.add_(0.2 * torch.randn_like(parameter))
        ids_BT = torch.randint(WORDS, (ROWS, TOKENS))
        if model.model.router_state is not None:  # moves the thresholds to where they split these tokens
            model.train()(ids_BT)
        trial = Trial(model.eval(), ids_BT)
        for fault, same in trial.faults():
            require(same, f"{subject} {fault}.")


class Trial:
    """One text run in different ways. All must give the same logits and choices."""

    def __init__(self, model: ChiarForCausalLM, ids_BT: Tensor) -> None:
        self.model, self.ids_BT = model, ids_BT
        self.expected = self.run(ids_BT)

    def faults(self) -> Iterator[tuple[str, bool]]:
        """Each possible fault, with True if the model does not have it."""
        ids_BT = self.ids_BT
        yield "gives numbers that are not finite", bool(self.expected[0].isfinite().all())
        yield DIFFERS["each time"], self.same(self.run(ids_BT))
        for stop in (1, TOKENS // 2, TOKENS - 1):
            other_BT = torch.cat([ids_BT[:, :stop], (ids_BT[:, stop:] + 1) % WORDS], 1)
            until = slice(None), slice(stop)
            yield NOT_CAUSAL, self.same(self.run(ids_BT[:, :stop]), until)
            yield NOT_CAUSAL, self.same([part[until] for part in self.run(other_BT)], until)
        yield DIFFERS["rows"], all(self.same(self.run(ids_BT[b : b + 1]), slice(b, b + 1)) for b in range(ROWS))
        padded_BS, mask_BS = self.padded()
        pieces = [6, 1, 1, 7, *[1] * (padded_BS.shape[1] - 15)]
        yield DIFFERS["cache"], self.same(self.run(ids_BT, pieces=pieces))
        yield DIFFERS["padding"], self.same(self.real(self.run(padded_BS, mask_BS), mask_BS))
        yield DIFFERS["cache"], self.same(self.real(self.run(padded_BS, mask_BS, pieces), mask_BS))
        if self.model.config.routing != "soft":
            yield DIFFERS["cache"], self.same(self.run(ids_BT, pieces=pieces, forced=6))
        self.model.enable_fast_decoding()
        yield DIFFERS["cache"], self.same(self.run(ids_BT, pieces=pieces, trace=False))
        if self.model.config.can_run_sparse:
            self.model.config.execution = "sparse"
            yield DIFFERS["sparse"], self.same(self.run(ids_BT))
            yield DIFFERS["sparse"], self.same(self.real(self.run(padded_BS, mask_BS), mask_BS))

    def run(
        self,
        ids_BT: Tensor,
        mask_BT: Maybe = None,
        pieces: list[int] | None = None,
        forced: int = 0,
        trace: bool = True,
    ) -> list[Tensor]:
        """Logits, then each routed layer's choices, of a text in one pass or in pieces. The first `forced` tokens are
        forced to the routes they take anyway."""
        layers, cache, start, outputs = self.model.config.routed_layers, None, 0, []
        for size in pieces or [ids_BT.shape[1]]:
            stop = min(start + size, ids_BT.shape[1])
            routes = None
            if stop <= forced:
                routes = {i: part[:, start:stop] for i, part in zip(layers, self.expected[1:], strict=True)}
            output = self.model(
                ids_BT[:, start:stop], None if mask_BT is None else mask_BT[:, :stop], past_key_values=cache,
                use_cache=pieces is not None, output_routing=trace, forced_routes=routes,
            )  # fmt: skip
            choices = [output.routing.layers[i].choice_BT for i in layers] if trace else []
            outputs.append([output.logits, *choices])
            cache, start = output.past_key_values, stop
            if start == ids_BT.shape[1]:
                break
        return [torch.cat(parts, 1) for parts in zip(*outputs, strict=True)]

    def same(self, outputs: list[Tensor], where: Any = slice(None)) -> bool:
        """Whether outputs are the expected ones at `where`. Choices are compared if there are any."""
        pairs = [(part, whole[where]) for part, whole in zip(outputs, self.expected, strict=False)]
        return all(bool(((part - whole).abs() <= MISMATCH * (1 + whole.abs())).all()) for part, whole in pairs)

    def padded(self) -> tuple[Tensor, Tensor]:
        """The text with three tokens of padding in each row: at the start, inside or at the end."""
        mask_BS = torch.ones(ROWS, TOKENS + 3, dtype=torch.long)
        for row, start in enumerate((0, 4, TOKENS)):
            mask_BS[row, start : start + 3] = 0
        padded_BS = torch.randint(WORDS, mask_BS.shape)
        padded_BS[mask_BS.bool()] = self.ids_BT.flatten()
        return padded_BS, mask_BS

    @staticmethod
    def real(outputs: list[Tensor], mask_BS: Tensor) -> list[Tensor]:
        return [part[mask_BS.bool()].view(ROWS, TOKENS, *part.shape[2:]) for part in outputs]
