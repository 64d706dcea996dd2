"""The engine goes on, whatever happens to a request."""

import asyncio
import math
from unittest.mock import Mock

import pytest
import torch

from chiar.data.tokens import TextCodec
from chiar.generation.writer import SCORE_CHUNK, Sampling
from chiar.model.load import load_model
from chiar.serving.app import Engine, Job, Limits, Service
from chiar.web import Refused
from small_corpora import tiny_model

BYTES = TextCodec(None, None)


@pytest.fixture
def engine(folder):
    model = load_model(str(folder))[0]
    model.config.gate_generation = "prefill"
    return again(model)


def again(model):
    """An engine belongs to the loop it began on."""
    return Engine(model, BYTES, Limits(length=64, rows=2, waiting=2))


def job(tokens=20, temperature=0.0, text="abc", ids=None, echo=False, **fields):
    sampling = Sampling(tokens, temperature, **fields)
    return Job("model", BYTES, [(ids or list(text.encode()), text)], sampling, echo=echo)


async def text_of(job):
    return "".join([piece.text async for _, piece in job.pieces()])


def answers(engine, *jobs):
    """Of jobs that are there together: a text each, or how it was refused."""

    async def run():
        for one in jobs:
            engine.submit(one)
        return await asyncio.gather(*map(text_of, jobs), return_exceptions=True)

    return asyncio.run(run())


def once(function, error):
    """The function, but its first call fails."""
    faults = [error]

    def failing(*arguments, **keywords):
        if faults:
            raise faults.pop()
        return function(*arguments, **keywords)

    return failing


def test_a_prompt_or_a_step_that_fails_harms_nobody_else(engine, monkeypatch, capfd):
    good, bad = answers(engine, job(), job(ids=[999]))
    assert good and bad.status == 500
    engine = again(engine.model)
    monkeypatch.setattr(engine.model, "forward", once(engine.model.forward, RuntimeError("no memory left")))
    engine.limits = Limits(length=64, rows=1)  # one after the other
    bad, good = answers(engine, job(), job())
    assert good and bad.status == 500
    said = capfd.readouterr().err
    assert "outside the vocabulary" in said and "no memory left" in said


def test_nobody_waits_for_an_engine_that_died(engine, monkeypatch):
    monkeypatch.setattr(engine, "advance", once(engine.advance, SystemError("a fault nobody thought of")))
    (refused,) = answers(engine, job())
    assert refused.status == 503
    with pytest.raises(Refused, match="stopping"):
        engine.submit(job())


def test_who_waits_and_leaves_makes_room(engine):
    async def run():
        long, waiting = [job(10_000) for _ in range(2)], [job(3) for _ in range(2)]
        for one in long:
            engine.submit(one)
        while engine.count(engine.running) < 2:
            await asyncio.sleep(0.01)
        for one in waiting:
            engine.submit(one)
        with pytest.raises(Refused) as caught:
            engine.submit(job())
        assert (caught.value.status, caught.value.retry_after) == (429, 1)
        waiting[0].ended = True
        engine.submit(last := job(3))
        long[0].ended = True
        assert await text_of(waiting[1]) == await text_of(last) != ""
        await engine.end()
        with pytest.raises(Refused, match="stopping"):
            engine.submit(job())
        with pytest.raises(Refused, match="stopping"):
            await text_of(long[1])

    asyncio.run(run())


def test_the_end_of_text_ends_a_text(engine):
    engine.eos_ids, ended = {answers(again(engine.model), job(8))[0].encode()[0]}, job(8)
    answers(engine, ended)
    assert (ended.rows[0].finished, ended.usage()["completion_tokens"]) == ("stop", 1)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_a_next_token_fails_alone(engine, capfd, temperature):
    """Its logits become NaN behind its own third token."""

    def spoil(module, arguments, logits):
        for number, row in enumerate(engine.rows if len(logits.shape) == 3 else []):
            if row.sampling.seed == 7 and row.stored == 6:
                logits[number] = math.nan
        return logits

    expected = answers(again(engine.model), job(30))[0]
    engine.model.lm_head.register_forward_hook(spoil)
    bad, good = answers(engine, job(30, temperature, seed=7), job(30))
    assert (bad.status, good) == (500, expected) and "logits are not finite" in str(bad)
    said = capfd.readouterr().err
    assert "logits are not finite" in said and "Traceback" not in said


