"""The engine without a model: time, splits and failures come out as scripted."""

import asyncio
from collections.abc import Sequence

import pytest

from pace_agent.engine.base import Generation, GenerationRequest, SamplingParams
from pace_agent.engine.scripted import ScriptedEngine
from pace_agent.errors import EngineError
from pace_agent.types import VersionSpan


class HandClock:
    """Time that moves when the test says so."""

    def __init__(self) -> None:
        self.time = 0.0
        self._moved = asyncio.Condition()

    def now(self) -> float:
        return self.time

    async def sleep(self, seconds: float) -> None:
        end = self.time + seconds
        async with self._moved:
            await self._moved.wait_for(lambda: self.time >= end - 1e-9)

    async def advance(self, seconds: float) -> None:
        await settle()
        self.time += seconds
        async with self._moved:
            self._moved.notify_all()
        await settle()


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def ask(rid: str, tokens: int = 10, stops: tuple[int, ...] = ()) -> GenerationRequest:
    return GenerationRequest(rid, [1, 2], SamplingParams(tokens, stop_token_ids=stops))


def tens(request: GenerationRequest) -> Sequence[int]:
    return range(10)


async def test_an_answer_is_cut_where_a_model_would_stop() -> None:
    engine = ScriptedEngine(tens, logprob=-2.0, version=3)
    assert await engine.generate(ask("a", 20, stops=(4, 8))) == Generation(
        (0, 1, 2, 3, 4), (-2.0,) * 5, (VersionSpan(3, 0, 5),), "stop"
    )
    assert (await engine.generate(ask("b", 4, stops=(4,)))).finish == "length"
    assert (await engine.generate(ask("c", 5, stops=(4,)))).finish == "stop"
    assert (await engine.generate(ask("d", 10))).finish == "stop"


async def test_an_answer_may_be_awaited() -> None:
    async def reply(request: GenerationRequest) -> list[int]:
        await asyncio.sleep(0)
        return [7, 8]

    assert (await ScriptedEngine(reply).generate(ask("a"))).output_ids == (7, 8)


async def test_tokens_come_evenly_and_pauses_do_not_count() -> None:
    clock = HandClock()
    engine = ScriptedEngine(tens, token_seconds=1.0, clock=clock)
    turn = asyncio.create_task(engine.generate(ask("a")))
    await clock.advance(3.0)
    await engine.pause()
    await clock.advance(50.0)
    await engine.update_weights({}, 1)
    await engine.resume()
    await clock.advance(4.0)
    await engine.pause()
    await engine.update_weights({}, 5)
    await engine.resume()
    await clock.advance(2.9)
    assert not turn.done()
    await clock.advance(0.1)
    done = await turn
    assert done.spans == (VersionSpan(0, 0, 3), VersionSpan(1, 3, 7), VersionSpan(5, 7, 10))
    assert done.segments == 3
    stats = engine.stats()
    assert (stats.interrupted, stats.updates, stats.paused_seconds, stats.sampled_tokens) == (1, 2, 50.0, 10)


async def test_a_turn_that_waits_or_has_ended_is_not_interrupted() -> None:
    clock = HandClock()
    engine = ScriptedEngine(tens, turn_seconds=10.0, clock=clock)
    await engine.pause()
    turn = asyncio.create_task(engine.generate(ask("a")))
    await clock.advance(30.0)
    await engine.update_weights({}, 1)
    await engine.resume()
    await clock.advance(10.0)
    done = await turn
    assert (done.spans, done.segments) == ((VersionSpan(1, 0, 10),), 1)
    assert engine.stats().interrupted == 0


async def test_abort_keeps_what_time_allowed() -> None:
    clock = HandClock()
    engine = ScriptedEngine(tens, token_seconds=1.0, clock=clock)
    turn = asyncio.create_task(engine.generate(ask("a")))
    await clock.advance(4.5)
    await engine.abort("a")
    done = await turn
    assert (done.output_ids, done.finish) == ((0, 1, 2, 3), "abort")


async def test_failures_are_injected_by_name() -> None:
    engine = ScriptedEngine(
        tens,
        fail=lambda request: "no luck" if request.rid == "b" else None,
        fail_update=lambda version: "disk full" if version == 2 else None,
    )
    await engine.generate(ask("a"))
    with pytest.raises(EngineError, match="no luck"):
        await engine.generate(ask("b"))
    await engine.pause()
    with pytest.raises(EngineError, match="disk full"):
        await engine.update_weights({}, 2)
    assert engine.version == 0


async def test_closing_ends_turns_with_an_error() -> None:
    engine = ScriptedEngine(tens, turn_seconds=100.0)
    turn = asyncio.create_task(engine.generate(ask("a")))
    await settle()
    await engine.aclose()
    with pytest.raises(EngineError, match="closed"):
        await turn
