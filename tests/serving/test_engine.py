"""The engine's thread goes on, whatever happens to a request."""

import asyncio

import pytest

from chiar.load import load_model
from chiar.serving.engine import Engine
from chiar.serving.job import Job
from chiar.serving.limits import Limits
from chiar.serving.metrics import Metrics
from chiar.serving.problems import ApiError
from chiar.serving.requests import CompletionRequest, Prompt
from chiar.tokens import TextCodec


@pytest.fixture
def engine(folder):
    model = load_model(str(folder))[0]
    model.config.gate_generation = "prefill"
    made = Engine(model, TextCodec(None, None), Limits(length=64, rows=2, waiting=2), Metrics(model.config.operators))
    made.start()
    yield made
    made.end(10)
    assert not made.thread.is_alive()


def request(text="abc", **fields):
    return CompletionRequest([Prompt(list(text.encode()), text)], **{"temperature": 0.0, **fields})


async def answer(job):
    return "".join([piece.text async for piece in job.pieces()])


def test_a_prompt_that_fails_harms_nobody_else(engine, capfd):
    async def run():
        good, bad = Job(request(max_tokens=20)), Job(CompletionRequest([Prompt([999], "")], max_tokens=20))
        engine.submit(good)
        engine.submit(bad)
        with pytest.raises(ApiError) as caught:
            await answer(bad)
        assert caught.value.status == 500
        assert await answer(good)

    asyncio.run(run())
    assert "outside the vocabulary" in capfd.readouterr().err


def test_a_step_that_fails_ends_its_texts_and_the_next_are_served(engine, monkeypatch, capfd):
    step, faults = engine.batch.model.forward, [RuntimeError("no memory left")]

    def fail_once(*arguments, **keywords):
        if faults:
            raise faults.pop()
        return step(*arguments, **keywords)

    monkeypatch.setattr(engine.batch.model, "forward", fail_once)

    async def run():
        for works in (False, True):
            engine.submit(job := Job(request(max_tokens=20)))
            if works:
                assert await answer(job)
            else:
                with pytest.raises(ApiError):
                    await answer(job)

    asyncio.run(run())
    assert "no memory left" in capfd.readouterr().err


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_nobody_waits_for_a_thread_that_died(engine, monkeypatch):
    def die():
        raise SystemError("a fault nobody thought of")

    monkeypatch.setattr(engine, "advance", die)

    async def run():
        engine.submit(job := Job(request()))
        with pytest.raises(ApiError, match="stopping"):
            await answer(job)
        with pytest.raises(ApiError, match="stopping"):
            engine.submit(Job(request()))

    asyncio.run(run())


def test_who_waits_and_leaves_makes_room(engine):
    async def run():
        long = [Job(request(max_tokens=10_000)) for _ in range(2)]
        for job in long:
            engine.submit(job)
        while engine.count_running() < 2:
            await asyncio.sleep(0.01)
        waiting = [Job(request(max_tokens=3)) for _ in range(2)]
        for job in waiting:
            engine.submit(job)
        with pytest.raises(ApiError) as caught:
            engine.submit(Job(request()))
        assert (caught.value.status, caught.value.retry_after) == (429, 1)
        waiting[0].cancel()
        engine.submit(last := Job(request(max_tokens=3)))
        long[0].cancel()
        assert await answer(waiting[1]) == await answer(last) != ""
        assert await answer(waiting[0]) == ""
        engine.close()
        with pytest.raises(ApiError, match="stopping"):
            engine.submit(Job(request()))
        await asyncio.to_thread(engine.end, 10)
        with pytest.raises(ApiError, match="stopping"):
            await answer(long[1])

    asyncio.run(run())


def test_the_end_of_text_ends_a_text(engine):
    async def run():
        plain = Job(request(max_tokens=8))
        engine.submit(plain)
        pieces = [piece async for piece in plain.pieces()]
        text = "".join(piece.text for piece in pieces)
        engine.batch.ends = {text.encode()[0]}
        ended = Job(request(max_tokens=8))
        engine.submit(ended)
        last = [piece async for piece in ended.pieces()][-1]
        assert (last.finish, ended.completion_tokens) == ("stop", 1)

    asyncio.run(run())
