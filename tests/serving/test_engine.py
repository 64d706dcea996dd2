"""The engine's thread goes on, whatever happens to a request."""

import asyncio
import math

import pytest
import torch

from chiar.data.tokens import TextCodec
from chiar.generation.writer import SCORED, Piece
from chiar.model.load import load_model
from chiar.serving.app import Service
from chiar.serving.engine import Engine, Job, Metrics, stopping
from chiar.serving.protocol import CompletionRequest, Limits, Prompt
from chiar.web import Refused


@pytest.fixture
def engine(folder):
    model = load_model(str(folder))[0]
    model.config.gate_generation = "prefill"
    return Engine(model, TextCodec(None, None), Limits(length=64, rows=2, waiting=2), Metrics(model.config.operators))


def request(text="abc", **fields):
    return CompletionRequest([Prompt(list(text.encode()), text)], **{"temperature": 0.0, **fields})


async def answer(job):
    return "".join([piece.text async for _, piece in job.pieces()])


def test_a_prompt_that_fails_harms_nobody_else(engine, capfd):
    async def run():
        good, bad = Job(request(max_tokens=20)), Job(CompletionRequest([Prompt([999], "")], max_tokens=20))
        engine.submit(good)
        engine.submit(bad)
        with pytest.raises(Refused) as caught:
            await answer(bad)
        assert caught.value.status == 500
        assert await answer(good)

    asyncio.run(run())
    assert "outside the vocabulary" in capfd.readouterr().err


def test_a_step_that_fails_ends_its_texts_and_the_next_are_served(engine, monkeypatch, capfd):
    step, faults = engine.model.forward, [RuntimeError("no memory left")]

    def fail_once(*arguments, **keywords):
        if faults:
            raise faults.pop()
        return step(*arguments, **keywords)

    monkeypatch.setattr(engine.model, "forward", fail_once)

    async def run():
        for works in (False, True):
            engine.submit(job := Job(request(max_tokens=20)))
            if works:
                assert await answer(job)
            else:
                with pytest.raises(Refused):
                    await answer(job)

    asyncio.run(run())
    assert "no memory left" in capfd.readouterr().err


def test_nobody_waits_for_a_thread_that_died(engine, monkeypatch):
    def die():
        raise SystemError("a fault nobody thought of")

    monkeypatch.setattr(engine, "advance", die)

    async def run():
        engine.submit(job := Job(request()))
        with pytest.raises(Refused, match="stopping"):
            await answer(job)
        with pytest.raises(Refused, match="stopping"):
            engine.submit(Job(request()))

    asyncio.run(run())


def test_who_waits_and_leaves_makes_room(engine):
    async def run():
        long = [Job(request(max_tokens=10_000)) for _ in range(2)]
        for job in long:
            engine.submit(job)
        while engine.count(engine.running) < 2:
            await asyncio.sleep(0.01)
        waiting = [Job(request(max_tokens=3)) for _ in range(2)]
        for job in waiting:
            engine.submit(job)
        with pytest.raises(Refused) as caught:
            engine.submit(Job(request()))
        assert (caught.value.status, caught.value.retry_after) == (429, 1)
        waiting[0].cancelled = True
        engine.submit(last := Job(request(max_tokens=3)))
        long[0].cancelled = True
        assert await answer(waiting[1]) == await answer(last) != ""
        engine.closed = True
        with pytest.raises(Refused, match="stopping"):
            engine.submit(Job(request()))
        await engine.end()
        with pytest.raises(Refused, match="stopping"):
            await answer(long[1])

    asyncio.run(run())


def test_the_end_of_text_ends_a_text(engine):
    async def run():
        plain = Job(request(max_tokens=8))
        engine.submit(plain)
        pieces = [piece async for _, piece in plain.pieces()]
        text = "".join(piece.text for piece in pieces)
        engine.ends = {text.encode()[0]}
        ended = Job(request(max_tokens=8))
        engine.submit(ended)
        last = [piece async for _, piece in ended.pieces()][-1]
        assert (last.finish, ended.written) == ("stop", 1)

    asyncio.run(run())