def test_a_prompt_whose_scores_are_not_finite_is_told_in_a_sentence(engine, capfd):
    with torch.no_grad():
        engine.model.lm_head.weight.fill_(math.nan)
    for bad in answers(engine, job(4), job(0, echo=True, logprobs=1)):
        assert bad.status == 500 and "logits are not finite" in str(bad)
    assert "Traceback" not in capfd.readouterr().err


def test_rows_that_cannot_be_dropped_do_not_harm_a_newcomer(engine, monkeypatch, capfd):
    """All layers but the last have lost a row then."""
    engine.limits, fail = Limits(length=64, rows=4), Mock(side_effect=MemoryError("no memory left"))

    async def run():
        jobs = [job(10_000) for _ in range(3)]
        for one in jobs:
            engine.submit(one)
        while len(engine.rows) < 3:
            await asyncio.sleep(0.01)
        monkeypatch.setattr(engine.cache.layers[-1], "batch_select_indices", fail)
        jobs[0].ended = True
        engine.submit(last := job(3))
        assert await text_of(last)
        for one in jobs[1:]:
            with pytest.raises(Refused, match="failed"):
                await text_of(one)

    asyncio.run(run())
    assert "no memory left" in capfd.readouterr().err


def test_the_logits_of_a_long_prompt_are_made_in_parts(engine):
    rows, text = [], "light and dark " * 40
    engine.model.lm_head.register_forward_hook(lambda module, given, made: rows.append(len(given[0])))

    async def run():
        engine.submit(one := job(0, text=text, echo=True, logprobs=1))
        return [token.logprob async for _, piece in one.pieces() for token in piece.tokens]

    (_, *own), ids = asyncio.run(run()), torch.tensor([list(text.encode())])
    assert rows == [SCORE_CHUNK, SCORE_CHUNK, 600 - 1 - 2 * SCORE_CHUNK]
    with torch.no_grad():
        expected = engine.model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(own), expected)


def test_tokens_are_counted_as_they_are_read_and_written_and_those_of_who_left_too(engine):
    """A third waits and is never read."""
    engine.limits, tokens = Limits(length=64, rows=2), ("prompt_tokens_total", "completion_tokens_total")

    async def run():
        jobs = [job(10_000), job(10_000, text="ab"), job(5)]
        for one in jobs:
            engine.submit(one)
        # Counted before the texts are finished.
        while any(engine.counts[name] < least for name, least in zip(tokens, (5, 6), strict=True)):
            await asyncio.sleep(0.01)
        for one in jobs:
            one.ended = True
        await engine.end()
        return sum(len(one.rows[0].tokens) for one in jobs[:2]), jobs[2].rows

    written, unread = asyncio.run(run())
    assert unread == [] and [engine.counts[name] for name in tokens] == [5, written]


def test_who_must_come_back_is_told_how_long_completions_take(engine):
    service = Service("model", engine)
    for answer in [*[("/v1/completions", 200, 7.5)] * 2, ("/v1/models", 200, 0), ("/v1/completions", 429, 100)]:
        service.answered({"path": answer[0]}, *answer[1:])
    engine.waiting += [job(), job()]
    with pytest.raises(Refused) as caught:
        engine.submit(job())
    assert caught.value.retry_after == 8


def test_a_byte_model_serves_bytes_that_are_no_text():
    """Lone continuation bytes, halves of characters and the end of text as prompts, together and alone; every piece is
    whole characters, and all pieces together are the text of all tokens."""
    prompts = [[0x80], [0xBF, 0xE6], [0x20, 0x20], list("漢".encode())[:2], [256], [0xFF, 0xFE, 0x80]]
    model = tiny_model("v5-tiny", seed=4, vocab_size=257, max_position_embeddings=64)

    def run(engine, *ids):
        jobs = [job(ids=one, text=BYTES.decode(one), temperature=1.0, seed=3) for one in ids]
        return answers(engine, *jobs), [[token.id for token in one.rows[0].tokens] for one in jobs]

    alone = [run(again(model), one) for one in prompts]
    for fast in (False, True):
        if fast:
            model.enable_fast_decoding()
        for first in range(0, len(prompts), 2):
            texts, tokens = run(again(model), *prompts[first : first + 2])
            for number, (text, ids) in enumerate(zip(texts, tokens, strict=True)):
                assert ([text], [ids]) == alone[first + number]
                assert text == BYTES.decode(ids)
