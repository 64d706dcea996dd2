"""Speculative decoding changes no output: greedy texts are the same, samples have the same distribution."""

import math
from itertools import product

import pytest
import torch

from chiar.data.tokens import TextCodec
from chiar.errors import InputError
from chiar.generation.writer import Row, Sampling, Writer, acceptance
from chiar.model import speculation
from helpers import dark_model, routed_model, token_ids

CODEC = TextCodec(None, None)
STACKS = {
    "one": {},
    "no past": {"router": "predictive"},
    "narrow window": {"window": 5, "layer_types": ["attention", "attention", "dark", "attention", "attention"]},
    "smoothed": {"carry": "smoothed"},
    "wider, no carry": {"carry": "none", "inner_size": 32},
}


@pytest.fixture(autouse=True)
def draft_always(monkeypatch):
    """The early head drafts however unsure it is, so that many drafts are wrong."""
    monkeypatch.setattr(speculation, "SURE", 0.0)


def agreeing(noise, threshold, **changes):
    """A model whose early head nearly agrees with its output head; `threshold` is the share of light tokens."""
    model = dark_model(**changes)
    (stack,) = model.model.stacks.values()
    with torch.no_grad():
        stack.norm.weight.copy_(model.model.norm.weight)
        for name, weight in model.model.layers[-1].named_parameters():
            weight *= 0.3 if name.endswith(("out.weight", "down.weight")) else 1
        stack.early.weight.copy_(model.lm_head.weight + noise * torch.randn_like(model.lm_head.weight))
        scores = (
            model.model(token_ids(4, 40, vocabulary=model.config.vocab_size), output_routes=True).routes[0].score_BT
        )
    model.model.set_thresholds(float(scores.quantile(threshold)))
    return model


def write(model, ids, sampling, most, kind=Row):
    writer, row = Writer(model, max_drafts=most), kind(CODEC, sampling)
    writer.begin(writer.read_prompt(ids), [row])
    written = [token.id for token in writer.follow(row)]
    assert written == [token.id for token in row.tokens if token.id not in writer.eos_ids]
    return row, writer


@pytest.mark.parametrize("design", STACKS.values(), ids=STACKS)
def test_greedy_output_matches_plain_decoding(design):
    """With accepted and rejected drafts, after prompts with and without dark tokens, and beyond a cache's allocation.
    Log-probabilities are those of the full model."""
    drafted = kept = 0
    for noise, threshold in ((0.0, 0.6), (0.3, 0.6), (0.3, 1.0), (3.0, 0.9)):
        model = agreeing(noise, threshold, **design)
        for seed in (0, 2):
            ids = token_ids(1, 3 + 9 * seed, seed=seed)[0].tolist()
            plain, _ = write(model, ids, Sampling(50, logprobs=1), 0)
            row, writer = write(model, ids, Sampling(50, logprobs=1), 1 + 2 * seed)
            assert [token.id for token in row.tokens] == [token.id for token in plain.tokens]
            for found, expected in zip(row.tokens, plain.tokens, strict=True):
                assert math.isclose(found.logprob, expected.logprob, abs_tol=1e-5)  # scores are fp32
            drafted, kept = drafted + writer.drafted, kept + writer.kept
    assert 10 < kept < drafted - 30  # enough drafts of both kinds


def test_verified_tokens_are_distributed_as_p():
    """Σ q(x) · (x is accepted, or replaced) is p for any q, also where p or q is 0."""
    generator = torch.Generator().manual_seed(0)
    for zeros in product([False, True], repeat=4):
        p_V, q_V = torch.rand(2, 5, generator=generator, dtype=torch.float64)
        q_V[1:3], p_V[2:4] = (
            torch.where(torch.tensor(z), 0.0, x) for z, x in ((zeros[:2], q_V[1:3]), (zeros[2:], p_V[2:4]))
        )
        p_V, q_V = p_V / p_V.sum(), q_V / q_V.sum()
        total_V = torch.zeros_like(p_V)
        for token in q_V.nonzero()[:, 0].tolist():
            ratio, residual_V = acceptance(token, q_V, p_V)
            total_V[token] += q_V[token] * min(1, ratio)
            total_V += q_V[token] * max(0, 1 - ratio) * residual_V.nan_to_num()
        torch.testing.assert_close(total_V, p_V, atol=1e-12, rtol=0)


