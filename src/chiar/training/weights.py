"""First weights: each module's from a seed of its own, so that no process needs the whole model to draw its share."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from chiar.model.load import load_weights
from chiar.model.modeling import ChiarForCausalLM
from chiar.training.distributed import local_rows
from chiar.training.tasks import TaskModel


def outline(config: Any, labels: dict[str, int]) -> TaskModel:
    """The model on the meta device: shapes without memory."""
    with torch.device("meta"):
        return TaskModel(ChiarForCausalLM(config), labels)


def module_seed(seed: int, name: str) -> int:
    return int(np.random.SeedSequence([seed, *name.encode()]).generate_state(1, np.uint64)[0] >> np.uint64(1))


def materialise(model: TaskModel, seed: int, device: torch.device, initial: str = "") -> None:
    """Give an outline memory and the weights of `seed`: the same ones whether it is whole or sharded.

    With `initial`, a folder, the language model has its weights instead.
    """
    model.to_empty(device=device)
    model.language.tie_weights()
    source = outline(model.language.config, head_sizes(model))
    places = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    stored = load_weights(initial, model.language.config).state_dict() if initial else {}
    for name, value in drawn(source, seed):
        start, rows = local_rows(places[name])
        value = stored.get(name.removeprefix("language."), value)
        with torch.no_grad():
            rows.copy_(value[start : start + len(rows)] if value.ndim else value)


def drawn(source: TaskModel, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Every saved tensor by name, one module in memory at a time. Drawn on the CPU: any device gets the same."""
    saved = set(source.state_dict())
    seen: set[int] = set()
    for prefix, module in source.named_modules():
        own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        fresh = [name for name, value in own if f"{prefix}.{name}" in saved and id(value) not in seen]
        seen.update(id(value) for _, value in own)
        if not fresh:
            continue
        module.to_empty(device="cpu", recurse=False)
        torch.manual_seed(module_seed(seed, prefix))
        source.language._init_weights(module)
        for name in fresh:
            yield f"{prefix}.{name}", getattr(module, name).detach()
        module.to_empty(device="meta", recurse=False)


def build(config: Any, labels: dict[str, int], seed: int, device: str = "cpu", initial: str = "") -> TaskModel:
    """A whole model with the weights of `seed`."""
    model = outline(config, labels)
    materialise(model, seed, torch.device(device), initial)
    return model


def whole(model: TaskModel, wanted: bool) -> TaskModel | None:
    """A copy in one piece on the CPU, where it is wanted. Every process must take part, one tensor at a time."""
    state = {}
    for name, value in model.state_dict().items():
        complete = value.full_tensor() if isinstance(value, DTensor) else value
        if wanted:
            state[name] = complete.cpu()
    if not wanted:
        return None
    copy = outline(model.language.config, head_sizes(model))
    copy.to_empty(device="cpu")
    copy.language.tie_weights()
    copy.load_state_dict(state)
    return copy


def head_sizes(model: TaskModel) -> dict[str, int]:
    return {name: len(head.bias) for name, head in model.heads.items()}  # type: ignore[arg-type]
