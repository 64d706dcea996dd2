"""Speculative decoding with a dark stack. The layers before the stack and its early head draft tokens as long as the
head is sure; the rest of the model then reads all of them in one pass, and its logits confirm or replace the drafts.

A draft always follows a light token, so only the last token of a pass may need the inner layers."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from chiar.config import ChiarConfig
from chiar.errors import require
from chiar.layers.context import Maybe, TokenContext
from chiar.layers.dark import DarkStack, Decision, DenseLayout
from chiar.layers.routers import Route, one_hot
from chiar.model.cache import ChiarCache
from chiar.model.inputs import make_context

SURE = 0.5  # a draft must be likelier than all other tokens together


@dataclass
class Half:
    """A token that the layers before the stack have read."""

    id: int
    x_11D: Tensor
    decided: Decision
    is_dark: bool
    early_V: Tensor  # logits of the next token

    @property
    def drafts(self) -> bool:
        return not self.is_dark and float(self.early_V.float().softmax(-1).max()) > SURE


def check_can_draft(config: ChiarConfig) -> None:
    fits = len(config.stacks) == 1 and config.router_kind.reads_prediction and not config.meta_router
    require(fits, "speculation needs one dark stack with router='rise' or 'predictive', and no gate: leave it off.")


class SplitModel:
    """`language` split at its dark stack, to decode one row. `at` tokens are cached; up to `most` can be taken back."""

    def __init__(self, language: Any, cache: ChiarCache, at: int, most: int) -> None:
        self.language, self.model, self.cache, self.at = language, language.model, cache, at
        check_can_draft(self.model.config)
        (self.inner,) = self.model.config.stacks.values()
        self.stack: DarkStack = self.model.stacks[str(self.inner.start)]
        cache.shelf.slack = most + 1
        self.carried_11D: Maybe = None  # what the stack carried before the last pass

    def context(self, ids: list[int], first: int) -> tuple[Tensor, TokenContext]:
        """Ids and context of tokens at positions from `first` on, with the threshold of the stack."""
        model, device = self.model, self.language.device
        ids_1T = torch.tensor([ids], device=device)
        place_1T = torch.arange(first, first + len(ids), device=device)[None]
        made = make_context(model.config, model.basis.transform(), ids_1T, ids_1T, None, place_1T, 0)
        return ids_1T, model.layer_contexts(made)[self.inner.start]

    def run(self, layers: range, x_1TD: Tensor, context: TokenContext) -> Tensor:
        for i in layers:
            x_1TD, _ = self.model._run_layer(self.model.layers[i], None, x_1TD, context, self.cache.layers[i], None)
        return x_1TD

    @torch.no_grad()
    def read_early(self, token: int, ahead: int) -> Half:
        """Run the layers before the stack on a token, with `ahead` tokens between it and the cached ones."""
        ids_11, context = self.context([token], self.at + ahead)
        x_11D = self.run(range(self.inner.start), self.model.embed(ids_11, None, context.positions_BT), context)
        decided = self.stack.decide(x_11D, context, self.cache.layers[self.inner.start], None)
        assert self.stack.early is not None
        return Half(token, x_11D, decided, bool(decided.dark_BT), self.stack.early(decided.router_input_BTD)[0, 0])

    @torch.no_grad()
    def read_rest(self, halves: list[Half]) -> Tensor:
        """Run the rest of the model on these tokens: logits of the token after each, (T, V)."""
        memory, last = self.cache.layers[self.inner.start], halves[-1]
        carried_11D = memory.get("stack")
        self.carried_11D = None if carried_11D is None else carried_11D.clone()
        _, context = self.context([half.id for half in halves], self.at)
        x_1TD, light = torch.cat([half.x_11D for half in halves], 1), len(halves) - last.is_dark
        parts = []
        if light:
            choice_1T = torch.zeros(1, light, dtype=torch.long, device=x_1TD.device)
            layout, route = (
                DenseLayout(choice_1T.bool(), context, is_empty=True),
                Route(choice_1T, one_hot(choice_1T, 2)),
            )
            parts.append(self.stack.combine(layout, x_1TD[:, :light], None, route, memory))
        if last.is_dark:
            parts.append(self.pass_stack(last, self.at + light))
        after = range(self.inner.stop, len(self.model.layers))
        return self.language.lm_head(self.model.norm(self.run(after, torch.cat(parts, 1), context)))[0]

    def pass_stack(self, last: Half, place: int) -> Tensor:
        stack, memory, (_, context) = self.stack, self.cache.layers[self.inner.start], self.context([last.id], place)
        layout = stack.make_layout(last.x_11D, last.decided.dark_BT, context, memory)
        change = stack.run(layout, last.x_11D, last.decided.route, partial(self.run, self.inner))
        return stack.combine(layout, last.x_11D, change, last.decided.route, memory)

    def keep(self, halves: list[Half], count: int) -> None:
        """Accept the first `count` tokens and take the others back."""
        rejected = len(halves) - count
        for i, layer in enumerate(self.cache.layers):
            if i not in self.inner:
                layer.step_back(rejected)
            else:
                layer.step_back(int(rejected > 0 and halves[-1].is_dark), rejected)
        if rejected and halves[-1].is_dark and self.carried_11D is not None:
            self.cache.layers[self.inner.start].put("stack", self.carried_11D)
        self.at += count
        self.cache.seen = self.at