class Scripted(Row):
    """Follows a script of draws, then always takes the first possible one, and records the alternatives."""

    script: list = []  # noqa: RUF012

    def __init__(self, *given):
        super().__init__(*given)
        self.decisions, self.probability = [], 1.0

    def decide(self, p_V):
        step = len(self.decisions)
        taken = self.script[step] if step < len(self.script) else int((p_V > 0).nonzero()[0])
        self.decisions.append((taken, [n for n in range(taken + 1, len(p_V)) if p_V[n] > 0]))
        self.probability *= float(p_V[taken])
        return taken

    draw = decide

    def bernoulli(self, probability):
        return bool(self.decide(torch.tensor([1 - probability, probability])))


@pytest.mark.parametrize("sure", [0.0, 0.38])
@pytest.mark.parametrize("sampling", [{"temperature": 1.3}, {"top_k": 2}], ids=["temperature", "top-k"])
@pytest.mark.parametrize("end", [None, 2])
def test_texts_have_the_probability_the_model_gives_them(sampling, end, sure, monkeypatch):
    """All possible draws are enumerated, and the probabilities of those that lead to a text are added up."""
    monkeypatch.setattr(speculation, "SURE", sure)
    model, ids, new = agreeing(1.0, 0.7, vocab_size=3, eos_token_id=end), [2, 0, 1], 4
    sampling = Sampling(new, **sampling)
    found, script, drafted = {}, [], 0
    while script is not None:
        monkeypatch.setattr(Scripted, "script", script)
        row, writer = write(model, ids, sampling, 2, Scripted)
        text = tuple(token.id for token in row.tokens)
        found[text] = found.get(text, 0) + row.probability
        drafted += writer.drafted
        branches = [step for step, (_, others) in enumerate(row.decisions) if others]
        script = None
        if branches:
            last = branches[-1]
            script = [taken for taken, _ in row.decisions[:last]] + [row.decisions[last][1][0]]
    assert drafted and len(found) > 7
    row = Row(CODEC, sampling)
    texts = {text[: text.index(end) + 1] if end in text else text for text in product(range(3), repeat=new)}
    for text in sorted(texts):
        with torch.no_grad():
            logits_TV = model(torch.tensor([[*ids, *text]])).logits[0, len(ids) - 1 : -1].float()
        expected = math.prod(float(row.probabilities(x_V)[t]) for x_V, t in zip(logits_TV, text, strict=True))
        assert math.isclose(found.get(text, 0.0), expected, abs_tol=1e-5)  # probabilities are fp32


def test_only_sure_tokens_are_drafted(monkeypatch):
    model, ids, counts = agreeing(0.3, 0.9), token_ids(1, 12)[0].tolist(), []
    with torch.no_grad():
        model.model.dark_stacks[0].early.weight *= 3
    for sure in (0.0, 0.5, 1.0):
        monkeypatch.setattr(speculation, "SURE", sure)
        row, writer = write(model, ids, Sampling(60), 4)
        counts.append((writer.drafted, [token.id for token in row.tokens]))
    assert counts[0][0] > counts[1][0] > counts[2][0] == 0 and counts[0][1] == counts[1][1] == counts[2][1]


def test_models_without_a_single_stack_with_early_head_are_rejected():
    several = {"layer_types": ["attention", "dark", "attention", "dark", "attention"]}
    for model in (routed_model(), dark_model(router="stride"), dark_model(**several)):
        with pytest.raises(InputError, match="speculation needs one dark stack"):
            write(model, [1, 2, 3], Sampling(5), 2)
