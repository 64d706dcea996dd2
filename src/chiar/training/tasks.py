"""One model for every task of a run: the language model, and a linear head for each classification corpus."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from chiar.kernels.linear_cross_entropy import linear_cross_entropy
from chiar.layers.routers import mean_over_tokens, one_hot
from chiar.model.modeling import ChiarForCausalLM, pool_states


@dataclass
class TaskResult:
    """The loss of one micro-batch and what its tokens did."""

    loss: Tensor
    use_LK: Tensor
    """Fraction of tokens each operator of each routed layer got."""
    gate: Tensor
    """Mean g (0 without a MetaRouter)."""
    correct: Tensor
    """How many rows were given their class (0 for language)."""


class TaskModel(nn.Module):
    """Classification goes through the whole decoder; a head is the `score` of ChiarForSequenceClassification."""

    def __init__(self, language: ChiarForCausalLM, labels: dict[str, int]) -> None:
        super().__init__()
        self.language = language
        width = language.config.hidden_size
        self.heads = nn.ModuleDict({name: nn.Linear(width, count) for name, count in labels.items()})

    def forward(self, ids_BT: Tensor, targets: Tensor, mask_BT: Tensor | None, head: str | None) -> TaskResult:
        decoded = self.language.model(ids_BT, attention_mask=mask_BT, output_routes=True)
        states_BTD = decoded.last_hidden_state
        correct = states_BTD.new_zeros(())
        if head is None:
            loss = linear_cross_entropy(states_BTD.flatten(0, 1), self.language.lm_head.weight, targets.flatten())
        else:
            logits_BC = self.heads[head](pool_states(states_BTD, mask_BT, self.language.config.classifier_pool))
            loss = F.cross_entropy(logits_BC.float(), targets)
            correct = (logits_BC.detach().argmax(-1) == targets).sum()
        if self.training and decoded.routing_loss is not None:
            loss = loss + decoded.routing_loss
        real_BT = None if mask_BT is None else mask_BT.bool()
        operators = len(self.language.config.operators)
        use = [mean_over_tokens(one_hot(route.choice_BT, operators), real_BT) for route in decoded.routes]
        use_LK = torch.stack(use) if use else loss.new_zeros(0, operators)
        gate = loss.new_zeros(())
        if decoded.gate_BT1 is not None:
            gate = mean_over_tokens(decoded.gate_BT1.detach(), real_BT)[0]
        return TaskResult(loss + self._untouched(head), use_LK, gate, correct)

    def _untouched(self, head: str | None) -> Tensor | float:
        """Zero times the parameters this task does not use, so that every process reduces every gradient."""
        if not self.heads:
            return 0.0
        parameters = [p for name, module in self.heads.items() if name != head for p in module.parameters()]
        if head is not None and not self.language.config.tie_word_embeddings:
            parameters += list(self.language.lm_head.parameters())
        return 0.0 * sum((p.sum() for p in parameters), torch.zeros((), device=self.language.device))
