"""Virtual time: what runs when, and that none of it is waited for."""

import asyncio
import socket
import threading
import time
from collections.abc import Awaitable, Iterator
from typing import TypeVar

import pytest

from pace_agent.clock import VirtualClock
from pace_agent.errors import RunError

T = TypeVar("T")
DAY = 86_400.0


@pytest.fixture
def clock() -> Iterator[VirtualClock]:
    made = VirtualClock()
    yield made
    made.loop.close()


def run(clock: VirtualClock, coroutine: Awaitable[T]) -> T:
    return clock.loop.run_until_complete(asyncio.ensure_future(coroutine, loop=clock.loop))


def test_a_sleep_takes_its_time_and_is_not_waited_for(clock: VirtualClock) -> None:
    run(clock, clock.sleep(1000 * DAY))
    assert clock.now() == 1000 * DAY


def test_a_sleep_too_short_for_the_clocks_digits_moves_it_all_the_same(clock: VirtualClock) -> None:
    run(clock, clock.sleep(1000.0))
    before = clock.now()
    run(clock, clock.sleep(1e-20))
    assert before < clock.now() < before + 1e-9


def test_computing_takes_no_time(clock: VirtualClock) -> None:
    async def compute() -> float:
        before, real = clock.now(), time.monotonic()
        while time.monotonic() == real:
            pass
        await asyncio.sleep(0)
        return clock.now() - before

    assert run(clock, compute()) == 0.0


def test_what_is_due_first_runs_first(clock: VirtualClock) -> None:
    seen: list[tuple[str, float]] = []

    async def one(name: str, *sleeps: float) -> None:
        for seconds in sleeps:
            await clock.sleep(seconds)
            seen.append((name, clock.now()))

    async def both() -> None:
        await asyncio.gather(one("slow", 3.0), one("quick", 1.0, 1.0, 2.0))

    run(clock, both())
    assert seen == [("quick", 1.0), ("quick", 2.0), ("slow", 3.0), ("quick", 4.0)]


def test_time_goes_on_from_one_run_of_the_loop_to_the_next(clock: VirtualClock) -> None:
    seen: list[float] = []

    async def background() -> None:
        while True:
            await clock.sleep(1.0)
            seen.append(clock.now())

    task = clock.loop.create_task(background())
    run(clock, clock.sleep(1.5))
    assert seen == [1.0]
    run(clock, clock.sleep(1.0))
    assert seen == [1.0, 2.0]
    assert clock.now() == 2.5
    task.cancel()
    run(clock, asyncio.wait([task]))


def test_a_timeout_is_one_of_virtual_time(clock: VirtualClock) -> None:
    async def limited(seconds: float) -> bool:
        try:
            async with asyncio.timeout(60.0):
                await clock.sleep(seconds)
        except TimeoutError:
            return False
        return True

    assert run(clock, limited(59.0))
    assert not run(clock, limited(61.0))
    assert clock.now() == 119.0


def test_a_cancelled_sleep_takes_no_more_time(clock: VirtualClock) -> None:
    async def cancel() -> None:
        sleeper = asyncio.ensure_future(clock.sleep(DAY))
        await clock.sleep(1.0)
        sleeper.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sleeper

    run(clock, cancel())
    assert clock.now() == 1.0
    run(clock, clock.sleep(1.0))
    assert clock.now() == 2.0


def test_where_nothing_can_happen_any_more_it_says_so(clock: VirtualClock) -> None:
    async def hang() -> None:
        await clock.sleep(2.0)
        await asyncio.Event().wait()

    task = clock.loop.create_task(hang())
    with pytest.raises(RunError, match="nothing can happen any more"):
        clock.loop.run_until_complete(task)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        clock.loop.run_until_complete(task)  # the loop is still of use


def test_threads_take_no_time_and_come_in_order(clock: VirtualClock) -> None:
    seen: list[str] = []

    def work(name: str, first: threading.Event | None) -> str:
        if first is not None:
            first.wait(0.05)  # on a real loop the other one would overtake it
        seen.append(name)
        return name

    async def both() -> list[str]:
        never = threading.Event()
        return await asyncio.gather(asyncio.to_thread(work, "a", never), asyncio.to_thread(work, "b", None))

    assert run(clock, both()) == ["a", "b"]
    assert seen == ["a", "b"]
    assert clock.now() == 0.0


def test_what_a_thread_raises_comes_through(clock: VirtualClock) -> None:
    def work() -> None:
        raise ValueError("broken on purpose")

    with pytest.raises(ValueError, match="on purpose"):
        run(clock, asyncio.to_thread(work))


def test_real_input_and_output_is_refused(clock: VirtualClock) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(OSError, match="virtual clock"):
        clock.loop.add_reader(ours.fileno(), lambda: None)
    with pytest.raises(OSError, match="virtual clock"):
        run(clock, asyncio.create_subprocess_exec("true", stdout=asyncio.subprocess.PIPE))