@pytest.mark.parametrize("temperature", [1e-320, 1e-45, 1e-30, 1e-6])
def test_a_temperature_of_nearly_zero_is_greedy(engine, temperature):
    async def run():
        jobs = [Job(request(max_tokens=6, temperature=t, top_p=p)) for t, p in [(0.0, 1.0), (temperature, 0.9)]]
        for job in jobs:
            engine.submit(job)
        greedy, nearly = [await answer(job) for job in jobs]
        assert greedy == nearly != ""

    asyncio.run(run())


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_a_next_token_fails_alone(engine, capfd, temperature):
    """Its logits become NaN behind its own third token."""
    head, expected = engine.model.lm_head, []

    def spoil(module, arguments, logits):
        for number, row in enumerate(engine.rows if len(logits.shape) == 3 else []):
            if row.job.request.seed == 7 and row.stored == 6:
                logits[number] = math.nan
        return logits

    async def run():
        good = Job(request(max_tokens=30))
        engine.submit(good)
        expected.append(await answer(good))
        hook = head.register_forward_hook(spoil)
        good, bad = Job(request(max_tokens=30)), Job(request(max_tokens=30, seed=7, temperature=temperature))
        for job in (bad, good):
            engine.submit(job)
        with pytest.raises(Refused) as caught:
            await answer(bad)
        assert caught.value.status == 500
        assert await answer(good) == expected[0]
        hook.remove()

    asyncio.run(run())
    assert "not finite" in capfd.readouterr().err


def test_rows_that_cannot_be_dropped_do_not_harm_a_newcomer(engine, monkeypatch, capfd):
    """All layers but the last have lost a row then."""
    engine.limits = Limits(length=64, rows=4)

    def fail(indices):
        raise MemoryError("no memory left")

    async def run():
        jobs = [Job(request(max_tokens=10_000)) for _ in range(3)]
        for job in jobs:
            engine.submit(job)
        while len(engine.rows) < 3:
            await asyncio.sleep(0.01)
        monkeypatch.setattr(engine.cache.layers[-1], "batch_select_indices", fail)
        jobs[0].cancelled = True
        engine.submit(last := Job(request(max_tokens=3)))
        assert await answer(last)
        for job in jobs[1:]:
            with pytest.raises(Refused, match="failed"):
                await answer(job)

    asyncio.run(run())
    assert "no memory left" in capfd.readouterr().err


def test_the_logits_of_a_long_prompt_are_made_in_parts(engine):
    rows = []
    engine.model.lm_head.register_forward_hook(lambda module, given, made: rows.append(len(given[0])))

    async def run():
        text = "light and dark " * 40
        engine.submit(job := Job(request(text, max_tokens=0, echo=True, logprobs=1)))
        pieces = [piece async for _, piece in job.pieces()]
        scores = pieces[0].tokens
        ids = torch.tensor([list(text.encode())])
        with torch.no_grad():
            expected = engine.model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        assert [token.id for token in scores] == ids[0].tolist()
        torch.testing.assert_close(torch.tensor([token.logprob for token in scores[1:]]), expected)

    asyncio.run(run())
    assert rows[:3] == [SCORED, SCORED, 600 - 1 - 2 * SCORED]


def test_a_choice_that_ends_after_its_request_failed(engine):
    service = Service("model", engine.model, engine.codec, engine.limits, None, None)

    async def run():
        job = Job(request())
        job.fail(stopping())
        job.put(0, Piece("", [], "length"))
        service.settle(job)
        assert job.is_over and not job.cancelled
        assert service.metrics.sums["clients_gone"] == 0

    asyncio.run(run())


def test_who_is_sent_away_is_told_how_long_a_completion_takes():
    metrics = Metrics([])
    assert metrics.typical_seconds() == 1
    for _ in range(2):
        metrics.count_request("/v1/completions", 200, 7.5)
    for status in (200, 404):
        metrics.count_request("/v1/models", status, 0.001)
    metrics.count_request("/v1/completions", 429, 100.0)
    assert metrics.typical_seconds() == 8
