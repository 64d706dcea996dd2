"""Drafts of an early head change nothing about what is written: greedy texts are the same, drawn ones as probable."""

import math
from itertools import product

import pytest
import torch

from chiar.data.tokens import TextCodec
from chiar.errors import InputError
from chiar.generation.writer import Row, Sampling, Writer, confirmed
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
def unsure(monkeypatch):
    """Drafts of whatever the early head says, so that many are wrong."""
    monkeypatch.setattr(speculation, "SURE", 0.0)


def agreeing(noise, threshold, **changes):
    """A model whose early head nearly says what its last one does; tokens below the threshold are light."""
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
    writer, row = Writer(model, speculates=most), kind(CODEC, sampling)
    writer.begin(writer.read_prompt(ids), [row])
    written = [token.id for token in writer.follow(row)]
    assert written == [token.id for token in row.tokens if token.id not in writer.ends]
    return row, writer


@pytest.mark.parametrize("design", STACKS.values(), ids=STACKS)
def test_greedy_texts_are_those_of_plain_decoding(design):
    """With drafts that stay and drafts that do not, behind prompts without and with dark tokens, over the end of a
    store; scores are those of the whole model."""
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
    assert 10 < kept < drafted - 30  # behind light tokens the next one may be uncertain as well, under `rise`


def test_what_is_confirmed_is_drawn_from_p():
    """Σ q(x) · (stays, or another is drawn) is p, whatever q; also where one of them is 0."""
    generator = torch.Generator().manual_seed(0)
    for zeros in product([False, True], repeat=4):
        p_V, q_V = torch.rand(2, 5, generator=generator, dtype=torch.float64)
        q_V[1:3], p_V[2:4] = (
            torch.where(torch.tensor(z), 0.0, x) for z, x in ((zeros[:2], q_V[1:3]), (zeros[2:], p_V[2:4]))
        )
        p_V, q_V = p_V / p_V.sum(), q_V / q_V.sum()
        total_V = torch.zeros_like(p_V)
        for token in q_V.nonzero()[:, 0].tolist():
            stays, other_V = confirmed(token, q_V, p_V)
            total_V[token] += q_V[token] * min(1, stays)
            total_V += q_V[token] * max(0, 1 - stays) * other_V.nan_to_num()
        torch.testing.assert_close(total_V, p_V, atol=1e-12, rtol=0)


class Scripted(Row):
    """Follows a script of draws, then always takes the first possible, and notes what else could have happened."""

    script: list = []  # noqa: RUF012

    def __init__(self, *given):
        super().__init__(*given)
        self.made, self.probability = [], 1.0

    def decide(self, p_V):
        at = len(self.made)
        taken = self.script[at] if at < len(self.script) else int((p_V > 0).nonzero()[0])
        self.made.append((taken, [n for n in range(taken + 1, len(p_V)) if p_V[n] > 0]))
        self.probability *= float(p_V[taken])
        return taken

    draw = decide

    def happens(self, probability):
        return bool(self.decide(torch.tensor([1 - probability, probability])))


@pytest.mark.parametrize("sure", [0.0, 0.38])
@pytest.mark.parametrize("sampling", [{"temperature": 1.3}, {"top_k": 2}], ids=["temperature", "top-k"])
@pytest.mark.parametrize("end", [None, 2])
def test_all_texts_have_the_probability_the_model_gives_them(sampling, end, sure, monkeypatch):
    """Every draw that can happen is followed, and the probabilities of what leads to a text add up."""
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
        open_places = [place for place, (_, others) in enumerate(row.made) if others]
        script = None
        if open_places:
            last = open_places[-1]
            script = [taken for taken, _ in row.made[:last]] + [row.made[last][1][0]]
    assert drafted and len(found) > 7
    row = Row(CODEC, sampling)
    texts = {text[: text.index(end) + 1] if end in text else text for text in product(range(3), repeat=new)}
    for text in sorted(texts):
        with torch.no_grad():
            logits_TV = model(torch.tensor([[*ids, *text]])).logits[0, len(ids) - 1 : -1].float()
        expected = math.prod(float(row.probabilities(x_V)[t]) for x_V, t in zip(logits_TV, text, strict=True))
        assert math.isclose(found.get(text, 0.0), expected, abs_tol=1e-5)  # probabilities are fp32


def test_only_what_is_likelier_than_not_is_drafted(monkeypatch):
    model, ids, counts = agreeing(0.3, 0.9), token_ids(1, 12)[0].tolist(), []
    with torch.no_grad():
        model.model.dark_stacks[0].early.weight *= 3
    for sure in (0.0, 0.5, 1.0):
        monkeypatch.setattr(speculation, "SURE", sure)
        row, writer = write(model, ids, Sampling(60), 4)
        counts.append((writer.drafted, [token.id for token in row.tokens]))
    assert counts[0][0] > counts[1][0] > counts[2][0] == 0 and counts[0][1] == counts[1][1] == counts[2][1]


def test_models_without_an_early_head_of_one_stack_are_refused():
    several = {"layer_types": ["attention", "dark", "attention", "dark", "attention"]}
    for model in (routed_model(), dark_model(router="stride"), dark_model(**several)):
        with pytest.raises(InputError, match="speculation needs one dark stack"):
            write(model, [1, 2, 3], Sampling(5), 2)
