"""One model for every task of a run: the language model, and a linear head for each classification corpus."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from chiar.config import ChiarConfig
from chiar.kernels.linear_cross_entropy import linear_cross_entropy
from chiar.layers.routers import mean_over_tokens, one_hot
from chiar.model.load import load_weights
from chiar.model.modeling import ChiarForCausalLM, pool_states
from chiar.training.batches import seed_of
from chiar.training.distributed import local_rows


@dataclass
class TaskResult:
    """The loss of one micro-batch and what its tokens did."""

    loss: Tensor
    use_LK: Tensor  # fraction of tokens each operator of each routed layer got
    gate: Tensor  # mean g (0 without a MetaRouter)
    correct: Tensor  # how many rows were given their class (0 for language)


class TaskModel(nn.Module):
    """Classification goes through the whole decoder; a head is the `score` of ChiarForSequenceClassification."""

    def __init__(self, config: ChiarConfig, labels: dict[str, int]) -> None:
        super().__init__()
        self.labels = labels  # classes by corpus
        self.language = ChiarForCausalLM(config)
        self.heads = nn.ModuleDict({name: nn.Linear(config.hidden_size, count) for name, count in labels.items()})

    def forward(self, ids_BT: Tensor, targets: Tensor, mask_BT: Tensor | None, head: str | None) -> TaskResult:
        decoded = self.language.model(ids_BT, attention_mask=mask_BT, output_routes=True)
        states_BTD, config = decoded.last_hidden_state, self.language.config
        correct = states_BTD.new_zeros(())
        if head is None:
            loss = linear_cross_entropy(states_BTD.flatten(0, 1), self.language.lm_head.weight, targets.flatten())
        else:
            logits_BC = self.heads[head](pool_states(states_BTD, mask_BT, config.classifier_pool))
            loss = F.cross_entropy(logits_BC.float(), targets)
            correct = (logits_BC.detach().argmax(-1) == targets).sum()
        if self.training and decoded.routing_loss is not None:
            loss = loss + decoded.routing_loss
        real_BT = None if mask_BT is None else mask_BT.bool()
        use = [mean_over_tokens(one_hot(route.choice_BT, len(config.operators)), real_BT) for route in decoded.routes]
        use_LK = torch.stack(use) if use else loss.new_zeros(0, len(config.operators))
        gate = loss.new_zeros(())
        if decoded.gate_BT1 is not None:
            gate = mean_over_tokens(decoded.gate_BT1.detach(), real_BT)[0]
        # Zero times the parameters this task does not use, so that every process reduces every gradient.
        unused = [p for name, module in self.heads.items() if name != head for p in module.parameters()]
        if head is not None and not config.tie_word_embeddings:
            unused += list(self.language.lm_head.parameters())
        if self.heads:
            loss = loss + 0.0 * sum((p.sum() for p in unused), loss.new_zeros(()))
        return TaskResult(loss, use_LK, gate, correct)


def outline(config: ChiarConfig, labels: dict[str, int]) -> TaskModel:
    """The model on the meta device: shapes without memory."""
    with torch.device("meta"):
        return TaskModel(config, labels)


def build(config: ChiarConfig, labels: dict[str, int], seed: int, device: str = "cpu", initial: str = "") -> TaskModel:
    """A whole model with the weights of `seed`."""
    model = outline(config, labels)
    materialise(model, seed, torch.device(device), initial)
    return model


@torch.no_grad()
def materialise(model: TaskModel, seed: int, device: torch.device, initial: str = "") -> None:
    """Give an outline memory and the weights of `seed`, the same whether whole or sharded: each module is drawn on the
    CPU from a seed of its own. With `initial`, a folder, the language model has its weights instead."""
    model.to_empty(device=device)
    model.language.tie_weights()
    places = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    stored = load_weights(initial, model.language.config).state_dict() if initial else {}
    source, seen = outline(model.language.config, model.labels), set[int]()
    saved = set(source.state_dict())
    for prefix, module in source.named_modules():
        own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        fresh = [name for name, value in own if f"{prefix}.{name}" in saved and id(value) not in seen]
        seen.update(id(value) for _, value in own)
        if not fresh:
            continue
        module.to_empty(device="cpu", recurse=False)
        torch.manual_seed(seed_of(seed, *prefix.encode()))
        source.language._init_weights(module)
        for name in fresh:
            start, rows = local_rows(places[f"{prefix}.{name}"])
            value = stored.get(f"{prefix}.{name}".removeprefix("language."), getattr(module, name))
            rows.copy_(value[start : start + len(rows)] if value.ndim else value)
        module.to_empty(device="meta", recurse=False)


def whole(model: TaskModel, wanted: bool) -> TaskModel | None:
    """A copy in one piece on the CPU, where it is wanted. Every process must take part, one tensor at a time."""
    state = {}
    for name, value in model.state_dict().items():
        complete = value.full_tensor() if isinstance(value, DTensor) else value
        if wanted:
            state[name] = complete.cpu()
    if not wanted:
        return None
    copy = outline(model.language.config, model.labels).to_empty(device="cpu")
    copy.language.tie_weights()
    copy.load_state_dict(state)
    return copy
