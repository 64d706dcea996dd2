"""The loss of each task."""

import torch
import torch.nn.functional as F

from chiar.training.tasks import build


def test_validation_is_without_the_regulariser(config):
    model = build(config(routing="soft", collapse_regulariser=0.5, dropout=0.0), {}, seed=0)
    ids = torch.arange(24).view(2, 12)
    targets = ids + 1
    logits = model.language(ids).logits
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    assert torch.allclose(model.eval()(ids, targets, None, None).loss, expected)
    regulariser = model.language(ids).routing_loss
    assert torch.allclose(model.train()(ids, targets, None, None).loss, expected + regulariser)
    assert regulariser < 0


def test_a_head_reads_the_last_real_token_and_every_head_stays_in_the_graph(config):
    model = build(config(dropout=0.0), {"first": 3, "second": 2}, seed=0)
    ids, mask = torch.arange(24).view(2, 12), torch.ones(2, 12, dtype=torch.long)
    mask[1, 7:] = 0
    targets = torch.tensor([2, 0])
    result = model(ids, targets, mask, "first")
    states = model.language.model(ids, attention_mask=mask).last_hidden_state
    expected = F.cross_entropy(model.heads["first"](torch.stack([states[0, 11], states[1, 6]])), targets)
    assert torch.allclose(result.loss, expected)
    result.loss.backward()
    assert model.heads["first"].weight.grad.abs().max() > 0
    assert (model.heads["second"].weight.grad == 0).all()
